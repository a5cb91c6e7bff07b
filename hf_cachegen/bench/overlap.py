"""How well a stream overlaps: its time beside those of its transfer and of its decoding alone."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedModel

from hf_cachegen.artifact import Artifact
from hf_cachegen.bench.link import LinkServer
from hf_cachegen.hf.buffers import LayerBuffers
from hf_cachegen.hf.cache import CompressedStreamingCache
from hf_cachegen.hf.codecs import LevelCodecs
from hf_cachegen.hf.compat import layer_devices, native_layers, token_layers
from hf_cachegen.stores import HttpStore, LocalStore
from hf_cachegen.streaming.meter import Meter
from hf_cachegen.streaming.transfer import SegmentReader
from hf_cachegen.tables import ModelTable


@dataclass(frozen=True)
class Overlap:
    """One level over one link, each time the median of several runs.

    Attributes
    ----------
    transfer_s
        From the first request to the last byte, with nothing else to do.
    decode_s
        To decode all of it with all threads, with every byte at hand.
    stream_s
        From the request for the cache until all of it is in place.
    ratio
        ``stream_s`` over the longer of the other two; 1 is a perfect overlap.
    """

    link: str
    level: str
    transfer_s: float
    decode_s: float
    stream_s: float
    ratio: float


def measure_overlap(
    model: PreTrainedModel,
    table: ModelTable,
    server: LinkServer,
    link: str,
    level: str,
    *,
    runs: int,
) -> Overlap:
    """Measure one level of the artefact that a server offers.

    Parameters
    ----------
    model, table
        What the artefact is of.
    server
        Its link is restarted for every transfer.
    link, level
        Names; that of the level as in the artefact.
    runs
        How often each is measured. They take turns.
    """
    with LocalStore(server.folder) as store:
        local = Artifact.open(store)
        buffers = partial(_buffers, model, table, local)
        wanted = _Wanted(
            [record.name for record in local.manifest.levels].index(level),
            [buffers().layers_of(chunk) for chunk in range(len(local.manifest.chunks))],
        )
        segments = wanted.read(local)
        parts: tuple[Callable[[], float], ...] = (
            partial(_transfer_s, server, wanted),
            lambda: _decode_s(buffers(), segments),
            partial(_stream_s, model, table, server, level),
        )
        taken = [[part() for part in parts] for _ in range(runs)]
    transfer_s, decode_s, stream_s = map(statistics.median, zip(*taken, strict=True))
    ratio = stream_s / max(transfer_s, decode_s)
    return Overlap(link, level, transfer_s, decode_s, stream_s, ratio)


Segment = tuple[int, int, int, bytes]
"""(chunk, level, layer, bytes)"""


@dataclass(frozen=True)
class _Wanted:
    """A level, and per chunk the layers that need it."""

    level: int
    layers: Sequence[Sequence[int]]

    def read(self, artifact: Artifact) -> list[Segment]:
        """Every segment, in the order of the files."""
        reader = SegmentReader(artifact)
        return [
            (chunk, self.level, layer, data)
            for chunk, layers in enumerate(self.layers)
            for layer, data in reader.read(chunk, self.level, layers, Meter())
        ]


def _buffers(model: PreTrainedModel, table: ModelTable, artifact: Artifact) -> LayerBuffers:
    manifest, identity, natives = (
        artifact.manifest,
        artifact.manifest.identity,
        native_layers(model),
    )
    devices = layer_devices(model, len(natives))
    codecs = LevelCodecs(manifest.levels, identity.layout, identity.table, artifact.store, table)
    return LayerBuffers(manifest, [devices[index] for index in token_layers(natives)], codecs)


def _transfer_s(server: LinkServer, wanted: _Wanted) -> float:
    server.link.restart()
    started = time.perf_counter()
    with HttpStore(server.url) as store:
        wanted.read(Artifact.open(store))
    return time.perf_counter() - started


def _decode_s(buffers: LayerBuffers, segments: Sequence[Segment]) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda segment: buffers.decode(*segment), segments))
    return time.perf_counter() - started


def _stream_s(model: PreTrainedModel, table: ModelTable, server: LinkServer, level: str) -> float:
    server.link.restart()
    started = time.perf_counter()
    cache = CompressedStreamingCache.from_pretrained(
        server.url, model=model, level=level, tables=table
    )
    cache.wait()
    taken_s = time.perf_counter() - started
    cache.close()
    return taken_s
