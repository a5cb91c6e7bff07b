"""Real long text that is already here: of Python and of the packages this one depends on.

Documents come in two splits that share no source text, ``calibration`` and ``evaluation``, each
with prose (the language reference) and code (the standard library), so that what is profiled on one
is measured on the other. Calibration also has the docstrings of other packages.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

Split = Literal["calibration", "evaluation"]

DOCUMENT_CHARS = 16_000
"""About 4,000 tokens of prose."""

CODE_MODULES: dict[Split, tuple[str, ...]] = {
    "calibration": (
        *("argparse", "ast", "asyncio.base_events", "calendar", "collections", "configparser"),
        *("csv", "datetime", "difflib", "email.message", "fractions", "functools", "http.client"),
        *("inspect", "ipaddress", "logging", "mailbox", "pathlib", "pdb", "random", "shutil"),
        *("socketserver", "statistics", "subprocess", "textwrap", "threading", "unittest.case"),
        *("urllib.request", "weakref", "zipfile"),
    ),
    "evaluation": ("tarfile", "typing"),
}

DOCUMENTED_PACKAGES = ("huggingface_hub", "numpy", "torch", "transformers")
"""Packages whose docstrings are calibration prose."""

DOCUMENTS_A_PACKAGE = 15

SHORTEST_DOCSTRING = 400
"""Characters; shorter ones are mostly lists of parameters."""


def _pack(texts: Iterable[str], chars: int) -> Iterator[str]:
    """Join short texts into documents of at least ``chars`` characters; drop a short rest."""
    document: list[str] = []
    for text in texts:
        document.append(text)
        if sum(map(len, document)) >= chars:
            yield "\n\n".join(document)
            document = []


def _docstrings(package: str) -> Iterator[str]:
    """Docstrings of a package's source files, read without importing them, in a mixed order."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    assert spec.origin is not None, package
    paths = sorted(Path(spec.origin).parent.rglob("*.py"))
    # A fixed shuffle: neighbouring files document much the same.
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= SHORTEST_DOCSTRING:
                    yield text


def documents(split: Split, *, chars: int = DOCUMENT_CHARS) -> dict[str, str]:
    """Named documents of one split: every other reference topic, docstrings, module sources."""
    names = sorted(topics)[0 if split == "calibration" else 1 :: 2]
    prose = _pack((topics[name] for name in names), chars)
    found = {f"prose-{i:02d}": text[: 2 * chars] for i, text in enumerate(prose)}
    if split == "calibration":
        for package in DOCUMENTED_PACKAGES:
            texts = itertools.islice(_pack(_docstrings(package), chars), DOCUMENTS_A_PACKAGE)
            found |= {f"docs-{package}-{i:02d}": text[: 2 * chars] for i, text in enumerate(texts)}
    for module in CODE_MODULES[split]:
        __import__(module)
        source = inspect.getsource(sys.modules[module])
        found[f"code-{module}"] = source[: 2 * chars]
    return found


def write_documents(folder: Path, split: Split, *, chars: int = DOCUMENT_CHARS) -> list[Path]:
    """Write one split as text files and return their paths, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in documents(split, chars=chars).items():
        path = folder / f"{name}.txt"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="writes FOLDER/calibration and FOLDER/evaluation")
    args = parser.parse_args()
    for split in CODE_MODULES:
        for path in write_documents(args.folder / split, split):
            print(path)
