"""One chunk over the link: its segments as they arrive, checked."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence

from hf_cachegen.artifact.reader import Artifact
from hf_cachegen.container import ChunkIndex
from hf_cachegen.errors import CacheGenError, FormatError, StoreError
from hf_cachegen.streaming.meter import Meter


class SegmentReader:
    """Reads segments of an artefact's chunks.

    The segments that a level refines are kept until they are forgotten, so that another level of
    the chunk costs only what is not there yet.

    Parameters
    ----------
    artifact
        Where the chunks are.
    keep
        Keep those of lossy levels themselves, too, which may be refined later.
    """

    def __init__(self, artifact: Artifact, *, keep: bool = False) -> None:
        self._artifact = artifact
        self._keep = keep
        self._kept: dict[int, dict[tuple[int, int], bytes]] = {}  # by chunk, (level, layer)

    def read(
        self, chunk: int, level: int, layers: Sequence[int], meter: Meter
    ) -> Generator[tuple[int, bytes], None, None]:
        """Yield (layer, checked bytes) of each layer.

        The bytes are those of the level after those of the levels that it refines. What lies side
        by side in the file is one ranged transfer. Closing the iterator ends the transfer; so does
        giving up the meter, in any thread, when the next bytes come. The meter counts what arrives,
        the chunk's index left out, and knows how much that will be before anything is yielded.

        Raises
        ------
        StoreError
            The link has failed for good, or the transfer was given up.
        FormatError
            A segment was damaged, and once more when it was asked for again.
        """
        manifest = self._artifact.manifest
        chain = manifest.chain(level)
        kept = self._kept.setdefault(chunk, {})
        parts = {key: kept[key] for key in itertools.product(chain, layers) if key in kept}
        missing = self._missing(chunk, level, layers)
        complete = set(layers) - {layer for _, layer in missing}

        def whole(layer: int) -> tuple[int, bytes]:
            return layer, b"".join(parts.pop((part, layer)) for part in chain)

        yield from (whole(layer) for layer in layers if layer in complete)
        for part, layer, segment in self._segments(chunk, missing, meter):
            parts[part, layer] = segment
            if part != level or (self._keep and not manifest.levels[level].exact):
                kept[part, layer] = segment
            if part == level:
                yield whole(layer)

    def brings_index(self, level: int) -> bool:
        """Whether a level is read with the chunk's index, which is asked for before any other."""
        return self._artifact.manifest.chain(level) == tuple(range(level + 1))

    def missing_bytes(self, chunk: int, level: int, layers: Sequence[int]) -> int:
        """What reading a level of a chunk would fetch, besides what is kept."""
        if not self._artifact.has_index(chunk):
            return self._artifact.manifest.read_bytes(chunk)[level]
        return _size_bytes(self._artifact.index(chunk), self._missing(chunk, level, layers))

    def forget(self, chunk: int | None = None) -> None:
        """Drop the segments of a chunk that are kept, or of all."""
        if chunk is None:
            self._kept.clear()
        else:
            self._kept.pop(chunk, None)

    def _missing(self, chunk: int, level: int, layers: Sequence[int]) -> list[tuple[int, int]]:
        """The (level, layer) that are not kept of those that a level consists of, in file order."""
        kept = self._kept.get(chunk, {})
        chain = self._artifact.manifest.chain(level)
        return sorted(key for key in itertools.product(chain, layers) if key not in kept)

    def located(self, chunk: int, level: int, layer: int, error: CacheGenError) -> CacheGenError:
        """The same error with the segment's place in front."""
        manifest = self._artifact.manifest
        where = (
            f"{manifest.chunks[chunk].path} in {self._artifact.store.location}, "
            f"level {manifest.levels[level].name}, layer {layer}"
        )
        located = type(error)(f"{where}: {error}")
        located.__cause__ = error
        return located

    def _segments(
        self, chunk: int, wanted: Sequence[tuple[int, int]], meter: Meter
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield (level, layer, checked bytes) of segments in file order."""
        if not self._artifact.has_index(chunk) and self._are_first(wanted):
            yield from self._first_segments(chunk, wanted, meter)
            return
        index = self._artifact.index(chunk)
        meter.expect(_size_bytes(index, wanted))
        for run in _runs(index, wanted):
            offset, size = index.segment(*run[0]).offset, _size_bytes(index, run)
            with self._arriving(chunk, offset, size, meter) as arriving:
                yield from self._cut(chunk, run, arriving)

    def _are_first(self, wanted: Sequence[tuple[int, int]]) -> bool:
        """Whether these are the segments of the first levels, right after the index."""
        n_layers = self._artifact.manifest.n_layers
        return bool(wanted) and list(wanted) == [
            (level, layer) for level in range(wanted[-1][0] + 1) for layer in range(n_layers)
        ]

    def _first_segments(
        self, chunk: int, wanted: Sequence[tuple[int, int]], meter: Meter
    ) -> Iterator[tuple[int, int, bytes]]:
        """The same of the segments of the first levels, in one transfer with the index.

        A request for the index alone would cost a round trip before the first segment.
        """
        index_bytes = self._artifact.index_bytes
        own_bytes = self._artifact.manifest.chunks[chunk].level_bytes[: wanted[-1][0] + 1]
        size = index_bytes + sum(own_bytes)
        with self._arriving(chunk, 0, size, meter, uncounted=index_bytes) as arriving:
            data = arriving.take(index_bytes)
            try:
                self._artifact.take_index(chunk, data)
            except FormatError:  # what a second request brings may be intact
                self._artifact.index(chunk)
            meter.expect(sum(own_bytes))
            yield from self._cut(chunk, wanted, arriving)

    @contextlib.contextmanager
    def _arriving(
        self, chunk: int, offset: int, size: int, meter: Meter, *, uncounted: int = 0
    ) -> Iterator[_Arriving]:
        """A transfer of a range of a chunk's file; the meter leaves its first bytes out."""
        path = self._artifact.manifest.chunks[chunk].path
        with contextlib.closing(self._artifact.store.stream(path, offset, size)) as pieces:
            yield _Arriving(pieces, meter, uncounted)

    def _cut(
        self, chunk: int, run: Sequence[tuple[int, int]], arriving: _Arriving
    ) -> Iterator[tuple[int, int, bytes]]:
        """Segments that lie side by side, as they arrive."""
        index = self._artifact.index(chunk)
        for level, layer in run:
            data = arriving.take(index.segment(level, layer).size)
            yield level, layer, self._checked(chunk, level, layer, data, arriving.meter)

    def _checked(self, chunk: int, level: int, layer: int, data: bytes, meter: Meter) -> bytes:
        """The segment if it is intact, else what a second request brings."""
        index = self._artifact.index(chunk)
        try:
            index.check(level, layer, data)
        except FormatError:
            span = index.segment(level, layer)
            meter.received(-span.size)
            with self._arriving(chunk, span.offset, span.size, meter) as arriving:
                data = arriving.take(span.size)
            try:
                index.check(level, layer, data)
            except FormatError as error:
                raise self.located(chunk, level, layer, error) from error
        return data


class _Arriving:
    """The bytes of a transfer, to be taken in order as they arrive."""

    def __init__(self, pieces: Iterator[bytes], meter: Meter, uncounted: int) -> None:
        self.meter = meter
        self._pieces = pieces
        self._uncounted = uncounted
        self._arrived = bytearray()

    def take(self, size: int) -> bytes:
        """The next so many bytes."""
        while len(self._arrived) < size:
            if self.meter.is_given_up:
                raise StoreError("the transfer was given up")
            self.meter.wait()
            piece = next(self._pieces)
            counted = max(len(piece) - self._uncounted, 0)
            self._uncounted -= len(piece) - counted
            self.meter.received(counted)
            self._arrived += piece
        data = bytes(self._arrived[:size])
        del self._arrived[:size]
        return data


def _size_bytes(index: ChunkIndex, segments: Sequence[tuple[int, int]]) -> int:
    """Bytes of several (level, layer)."""
    return sum(index.segment(*segment).size for segment in segments)


def _runs(
    index: ChunkIndex, segments: Sequence[tuple[int, int]]
) -> Iterator[list[tuple[int, int]]]:
    """Stretches of (level, layer) that lie side by side in the file."""
    run: list[tuple[int, int]] = []
    end = 0
    for segment in segments:
        span = index.segment(*segment)
        if run and span.offset != end:
            yield run
            run = []
        run.append(segment)
        end = span.offset + span.size
    if run:
        yield run
