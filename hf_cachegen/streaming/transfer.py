"""One chunk over the link: its segments as they arrive, checked, and the rate at which they do."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

from hf_cachegen.artifact.reader import Artifact
from hf_cachegen.container import ChunkIndex
from hf_cachegen.errors import CacheGenError, FormatError

T = TypeVar("T")

MIN_SAMPLE_BYTES = 1 << 16
"""A part of a transfer tells the link's rate if it is not smaller than that."""


class Meter:
    """Measures a link while a transfer runs, from the construction or the last restart on.

    Once a slow decoder holds the transfer up, what arrives says nothing about the link: bytes wait
    in buffers on both sides and then come at once. So only what came before counts.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin to measure."""
        self.size_bytes = 0
        self._started_s = time.monotonic()
        self._held_up: tuple[int, float] | None = None

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started_s

    def hold_up(self) -> None:
        """Note that the transfer waits for something else than the link from now on."""
        self._held_up = self._held_up or (self.size_bytes, self.seconds)

    def bytes_per_s(self) -> float | None:
        """The link's rate; None if too little came before the transfer was held up."""
        if self._held_up is None:
            return self.size_bytes / max(self.seconds, 1e-9) if self.size_bytes else None
        size, seconds = self._held_up
        return size / max(seconds, 1e-9) if size >= MIN_SAMPLE_BYTES else None


class SegmentReader:
    """Reads segments of an artefact's chunks.

    Parameters
    ----------
    artifact
        Where the chunks are.
    keep
        Keep the segments of lossy levels, so that refining a chunk fetches only what it lacks.
    """

    def __init__(self, artifact: Artifact, *, keep: bool = False) -> None:
        self._artifact = artifact
        self._keep = keep
        self._kept: dict[tuple[int, int], tuple[int, bytes]] = {}

    def read(
        self, chunk: int, level: int, layers: Sequence[int], meter: Meter
    ) -> Generator[tuple[int, bytes], None, None]:
        """Yield (layer, checked bytes) of each layer.

        The bytes are those of the level after those of the levels that it refines. What lies side
        by side in the file is one ranged transfer. Closing the iterator ends the transfer. The
        meter counts what arrives.

        Raises
        ------
        StoreError
            The link has failed for good.
        FormatError
            A segment was damaged, and once more when it was asked for again.
        """
        chain = self._artifact.manifest.chain(level)
        data: dict[int, bytes] = {}
        wanted: list[tuple[int, int]] = []
        for layer in layers:
            held, data[layer] = self._kept.get((chunk, layer), (None, b""))
            if held not in chain[:-1]:
                held, data[layer] = None, b""
            missing = chain if held is None else chain[chain.index(held) + 1 :]
            wanted += [(part, layer) for part in missing]
        for part, layer, segment in self._segments(chunk, sorted(wanted)):
            data[layer] += segment
            meter.size_bytes += len(segment)
            if part == level:
                if self._keep and not self._artifact.manifest.levels[level].exact:
                    self._kept[chunk, layer] = level, data[layer]
                yield layer, data.pop(layer)

    def forget(self) -> None:
        """Drop the segments that were kept."""
        self._kept.clear()

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
        self, chunk: int, wanted: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield (level, layer, checked bytes) of segments in file order."""
        if not self._artifact.has_index(chunk) and self._are_first(wanted):
            yield from self._first_segments(chunk, wanted)
            return
        index = self._artifact.index(chunk)
        for run in _runs(index, wanted):
            spans = [index.segment(*segment) for segment in run]
            with self._arriving(chunk, spans[0].offset, sum(s.size for s in spans)) as arriving:
                yield from self._cut(chunk, run, arriving)

    def _are_first(self, wanted: Sequence[tuple[int, int]]) -> bool:
        """Whether these are the segments of the first levels, right after the index."""
        n_layers = self._artifact.manifest.n_layers
        return bool(wanted) and list(wanted) == [
            (level, layer) for level in range(wanted[-1][0] + 1) for layer in range(n_layers)
        ]

    def _first_segments(
        self, chunk: int, wanted: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int, bytes]]:
        """The same of the segments of the first levels, in one transfer with the index.

        A request for the index alone would cost a round trip before the first segment.
        """
        index_bytes = self._artifact.index_bytes
        own_bytes = self._artifact.manifest.chunks[chunk].level_bytes[: wanted[-1][0] + 1]
        with self._arriving(chunk, 0, index_bytes + sum(own_bytes)) as arriving:
            data = arriving.take(index_bytes)
            try:
                self._artifact.take_index(chunk, data)
            except FormatError:  # what a second request brings may be intact
                self._artifact.index(chunk)
            yield from self._cut(chunk, wanted, arriving)

    @contextlib.contextmanager
    def _arriving(self, chunk: int, offset: int, size: int) -> Iterator[_Arriving]:
        """A transfer of a range of a chunk's file."""
        path = self._artifact.manifest.chunks[chunk].path
        with contextlib.closing(self._artifact.store.stream(path, offset, size)) as pieces:
            yield _Arriving(pieces)

    def _cut(
        self, chunk: int, run: Sequence[tuple[int, int]], arriving: _Arriving
    ) -> Iterator[tuple[int, int, bytes]]:
        """Segments that lie side by side, as they arrive."""
        index = self._artifact.index(chunk)
        for level, layer in run:
            data = arriving.take(index.segment(level, layer).size)
            yield level, layer, self._checked(chunk, level, layer, data)

    def _checked(self, chunk: int, level: int, layer: int, data: bytes) -> bytes:
        """The segment if it is intact, else what a second request brings."""
        index = self._artifact.index(chunk)
        try:
            index.check(level, layer, data)
        except FormatError:
            span, path = index.segment(level, layer), self._artifact.manifest.chunks[chunk].path
            data = self._artifact.store.read(path, span.offset, span.size, max_bytes=span.size)
            try:
                index.check(level, layer, data)
            except FormatError as error:
                raise self.located(chunk, level, layer, error) from error
        return data


class _Arriving:
    """The bytes of a transfer, to be taken in order as they arrive."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._arrived = bytearray()

    def take(self, size: int) -> bytes:
        """The next so many bytes."""
        while len(self._arrived) < size:
            self._arrived += next(self._pieces)
        data = bytes(self._arrived[:size])
        del self._arrived[:size]
        return data


def with_pauses(
    source: Generator[T, None, None], pause_s: float
) -> Generator[T | None, None, None]:
    """What a generator yields, and None each time that nothing has come for ``pause_s``.

    The generator runs in a thread of its own, no further than what is asked for. Closing this one
    closes it as soon as it has come to its next item or error, which may be long after.
    """
    wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
    found: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        with contextlib.closing(source):
            while wanted.get():
                try:
                    found.put((next(source, None), None))
                except BaseException as error:
                    found.put((None, error))

    threading.Thread(target=run, name="hf-cachegen-receive", daemon=True).start()
    try:
        while True:
            wanted.put(True)
            while True:
                try:
                    item, error = found.get(timeout=pause_s)
                    break
                except queue.Empty:
                    yield None
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        wanted.put(False)


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
