"""The embedded model, for what only a real one can show."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def examples_folder() -> Path:
    """Where the examples are."""
    return ROOT / "examples"


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """SmolLM2-135M as `make model` prepares it; skips where that has not been done."""
    folder = ROOT / ".cache" / "models" / "SmolLM2-135M"
    if not (folder / "config.json").exists():
        pytest.skip(f"no model in {folder.relative_to(ROOT)}; `make model` prepares it")
    return folder
