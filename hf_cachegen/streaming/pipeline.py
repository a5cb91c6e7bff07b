"""Fetch chunks in one thread and decode them in others, layer by layer, while the next travels.

A transfer cuts the arriving bytes into segments and hands each to the decoders as soon as it is
complete and its checksum holds. Whoever needs a layer waits for that layer only, so a model's first
layers compute while its last ones are still being decoded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hf_cachegen.artifact.reader import Artifact
from hf_cachegen.container import ChunkIndex
from hf_cachegen.errors import CacheGenError, FormatError, StoreError
from hf_cachegen.streaming.controller import Policy, StreamState

MIN_SEGMENTS_IN_FLIGHT = 8

DecodeSegment = Callable[[int, int, int, bytes], Sequence[int]]
"""Called with (chunk, level, layer, data), from several threads; returns the layers that now have
all their values of this chunk."""


@dataclass(frozen=True)
class ChunkTransfer:
    """One chunk as it was fetched.

    Attributes
    ----------
    level
        Index of the level.
    started_s, seconds
        When the request was made, from the start of the stream, and how long the transfer took.
    """

    chunk: int
    level: int
    size_bytes: int
    started_s: float
    seconds: float


class ChunkStream:
    """Streams an artefact's chunks into a decoder.

    Parameters
    ----------
    artifact
        Where the chunks are. Its store is closed with the stream.
    policy
        Chooses each chunk's level.
    layers
        Per chunk, the layers that need it, ascending.
    decode
        Decodes one segment to where its values belong.
    workers
        Decoding threads; by default one per CPU.
    """

    def __init__(
        self,
        artifact: Artifact,
        policy: Policy,
        layers: Sequence[Sequence[int]],
        decode: DecodeSegment,
        *,
        workers: int | None = None,
    ) -> None:
        self.artifact = artifact
        self.transfers: list[ChunkTransfer] = []
        self._policy = policy
        self._layers = layers
        self._decode = decode
        n_layers = artifact.manifest.n_layers
        self._undecoded = [sum(layer in chunk for chunk in layers) for layer in range(n_layers)]
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._closed = False
        self._started_at = time.monotonic()
        self._decoders = ThreadPoolExecutor(
            workers or os.cpu_count() or 1, thread_name_prefix="hf-cachegen-decode"
        )
        # Encoded segments in memory: half a chunk's worth, for which a slow decoder holds up the
        # link. More would show beside the cache itself at levels that are hardly smaller than it.
        self._room = threading.Semaphore(max(n_layers // 2, MIN_SEGMENTS_IN_FLIGHT))
        self._fetcher = threading.Thread(target=self._run, name="hf-cachegen-fetch", daemon=True)
        self._fetcher.start()

    def wait_layer(self, layer: int) -> None:
        """Return once every chunk of a layer is decoded.

        Raises
        ------
        StoreError, FormatError
            What ended the stream before that.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._undecoded[layer] == 0 or self._error is not None or self._closed
            )
            if self._undecoded[layer] == 0:
                return
            if self._error is not None:
                raise self._error
            raise StoreError("the cache's stream was closed before this layer had arrived")

    def wait_transfers(self) -> None:
        """Return once every chunk is fetched, or the stream has ended before that."""
        self._fetcher.join()

    def close(self, *, wait: bool = True) -> None:
        """End transfers and decoding.

        Parameters
        ----------
        wait
            Return when the threads have ended, which their own threads must not wait for.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.artifact.store.close()
        self._room.release()  # the fetcher may be waiting for room
        self._decoders.shutdown(wait=wait, cancel_futures=True)
        if wait:
            self._fetcher.join()

    def _run(self) -> None:
        try:
            for chunk in range(len(self._layers)):
                self._fetch_chunk(chunk)
                if self._closed:
                    return
        except Exception as error:
            self._fail(error)
        finally:
            self._decoders.shutdown(wait=False)  # they end when nothing is left to decode

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _fetch_chunk(self, chunk: int) -> None:
        started = time.monotonic()
        level = self._policy.choose(self._state(started - self._started_at))
        size = 0
        for first, last in _runs(self._layers[chunk]):
            for layer, data in self._fetch_segments(chunk, level, first, last):
                size += len(data)
                self._room.acquire()
                if self._closed or self._error is not None:
                    return
                self._decoders.submit(self._decode_segment, chunk, level, layer, data)
        seconds = time.monotonic() - started
        self.transfers.append(
            ChunkTransfer(chunk, level, size, started - self._started_at, seconds)
        )

    def _state(self, elapsed_s: float) -> StreamState:
        return StreamState(
            sizes_bytes=[c.level_bytes for c in self.artifact.manifest.chunks],
            chosen=[t.level for t in self.transfers],
            elapsed_s=elapsed_s,
            throughputs_bytes_per_s=[
                t.size_bytes / max(t.seconds, 1e-9) for t in self.transfers if t.size_bytes
            ],
        )

    def _fetch_segments(
        self, chunk: int, level: int, first: int, last: int
    ) -> Iterator[tuple[int, bytes]]:
        """Yield (layer, checked bytes) of consecutive layers from one ranged transfer."""
        index = self._index(chunk)
        path = self.artifact.manifest.chunks[chunk].path
        span = index.span(level, first, last)
        pieces = self.artifact.store.stream(path, span.offset, span.size)
        arrived = bytearray()
        try:
            for layer in range(first, last + 1):
                size = index.segment(level, layer).size
                while len(arrived) < size:
                    arrived += next(pieces)
                data = bytes(arrived[:size])
                del arrived[:size]
                yield layer, self._checked(chunk, level, layer, data)
        finally:
            pieces.close()

    def _index(self, chunk: int) -> ChunkIndex:
        """The chunk's index, asked for a second time if it is damaged."""
        try:
            return self.artifact.index(chunk)
        except FormatError:
            return self.artifact.index(chunk)

    def _checked(self, chunk: int, level: int, layer: int, data: bytes) -> bytes:
        """The segment if it is intact, else what a second request brings, else FormatError."""
        index = self.artifact.index(chunk)
        try:
            index.check(level, layer, data)
        except FormatError:
            span, path = index.segment(level, layer), self.artifact.manifest.chunks[chunk].path
            data = self.artifact.store.read(path, span.offset, span.size, max_bytes=span.size)
            try:
                index.check(level, layer, data)
            except FormatError as error:
                raise self._located(chunk, level, layer, error) from error
        return data

    def _decode_segment(self, chunk: int, level: int, layer: int, data: bytes) -> None:
        try:
            if self._closed or self._error is not None:
                return
            done = self._decode(chunk, level, layer, data)
        except CacheGenError as error:
            self._fail(self._located(chunk, level, layer, error))
        except Exception as error:
            self._fail(error)
        else:
            with self._changed:
                for finished in done:
                    self._undecoded[finished] -= 1
                self._changed.notify_all()
        finally:
            self._room.release()

    def _located(self, chunk: int, level: int, layer: int, error: CacheGenError) -> CacheGenError:
        manifest = self.artifact.manifest
        where = (
            f"{manifest.chunks[chunk].path} in {self.artifact.store.location}, "
            f"level {manifest.levels[level].name}, layer {layer}"
        )
        located = type(error)(f"{where}: {error}")
        located.__cause__ = error
        return located


def _runs(layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each stretch of consecutive layers."""
    start = 0
    for position in range(1, len(layers) + 1):
        if position == len(layers) or layers[position] != layers[position - 1] + 1:
            yield layers[start], layers[position - 1]
            start = position
