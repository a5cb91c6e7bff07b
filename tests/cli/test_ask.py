"""``generate`` under a policy, and what ``--verbose`` tells of the stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_cachegen.cli import app


def ask(model: Path, cache: Path, *options: str) -> Any:
    arguments = ["generate", str(model), str(cache), "--question", "Who pays?"]
    return CliRunner().invoke(app, [*arguments, "--max-new-tokens", "4", *options])


@pytest.mark.parametrize(
    "options",
    [
        ["--policy", "text"],
        ["--policy", "fixed:lossless"],
        ["--policy", "soonest:finest"],
        ["--ttft-target", "30"],
        ["--policy", "layered", "--ttft-target", "30"],
    ],
)
def test_exact_contexts_give_one_answer(tiny_model_folder: Path, encoded: Path, options: list[str]):
    result = ask(tiny_model_folder, encoded, *options, "--compare")
    assert result.exit_code == 0, result.stderr
    assert "the same answer" in result.stderr


def test_verbose_tells_each_chunk(tiny_model_folder: Path, encoded: Path):
    text = ask(tiny_model_folder, encoded, "--policy", "text", "--verbose").stderr
    assert "as measured (and as predicted)" in text
    rows = [line.split() for line in text.splitlines() if " text " in line]
    assert [row[0] for row in rows] == [str(chunk) for chunk in range(len(rows))]
    fetched = ask(tiny_model_folder, encoded, "--level", "coarsest", "--verbose").stderr
    assert "MB" in fetched
    assert len([line for line in fetched.splitlines() if " MB " in line]) == len(rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--level", "lossless", "--policy", "text"], "got both"),
        (["--level", "lossless", "--ttft-target", "1"], "got both"),
        (["--policy", "paper"], "needs a target, got none; pass --ttft-target"),
        (["--policy", "text", "--ttft-target", "1"], "no --ttft-target with policy 'text'"),
        (["--policy", "fixed:raw", "--ttft-target", "1"], "no --ttft-target with policy 'fixed"),
        (["--policy", "soonest:finest", "--ttft-target", "1"], "no --ttft-target with policy"),
        (["--policy", "fastest", "--ttft-target", "1"], "unknown policy 'fastest'"),
        (["--policy", "fixed:best"], "unknown level 'best'"),
    ],
)
def test_wrong_options_are_refused(
    tiny_model_folder: Path, encoded: Path, options: list[str], words: str
):
    result = ask(tiny_model_folder, encoded, *options)
    assert result.exit_code == 2
    assert words in result.stderr
