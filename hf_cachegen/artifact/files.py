"""Durable, atomic writes: a name shows the old file or folder or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hf_cachegen.errors import StoreError
from hf_cachegen.stores.writing import create

_TEMPORARY_SUFFIX = ".tmp"

SCRATCH_PREFIX = ".new-"
"""Begins the names of folders that an interrupted :func:`replace_folder` leaves behind."""


def write_file(path: Path, data: bytes) -> None:
    """Write a temporary file beside ``path``, flush it to the disk, and rename it.

    Several may write the same file at once: the last one's bytes stay. A link at ``path`` is
    replaced, not followed.

    Raises
    ------
    StoreError
        The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}")
    try:
        try:
            _write_flushed(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error


def check_writable(folder: Path) -> None:
    """Raise StoreError if a folder cannot be made, or written to. Nothing is left behind.

    That a disk is full shows only when something is written.
    """
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise StoreError(f"cannot write to {folder}: expected a folder, {nearest} is a file")
        # Permissions do not tell of disks that are read-only, and of folders such as /proc.
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise StoreError(
            f"cannot write to {folder}: {error.strerror}; choose another folder"
        ) from error


def holds_files(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether a folder has files of these names with just these bytes, whatever else it has."""
    try:
        return all((folder / name).read_bytes() == data for name, data in files.items())
    except OSError:
        return False


def replace_folder(
    folder: Path, files: Mapping[str, bytes], *, scratch_in: Path | None = None
) -> None:
    """Make ``folder`` one with these files and no others. It appears whole or not at all.

    Others may do the same with the same files at the same time.

    Parameters
    ----------
    folder, files
        What to make, and the bytes by name.
    scratch_in
        A folder on the same disk, in which an interrupted call leaves a folder; by default the one
        that ``folder`` is in.

    Raises
    ------
    OSError
        The folder cannot be written. What it held is still there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=scratch_in or folder.parent))
    new, old = scratch / "new", scratch / "old"
    try:
        new.mkdir()
        for name, data in files.items():
            _write_flushed(new / name, data)
        with contextlib.suppress(OSError):
            new.rename(folder)  # fails unless there is nothing, or an empty folder
        if holds_files(folder, files):
            return
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if not holds_files(folder, files):
                raise
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)


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


def _write_flushed(path: Path, data: bytes) -> None:
    with create(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
