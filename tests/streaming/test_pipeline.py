"""The stream of chunks: order, laziness, errors, and the end of its threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_cachegen.artifact import Artifact, LevelRecord
from hf_cachegen.errors import FormatError, StoreError
from hf_cachegen.stores import LocalStore
from hf_cachegen.streaming.controller import FixedLevel, Policy, StreamState
from hf_cachegen.streaming.meter import Meter
from hf_cachegen.streaming.pipeline import REQUESTS_AHEAD, ChunkStream
from hf_cachegen.streaming.rates import MachineRates
from hf_cachegen.streaming.steps import StreamStep

N_LAYERS, N_CHUNKS = 4, 3

ALL = [list(range(N_LAYERS))] * N_CHUNKS

Decoded = dict[tuple[int, int], bytes]


class Collector:
    """A decoder that keeps what it gets."""

    def __init__(self, wait: Callable[[int], object] = lambda layer: None) -> None:
        self.found: Decoded = {}
        self._wait = wait

    def __call__(self, chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        self._wait(layer)
        assert data.startswith(f"chunk {chunk}, level {level}, layer {layer};".encode())
        self.found[chunk, layer] = data
        return (layer,)


def start(
    store: Any,
    decode: Callable[[int, int, int, bytes], Sequence[int]],
    policy: Policy | None = None,
    layers: Sequence[Sequence[int]] = ALL,
) -> ChunkStream:
    return ChunkStream(Artifact.open(store), policy or FixedLevel(0), layers, decode, workers=2)


def test_every_segment_arrives(made_up: Path, slow_store: Any, threads_end: Any) -> None:
    decode = Collector()
    stream = start(slow_store(made_up), decode, FixedLevel(1))
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
        assert all((chunk, layer) in decode.found for chunk in range(N_CHUNKS))
    stream.wait_transfers()
    steps = stream.report()
    assert [(step.chunk, step.level) for step in steps] == [(0, 1), (1, 1), (2, 1)]
    assert all(step.finished and not step.refinement for step in steps)
    sizes = [chunk.level_bytes[1] for chunk in stream.artifact.manifest.chunks]
    assert [step.size_bytes for step in steps] == sizes
    started = [step.started_s for step in steps]
    assert started == sorted(started)
    assert threads_end()  # without being closed


def test_layers_that_a_chunk_need_not_give_are_not_fetched(made_up: Path, slow_store: Any) -> None:
    store, decode = slow_store(made_up), Collector()
    stream = start(store, decode, layers=[[1], [0, 1, 3], [0, 1, 2, 3]])
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
    assert set(decode.found) == {(0, 1)} | {(1, i) for i in (0, 1, 3)} | {(2, i) for i in range(4)}
    assert len(store.reads) == 1 + 2 + 1  # one request for each stretch of layers


def test_level_is_chosen_anew_for_each_chunk(made_up: Path, slow_store: Any) -> None:
    states: list[StreamState] = []

    class Alternating(Policy):
        def choose(self, state: StreamState) -> int:
            states.append(state)
            return state.next_chunk % 2

    decode = Collector()
    stream = start(slow_store(made_up), decode, Alternating())
    stream.wait_transfers()
    assert [step.level for step in stream.report()] == [0, 1, 0]
    assert [list(state.chosen) for state in states] == [[], [0], [0, 1]]
    # So little tells more of the latency than of the link: it counts while nothing else does.
    assert [len(state.throughputs_bytes_per_s) for state in states] == [0, 1, 1]
    assert all(rate > 0 for rate in states[-1].throughputs_bytes_per_s)
    manifest = stream.artifact.manifest
    assert [tuple(sizes) for sizes in states[0].sizes_bytes] == [
        chunk.level_bytes for chunk in manifest.chunks
    ]
    stream.close()


def test_layer_is_not_held_up_by_the_decoding_of_others(made_up: Path, slow_store: Any) -> None:
    release = threading.Event()
    decode = Collector(lambda layer: layer != 3 or release.wait(20))
    stream = start(slow_store(made_up), decode, layers=[ALL[0]])
    for layer in range(3):
        stream.wait_layer(layer)
    assert (0, 3) not in decode.found
    release.set()
    stream.wait_layer(3)
    stream.close()


def test_slow_decoder_holds_up_the_link(made_up: Path, slow_store: Any) -> None:
    """Encoded bytes of two chunks at most are in memory."""
    release = threading.Event()
    store = slow_store(made_up)
    stream = start(store, Collector(lambda layer: release.wait(20)))
    deadline = time.monotonic() + 20
    expected = [True, True, False]  # the third is under way, its first segment has no room
    while (
        [step.finished for step in stream.report()] != expected or len(store.reads) < N_CHUNKS
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.02)  # for what must not come
    assert [step.finished for step in stream.report()] == expected
    release.set()
    stream.wait_transfers()
    assert [step.finished for step in stream.report()] == [True] * 3


def test_group_completes_the_layers_that_it_carries(made_up: Path, slow_store: Any) -> None:
    def decode(chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        return (layer, layer + 1) if layer % 2 == 0 else ()

    stream = start(slow_store(made_up), decode)
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
    stream.close()


def test_damaged_segment_is_asked_for_once_more(made_up: Path, slow_store: Any) -> None:
    decode, store = Collector(), slow_store(made_up, damage=1)
    stream = start(store, decode)
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
    assert len(decode.found) == N_CHUNKS * N_LAYERS
    assert len(store.reads) == N_CHUNKS + 1


def test_segment_that_stays_damaged_is_named(
    made_up: Path, slow_store: Any, threads_end: Any
) -> None:
    store = slow_store(made_up, damage=2)
    stream = start(store, Collector())
    with pytest.raises(FormatError, match=r"chunks/\w+\.kv in .*level low, layer 0: .*checksum"):
        stream.wait_layer(3)
    assert len(store.reads) == 2
    assert threads_end()


@pytest.mark.parametrize("error", [FormatError("bad bytes"), RuntimeError("out of memory")])
def test_decoder_that_fails_ends_the_stream(
    made_up: Path, slow_store: Any, threads_end: Any, error: Exception
) -> None:
    def decode(chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        if (chunk, layer) == (1, 2):
            raise error
        return (layer,)

    stream = start(slow_store(made_up), decode)
    place = r"chunks/\w+\.kv in .*level low, layer 2: bad bytes"
    with pytest.raises(type(error), match=place if isinstance(error, FormatError) else str(error)):
        stream.wait_layer(3 if isinstance(error, FormatError) else 2)
    assert threads_end()


def test_policy_that_fails_ends_the_stream(
    made_up: Path, slow_store: Any, threads_end: Any
) -> None:
    class Broken(Policy):
        def choose(self, state: StreamState) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start(slow_store(made_up), Collector(), Broken()).wait_layer(0)
    assert threads_end()


def test_waiting_ends_when_the_stream_is_closed(
    made_up: Path, slow_store: Any, threads_end: Any
) -> None:
    stream = start(slow_store(made_up, gated=True), Collector())
    errors: list[Exception] = []

    def wait() -> None:
        try:
            stream.wait_layer(0)
        except StoreError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    began = time.monotonic()
    stream.close()
    waiting.join(timeout=10)
    assert time.monotonic() - began < 15  # the gate stays closed for ever
    assert len(errors) == 1
    assert threads_end()
    stream.close()  # and once more does nothing


def test_stream_may_be_closed_by_its_own_threads(
    made_up: Path, slow_store: Any, threads_end: Any
) -> None:
    """As when garbage is collected in one of them."""
    streams: list[ChunkStream] = []
    started = threading.Event()

    def decode(chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        started.wait(20)
        streams[0].close(wait=False)
        return (layer,)

    streams.append(start(slow_store(made_up), decode))
    started.set()
    assert threads_end()


def test_what_arrived_before_the_end_stays_usable(made_up: Path, slow_store: Any) -> None:
    decode = Collector()
    stream = start(slow_store(made_up), decode)
    stream.wait_layer(1)
    stream.close()
    stream.wait_layer(1)


class Together(Collector):
    """A decoder of several segments at once, whose first segment is through when ``go`` is set."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.batches: list[tuple[int, list[int]]] = []
        self.go = threading.Event()
        self.error: Exception | None = None
        self._store = store
        self._begun = threading.Event()

    def __call__(self, chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        self._begun.set()
        self.go.wait(20)
        return super().__call__(chunk, level, layer, data)

    def many(self, level: int, layer: int, segments: Sequence[tuple[int, bytes]]) -> Sequence[int]:
        self.batches.append((layer, [chunk for chunk, _ in segments]))
        if self.error is not None:
            raise self.error
        for chunk, data in segments:
            super().__call__(chunk, level, layer, data)
        return (layer,)

    def start(self) -> ChunkStream:
        """All segments but the first have come, and wait: there is room for them."""
        artifact = Artifact.open(self._store)
        stream = ChunkStream(artifact, FixedLevel(0), ALL, self, decode_many=self.many, workers=1)
        self._store.gate.release()  # for the first chunk
        assert self._begun.wait(20)
        self._store.gate.release(10)
        stream.wait_transfers()
        return stream


def test_segments_that_wait_are_decoded_together(
    made_up: Path, slow_store: Any, threads_end: Any
) -> None:
    decode = Together(slow_store(made_up, gated=True))
    stream = decode.start()
    decode.go.set()
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
    assert decode.batches == [(1, [0, 1, 2]), (2, [0, 1, 2]), (3, [0, 1, 2]), (0, [1, 2])]
    assert set(decode.found) == {(c, i) for c in range(N_CHUNKS) for i in range(N_LAYERS)}
    steps = stream.report()
    assert all(step.finished and step.decode_s is not None for step in steps)
    assert threads_end()


@pytest.mark.parametrize("error", [FormatError("bad bytes"), RuntimeError("out of memory")])
def test_what_cannot_be_decoded_together_is_decoded_one_by_one(
    made_up: Path, slow_store: Any, error: Exception
) -> None:
    decode = Together(slow_store(made_up, gated=True))
    decode.error = error
    stream = decode.start()
    decode.go.set()
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
    assert len(decode.batches) == 4
    assert set(decode.found) == {(c, i) for c in range(N_CHUNKS) for i in range(N_LAYERS)}


def test_damaged_segment_among_several_is_named(
    made_up: Path, slow_store: Any, threads_end: Any
) -> None:
    class Damaged(Together):
        def __call__(self, chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
            if (chunk, layer) == (1, 2):
                raise FormatError("bad bytes")
            return super().__call__(chunk, level, layer, data)

    decode = Damaged(slow_store(made_up, gated=True))
    decode.error = FormatError("one of them is damaged")
    stream = decode.start()
    path = stream.artifact.manifest.chunks[1].path
    decode.go.set()
    with pytest.raises(FormatError, match=f"{path} in .*level low, layer 2: bad bytes"):
        stream.wait_layer(2)
    assert threads_end()


def test_segments_that_wait_together_are_dropped_when_the_stream_is_closed(
    made_up: Path, slow_store: Any, threads_end: Any
) -> None:
    decode = Together(slow_store(made_up, gated=True))
    stream = decode.start()
    stream.close(wait=False)
    decode.go.set()
    assert threads_end()
    assert decode.batches == []
    assert set(decode.found) == {(0, 0)}
    with pytest.raises(StoreError, match="closed"):
        stream.wait_layer(0)


def test_a_chunk_is_finished_before_it_can_be_in_place(
    make_up: Any, segment: Any, slow_store: Any
) -> None:
    """Its last segments may be empty: what matters has come before them."""

    def part(chunk: int, level: int, layer: int) -> bytes:
        return segment(chunk, level, layer) if layer < 2 else b""

    folder = make_up([LevelRecord(name="low", codec="raw", exact=True)], N_CHUNKS, part)
    steps: list[StreamStep] = []
    begun = threading.Event()

    def decode(chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        begun.wait(20)
        if layer == 1:
            steps.append(stream.report()[chunk])
        return {0: (0,), 1: (1, 2, 3)}.get(layer, ())

    # One thread decodes in order, so that it finds what was noted before the segment came.
    artifact = Artifact.open(slow_store(folder))
    stream = ChunkStream(artifact, FixedLevel(0), ALL, decode, workers=1)
    begun.set()
    stream.wait_layer(3)
    assert [step.chunk for step in steps] == list(range(N_CHUNKS))
    assert all(step.finished for step in steps)
    sizes = [chunk.level_bytes[0] for chunk in artifact.manifest.chunks]
    assert [step.size_bytes for step in steps] == sizes
    stream.close()


class Holding(LocalStore):
    """Holds the last segment of a chunk back until the next chunk is asked for."""

    def __init__(self, folder: Path, paths: Sequence[str]) -> None:
        super().__init__(folder)
        self.asked: list[str] = []
        self.in_time: list[bool] = []
        self._asked_for = [threading.Event() for _ in paths]
        self._paths = list(paths)

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        data = b"".join(super()._pieces(path, offset, size, max_bytes))
        if path not in self._paths:
            yield data
            return
        self.asked.append(path)
        chunk = self._paths.index(path)
        self._asked_for[chunk].set()
        yield data[:-260]
        if chunk + 1 < len(self._paths):
            self.in_time.append(self._asked_for[chunk + 1].wait(20))
        yield data[-260:]


def test_the_next_chunk_is_asked_for_before_this_one_has_come(made_up: Path) -> None:
    paths = [chunk.path for chunk in Artifact.open(LocalStore(made_up)).manifest.chunks]
    store = Holding(made_up, paths)
    stream = start(store, Collector())
    stream.wait_layer(3)
    stream.close()
    assert store.in_time == [True] * (N_CHUNKS - 1)
    assert store.asked == paths, "each is asked for once"


def test_chunk_in_place_stays_so_when_empty_segments_come_too_late(
    make_up: Any, segment: Any, slow_store: Any, threads_end: Any
) -> None:
    """The stream is closed before the decoder gets to them: nothing of the chunk is lost."""
    release = threading.Event()

    def first_alone(chunk: int, level: int, layer: int) -> bytes:
        return segment(chunk, level, layer) if layer == 0 else b""

    def decode(chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        if layer == 1:
            assert release.wait(20)
        return range(N_LAYERS) if layer == 0 else ()

    folder = make_up([LevelRecord(name="low", codec="raw", exact=False)], 1, first_alone)
    artifact = Artifact.open(slow_store(folder))
    stream = ChunkStream(artifact, FixedLevel(0), [ALL[0]], decode, workers=1)
    stream.wait_layer(N_LAYERS - 1)
    stream.close(wait=False)
    release.set()
    assert threads_end()
    assert stream.sources() == ["low"]
    assert [step.finished for step in stream.report()] == [True]


def test_chunks_are_asked_for_ahead_where_answers_take_their_time(
    make_up: Any, segment: Any, recording_store: Any
) -> None:
    """As many as an answer takes to come, up to a limit, and each once."""
    asked: list[str] = []
    answer = threading.Event()

    class DistantStore(recording_store):  # type: ignore[misc]
        latency_s = 100.0

        def _pieces(self, path: str, *span: Any) -> Generator[bytes, None, None]:
            if path.startswith("chunks/"):
                asked.append(path)
                assert answer.wait(60)
            yield from super()._pieces(path, *span)

    folder = make_up([LevelRecord(name="low", codec="raw", exact=True)], 9, segment)
    rates, decode = MachineRates(), Collector()
    artifact = Artifact.open(DistantStore(folder))
    rates.note_link(artifact.store.location, 1e6)
    stream = ChunkStream(artifact, FixedLevel(0), [ALL[0]] * 9, decode, rates=rates)
    deadline = time.monotonic() + 60
    while len(asked) < 1 + REQUESTS_AHEAD and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    paths = [chunk.path for chunk in artifact.manifest.chunks]
    assert sorted(asked) == sorted(paths[: 1 + REQUESTS_AHEAD])
    answer.set()
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
    assert sorted(asked) == sorted(paths)
    assert [step.chunk for step in stream.report()] == list(range(9))
    started = [step.started_s for step in stream.report()]
    assert started == sorted(started), "each counts from its turn"
    stream.close()


def test_what_a_level_needs_besides_counts_for_the_next_chunk(
    made_up: Path, slow_store: Any
) -> None:
    """Of the level that it is for, until it is there."""
    states: list[StreamState] = []
    besides = {0: 1000, 1: None}

    class Observing(Policy):
        def choose(self, state: StreamState) -> int:
            states.append(state)
            return 0

    def prepare(level: int, meter: Meter) -> None:
        besides[level] = 0

    stream = ChunkStream(
        Artifact.open(slow_store(made_up)),
        Observing(),
        ALL,
        Collector(),
        prepare=prepare,
        besides_bytes=besides.__getitem__,
    )
    stream.wait_transfers()
    own = [chunk.level_bytes for chunk in stream.artifact.manifest.chunks]
    first, *others = ([tuple(sizes) for sizes in state.sizes_bytes] for state in states)
    assert first == [(own[0][0] + 1000, own[0][1]), *own[1:]]
    assert all(sizes == own for sizes in others)
    stream.close()
