"""Running the command line in this process, and an encoded document to run it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from hf_cachegen.bench.local_hub import LocalHub
from hf_cachegen.cli import app

Run = Callable[..., str]


@pytest.fixture(scope="session")
def run() -> Run:
    """``run(*arguments)`` expects success and returns stdout."""

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, f"{result.stderr}\n{result.exception!r}"
        return result.stdout

    return run


@pytest.fixture(scope="session")
def refuse() -> Run:
    """``refuse(*arguments)`` expects a user's mistake and returns the one line on stderr."""

    def refuse(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 2, f"{result.stdout}\n{result.exception!r}"
        *bars, line = result.stderr.splitlines()
        assert all("%|" in bar or not bar.strip() for bar in bars), result.stderr
        assert line.startswith("hf-cachegen: error: ")
        return line

    return refuse


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """An empty Hub that huggingface_hub talks to, with a cache of its own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    with LocalHub(tmp_path / "hub") as server:
        yield server


@pytest.fixture(scope="session")
def document(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    """The tiny text as a file."""
    path = tmp_path_factory.mktemp("documents") / "contract.txt"
    path.write_text(tiny_text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def encoded(
    tmp_path_factory: pytest.TempPathFactory, run: Run, tiny_model_folder: Path, document: Path
) -> Path:
    """The document's cache with an embedded table, in chunks of 200 tokens."""
    folder = tmp_path_factory.mktemp("caches") / "contract-kv"
    run("encode", tiny_model_folder, "--text", document, "-o", folder, "--chunk-tokens", 200)
    return folder
