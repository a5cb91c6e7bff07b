"""Real long text that every Python carries: the language reference and the standard library.

Documents come in two splits that share no source text, ``calibration`` and ``evaluation``, each
with prose and code, so that what is profiled on one is measured on the other.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

Split = Literal["calibration", "evaluation"]

DOCUMENT_CHARS = 16_000
"""About 4,000 tokens of prose."""

CODE_MODULES: dict[Split, tuple[str, ...]] = {
    "calibration": ("argparse", "asyncio.base_events", "difflib", "inspect", "logging", "pathlib"),
    "evaluation": ("tarfile", "typing"),
}


def _pack(texts: Iterable[str], chars: int) -> Iterator[str]:
    """Join short texts into documents of at least ``chars`` characters; drop a short rest."""
    document: list[str] = []
    for text in texts:
        document.append(text)
        if sum(map(len, document)) >= chars:
            yield "\n\n".join(document)
            document = []


def documents(split: Split, *, chars: int = DOCUMENT_CHARS) -> dict[str, str]:
    """Named documents of one split: reference topics (every other one) and module sources."""
    names = sorted(topics)[0 if split == "calibration" else 1 :: 2]
    prose = _pack((topics[name] for name in names), chars)
    found = {f"prose-{i:02d}": text[: 2 * chars] for i, text in enumerate(prose)}
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
