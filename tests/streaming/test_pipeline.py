"""The stream of chunks: order, laziness, errors, and the end of its threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from hf_cachegen.artifact import Artifact, ArtifactWriter, Identity, LevelRecord
from hf_cachegen.errors import FormatError, StoreError
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec
from hf_cachegen.stores import LocalStore
from hf_cachegen.streaming.controller import FixedLevel, Policy, StreamState
from hf_cachegen.streaming.pipeline import ChunkStream

N_LAYERS, N_CHUNKS, CHUNK_TOKENS = 4, 3, 8

ALL = [list(range(N_LAYERS))] * N_CHUNKS

Decoded = dict[tuple[int, int], bytes]


def segment(chunk: int, level: int, layer: int) -> bytes:
    return f"chunk {chunk}, level {level}, layer {layer};".encode() * (10 * (level + 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three chunks, two levels, four layers of made-up bytes."""
    tensor = TensorSpec(name="keys", heads=2, dim=64)
    layer = LayerSpec(kind="full_attention", tensors=(tensor,))
    identity = Identity(
        model_id="org/model",
        weights="ab" * 16,
        config="cd" * 16,
        architecture="LlamaForCausalLM",
        layout=KVLayout(dtype="float32", ropes={}, layers=(layer,) * N_LAYERS),
    )
    levels = [LevelRecord(name=name, codec="raw", exact=True) for name in ("low", "high")]
    target = tmp_path_factory.mktemp("streams") / "artefact"
    tokens = list(range(N_CHUNKS * CHUNK_TOKENS))
    with ArtifactWriter(target, identity, levels, CHUNK_TOKENS, tokens) as writer:
        for plan in writer.missing_chunks():
            writer.add_chunk(
                plan,
                [[segment(plan.position, i, j) for j in range(N_LAYERS)] for i in range(2)],
            )
        writer.commit()
    return target


class SlowStore(LocalStore):
    """Gives chunks in small pieces, and waits at each chunk for ``gate``."""

    def __init__(self, folder: Path, *, gated: bool = False, damage: int = 0) -> None:
        super().__init__(folder)
        self.reads: list[tuple[int, int | None]] = []
        self.gate = threading.Semaphore(0 if gated else 1_000_000)
        self.closed = False
        self._damage = damage

    def close(self) -> None:
        self.closed = True
        self.gate.release(1000)

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        data = b"".join(super()._pieces(path, offset, size, max_bytes))
        if path.startswith("chunks/") and offset:
            self.gate.acquire()
            self.reads.append((offset, size))
            if self.closed:
                raise StoreError("the store was closed")
            if self._damage:
                self._damage -= 1
                data = b"#" + data[1:]
        yield from (data[start : start + 50] for start in range(0, len(data), 50))


class Collector:
    """A decoder that keeps what it gets."""

    def __init__(self, wait: Callable[[int], object] = lambda layer: None) -> None:
        self.found: Decoded = {}
        self._wait = wait

    def __call__(self, chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        self._wait(layer)
        assert data == segment(chunk, level, layer)
        self.found[chunk, layer] = data
        return (layer,)


def start(
    store: LocalStore,
    decode: Callable[[int, int, int, bytes], Sequence[int]],
    policy: Policy | None = None,
    layers: Sequence[Sequence[int]] = ALL,
) -> ChunkStream:
    return ChunkStream(Artifact.open(store), policy or FixedLevel(0), layers, decode, workers=2)


def threads_end() -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(t.name.startswith("hf-cachegen") for t in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


def test_every_segment_arrives(folder: Path) -> None:
    decode = Collector()
    stream = start(SlowStore(folder), decode, FixedLevel(1))
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
        assert all((chunk, layer) in decode.found for chunk in range(N_CHUNKS))
    stream.wait_transfers()
    assert [(t.chunk, t.level) for t in stream.transfers] == [(0, 1), (1, 1), (2, 1)]
    sizes = [chunk.level_bytes[1] for chunk in stream.artifact.manifest.chunks]
    assert [t.size_bytes for t in stream.transfers] == sizes
    started = [t.started_s for t in stream.transfers]
    assert started == sorted(started)
    assert threads_end()  # without being closed


def test_layers_that_a_chunk_need_not_give_are_not_fetched(folder: Path) -> None:
    store, decode = SlowStore(folder), Collector()
    stream = start(store, decode, layers=[[1], [0, 1, 3], [0, 1, 2, 3]])
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
    assert set(decode.found) == {(0, 1)} | {(1, i) for i in (0, 1, 3)} | {(2, i) for i in range(4)}
    assert len(store.reads) == 1 + 2 + 1  # one request for each stretch of layers


def test_level_is_chosen_anew_for_each_chunk(folder: Path) -> None:
    states: list[StreamState] = []

    class Alternating(Policy):
        def choose(self, state: StreamState) -> int:
            states.append(state)
            return state.next_chunk % 2

    decode = Collector()
    stream = start(SlowStore(folder), decode, Alternating())
    stream.wait_transfers()
    assert [t.level for t in stream.transfers] == [0, 1, 0]
    assert [list(state.chosen) for state in states] == [[], [0], [0, 1]]
    assert [len(state.throughputs_bytes_per_s) for state in states] == [0, 1, 2]
    assert all(rate > 0 for rate in states[-1].throughputs_bytes_per_s)
    manifest = stream.artifact.manifest
    assert [tuple(sizes) for sizes in states[0].sizes_bytes] == [
        chunk.level_bytes for chunk in manifest.chunks
    ]
    stream.close()


def test_layer_is_not_held_up_by_the_decoding_of_others(folder: Path) -> None:
    release = threading.Event()
    decode = Collector(lambda layer: layer != 3 or release.wait(20))
    stream = start(SlowStore(folder), decode, layers=[ALL[0]])
    for layer in range(3):
        stream.wait_layer(layer)
    assert (0, 3) not in decode.found
    release.set()
    stream.wait_layer(3)
    stream.close()


def test_slow_decoder_holds_up_the_link(folder: Path) -> None:
    """Encoded bytes of two chunks at most are in memory."""
    release = threading.Event()
    store = SlowStore(folder)
    stream = start(store, Collector(lambda layer: release.wait(20)))
    deadline = time.monotonic() + 10
    while len(store.reads) < N_CHUNKS and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(stream.transfers) == 2  # the third is under way, its first segment has no room
    release.set()
    stream.wait_transfers()
    assert len(stream.transfers) == 3


def test_group_completes_the_layers_that_it_carries(folder: Path) -> None:
    def decode(chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        return (layer, layer + 1) if layer % 2 == 0 else ()

    stream = start(SlowStore(folder), decode)
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
    stream.close()


def test_damaged_segment_is_asked_for_once_more(folder: Path) -> None:
    decode, store = Collector(), SlowStore(folder, damage=1)
    stream = start(store, decode)
    for layer in range(N_LAYERS):
        stream.wait_layer(layer)
    assert len(decode.found) == N_CHUNKS * N_LAYERS
    assert len(store.reads) == N_CHUNKS + 1


def test_segment_that_stays_damaged_is_named(folder: Path) -> None:
    store = SlowStore(folder, damage=2)
    stream = start(store, Collector())
    with pytest.raises(FormatError, match=r"chunks/\w+\.kv in .*level low, layer 0: .*checksum"):
        stream.wait_layer(3)
    assert len(store.reads) == 2
    assert threads_end()


@pytest.mark.parametrize("error", [FormatError("bad bytes"), RuntimeError("out of memory")])
def test_decoder_that_fails_ends_the_stream(folder: Path, error: Exception) -> None:
    def decode(chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        if (chunk, layer) == (1, 2):
            raise error
        return (layer,)

    stream = start(SlowStore(folder), decode)
    place = r"chunks/\w+\.kv in .*level low, layer 2: bad bytes"
    with pytest.raises(type(error), match=place if isinstance(error, FormatError) else str(error)):
        stream.wait_layer(3 if isinstance(error, FormatError) else 2)
    assert threads_end()


def test_policy_that_fails_ends_the_stream(folder: Path) -> None:
    class Broken(Policy):
        def choose(self, state: StreamState) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start(SlowStore(folder), Collector(), Broken()).wait_layer(0)
    assert threads_end()


def test_waiting_ends_when_the_stream_is_closed(folder: Path) -> None:
    stream = start(SlowStore(folder, gated=True), Collector())
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
    assert time.monotonic() - began < 5
    assert len(errors) == 1
    assert threads_end()
    stream.close()  # and once more does nothing


def test_stream_may_be_closed_by_its_own_threads(folder: Path) -> None:
    """As when garbage is collected in one of them."""
    streams: list[ChunkStream] = []
    started = threading.Event()

    def decode(chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        started.wait(20)
        streams[0].close(wait=False)
        return (layer,)

    streams.append(start(SlowStore(folder), decode))
    started.set()
    assert threads_end()


def test_what_arrived_before_the_end_stays_usable(folder: Path) -> None:
    decode = Collector()
    stream = start(SlowStore(folder), decode)
    stream.wait_layer(1)
    stream.close()
    stream.wait_layer(1)
