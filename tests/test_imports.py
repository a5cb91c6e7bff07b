"""What the package exports, and what it does not import to do so."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hf_cachegen


@pytest.mark.parametrize("name", hf_cachegen.__all__)
def test_exported_name_is_there(name: str) -> None:
    assert getattr(hf_cachegen, name).__name__ == name


def test_other_name_is_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'load_cache'"):
        hf_cachegen.load_cache  # noqa: B018


@pytest.mark.parametrize(
    "module",
    [
        "hf_cachegen",
        "hf_cachegen.artifact",
        "hf_cachegen.container",
        "hf_cachegen.layout",
        "hf_cachegen.streaming.controller",
    ],
)
def test_import_is_light(module: str) -> None:
    heavy = "{'torch', 'transformers', 'numba'} & set(sys.modules)"
    code = f"import sys, {module}; sys.exit(bool({heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
