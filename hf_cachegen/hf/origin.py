"""Where a streamed cache came from, so that saving it copies what has not changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from hf_cachegen.artifact import EXACT, Artifact, ChunkPlan, Identity, LevelRecord, Manifest
from hf_cachegen.errors import UnsupportedError
from hf_cachegen.tables import ModelTable


@dataclass(frozen=True)
class Origin:
    """The artefact that a cache was streamed from, and where each chunk's values come from.

    ``n_tokens`` are those that the cache holds or has given up by now.
    """

    artifact: Artifact
    n_tokens: int
    sources: Sequence[str]
    table: ModelTable | None

    @classmethod
    def of(cls, cache: Cache) -> Origin | None:
        """Where a cache was streamed from, once it is here; None of any other cache."""
        if not hasattr(cache, "stream_report"):
            return None
        cache.wait()
        return cls(cache.artifact, cache.get_seq_length(), cache.chunk_sources(), cache.table())

    @property
    def manifest(self) -> Manifest:
        """The artefact's manifest."""
        return self.artifact.manifest

    def is_same(
        self,
        identity: Identity,
        levels: Sequence[LevelRecord],
        chunk_tokens: int,
        token_ids: Tensor,
    ) -> bool:
        """Whether these make the very artefact, so that every chunk can be copied."""
        found = (identity.digest, tuple(levels), chunk_tokens, token_ids.tolist())
        manifest = self.manifest
        return found == (
            manifest.identity.digest,
            manifest.levels,
            manifest.chunk_tokens,
            self.artifact.token_ids.tolist(),
        )

    def held_from(self) -> list[int]:
        """First token that the artefact holds, by layer: a sliding layer of it may hold more than
        that of a cache which has begun to use it."""
        chunks = self.manifest.chunks
        return [
            max((c.first_token(layer) for c in chunks if c.first_token(layer) > c.start), default=0)
            for layer in range(self.manifest.n_layers)
        ]

    def kept(self) -> NDArray[np.bool_] | None:
        """Which tokens the artefact has, bool ``[L or 1, H or 1, T]``; None if it has all.

        Raises
        ------
        UnsupportedError
            The cache has others now.
        """
        kept = self.artifact.read_kept()
        if kept is not None and self.n_tokens != self.manifest.tokens.n:
            raise UnsupportedError(
                f"the cache has gone from {self.manifest.tokens.n} to {self.n_tokens} tokens since "
                "it was loaded; tokens were evicted from it, so it can be saved only as it was"
            )
        return kept

    def segments(self, plan: ChunkPlan) -> tuple[list[list[bytes]], str] | None:
        """Segments and source of the chunk with the plan's name; None if there is no such chunk."""
        for position, record in enumerate(self.manifest.chunks):
            if record.name == plan.name:
                levels = range(len(self.manifest.levels))
                return [self._level(position, level) for level in levels], record.source
        return None

    def source(self, plan: ChunkPlan) -> str:
        """Where the values of a newly encoded chunk come from: a lossy level, or the model."""
        for record, source in zip(self.manifest.chunks, self.sources, strict=True):
            overlaps = record.start < plan.end and plan.start < record.end
            if overlaps and source != EXACT:
                return source
        return EXACT

    def states_source(self, n_tokens: int) -> str:
        """Where the states of a cache of so many tokens come from: a lossy level, or the model.

        Those of the context itself are as they were stored. Later ones have seen its values.
        """
        stored = self.manifest.states.source if self.manifest.states else EXACT
        if n_tokens == self.manifest.tokens.n:
            return stored
        return next((source for source in (stored, *self.sources) if source != EXACT), EXACT)

    def _level(self, position: int, level: int) -> list[bytes]:
        index, record = self.artifact.index(position), self.artifact.manifest.chunks[position]
        span = index.span(level, 0, index.n_layers - 1)
        data = self.artifact.store.read(record.path, span.offset, span.size, max_bytes=span.size)
        segments = []
        for layer in range(index.n_layers):
            offset, size = index.segment(level, layer)
            segments.append(data[offset - span.offset : offset - span.offset + size])
            index.check(level, layer, segments[-1])
        return segments
