"""A table copied to this machine: an interrupted copy goes on from the byte it reached."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import filelock

from hf_cachegen.artifact.files import holds_files, replace_folder
from hf_cachegen.errors import FormatError, StoreError
from hf_cachegen.stores.base import Store, intact
from hf_cachegen.stores.download import RemoteFile, download, part_of, wanted_pieces
from hf_cachegen.stores.writing import remove_link
from hf_cachegen.tables.record import CodecRecord, TableRecord, new_hash, path_in
from hf_cachegen.tables.table import ModelTable, check_payload, check_replaceable

LOCK_NAME = ".lock"
LOCK_POLL_S = 0.1
LOCK_WAIT_S = 10.0
"""Who takes longer may be stopped, or on a link that is slow for him alone."""


def download_table(
    record: TableRecord,
    store: Store,
    folder: str,
    target: Path,
    *,
    progress: Callable[[int], object] = lambda n_bytes: None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> ModelTable:
    """Copy a table's files that are not there. The folder appears whole or not at all.

    Until it does, what has arrived is in a folder beside it, :func:`part_of` the target. One
    process or thread fills it at a time; others wait, and then find the table, or go on from there.
    They wait no longer than :data:`LOCK_WAIT_S`, and see the progress of whoever fills it.

    Parameters
    ----------
    record
        The table, or the part of it that is wanted, as :meth:`TableRecord.read` found it.
    store, folder
        Where it is, as for :meth:`ModelTable.load`.
    target
        Made if need be. An earlier table in it is replaced.
    progress
        Called with the number of bytes that were copied or found since the last call; with a
        negative one for those that turned out damaged.
    is_wanted
        Asked at each piece, and while another copies. Once it says no, a StoreError is raised.

    Raises
    ------
    ValueError
        The target holds something other than a table, which would be lost.
    StoreError, FormatError
        A file cannot be read, is damaged, or is not what the record says.
    OSError
        The target cannot be written; a TimeoutError: somebody else is still writing it.
    """
    check_replaceable(target)
    parts = part_of(target)
    tell = _Progress(progress)
    with _alone_in(parts, is_wanted, lambda: tell.foresee(arrived_bytes(record, target))):
        payloads: dict[str, bytes] = {}
        for entry in record.codecs:
            path, size, digest = entry.file_name, entry.arrays.size_bytes, entry.arrays.digest
            file = RemoteFile(path_in(folder, path), size, digest, new_hash)
            place = target / path
            if file.is_at(place):
                tell(size)
            else:
                place = parts / path
                download(store, file, place, progress=tell, is_wanted=is_wanted)
            payloads[path] = place.read_bytes()
        table = ModelTable.parse(record, payloads, store.location)
        if not holds_files(target, table.files()):
            replace_folder(target, table.files(), scratch_in=parts)
        shutil.rmtree(parts, ignore_errors=True)
    return table


def stream_table(
    record: TableRecord,
    store: Store,
    folder: str,
    *,
    progress: Callable[[int], object],
    is_wanted: Callable[[], bool],
) -> ModelTable:
    """Read a table from afar and keep nothing of it; else as :func:`download_table`."""

    def read(entry: CodecRecord) -> bytes:
        path, file = path_in(folder, entry.file_name), entry.arrays
        pieces: list[bytes] = []
        for piece in wanted_pieces(store, path, 0, file.size_bytes, is_wanted):
            pieces.append(piece)
            progress(len(piece))
        payload = b"".join(pieces)
        try:
            check_payload(payload, file, f"{path} in {store.location}")
        except FormatError:
            progress(-len(payload))
            raise
        return payload

    payloads = {entry.file_name: intact(partial(read, entry)) for entry in record.codecs}
    return ModelTable.parse(record, payloads, store.location)


def arrived_bytes(record: TableRecord, target: Path) -> int:
    """What is there of a table whose copy to a target is not complete."""

    def arrived(name: str) -> int:
        for place in (part_of(target) / name, part_of(part_of(target) / name)):
            with contextlib.suppress(OSError):
                return place.stat().st_size
        return 0

    return sum(min(arrived(e.file_name), e.arrays.size_bytes) for e in record.codecs)


class _Progress:
    """Tells of bytes once, though they may be seen to arrive before they are found."""

    def __init__(self, tell: Callable[[int], object]) -> None:
        self._tell = tell
        self._ahead_bytes = 0

    def foresee(self, size_bytes: int) -> None:
        """So many bytes in all will be found."""
        if size_bytes > self._ahead_bytes:
            self._tell(size_bytes - self._ahead_bytes)
            self._ahead_bytes = size_bytes

    def __call__(self, size_bytes: int) -> None:
        """So many were found, or copied, or turned out damaged if negative."""
        told_bytes = max(min(size_bytes, self._ahead_bytes), 0)
        self._ahead_bytes -= told_bytes
        if size_bytes != told_bytes:
            self._tell(size_bytes - told_bytes)


@contextlib.contextmanager
def _alone_in(
    folder: Path, is_wanted: Callable[[], bool], while_waiting: Callable[[], object]
) -> Iterator[None]:
    """Make a folder and keep others out of it, who may remove it when they are done."""
    lock = filelock.FileLock(folder / LOCK_NAME, timeout=LOCK_POLL_S)
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while not lock.is_locked:
        remove_link(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(filelock.Timeout, FileNotFoundError):
            lock.acquire()
        if not is_wanted():
            lock.release()
            raise StoreError(f"what {folder} is for is not wanted any more")
        if not lock.is_locked:
            while_waiting()
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"expected to write to {folder} within {LOCK_WAIT_S:g} s, but another process "
                    "is at it; wait for it, or end it if it hangs"
                )
    try:
        yield
    finally:
        lock.release()
