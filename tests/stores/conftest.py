"""A small artefact-like folder, and a local Hub that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from huggingface_hub import HfApi

from hf_cachegen.bench.local_hub import LocalHub

CHUNK = "chunks/00.kv"


@pytest.fixture
def chunk() -> bytes:
    """Content of ``chunks/00.kv``: binary, so that it is stored with LFS."""
    return np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def folder(tmp_path: Path, chunk: bytes) -> Path:
    """``cache.json``, ``chunks/00.kv`` and an empty file."""
    root = tmp_path / "artefact"
    (root / "chunks").mkdir(parents=True)
    (root / "cache.json").write_text('{"version": 1}')
    (root / CHUNK).write_bytes(chunk)
    (root / "empty").touch()
    return root


@pytest.fixture
def hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A Hub with the folder in the public repository ``me/context``."""
    # The constants are read from the environment at import, which another test may have caused.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with LocalHub(tmp_path / "hub") as server:
        api = HfApi(endpoint=server.endpoint, token=server.token)
        api.create_repo("me/context")
        api.upload_folder(repo_id="me/context", folder_path=folder)
        yield server
