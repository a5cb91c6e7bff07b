"""The examples run as a newcomer runs them, with a real model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from hf_cachegen.bench.corpus import documents

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

TIMEOUT_S = 300
CONTEXT_TOKENS = 300

RunExample = Callable[..., str]


@pytest.fixture
def run_example(examples_folder: Path, real_model_folder: Path) -> RunExample:
    def run(script: str, *arguments: str | Path) -> str:
        command = [sys.executable, examples_folder / script, *arguments]
        command += ["--model", real_model_folder, "--dtype", "float32"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_scripts_save_a_context_and_answer_from_it(run_example: RunExample, tmp_path: Path) -> None:
    document, cache = tmp_path / "reference.txt", tmp_path / "reference-kv"
    document.write_text(documents("evaluation")["prose-05"], encoding="utf-8")
    saved = run_example("save_context.py", document, cache, "--max-tokens", str(CONTEXT_TOKENS))
    assert saved.startswith(f"{CONTEXT_TOKENS} tokens in 1 chunk")
    assert [line.split()[0] for line in saved.splitlines()[1:]][-1] == "lossless"

    question = "What does the return statement do?"
    short = ("--max-new-tokens", "12")
    exact = run_example("load_and_generate.py", cache, question, *short, "--level", "lossless")
    lossy = run_example("load_and_generate.py", cache, question, *short)
    for answer in (exact, lossy):
        assert "return statement" in answer
        assert "<|im_" not in answer


def test_script_evicts_tokens_and_saves_the_others(run_example: RunExample, tmp_path: Path) -> None:
    document, cache = tmp_path / "reference.txt", tmp_path / "pruned-kv"
    document.write_text(documents("evaluation")["prose-05"], encoding="utf-8")
    sizes = ("--tokens", str(CONTEXT_TOKENS), "--ahead", "100")
    printed = run_example("evict_and_save.py", document, cache, *sizes).splitlines()
    assert printed[0] == "150 of 300 tokens kept by each head"
    kl = {level: float(line[-1]) for level, *line in map(str.split, printed[1:])}
    # Half of the tokens predict much as the whole cache does, and the finest level as they do.
    assert 1e-4 < kl["lossless"] < 0.1
    assert kl["delta-3"] < 2 * kl["lossless"] + 0.02


@pytest.fixture(scope="module")
def executed(examples_folder: Path, real_model_folder: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(examples_folder / "first_steps.ipynb", as_version=4)
    where = {"metadata": {"path": str(examples_folder)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, resources=where).execute()
    return notebook


def test_notebook_answers_and_plots(executed: nbformat.NotebookNode) -> None:
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    assert "1500 tokens run and encoded" in printed
    assert "The return statement" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_notebook_is_committed_without_outputs(examples_folder: Path) -> None:
    notebook = nbformat.read(examples_folder / "first_steps.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
