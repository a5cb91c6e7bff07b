"""Imports go down only; docs/architecture.md draws the floors."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = (
    ("errors", "config", "layout"),
    ("triton_kernels", "container", "stores"),
    ("codec",),
    ("artifact",),
    ("tables", "levels"),
    ("streaming",),
    ("hf",),
    ("bench", "cli", "__main__", "hf_cachegen"),  # hf_cachegen: the package's own __init__
)
SAME_FLOOR = {("layout", "config"), ("levels", "tables"), ("cli", "bench"), ("__main__", "cli")}
KNOW_TRANSFORMERS = {"hf", "bench", "cli"}
KNOW_NO_TORCH = {"errors", "config", "layout", "container", "stores", "artifact"}

FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_cachegen"
KERNELS = "triton_kernels"  # installs as hf_cachegen.triton_kernels

_OWN_NAME = re.compile(rf"({PACKAGE}|{KERNELS})(\.[\w.]*)?")
_DYNAMIC_IMPORTS = {"import_module", "__import__"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    inside = parts[1:] if parts[0] == PACKAGE else parts
    return ".".join((PACKAGE, *(part for part in inside if part != "__init__")))


MODULES = {
    module_name(path): path
    for folder in (PACKAGE, KERNELS)
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def unit_of(module: str) -> str:
    """The entry of FLOORS that one of our dotted names belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR_OF else PACKAGE


def imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Absolute names of everything imported, at the top of a module or inside its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imports_itself_by_name(tree: ast.AST) -> bool:
    """Whether a module calls ``import_module`` and spells a name of ours, there or in a table."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in _DYNAMIC_IMPORTS
    ]
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    arguments = [n.value for call in calls for n in ast.walk(call) if isinstance(n, ast.Constant)]
    return bool(calls) and (
        any(isinstance(text, str) and _OWN_NAME.fullmatch(text) for text in strings)
        or any(isinstance(text, str) and text.startswith(".") for text in arguments)
    )


def may_import(unit: str, name: str) -> bool:
    """Whether a unit may import a dotted name."""
    library = name.partition(".")[0]
    if library == PACKAGE:
        other = unit_of(name)
        lower = FLOOR_OF[other] < FLOOR_OF[unit]
        return lower or unit == other or (unit, other) in SAME_FLOOR
    if library == "transformers":
        return unit in KNOW_TRANSFORMERS
    if library == "torch":
        return unit not in KNOW_NO_TORCH
    return library != KERNELS  # under this bare name it is another project's package


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Imports of a module that the floors forbid."""
    tree = ast.parse(source)
    package = module if is_package else module.rpartition(".")[0]
    unit = unit_of(module)
    found = [name for name in imported_names(tree, package) if not may_import(unit, name)]
    return found + ["import_module"] * imports_itself_by_name(tree)


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_lower_floors_only(module: str) -> None:
    path = MODULES[module]
    is_package = path.name == "__init__.py"
    forbidden = violations(path.read_text(encoding="utf-8"), module, is_package=is_package)
    assert not forbidden, f"{module} may not import {forbidden}, see docs/architecture.md"


def test_every_module_has_a_floor() -> None:
    units = {name.partition(".")[2].partition(".")[0] or PACKAGE for name in MODULES}
    assert units - FLOOR_OF.keys() == set()
    assert {"container", "codec", "hf", KERNELS} <= units


def documented() -> set[str]:
    """Dotted names of all that the table of docs/architecture.md has a row for."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Modules")[1]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return {f"{PACKAGE}.{name.replace('/', '.')}".removesuffix(".__init__") for name in names}


def test_the_document_has_a_row_for_every_module_or_its_package() -> None:
    rows = documented()
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert rows - MODULES.keys() == set(), "rows of modules that are gone"
    whole = rows & packages - {PACKAGE, f"{PACKAGE}.{KERNELS}"}  # one row for all their modules
    missing = {
        module
        for module in MODULES.keys() - rows - packages
        if not any(module.startswith(f"{package}.") for package in whole)
    }
    assert missing == set()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("codec.rans", "from hf_cachegen.artifact import Manifest"),
        ("codec.rans", "import hf_cachegen.hf.cache"),
        ("codec.rans", "from hf_cachegen import hf"),
        ("codec.rans", "from hf_cachegen import anything"),
        ("codec.rans", "def f():\n    if True:\n        from hf_cachegen.streaming import x"),
        ("codec.rans", "from ..tables import ModelTable"),
        ("codec.rans", "from .. import tables"),
        ("codec.rans", "import transformers"),
        ("codec.rans", "import triton_kernels"),
        ("container", "from hf_cachegen.stores.base import Store"),
        ("container", "import torch.nn"),
        ("stores.hub", "from hf_cachegen.container import build_chunk"),
        ("stores.hub", "def f():\n    from torch import Tensor"),
        ("triton_kernels", "from hf_cachegen.container import build_chunk"),
        ("tables", "from hf_cachegen.levels import codec_for"),
        ("streaming.pipeline", "from transformers.cache_utils import Cache"),
        ("bench.link", "from hf_cachegen.cli import app"),
        ("hf.cache", "import importlib\nimportlib.import_module('hf_cachegen.hf.hub')"),
        ("hf.cache", "from importlib import import_module\nimport_module('.hub', __package__)"),
        ("hf.cache", "NAMES = {'a': 'hf_cachegen.cli'}\n__import__(NAMES['a'])"),
        ("hf.cache", "def f(x):\n    return __import__(f'hf_cachegen.{x}')"),
    ],
)
def test_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(violations(source, f"{PACKAGE}.{module}")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("codec.rans", "import torch\nfrom hf_cachegen.triton_kernels import rans"),
        ("codec.rans", "from . import bank\nfrom .. import errors\nfrom ..layout import KVLayout"),
        ("levels", "from hf_cachegen.tables import ModelTable"),
        ("cli", "import transformers\nfrom hf_cachegen.bench import codec"),
        ("bench.corpus", "def f(name):\n    __import__(name)"),
    ],
)
def test_allowed_import_passes(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}") == []
