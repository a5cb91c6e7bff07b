"""Files of a store copied to this machine: an interrupted copy goes on from the byte it reached."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

from hf_cachegen.errors import FormatError, StoreError
from hf_cachegen.stores.base import Store, TruncatedError, intact
from hf_cachegen.stores.writing import open_kept

PART_SUFFIX = ".part"
"""Ends the names of files, and of folders of such files, that are not complete."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store, and how to know its bytes.

    Attributes
    ----------
    path
        Relative to the store.
    size_bytes
        Its length.
    digest
        Digest of its bytes, hex.
    new_hash
        Makes the hash object that the digest is of.
    """

    path: str
    size_bytes: int
    digest: str
    new_hash: Callable[[], Any] = hashlib.sha256

    def is_at(self, place: Path) -> bool:
        """Whether a file on this machine has just these bytes."""
        if not place.is_file() or place.stat().st_size != self.size_bytes:
            return False
        with place.open("rb") as file:
            return bool(hashlib.file_digest(file, self.new_hash).hexdigest() == self.digest)


def part_of(target: Path) -> Path:
    """Where a file, or a folder, is until it is complete: beside the target, with ``.part``."""
    return target.with_name(f"{target.name}{PART_SUFFIX}")


def download(
    store: Store,
    file: RemoteFile,
    target: Path,
    *,
    progress: Callable[[int], object] = lambda n_bytes: None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Copy a file of a store, unless it is there.

    Until it is complete and intact, its bytes are in :func:`part_of` the target, and the next call
    goes on from there, in this process or another. A link there is replaced, not followed. Who
    calls it for the same target at the same time costs the link more and does no harm.

    Parameters
    ----------
    store, file
        What to copy.
    target
        A file in an existing folder; replaced if it has other bytes.
    progress
        Called with the number of bytes that were copied or found since the last call; with a
        negative one for those that turned out damaged.
    is_wanted
        Asked at each piece. Once it says no, the copy ends with a StoreError.

    Raises
    ------
    StoreError
        The file cannot be read; the message says how much of it is kept.
    FormatError
        It is damaged in the store, or shorter than expected. Nothing is kept.
    OSError
        The target cannot be written.
    """
    if file.is_at(target):
        progress(file.size_bytes)
        return
    # What is kept of an earlier version, or was damaged on its way, is worth a second attempt.
    intact(functools.partial(_complete, store, file, target, progress, is_wanted))


def wanted_pieces(
    store: Store, path: str, offset: int, size: int, is_wanted: Callable[[], bool]
) -> Generator[bytes, None, None]:
    """As :meth:`Store.stream`; ends with a StoreError at the first piece that nobody wants."""
    with contextlib.closing(store.stream(path, offset, size)) as pieces:
        for piece in pieces:
            yield piece
            if not is_wanted():
                raise StoreError(f"{path} in {store.location} is not wanted any more")


def _complete(
    store: Store,
    file: RemoteFile,
    target: Path,
    progress: Callable[[int], object],
    is_wanted: Callable[[], bool],
) -> None:
    part = part_of(target)
    damage: FormatError | None = None
    with open_kept(part) as out:
        try:
            _fill(out, store, file, progress, is_wanted)
        except FormatError as error:
            damage = error
        size_bytes = out.tell()
    if damage is not None:
        part.unlink(missing_ok=True)
        progress(-size_bytes)
        raise damage
    try:
        part.replace(target)
    except FileNotFoundError:  # somebody else has completed it
        if not file.is_at(target):
            raise


def _fill(
    out: BufferedRandom,
    store: Store,
    file: RemoteFile,
    progress: Callable[[int], object],
    is_wanted: Callable[[], bool],
) -> None:
    """Add what is missing to what a file has, and check it; FormatError if it cannot be right."""
    found = hashlib.file_digest(out, file.new_hash)
    progress(out.tell())
    if out.tell() < file.size_bytes:
        for piece in _missing_pieces(store, file, out.tell(), is_wanted):
            out.write(piece)
            found.update(piece)
            progress(len(piece))
    out.flush()
    os.fsync(out.fileno())
    if (out.tell(), found.hexdigest()) != (file.size_bytes, file.digest):
        raise FormatError(
            f"{file.path} in {store.location}: expected {file.size_bytes} bytes of digest "
            f"{file.digest}, found {out.tell()} of {found.hexdigest()}; the file is damaged there"
        )


def _missing_pieces(
    store: Store, file: RemoteFile, position: int, is_wanted: Callable[[], bool]
) -> Generator[bytes, None, None]:
    """What lies behind a position; an error says how far it came, if the next attempt goes on."""
    try:
        missing_bytes = file.size_bytes - position
        for piece in wanted_pieces(store, file.path, position, missing_bytes, is_wanted):
            position += len(piece)
            yield piece
    except TruncatedError as error:
        raise FormatError(f"{error}; nothing of it is kept") from error
    except StoreError as error:
        if not position:
            raise
        raise type(error)(
            f"{error}; {position} of {file.size_bytes} bytes are kept, from which the next attempt "
            "goes on"
        ) from error
