"""The longest stored beginning of a prompt, among the artefacts of a folder."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from hf_cachegen.artifact.identity import Identity
from hf_cachegen.artifact.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    TokensRecord,
    token_bytes,
)
from hf_cachegen.artifact.naming import chunk_names
from hf_cachegen.artifact.reader import Artifact
from hf_cachegen.config import MANIFEST_NAME
from hf_cachegen.errors import FormatError
from hf_cachegen.stores.local import LocalStore


def open_longest_prefix(
    folder: str | os.PathLike[str],
    token_ids: NDArray[np.int32],
    accepts: Callable[[Identity], bool] | None = None,
) -> Artifact | None:
    """Open the artefact below a folder that begins a prompt with the most tokens.

    Chunk names are hashes of all tokens up to a chunk's end, so ``cache.json`` tells how far an
    artefact and the prompt agree: to the artefact's end, or to the last chunk that is the same in
    both. Of an artefact that goes on differently only the first chunks are opened. One with states
    is taken as a whole, and if the prompt goes on after it: they are those after its last token,
    and one token at least has to run. So is one from which tokens were evicted, since which ones
    depends on all of it; of two as long, one that has every token is taken.

    Parameters
    ----------
    folder
        A folder with artefacts in it, at any depth.
    token_ids
        int32 [T] of the prompt.
    accepts
        Whether an artefact of this identity may be used; by default all are.

    Returns
    -------
    Artifact or None
        What was found; None if no artefact agrees with the prompt in a whole chunk.
    """
    found: list[tuple[int, Path, Manifest]] = []
    for path in sorted(Path(folder).rglob(MANIFEST_NAME)):
        manifest = _read(path)
        if manifest is None or (accepts is not None and not accepts(manifest.identity)):
            continue
        usable = token_ids[:-1] if _is_one_whole(manifest) else token_ids
        begun = begin(manifest, usable[: manifest.tokens.n])
        if begun is not None:
            found.append((begun.tokens.n, path.parent, begun))
    if not found:
        return None
    length, parent, manifest = max(found, key=lambda entry: (entry[0], entry[2].kept is None))
    return Artifact(LocalStore(parent), manifest, token_ids[:length])


def begin(manifest: Manifest, token_ids: NDArray[np.int32]) -> Manifest | None:
    """The manifest of an artefact's first chunks, as far as they hold the given tokens.

    Parameters
    ----------
    manifest
        Of the whole artefact.
    token_ids
        int32 [T] that it should begin with.

    Returns
    -------
    Manifest or None
        None if not even the first chunk does, or if sliding layers have not kept what the tokens
        after a shorter beginning would see, or if it has states or lacks evicted tokens and the
        given ones are not all of its own.
    """
    if _is_one_whole(manifest):
        digest = hashlib.sha256(token_bytes(token_ids)).hexdigest()
        return manifest if digest == manifest.tokens.sha256 else None
    chunks = [chunk for chunk in manifest.chunks if chunk.end <= len(token_ids)]
    if not chunks:
        return None
    names = chunk_names(
        manifest.identity,
        manifest.levels,
        manifest.chunk_tokens,
        token_ids[: chunks[-1].end],
        [chunk.skipped for chunk in chunks],
    )
    same = [name == chunk.name for name, chunk in zip(names, chunks, strict=True)]
    n_chunks = (*same, False).index(False)
    if n_chunks == len(manifest.chunks):
        return manifest
    if n_chunks == 0:
        return None
    ids = token_ids[: chunks[n_chunks - 1].end]
    tokens = TokensRecord(n=len(ids), sha256=hashlib.sha256(token_bytes(ids)).hexdigest())
    fields = {**dict(manifest), "tokens": tokens, "chunks": manifest.chunks[:n_chunks]}
    try:
        return Manifest(**fields)
    except ValidationError:  # a window that reaches back into tokens that are not stored
        return None


def _is_one_whole(manifest: Manifest) -> bool:
    """Whether no beginning of an artefact can be had: of its states, or of evicted tokens."""
    return manifest.states is not None or manifest.kept is not None


def _read(path: Path) -> Manifest | None:
    """A manifest; None, with a warning, if it cannot be read."""
    try:
        data = LocalStore(path.parent).read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
        return Manifest.parse(data)
    except FormatError as error:
        warnings.warn(f"{path} is passed over: {error}", stacklevel=3)
        return None
