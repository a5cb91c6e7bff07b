"""A table copied to this machine: an interrupted copy goes on from the byte it reached."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from hf_cachegen.artifact.files import holds_files, replace_folder
from hf_cachegen.errors import StoreError
from hf_cachegen.stores.base import Store
from hf_cachegen.stores.download import RemoteFile, download, part_of, remove_link
from hf_cachegen.tables.record import TableRecord, new_hash, path_in
from hf_cachegen.tables.table import ModelTable, check_replaceable

LOCK_NAME = ".lock"
LOCK_POLL_S = 0.5
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
    They wait no longer than :data:`LOCK_WAIT_S`.

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
    with _alone_in(parts, is_wanted):
        payloads: dict[str, bytes] = {}
        for entry in record.codecs:
            path, size, digest = entry.file_name, entry.arrays.size_bytes, entry.arrays.digest
            file = RemoteFile(path_in(folder, path), size, digest, new_hash)
            place = target / path
            if file.is_at(place):
                progress(size)
            else:
                place = parts / path
                download(store, file, place, progress=progress, is_wanted=is_wanted)
            payloads[path] = place.read_bytes()
        table = ModelTable.parse(record, payloads, store.location)
        if not holds_files(target, table.files()):
            replace_folder(target, table.files(), scratch_in=parts)
        shutil.rmtree(parts, ignore_errors=True)
    return table


@contextlib.contextmanager
def _alone_in(folder: Path, is_wanted: Callable[[], bool]) -> Iterator[None]:
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
        if not lock.is_locked and time.monotonic() > deadline_s:
            raise TimeoutError(
                f"expected to write to {folder} within {LOCK_WAIT_S:g} s, but another process is "
                "at it; wait for it, or end it if it hangs"
            )
    try:
        yield
    finally:
        lock.release()
