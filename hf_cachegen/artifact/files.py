"""Durable, atomic file writes: a name shows the old bytes or the new ones, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hf_cachegen.errors import StoreError

_TEMPORARY_SUFFIX = ".tmp"


def write_file(path: Path, data: bytes) -> None:
    """Write a temporary file beside ``path``, flush it to the disk, and rename it.

    Raises
    ------
    StoreError
        The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}{_TEMPORARY_SUFFIX}")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error


def sync_file(path: Path) -> None:
    """Flush a file that another writer has closed."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    if os.name == "nt":  # Windows cannot open a folder; NTFS journals its renames
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporaries(folder: Path) -> Iterator[Path]:
    """Files that an interrupted :func:`write_file` left in a folder."""
    return folder.glob(f".*{_TEMPORARY_SUFFIX}")
