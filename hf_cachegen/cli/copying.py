"""Copying an artefact into a folder, which holds the old one or the new one at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import filelock
import numpy as np

from hf_cachegen.artifact import Artifact
from hf_cachegen.artifact.files import sync_folder, write_file
from hf_cachegen.artifact.writer import LOCK_NAME, remove_unused
from hf_cachegen.cli.inspect import embedded_record
from hf_cachegen.config import CHUNKS_FOLDER, MANIFEST_NAME
from hf_cachegen.errors import IdentityError, StoreError
from hf_cachegen.stores import LocalStore
from hf_cachegen.stores.download import RemoteFile, download

PIECE_BYTES = 1 << 20


def copy_artifact(
    artifact: Artifact,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Callable[[int], object],
) -> None:
    """Copy an artefact to a folder. Files that are there and intact are kept.

    A copy that is interrupted leaves ``NAME.part``, from whose end the next one goes on. While one
    is going on, other saves and copies to the folder are refused.

    Parameters
    ----------
    artifact
        What to copy.
    folder
        Created if need be. It may hold an earlier, shorter version of the same artefact.
    overwrite
        Also replace an artefact of something else.
    progress
        Called with the number of bytes that were copied or found since the last call; with a
        negative one for those that turned out damaged.

    Raises
    ------
    IdentityError
        The folder holds an artefact of something else.
    FormatError, StoreError
        A file of the artefact is damaged or cannot be read, or the folder cannot be written, or
        somebody else is writing to it.
    """
    target = Path(folder)
    manifest = artifact.manifest
    try:
        (target / CHUNKS_FOLDER).mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target / LOCK_NAME, timeout=0):
            _check_replaceable(artifact, target, overwrite)
            for record in manifest.files:
                file = RemoteFile(record.path, record.size_bytes, record.sha256)
                download(artifact.store, file, target / record.path, progress=progress)
            _copy_rest(artifact, target)
            write_file(target / MANIFEST_NAME, manifest.to_bytes())
            remove_unused(target, manifest)
    except filelock.Timeout as error:
        raise StoreError(f"another save or fetch is writing to {target}; wait for it") from error
    except OSError as error:
        raise StoreError(f"cannot write to {target}: {error}") from error


def _check_replaceable(artifact: Artifact, folder: Path, overwrite: bool) -> None:
    """Raise IdentityError if there is an artefact in the folder that is to stay."""
    store = LocalStore(folder)
    if overwrite or not store.exists(MANIFEST_NAME):
        return
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


def _copy_rest(artifact: Artifact, folder: Path) -> None:
    """The token ids and the embedded table."""
    reference = artifact.manifest.identity.table
    record = embedded_record(artifact)
    if record is not None and reference is not None:
        from hf_cachegen.tables.download import download_table  # imports torch

        download_table(record, artifact.store, reference.folder, folder / reference.folder)
    path = artifact.manifest.tokens.path
    size_limit = 4 * artifact.manifest.tokens.n + PIECE_BYTES
    write_file(folder / path, artifact.store.read(path, max_bytes=size_limit))
    sync_folder(folder / CHUNKS_FOLDER)
