"""The benchmark of streams: every source answers, over every link, and the figures add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_cachegen.bench.dumps import DUMPS
from hf_cachegen.bench.link import read_trace
from hf_cachegen.bench.stream import SOURCES, BenchLink, StreamBench, bench_stream
from hf_cachegen.cli import app
from hf_cachegen.codec.delta import DeltaConfig
from hf_cachegen.hf.codecs import load_table
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.hf.profiling import profile_model
from hf_cachegen.stores import LocalStore

CONTEXT, AHEAD = 300, 8
LEVELS = ("delta-0", "delta-1", "delta-2", "delta-3", "lossless")


@pytest.fixture(scope="module")
def table_folder(tiny_model: Any, tiny_tokenizer: Any, tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("tables") / "tiny"
    texts = {"numbers": " ".join(map(str, range(400)))}
    profile_model(tiny_model, tiny_tokenizer, texts, configs=[DeltaConfig()]).save(folder)
    return folder


@pytest.fixture(scope="module")
def measured(tiny_model: Any, tiny_tokenizer: Any, tiny_text: str, table_folder: Path) -> Any:
    """All sources over a link of 20 Mbit/s and one that stops for 0.2 s."""
    ids = tiny_tokenizer(tiny_text, return_tensors="pt")["input_ids"][0]
    return bench_stream(
        tiny_model,
        load_table(table_folder)[0],
        ids[:CONTEXT],
        ids[CONTEXT : CONTEXT + AHEAD],
        [
            BenchLink.constant(20.0),
            BenchLink("gap", [(0.0, 1e3), (0.2, 1e7)]),
        ],
        target_s=0.3,
        runs=2,
        chunk_tokens=100,
        progress=False,
    )


def test_every_source_over_every_link(measured: StreamBench):
    names = [name for name in SOURCES if name != "fixed"]
    at = SOURCES.index("fixed")
    expected = [*names[:at], *(f"fixed:{level}" for level in LEVELS), *names[at:]]
    assert [(row.link, row.source) for row in measured.rows] == [
        (link, source) for link in ("20 Mbit/s", "gap") for source in expected
    ]
    for row in measured.rows:
        assert len(row.ttft_s) == 2
        assert min(row.ttft_s) <= row.ttft_p50_s <= row.ttft_p90_s <= max(row.ttft_s)
        assert row.missed in (0.0, 0.5, 1.0)


def test_bytes_and_shares(measured: StreamBench):
    rows = {row.source: row for row in measured.rows if row.link == "20 Mbit/s"}
    values = CONTEXT * 3 * 2 * 2 * 16
    assert rows["text"].size_bytes == 0
    assert 2 * values < rows["bf16"].size_bytes < 2.1 * values
    assert values < rows["uniform-8"].size_bytes < 1.3 * values
    sizes = [rows[f"fixed:{level}"].size_bytes for level in LEVELS]
    assert sizes == sorted(sizes)
    for level in LEVELS:
        assert rows[f"fixed:{level}"].shares == {level: 1.0}
    for name in ("paper", "robust", "layered"):
        assert sum(rows[name].shares.values()) == pytest.approx(1.0)


def test_quality(measured: StreamBench):
    rows = {row.source: row for row in measured.rows if row.link == "20 Mbit/s"}
    assert rows["text"].kl_mean == pytest.approx(0, abs=1e-6)
    assert rows["fixed:lossless"].kl_mean == pytest.approx(0, abs=1e-6)
    assert rows["bf16"].kl_mean == pytest.approx(0, abs=1e-6)
    assert rows["bf16"].kl_mean < rows["fixed:delta-0"].kl_mean
    assert rows["uniform-8"].kl_mean < rows["fixed:delta-0"].kl_mean


def test_slow_link_is_waited_for(measured: StreamBench):
    rows = {row.source: row for row in measured.rows if row.link == "gap"}
    assert rows["fixed:delta-0"].ttft_p50_s > 0.2
    assert rows["text"].ttft_p50_s < rows["fixed:delta-0"].ttft_p50_s


def test_report_is_json(measured: StreamBench):
    found = json.loads(json.dumps(measured.to_json()))
    assert found["schema"] == 1
    assert found["rows"][0]["source"] == "text"


def test_unknown_source_is_named_with_those_that_are(tiny_model: Any, table_folder: Path):
    with pytest.raises(ValueError, match=r"unknown source 'fast'.*robust.*delta-0"):
        bench_stream(
            tiny_model,
            load_table(table_folder)[0],
            torch.arange(3, 50),
            torch.arange(4),
            [],
            sources=["fast"],
            progress=False,
        )


@pytest.mark.parametrize("name", DUMPS)
def test_dumps_give_back_what_they_hold(tiny_model: Any, tmp_path: Path, name: str):
    ids = torch.arange(3, 60)
    cache = prefill(tiny_model, ids, progress=False)
    dump = DUMPS[name]
    dump.save(tmp_path, cached_layers(cache))
    size = (tmp_path / dump.path).stat().st_size
    found = dump.load(LocalStore(tmp_path), size, tiny_model)
    for ours, exact in zip(found.layers, cache.layers, strict=True):
        for mine, theirs in ((ours.keys, exact.keys), (ours.values, exact.values)):
            bound = theirs.abs().amax(-1, keepdim=True) * (2**-8 if name == "bf16" else 2**-7)
            assert ((mine - theirs).abs() <= bound).all()


def test_command(tiny_model_folder: Path, table_folder: Path, tiny_text: str, tmp_path: Path):
    document, trace = tmp_path / "text.txt", tmp_path / "drop.txt"
    document.write_text(tiny_text)
    trace.write_text("# seconds, Mbit/s\n0 50\n0.1 5  # slower\n")
    result = CliRunner().invoke(
        app,
        [
            *("bench", "stream", str(tiny_model_folder), "--text", str(document)),
            *("--table", str(table_folder), "--context", "200", "--ahead", "8", "--runs", "1"),
            *("--link-mbps", "80", "--trace", str(trace), "--chunk-tokens", "80", "--json"),
            *("--source", "text", "robust", "fixed:lossless", "--target", "1"),
        ],
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert [(row["link"], row["source"]) for row in found["rows"]] == [
        (link, source)
        for link in ("80 Mbit/s", "drop")
        for source in ("text", "robust", "fixed:lossless")
    ]
    assert "TTFT p50" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--context", "5000"], "at least 5064 tokens"),
        (["--target", "0"], "above 0"),
        (["--link-mbps", "-1"], "above 0"),
        (["--context", "20", "--ahead", "4", "--source", "fast"], "unknown source 'fast'"),
    ],
)
def test_wrong_options_are_refused(
    tiny_model_folder: Path,
    table_folder: Path,
    tiny_text: str,
    tmp_path: Path,
    arguments: list[str],
    words: str,
):
    document = tmp_path / "text.txt"
    document.write_text(tiny_text)
    base = ["bench", "stream", str(tiny_model_folder), "--text", str(document)]
    result = CliRunner().invoke(app, [*base, "--table", str(table_folder), *arguments])
    assert result.exit_code == 2, result.stdout
    assert words in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [("0 1 2", "line 1"), ("0 5\n1 fast", "line 2"), ("1 5", "expected a trace"), ("", "trace")],
)
def test_traces_that_make_no_sense(tmp_path: Path, text: str, words: str):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_trace(path)
