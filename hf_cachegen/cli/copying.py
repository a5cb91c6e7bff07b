"""Copying an artefact into a folder, byte by byte, so that it is valid at any moment."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import filelock
import numpy as np

from hf_cachegen.artifact import Artifact, Manifest
from hf_cachegen.artifact.files import sync_folder, write_file
from hf_cachegen.artifact.manifest import MAX_MANIFEST_BYTES, FileRecord
from hf_cachegen.artifact.writer import LOCK_NAME
from hf_cachegen.cli.inspect import embedded_table
from hf_cachegen.config import CHUNKS_FOLDER, MANIFEST_NAME
from hf_cachegen.errors import FormatError, IdentityError, StoreError
from hf_cachegen.stores import LocalStore, Store

PIECE_BYTES = 1 << 20


def copy_artifact(
    artifact: Artifact,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Callable[[int], object],
) -> None:
    """Copy an artefact to a folder. Files that are there and intact are kept.

    Parameters
    ----------
    artifact
        What to copy.
    folder
        Created if need be. It may hold an earlier, shorter version of the same artefact.
    overwrite
        Also replace an artefact of something else.
    progress
        Called with the number of bytes that were copied or found since the last call.

    Raises
    ------
    IdentityError
        The folder holds an artefact of something else.
    FormatError, StoreError
        A file of the artefact is damaged or cannot be read, or the folder cannot be written.
    """
    target = Path(folder)
    manifest = artifact.manifest
    try:
        (target / CHUNKS_FOLDER).mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target / LOCK_NAME, timeout=0):
            previous = _previous(artifact, target, overwrite)
            for record in manifest.files:
                _copy_file(artifact.store, record, target / record.path, progress)
            _copy_rest(artifact, target)
            write_file(target / MANIFEST_NAME, manifest.to_bytes())
            _remove_unused(previous, manifest, target)
    except filelock.Timeout as error:
        raise StoreError(f"another save is writing to {target}; wait for it") from error
    except OSError as error:
        raise StoreError(f"cannot write to {target}: {error}") from error


def _previous(artifact: Artifact, folder: Path, overwrite: bool) -> Manifest | None:
    """The manifest in the folder, if there is one that may be replaced."""
    store = LocalStore(folder)
    if not store.exists(MANIFEST_NAME):
        return None
    if overwrite:
        with contextlib.suppress(FormatError, StoreError):
            return Manifest.parse(store.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES))
        return None
    held = Artifact.open(store)
    same = held.manifest.identity.digest == artifact.manifest.identity.digest
    begins = np.array_equal(held.token_ids, artifact.token_ids[: len(held.token_ids)])
    kept = held.manifest.kept == artifact.manifest.kept
    if not (same and begins and kept):
        what = "other tokens" if same else "another model, table or dtype"
        raise IdentityError(
            f"{folder} holds a cache of {what} than {artifact.store.location}; "
            "choose another folder, or pass --overwrite"
        )
    return held.manifest


def _copy_file(
    store: Store,
    record: FileRecord,
    target: Path,
    progress: Callable[[int], object],
) -> None:
    if target.is_file() and target.stat().st_size == record.size_bytes:
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == record.sha256:
                progress(record.size_bytes)
                return
    temporary = target.with_name(f".{target.name}.tmp")
    sha256 = hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            for piece in store.stream(record.path, 0, record.size_bytes):
                file.write(piece)
                sha256.update(piece)
                progress(len(piece))
            file.flush()
            os.fsync(file.fileno())
        if sha256.hexdigest() != record.sha256:
            raise FormatError(
                f"{record.path} in {store.location}: expected SHA-256 {record.sha256}, found "
                f"{sha256.hexdigest()}; the file is damaged there"
            )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _copy_rest(artifact: Artifact, folder: Path) -> None:
    """The token ids and the embedded table."""
    table, reference = embedded_table(artifact), artifact.manifest.identity.table
    if table is not None and reference is not None:
        table.save(folder / reference.folder)
    path = artifact.manifest.tokens.path
    size_limit = 4 * artifact.manifest.tokens.n + PIECE_BYTES
    write_file(folder / path, artifact.store.read(path, max_bytes=size_limit))
    sync_folder(folder / CHUNKS_FOLDER)


def _remove_unused(previous: Manifest | None, manifest: Manifest, folder: Path) -> None:
    """Remove the files of the artefact that was here before."""
    if previous is None:
        return
    used = {manifest.tokens.path, *(record.path for record in manifest.files)}
    for path in {previous.tokens.path, *(record.path for record in previous.files)} - used:
        # A file that cannot be removed does no harm.
        with contextlib.suppress(OSError):
            (folder / path).unlink()
