"""Opening and checking an artefact in any store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import safetensors
from numpy.typing import NDArray

from hf_cachegen.artifact.kept import unpack_kept
from hf_cachegen.artifact.manifest import (
    MAX_MANIFEST_BYTES,
    ChunkRecord,
    KeptRecord,
    Manifest,
    StatesRecord,
    TokensRecord,
    token_bytes,
)
from hf_cachegen.config import MANIFEST_NAME
from hf_cachegen.container import ChunkIndex, Span, index_size_bytes
from hf_cachegen.errors import FormatError
from hf_cachegen.stores.base import Store, intact

TOKENS_TENSOR = "input_ids"

_MAX_TOKENS_HEADER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What :meth:`Artifact.verify` has read and found intact."""

    n_chunks: int
    n_segments: int
    size_bytes: int


class Artifact:
    """One document's encoded cache in a store: manifest, token ids and chunk indices.

    Safe to use from several threads.

    Attributes
    ----------
    store
        Where the files are.
    manifest
        The records of ``cache.json``.
    """

    def __init__(
        self, store: Store, manifest: Manifest, token_ids: NDArray[np.int32] | None = None
    ) -> None:
        self.store = store
        self.manifest = manifest
        self._token_ids = token_ids
        self._indices: dict[int, ChunkIndex] = {}

    @classmethod
    def open(cls, store: Store, *, tokens: bool = True) -> Artifact:
        """Read and check ``cache.json`` and the token ids; no chunk is read.

        Parameters
        ----------
        store
            Where the files are.
        tokens
            Whether to read the token ids, too. Else they are when they are first asked for.

        Raises
        ------
        StoreError
            A file is missing or cannot be read.
        FormatError
            A file is damaged or of a newer version.
        """
        manifest = intact(
            lambda: Manifest.parse(store.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES))
        )
        artifact = cls(store, manifest)
        if tokens:
            artifact.read_tokens()
        return artifact

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32 [T], read-only.

        Raises
        ------
        StoreError, FormatError
            They were not read yet, and their file is missing, cannot be read, or is damaged.
        """
        return self.read_tokens() if self._token_ids is None else self._token_ids

    def read_tokens(self) -> NDArray[np.int32]:
        """Read and check the token ids, and keep them; see :attr:`token_ids`."""
        # Two threads may both do so: the same bytes, once too often.
        self._token_ids = intact(lambda: _read_tokens(self.store, self.manifest.tokens))
        return self._token_ids

    def index(self, chunk: int) -> ChunkIndex:
        """The index of a chunk file, read once and checked against ``cache.json``.

        Raises
        ------
        FormatError
            The index is damaged, or not the one ``cache.json`` names.
        """
        found = self._indices.get(chunk)
        if found is None:
            # Two threads may both read it: the same bytes, once too often.
            size = self.index_bytes
            path = self.manifest.chunks[chunk].path
            found = intact(
                lambda: self.take_index(chunk, self.store.read(path, 0, size, max_bytes=size))
            )
        return found

    @property
    def index_bytes(self) -> int:
        """Length of the index that every chunk file begins with."""
        return index_size_bytes(len(self.manifest.levels), self.manifest.n_layers)

    def has_index(self, chunk: int) -> bool:
        """Whether :meth:`index` reads nothing, as it knows the index of this chunk."""
        return chunk in self._indices

    def take_index(self, chunk: int, data: bytes) -> ChunkIndex:
        """The index of a chunk whose file begins with these bytes, checked and kept.

        Raises
        ------
        FormatError
            As for :meth:`index`.
        """
        record = self.manifest.chunks[chunk]
        index = self._indices[chunk] = self._parse_index(record, data)
        return index

    def verify(self, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Read every file of what is cached, and check lengths, SHA-256 and each segment.

        Holds one level of one chunk at a time.

        Parameters
        ----------
        progress
            Called with the number of bytes read since the last call.

        Raises
        ------
        FormatError
            Names the first file, and the segment where one can be told, that is not intact.
        StoreError
            A file is missing, has another length, or cannot be read.
        """
        progress = progress or _ignore
        if self._token_ids is None:
            self.read_tokens()
        for position, record in enumerate(self.manifest.chunks):
            self._verify_chunk(record, self.index(position), progress)
        manifest = self.manifest
        if manifest.states is not None:
            progress(len(self.read_states()))
        if manifest.kept is not None:
            self.read_kept()
            progress(manifest.kept.size_bytes)
        return VerifyReport(
            n_chunks=len(manifest.chunks),
            n_segments=len(manifest.chunks) * len(manifest.levels) * manifest.n_layers,
            size_bytes=sum(record.size_bytes for record in manifest.files),
        )

    def read_states(self) -> bytes:
        """The safetensors file of the states after the last token, checked.

        Raises
        ------
        ValueError
            The artefact has none.
        FormatError
            The file is damaged.
        StoreError
            It is missing, or cannot be read.
        """
        record = self.manifest.states
        if record is None:
            raise ValueError(f"expected an artefact with states, {self.store.location} has none")
        return self._read_file(record)

    def read_kept(self) -> NDArray[np.bool_] | None:
        """Which tokens are cached, bool ``[L or 1, H or 1, T]``; None if all are.

        Raises
        ------
        FormatError
            The file is damaged, or is not of this document.
        StoreError
            It is missing, or cannot be read.
        """
        manifest = self.manifest
        if manifest.kept is None:
            return None
        kept = unpack_kept(self._read_file(manifest.kept), manifest.kept.n, manifest.tokens.n)
        layers = manifest.identity.layout.layers
        heads = {spec.heads for layer in layers for spec in layer.tensors}
        n_layers, n_heads = kept.shape[:2]
        if n_layers not in (1, len(layers)) or not (n_heads == 1 or heads == {n_heads}):
            raise FormatError(
                f"{manifest.kept.path} in {self.store.location}: expected kept tokens of 1 or "
                f"{len(layers)} layers and 1 or {sorted(heads)} heads, found {n_layers} and "
                f"{n_heads}"
            )
        return kept

    def _read_file(self, record: StatesRecord | KeptRecord) -> bytes:
        return intact(lambda: self._read_checked(record))

    def _read_checked(self, record: StatesRecord | KeptRecord) -> bytes:
        data = self.store.read(record.path, max_bytes=record.size_bytes)
        digest = hashlib.sha256(data).hexdigest()
        if digest != record.sha256:
            raise FormatError(
                f"{record.path} in {self.store.location}: expected SHA-256 {record.sha256} of "
                f"{record.size_bytes} bytes, found {digest} of {len(data)}; the file is damaged, "
                "fetch it again"
            )
        return data

    def _parse_index(self, record: ChunkRecord, data: bytes) -> ChunkIndex:
        try:
            index = ChunkIndex.parse(
                data,
                n_levels=len(self.manifest.levels),
                n_layers=self.manifest.n_layers,
                n_tokens=record.n_tokens,
            )
        except FormatError as error:
            raise self._damaged(record, str(error)) from error
        if index.digest != record.index_digest or index.level_bytes != record.level_bytes:
            raise self._damaged(
                record,
                f"chunk index: expected digest {record.index_digest}, found {index.digest}; "
                "the file is from another save",
            )
        return index

    def _verify_chunk(
        self, record: ChunkRecord, index: ChunkIndex, progress: Callable[[int], None]
    ) -> None:
        sha256 = hashlib.sha256()
        spans = _level_spans(index)
        for level, span in spans:
            # The last range is read to the end of the file, so that an excess shows.
            size = None if span is spans[-1][1] else span.size
            data = self.store.read(record.path, span.offset, size, max_bytes=span.size)
            sha256.update(data)
            progress(len(data))
            try:
                _check_level(index, level, data)
            except FormatError as error:
                raise self._damaged(record, str(error)) from error
        if sha256.hexdigest() != record.sha256:
            raise self._damaged(
                record, f"expected SHA-256 {record.sha256}, found {sha256.hexdigest()}"
            )

    def _damaged(self, record: ChunkRecord, reason: str) -> FormatError:
        return FormatError(f"{record.path} in {self.store.location}: {reason}")


def _level_spans(index: ChunkIndex) -> list[tuple[int | None, Span]]:
    """The ranges that make up a chunk file: its index (level None), then each level with bytes."""
    levels = [(level, index.span(level, 0, index.n_layers - 1)) for level in range(index.n_levels)]
    return [(None, Span(0, index.offsets[0])), *(entry for entry in levels if entry[1].size)]


def _check_level(index: ChunkIndex, level: int | None, data: bytes) -> None:
    if level is None:  # the index was checked when it was parsed
        return
    start = index.segment(level, 0).offset
    for layer in range(index.n_layers):
        offset, size = index.segment(level, layer)
        index.check(level, layer, data[offset - start : offset - start + size])


def _read_tokens(store: Store, record: TokensRecord) -> NDArray[np.int32]:
    where = f"{record.path} in {store.location}"
    data = store.read(record.path, max_bytes=4 * record.n + _MAX_TOKENS_HEADER_BYTES)
    try:
        tensors = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise FormatError(f"{where}: not a safetensors file ({error}); fetch it again") from error
    found = {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in tensors.items()}
    expected = {TOKENS_TENSOR: ("I32", (record.n,))}
    if found != expected:
        raise FormatError(f"{where}: expected the tensors {expected}, found {found}")
    token_ids = np.frombuffer(tensors[TOKENS_TENSOR]["data"], dtype="<i4").astype(np.int32)
    digest = hashlib.sha256(token_bytes(token_ids)).hexdigest()
    if digest != record.sha256:
        raise FormatError(
            f"{where}: expected token ids with SHA-256 {record.sha256}, found {digest}; "
            "the file is damaged, fetch it again"
        )
    token_ids.flags.writeable = False
    return token_ids


def _ignore(size_bytes: int) -> None:
    """Progress that nobody watches."""
