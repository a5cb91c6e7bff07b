"""Names of chunk files, and the plan of the chunks that a document needs."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_cachegen.artifact.identity import Identity
from hf_cachegen.artifact.manifest import (
    KeptRecord,
    LevelRecord,
    Skipped,
    chunk_bounds,
    skip_before,
    token_bytes,
)
from hf_cachegen.container import MAX_CHUNK_TOKENS
from hf_cachegen.layout import canonical_json


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A chunk that an artefact needs: tokens [start, end), less what its sliding layers skip.

    ``skipped`` holds (layer, leading tokens of the chunk that this layer's segments leave out).
    """

    position: int
    start: int
    end: int
    name: str
    skipped: Skipped


def plan_chunks(
    identity: Identity,
    levels: Sequence[LevelRecord],
    chunk_tokens: int,
    token_ids: NDArray[np.int32],
    held_from: Sequence[int] | None = None,
    kept: KeptRecord | None = None,
) -> list[ChunkPlan]:
    """All chunks of a document, each holding no more than its layers need; none without layers.

    ``held_from`` is the first token that the cache at hand still holds, by layer; None: token 0.
    Of a cache from which tokens were evicted, only those that are ``kept`` count.
    """
    if not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        raise ValueError(f"expected 1 to {MAX_CHUNK_TOKENS} tokens per chunk, got {chunk_tokens}")
    layers = identity.layout.layers
    if not layers:
        return []
    n_cached = len(token_ids) if kept is None else kept.n
    bounds = chunk_bounds(n_cached, chunk_tokens)
    first_tokens = [
        max(layer.first_token(n_cached), held)
        for layer, held in zip(layers, held_from or [0] * len(layers), strict=True)
    ]
    skipped = [skip_before(first_tokens, *bound) for bound in bounds]
    names = chunk_names(identity, levels, chunk_tokens, token_ids, skipped, kept)
    return [
        ChunkPlan(position, start, end, name, skips)
        for position, ((start, end), name, skips) in enumerate(
            zip(bounds, names, skipped, strict=True)
        )
    ]


def chunk_names(
    identity: Identity,
    levels: Sequence[LevelRecord],
    chunk_tokens: int,
    token_ids: NDArray[np.int32],
    skipped: Sequence[Skipped],
    kept: KeptRecord | None = None,
) -> list[str]:
    """Names of all chunk files of a document, in one pass over its ids.

    A name is the BLAKE2b-16 of the identity, the levels, the chunk length, all token ids up to
    the chunk's end, and what the chunk skips. A longer document therefore shares the names of its
    parent's full chunks, as in the prefix caches of vLLM and SGLang.
    Where tokens were evicted, which ones depends on those that came after them, so that a name is
    of the whole document and of all that is kept.

    Parameters
    ----------
    token_ids
        int32 [T].
    skipped
        One entry per chunk.
    kept
        What is kept of a document from which tokens were evicted.
    """
    levels_digest = hashlib.blake2b(
        canonical_json([level.model_dump(mode="json") for level in levels]), digest_size=16
    ).digest()
    person = b"hfkv chunk" if kept is None else b"hfkv kept chunk"
    prefix = hashlib.blake2b(digest_size=16, person=person)
    prefix.update(bytes.fromhex(identity.digest) + levels_digest)
    prefix.update(struct.pack("<I", chunk_tokens))
    if kept is not None:
        prefix.update(bytes.fromhex(kept.sha256) + token_bytes(token_ids))
    names = []
    bounds = chunk_bounds(len(token_ids) if kept is None else kept.n, chunk_tokens)
    for (start, end), layers in zip(bounds, skipped, strict=True):
        if kept is None:
            prefix.update(token_bytes(token_ids[start:end]))
        name = prefix.copy()
        for layer, count in layers:
            name.update(struct.pack("<II", layer, count))
        # The two lengths last make the hashed string decodable, so no two inputs share one.
        name.update(struct.pack("<II", end, len(layers)))
        names.append(name.hexdigest())
    return names
