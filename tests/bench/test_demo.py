"""The demo measures what it says, on a tiny model and a fast link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_cachegen.bench import demo
from hf_cachegen.bench.ttft import AHEAD_TOKENS, TtftResult, build_prompt, measure_ttft
from hf_cachegen.hf.profiling import profile_model
from hf_cachegen.tables import ModelTable

CONTEXT_TOKENS = 300
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def table(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tiny_text: str
) -> ModelTable:
    samples = {"contract": tiny_text}
    return profile_model(tiny_model, tiny_tokenizer, samples, sample_tokens=200, progress=False)


@pytest.fixture(scope="module")
def result(
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tiny_text: str,
    table: ModelTable,
) -> TtftResult:
    prompt = build_prompt(tiny_tokenizer, tiny_text, "Who signed it?", CONTEXT_TOKENS)
    return measure_ttft(
        tiny_model, tiny_tokenizer, table, prompt, link_mbps=20, runs=2, progress=False
    )


def test_exact_levels_change_nothing(result: TtftResult) -> None:
    exact = {row.level: row for row in result.levels if row.level in ("lossless", "raw")}
    assert len(exact) == 2
    for row in exact.values():
        assert row.kl_mean == 0
        assert row.answer.text == result.text.text


def test_coarser_levels_are_smaller_and_less_exact(result: TtftResult) -> None:
    lossy = [row for row in result.levels if row.level.startswith("delta")]
    assert len(lossy) >= 4
    assert [row.size_bytes for row in lossy] == sorted(row.size_bytes for row in lossy)
    assert lossy[0].kl_mean > lossy[-1].kl_mean > 0


def test_sizes_are_those_of_one_transfer(result: TtftResult) -> None:
    raw = result.levels[-1]
    cache_bytes = 3 * 2 * 2 * 16 * CONTEXT_TOKENS * 4
    assert raw.level == "raw"
    assert cache_bytes < raw.size_bytes < 1.5 * cache_bytes
    assert raw.bits_per_value == pytest.approx(8 * raw.size_bytes / (cache_bytes / 4), rel=1e-3)
    assert raw.ratio_bf16 == pytest.approx(16 / raw.bits_per_value)


def test_first_token_waits_for_the_link(result: TtftResult) -> None:
    for row in result.levels:
        assert row.answer.ttft_s > 0.8 * row.size_bytes * 8 / 20e6


def test_prompt_begins_with_the_document(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    document = ("The tenant pays the rent. " * 100).strip()
    prompt = build_prompt(tiny_tokenizer, document, "Who pays?", CONTEXT_TOKENS)
    assert len(prompt.context) == CONTEXT_TOKENS
    assert len(prompt.ahead) == AHEAD_TOKENS
    document_ids = tiny_tokenizer(document)["input_ids"]
    assert torch.cat((prompt.context, prompt.ahead)).tolist() == document_ids[:364]
    assert prompt.question.tolist() == tiny_tokenizer("\n\nWho pays?\nAnswer:")["input_ids"]


def test_prompt_follows_the_chat_template(
    tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", TEMPLATE)
    document, question = "Who pays? " * 200, "Who pays?"
    prompt = build_prompt(tiny_tokenizer, document, question, CONTEXT_TOKENS)
    before, after = f"<user>{document}", f"\n\n{question}</user><assistant>"
    assert prompt.context.tolist() == tiny_tokenizer(before)["input_ids"][:CONTEXT_TOKENS]
    assert prompt.question.tolist() == tiny_tokenizer(after)["input_ids"]


def test_short_document_is_refused(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="expected a document of at least 364 tokens, found"):
        build_prompt(tiny_tokenizer, "short", "Who?", CONTEXT_TOKENS)


def test_every_answer_is_shown_with_its_sources(result: TtftResult) -> None:
    console = Console(record=True, width=120)
    demo.show(result, console)
    shown = console.export_text()
    for name in ("Answer from text", "bits/value", *(row.level for row in result.levels)):
        assert name in shown
    for answer in {result.text.text, *(row.answer.text for row in result.levels)}:
        assert shown.count(f"{answer.splitlines()[0]}\n") == 1


def test_json_is_the_last_line(
    tiny_model_folder: Path,
    table: ModelTable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table.save(tmp_path / "table")
    options = ["--dtype", "float32", "--tokens", "200", "--link-mbps", "1000", "--json"]
    demo.main(["--model", str(tiny_model_folder), "--table", str(tmp_path / "table"), *options])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["schema"] == demo.SCHEMA
    assert result["dtype"] == "float32"
    assert result["context_tokens"] == 200
    assert [row["level"] for row in result["levels"]][-2:] == ["lossless", "raw"]
