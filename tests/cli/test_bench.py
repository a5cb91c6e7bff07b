"""``profile --evaluate`` and ``bench``: what they measure and what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_cachegen.bench import codec as bench_codec
from hf_cachegen.cli import app


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> list[Path]:
    """Three texts that differ."""
    folder = tmp_path_factory.mktemp("texts")
    paths = [folder / f"{name}.txt" for name in ("one", "two", "three")]
    for count, path in enumerate(paths):
        path.write_text(tiny_text[100 * count :], encoding="utf-8")
    return paths


@pytest.fixture
def measure(tiny_model_folder: Path, documents: list[Path]) -> list[str]:
    """Arguments of a short codec benchmark: two texts measured, the third profiled."""
    return [
        *("bench", "codec", str(tiny_model_folder), "--context", "120", "--continuation", "16"),
        *("--text", str(documents[0]), str(documents[1]), "--json"),
    ]


def test_the_last_line_of_stdout_is_the_report(measure, documents):
    arguments = [*measure, "--calibration", str(documents[2]), "--set", "delta.factors=1,0.5"]
    result = CliRunner().invoke(
        app, [*arguments, "--max-samples", "1", "--set", "delta.tables=tensor"]
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["schema"] == 1
    assert found["table_bytes"] > 0
    rows = {(row["codec"], row["level"]): row for row in found["rows"]}
    coarse, fine, lossless, raw = list(rows)[-4:]
    assert [coarse, fine] == [("delta", "delta-0"), ("delta", "delta-1")]
    assert [lossless, raw] == [("lossless", "lossless"), ("raw", "raw")]
    assert rows[lossless]["kl_mean"] == 0
    assert rows[coarse]["bits_per_value"] < rows[fine]["bits_per_value"]
    assert "delta-1" in result.stderr


def test_nested_levels_are_measured_with_what_they_refine(measure, documents):
    """The benchmark itself checks that what streams is what the chain of codecs decodes."""
    arguments = [*measure, "--calibration", str(documents[2]), "--codec", "transform"]
    arguments += ["--codecs", "transform", "--set", "transform.group=2", "transform.levels=2"]
    arguments += ["--set", "transform.step=3e-4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    coarse, fine = [row for row in rows if row["codec"] == "transform"]
    assert [coarse["level"], fine["level"]] == ["transform-0", "transform-1"]
    assert coarse["bits_per_value"] < fine["bits_per_value"] < 32
    assert coarse["kl_mean"] > 0 < fine["kl_mean"]
    assert fine["encode_s"] > 0 < fine["decode_s"]


def test_a_flaw_in_the_round_trip_is_exit_code_1(measure, documents, monkeypatch):
    monkeypatch.setattr(bench_codec.torch, "equal", lambda a, b: False)
    result = CliRunner().invoke(
        app, [*measure, "--calibration", str(documents[2]), "--codec", "raw"]
    )
    assert result.exit_code == 1
    assert "round trip" in result.stderr
    assert result.stdout == ""


def test_profile_writes_what_it_measured_into_the_card(
    run, refuse, tmp_path, tiny_model_folder, documents, measure
):
    out = tmp_path / "table"
    arguments = ["profile", tiny_model_folder, "-o", out, "--text", documents[2]]
    arguments += ["--sample-tokens", 100, "--max-samples", 2, "--codecs", "delta"]
    arguments += ["--set", "delta.factors=1,"]
    assert "1756 tokens" in refuse(*arguments, "--evaluate", documents[0])
    assert not out.exists()  # it is told before the profile
    run(*arguments)
    card = (out / "README.md").read_text()
    assert "| three | 200 |" in card
    assert "Not measured" in card
    longer = tmp_path / "longer.txt"
    longer.write_text(2 * documents[0].read_text())
    run(*arguments, "--evaluate", longer)
    card = (out / "README.md").read_text()
    assert "On longer (" in card
    assert "| lossless | lossless | " in card
    found = json.loads(run(*measure, "--table", out).splitlines()[-1])
    assert [row["level"] for row in found["rows"]][-3:] == ["delta-0", "lossless", "raw"]


def test_entropy_as_json(run):
    found = json.loads(run("bench", "entropy", "--repeats", 1, "--json").splitlines()[-1])
    assert found["schema"] == 1
    assert {row["backend"] for row in found["rows"]} == {"numba", "numpy"}
    assert all(row["decode_integers"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--calibration FILE... or --table"),
        (["--calibration", "{three}", "--table", "x"], "--calibration FILE... or --table"),
        (["--calibration", "{one}"], "not profiled, got one"),
        (["--calibration", "{three}", "--set", "delta.bins=1,x"], "--set delta.bins: "),
        (["--calibration", "{three}", "--set", "delta.factors=1,2"], "decrease"),
        (["--calibration", "{three}", "--set", "delta.group=-1"], "--set delta.group: "),
        (["--calibration", "{three}", "--set", "transform.none=1"], "--set transform.none: "),
        (["--calibration", "{three}", "--set", "transform.levels=0"], "--set transform.levels: "),
        (["--calibration", "{three}", "--set", "transform.step=x"], "--set transform.step: "),
        (["--calibration", "{three}", "--set", "transform.group"], "expected CODEC.NAME=VALUE"),
        (["--calibration", "{three}", "--set", "other.group=1"], "expected CODEC.NAME=VALUE"),
        (["--calibration", "{three}", "--codecs", "zip"], "--codecs: unknown zip"),
        (["--table", "x", "--set", "delta.group=3"], "the table has its own"),
        (["--calibration", "{three}", "{three}"], "'three' twice"),
    ],
)
def test_wrong_options_are_refused(refuse, measure, documents, options, words):
    names = {path.stem: path for path in documents}
    assert words in refuse(*measure, *(option.format(**names) for option in options))


def test_text_must_be_utf8(refuse, tmp_path, tiny_model_folder):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    assert "UTF-8" in refuse("encode", tiny_model_folder, "--text", path, "-o", tmp_path / "x")
