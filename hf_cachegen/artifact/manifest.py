"""The records of ``cache.json``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    model_serializer,
    model_validator,
)

from hf_cachegen.artifact.identity import CodecName, Identity, Text
from hf_cachegen.config import CHUNKS_FOLDER, FORMAT_VERSION, MANIFEST_NAME
from hf_cachegen.container import MAX_CHUNK_TOKENS, MAX_LEVELS, index_size_bytes
from hf_cachegen.errors import FormatError
from hf_cachegen.layout import Record, canonical_json

FORMAT_NAME: Final = "hf-cachegen"

EXACT = "exact"
"""Source of a chunk whose values came straight from the model."""

MAX_MANIFEST_BYTES = 64 << 20
MAX_TOKENS = 1 << 24
MAX_STATES_BYTES = 4 << 30
MAX_KEPT_BYTES = 1 << 30

MAX_EXPANSION = 4
"""A level's segments may hold this many times the uncompressed bytes of the chunk ..."""

LAYER_SLACK_BYTES = 1 << 20
"""... and this much more per layer. It bounds what a hostile manifest can make a reader hold."""

_SHOWN_ERRORS = 5

Skipped = tuple[tuple[int, int], ...]
"""(layer, leading tokens of a chunk that this layer does not hold) of sliding layers."""

_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Index = Annotated[int, Field(ge=0, lt=1 << 32)]
_Size = Annotated[int, Field(ge=0, lt=1 << 48)]


class TokensRecord(Record):
    """The token ids of the document: how many, and the SHA-256 of their int32 LE bytes."""

    n: int = Field(ge=1, le=MAX_TOKENS)
    sha256: _Sha256

    @property
    def path(self) -> str:
        """File of the ids. Named by its content, so that a new save leaves an old one intact."""
        return f"tokens-{self.sha256[:32]}.safetensors"


class StatesRecord(Record):
    """The states after the last token, of the layers that keep some, exactly.

    Attributes
    ----------
    size_bytes, sha256
        Of the whole file.
    source
        ``"exact"``, or the lossy level that the model read when it came to these states.
    """

    size_bytes: int = Field(ge=1, le=MAX_STATES_BYTES)
    sha256: _Sha256
    source: Text = EXACT

    @property
    def path(self) -> str:
        """File of the states. Named by its content, so that a new save leaves an old one intact."""
        return f"states-{self.sha256[:32]}.safetensors"


class KeptRecord(Record):
    """Which tokens are cached, of a cache from which others were evicted.

    Attributes
    ----------
    n
        Tokens that each layer and head has.
    size_bytes, sha256
        Of the whole file.
    """

    n: int = Field(ge=1, le=MAX_TOKENS)
    size_bytes: int = Field(ge=1, le=MAX_KEPT_BYTES)
    sha256: _Sha256

    @property
    def path(self) -> str:
        """File of them. Named by its content, so that a new save leaves an old one intact."""
        return f"kept-{self.sha256[:32]}.safetensors"


class LevelRecord(Record):
    """One quality.

    Attributes
    ----------
    exact
        Decoding gives back the cache bit by bit.
    refines
        The level that this one adds to: its segments are read first. None if it stands alone.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")]
    codec: CodecName
    params: dict[Text, int | float | str | bool] = Field(default_factory=dict, max_length=256)
    exact: bool
    refines: Text | None = None

    @model_serializer(mode="wrap")
    def _leave_out_none(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A level that stands alone has the bytes, and so the chunk names, that it always had."""
        return _without_none({"refines"}, serialise(self))


class ChunkRecord(Record):
    """One chunk file: the tokens it covers and what its bytes must be.

    Attributes
    ----------
    name
        Stem of the file, from :func:`hf_cachegen.artifact.naming.chunk_names`.
    start, end
        Tokens covered, ``end`` excluded; only those that are kept count, if others were evicted.
    size_bytes, sha256
        Of the whole file.
    index_digest
        :attr:`hf_cachegen.container.ChunkIndex.digest`.
    level_bytes
        Bytes of each level's own segments, coarsest first; see :meth:`Manifest.read_bytes`.
    skipped
        See :data:`Skipped`; by layer, and only layers that skip tokens.
    source
        ``"exact"``, or the level that the values had been decoded from before they were encoded.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    start: _Index
    end: _Index
    size_bytes: _Size
    index_digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    sha256: _Sha256
    level_bytes: tuple[_Size, ...] = Field(min_length=1, max_length=MAX_LEVELS)
    skipped: tuple[tuple[_Index, _Index], ...] = ()
    source: Text = EXACT

    @property
    def path(self) -> str:
        """The file, relative to the artefact."""
        return f"{CHUNKS_FOLDER}/{self.name}.kv"

    @property
    def n_tokens(self) -> int:
        """Tokens covered."""
        return self.end - self.start

    def first_token(self, layer: int) -> int:
        """First token of the document that this chunk holds for ``layer``."""
        return self.start + dict(self.skipped).get(layer, 0)


FileRecord = ChunkRecord | StatesRecord | KeptRecord
"""A file with something that is cached: each has ``path``, ``size_bytes`` and ``sha256``."""


class Manifest(Record):
    """``cache.json``: everything about an artefact but its token ids and segments.

    ``levels`` go from coarse to fine, ``chunks`` follow each other from the first token to the
    last; there are none of a model that caches nothing of each token. ``states`` are None of a
    model whose layers keep none, ``kept`` of a cache that holds every token.
    """

    format: Literal["hf-cachegen"] = FORMAT_NAME
    version: int = Field(default=FORMAT_VERSION, ge=FORMAT_VERSION, le=FORMAT_VERSION)
    library_version: Text = Field(default_factory=lambda: importlib.metadata.version("hf-cachegen"))
    identity: Identity
    tokens: TokensRecord
    chunk_tokens: int = Field(ge=1, le=MAX_CHUNK_TOKENS)
    levels: tuple[LevelRecord, ...] = Field(min_length=1, max_length=MAX_LEVELS)
    chunks: tuple[ChunkRecord, ...]
    states: StatesRecord | None = None
    kept: KeptRecord | None = None

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read the bytes of ``cache.json``.

        Raises
        ------
        FormatError
            The bytes are too many, no manifest, or of a newer version.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise FormatError(
                f"{MANIFEST_NAME}: expected at most {MAX_MANIFEST_BYTES} bytes, found {len(data)}"
            )
        try:
            head = _Head.model_validate_json(data)
            if head.format == FORMAT_NAME and head.version != FORMAT_VERSION:
                raise FormatError(
                    f"{MANIFEST_NAME}: version {head.version} is unknown, this library reads "
                    f"{FORMAT_VERSION}; upgrade hf-cachegen"
                )
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise FormatError(f"{MANIFEST_NAME}: {_readable(error)}") from error

    def to_bytes(self) -> bytes:
        """The canonical JSON of ``cache.json``."""
        return canonical_json(self.model_dump(mode="json"))

    @model_serializer(mode="wrap")
    def _leave_out_none(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """An artefact without one of them has the bytes that it always had."""
        return _without_none({"states", "kept"}, serialise(self))

    @property
    def n_layers(self) -> int:
        """Layers that cache something of each token."""
        return len(self.identity.layout.layers)

    @property
    def n_cached(self) -> int:
        """Tokens that the chunks cover: all of the document, or those that are kept."""
        return self.tokens.n if self.kept is None else self.kept.n

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """All that is cached, file by file: the chunks, and the other records that there are."""
        others = (self.states, self.kept)
        return (*self.chunks, *(record for record in others if record is not None))

    def chain(self, level: int) -> tuple[int, ...]:
        """The levels whose segments reading a level takes: those it refines, coarse first."""
        refined = self.levels[level].refines
        if refined is None:
            return (level,)
        names = [record.name for record in self.levels]
        return (*self.chain(names.index(refined)), level)

    def read_bytes(self, chunk: int) -> tuple[int, ...]:
        """Bytes of a chunk that reading each level takes, coarsest first."""
        own = self.chunks[chunk].level_bytes
        return tuple(
            sum(own[part] for part in self.chain(level)) for level in range(len(self.levels))
        )

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        check_levels(self.levels)
        return self

    @model_validator(mode="after")
    def _check_kept(self) -> Self:
        if self.kept is None:
            return self
        if self.kept.n > self.tokens.n:
            raise ValueError(
                f"expected at most {self.tokens.n} tokens to be kept, found {self.kept.n}"
            )
        layers = self.identity.layout.layers
        if not layers or self.states or any(layer.window is not None for layer in layers):
            raise ValueError("expected kept tokens of layers with full attention alone")
        return self

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        if len({chunk.name for chunk in self.chunks}) != len(self.chunks):
            raise ValueError("expected chunks with different names, found one twice")
        if not self.n_layers:
            if self.chunks or self.states is None:
                raise ValueError("expected states and no chunks of a layout without layers")
            return self
        bounds = chunk_bounds(self.n_cached, self.chunk_tokens, limit=len(self.chunks))
        found = tuple((chunk.start, chunk.end) for chunk in self.chunks)
        if not found or found != bounds or bounds[-1][1] != self.n_cached:
            raise ValueError(
                f"expected chunks of {self.chunk_tokens} tokens (the last may be shorter) that "
                f"follow each other from 0 to {self.n_cached}, found {_preview(found)}"
            )
        for chunk in self.chunks:
            self._check_sizes(chunk)
            self._check_skipped(chunk)
        return self

    def _check_sizes(self, chunk: ChunkRecord) -> None:
        expected = index_size_bytes(len(self.levels), self.n_layers) + sum(chunk.level_bytes)
        if len(chunk.level_bytes) != len(self.levels) or chunk.size_bytes != expected:
            raise ValueError(
                f"chunk {chunk.name}: expected {len(self.levels)} levels and {expected} bytes, "
                f"found {len(chunk.level_bytes)} levels and {chunk.size_bytes} bytes"
            )
        raw_bytes = self.identity.layout.bytes_per_token * chunk.n_tokens
        most = MAX_EXPANSION * raw_bytes + LAYER_SLACK_BYTES * self.n_layers
        if max(chunk.level_bytes) > most:
            raise ValueError(
                f"chunk {chunk.name}: expected at most {most} bytes in a level, "
                f"found {max(chunk.level_bytes)}"
            )

    def _check_skipped(self, chunk: ChunkRecord) -> None:
        layers = [layer for layer, _ in chunk.skipped]
        if layers != sorted(set(layers)) or any(count == 0 for _, count in chunk.skipped):
            raise ValueError(f"chunk {chunk.name}: expected each skipping layer once, in order")
        layout, n_tokens = self.identity.layout, self.n_cached
        visible = [layer.first_visible(n_tokens) for layer in layout.layers]
        allowed = skip_before(visible, chunk.start, chunk.end)
        if not skips_at_most(chunk.skipped, allowed):
            raise ValueError(
                f"chunk {chunk.name}: tokens that attention can see are missing: at most "
                f"{_preview(allowed)} (layer, tokens) may be skipped, found "
                f"{_preview(chunk.skipped)}"
            )


class _Head(BaseModel):
    """The part of a manifest that every version has."""

    format: str
    version: int


def check_levels(levels: Sequence[LevelRecord]) -> None:
    """Raise ValueError unless there are 1 to 64 levels, each once and after what it refines."""
    names = [level.name for level in levels]
    if not 1 <= len(names) <= MAX_LEVELS or len(set(names)) != len(names):
        raise ValueError(f"expected 1 to {MAX_LEVELS} levels with different names, found {names}")
    for position, level in enumerate(levels):
        if level.refines is not None and level.refines not in names[:position]:
            raise ValueError(
                f"level {level.name} refines {level.refines}: expected that among the levels "
                f"before it, found {names[:position]}"
            )


def _without_none(names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    """The values, less those of ``names`` that are None."""
    return {k: v for k, v in values.items() if k not in names or v is not None}


def token_bytes(token_ids: NDArray[np.int32]) -> bytes:
    """The bytes of token ids that are hashed: int32, little-endian."""
    return token_ids.astype("<i4").tobytes()


def chunk_bounds(
    n_tokens: int, chunk_tokens: int, limit: int | None = None
) -> tuple[tuple[int, int], ...]:
    """(start, end) of each chunk, or of the first ``limit`` chunks."""
    starts = range(0, n_tokens, chunk_tokens)[:limit]
    return tuple((start, min(start + chunk_tokens, n_tokens)) for start in starts)


def skip_before(first_tokens: Sequence[int], start: int, end: int) -> Skipped:
    """Leading tokens of the chunk [start, end) before each layer's first token."""
    counts = (min(first, end) - start for first in first_tokens)
    return tuple((layer, count) for layer, count in enumerate(counts) if count > 0)


def skips_at_most(skipped: Skipped, allowed: Skipped) -> bool:
    """Whether each layer skips no more tokens than allowed."""
    limits = dict(allowed)
    return all(count <= limits.get(layer, 0) for layer, count in skipped)


def _preview(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:3]))
    return f"[{shown}{', ...' if len(values) > 3 else ''}]"


def _readable(error: ValidationError) -> str:
    lines = [
        f"{'.'.join(map(str, detail['loc'])) or 'document'}: {detail['msg']}"
        for detail in error.errors(include_url=False, include_input=False)[:_SHOWN_ERRORS]
    ]
    return "; ".join(lines) + " (the file is damaged or not a manifest; fetch it again)"
