"""Recomputed chunks and refinements: order, deadlines, and the end of them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_cachegen.artifact import Artifact, LevelRecord
from hf_cachegen.errors import FormatError, StoreError, UnsupportedError
from hf_cachegen.streaming.costs import PASS_MARGIN
from hf_cachegen.streaming.meter import Meter
from hf_cachegen.streaming.pipeline import ChunkStream
from hf_cachegen.streaming.policy import TEXT, Policy, Refinement, StreamState
from hf_cachegen.streaming.rates import MachineRates, PrefillCost

LATER = 1e6
ALL = [[0, 1, 2, 3]] * 3


class Memory:
    """What is in place, by chunk and layer, and everything that was done, in order."""

    def __init__(self, decode_s: float = 0.0) -> None:
        self.held: dict[tuple[int, int], int] = {}
        self.events: list[tuple[str, int, int]] = []
        self._decode_s = decode_s
        self._lock = threading.Lock()

    def decode(self, chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        time.sleep(self._decode_s)
        with self._lock:
            self.held[chunk, layer] = level
            self.events.append(("decode", chunk, level))
        return (layer,)

    def recompute(self, chunk: int) -> Iterator[None]:
        before = [self.held[earlier, layer] for earlier in range(chunk) for layer in range(4)]
        yield
        assert before == [self.held[k, layer] for k in range(chunk) for layer in range(4)]
        for layer in range(4):
            self.held[chunk, layer] = TEXT
        with self._lock:
            self.events.append(("recompute", chunk, TEXT))

    def levels(self, chunk: int) -> set[int]:
        return {self.held[chunk, layer] for layer in range(4)}


@pytest.fixture
def start(made_up: Path, slow_store: Any) -> Any:
    """``start(policy, memory, **options)``; the store's own options in ``store``."""

    def start(
        policy: Any, memory: Memory, *, store: Any = None, workers: int = 2, **options: Any
    ) -> ChunkStream:
        artifact = Artifact.open(store or slow_store(made_up))
        return ChunkStream(
            artifact,
            policy,
            ALL,
            memory.decode,
            recompute=memory.recompute,
            workers=workers,
            **options,
        )

    return start


def use(stream: ChunkStream) -> None:
    for layer in range(4):
        stream.wait_layer(layer)


@pytest.mark.parametrize("levels", [(TEXT, 0, 1), (0, TEXT, 0), (1, TEXT, TEXT), (TEXT,) * 3])
def test_chunks_are_recomputed_in_order(start: Any, scripted: Any, levels: tuple[int, ...]):
    memory = Memory(decode_s=0.005)
    stream = start(scripted(levels), memory)
    use(stream)
    assert [memory.levels(chunk) for chunk in range(3)] == [{level} for level in levels]
    recomputed = [chunk for kind, chunk, _ in memory.events if kind == "recompute"]
    assert recomputed == [chunk for chunk, level in enumerate(levels) if level == TEXT]
    for kind, chunk, _ in memory.events:
        assert kind == "decode" or all(levels[k] is not None for k in range(chunk))
    steps = stream.report()
    assert all(step.finished for step in steps)
    for step in steps:
        assert (step.recompute_s is None) == (step.level != TEXT)
        assert (step.transfer_s is None) == (step.level == TEXT)


def test_link_goes_on_while_a_chunk_waits_for_its_recomputation(start: Any, scripted: Any):
    memory = Memory()
    # One decoder, so that segments are decoded in the order in which they arrive.
    stream = start(scripted((TEXT, 0, 1)), memory, workers=1)
    stream.wait_transfers()
    stop = time.monotonic() + 10
    while len(memory.events) < 8 and time.monotonic() < stop:
        time.sleep(0.01)
    assert memory.events == [("decode", 1, 0)] * 4 + [("decode", 2, 1)] * 4
    use(stream)
    assert memory.events[8:] == [("recompute", 0, TEXT)]


def test_text_without_a_model_is_refused(made_up: Path, slow_store: Any, scripted: Any):
    stream = ChunkStream(
        Artifact.open(slow_store(made_up)), scripted((0, TEXT, 0)), ALL, Memory().decode
    )
    with pytest.raises(UnsupportedError, match="recompute chunk 1"):
        use(stream)


def test_refinements_come_after_the_base(start: Any, scripted: Any):
    memory = Memory(decode_s=0.003)
    order = (1, 0, 2)
    stream = start(scripted((0,) * 3, [Refinement(c, 1, 0, LATER) for c in order]), memory)
    use(stream)
    assert all(memory.levels(chunk) == {1} for chunk in range(3))
    for chunk in range(3):
        seen = [level for _, which, level in memory.events if which == chunk]
        assert seen == [0] * 4 + [1] * 4
    steps = stream.report()
    assert [(s.chunk, s.level, s.refinement) for s in steps[3:]] == [(c, 1, True) for c in order]


def changes(seen: list[list[Any]]) -> list[list[Any]]:
    """Each once, however often it was asked for in a row."""
    return [one for one, _ in itertools.groupby(seen)]


def test_chosen_levels_that_a_policy_sees_follow_its_refinements(start: Any, scripted: Any):
    refinements = [Refinement(2, 1, 0, LATER), Refinement(0, 1, 0, LATER)]
    policy = scripted((0,) * 3, refinements)
    use(start(policy, Memory()))
    assert changes([list(state.chosen) for state in policy.states[3:]]) == [
        [0, 0, 0],
        [0, 0, 1],
        [1, 0, 1],
    ]


def test_refinement_never_changes_what_a_recomputation_reads(start: Any, scripted: Any):
    """Chunk 2 is recomputed from chunks 0 and 1 while chunk 0 is to be refined."""
    memory = Memory(decode_s=0.002)
    policy = scripted((0, 0, TEXT), [Refinement(0, 1, 0, LATER)])
    use(start(policy, memory))  # Memory.recompute checks it
    assert [memory.levels(chunk) for chunk in range(3)] == [{1}, {0}, {TEXT}]
    kinds = [event for event in memory.events if event[0] == "recompute" or event[2] == 1]
    assert kinds == [("recompute", 2, TEXT), *[("decode", 0, 1)] * 4]


def test_stalled_refinement_is_given_up_at_its_time(
    start: Any, scripted: Any, made_up: Path, slow_store: Any, threads_end: Any
):
    store = slow_store(made_up, gated=True)
    for _ in range(3):
        store.gate.release()  # the bases, and nothing more
    memory = Memory()
    started = time.monotonic()
    stream = start(scripted((0,) * 3, [Refinement(2, 1, 0, 0.5)]), memory, store=store)
    use(stream)
    assert 0.3 < time.monotonic() - started < 15  # the gate stays closed
    assert all(memory.levels(chunk) == {0} for chunk in range(3))
    stream.wait_transfers()  # which does not wait for the stalled one
    assert not stream.report()[-1].finished
    store.gate.release(10)
    time.sleep(0.05)
    assert all(memory.levels(chunk) == {0} for chunk in range(3))  # too late to be decoded
    stream.close()
    assert threads_end()


def test_refinement_ends_with_the_segment_that_is_being_decoded(start: Any, scripted: Any):
    """Its time is over while its other segments are in the queue: these are dropped."""
    refining, release = threading.Event(), threading.Event()

    class Held(Memory):
        def decode(self, chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
            if level == 1:
                refining.set()
                release.wait(20)
            return super().decode(chunk, level, layer, data)

    # So late that it has begun by then on any machine.
    memory, policy = Held(), scripted((0,) * 3, [Refinement(1, 1, 0, 3.0)])
    policy.until_s = 3.0
    stream = start(policy, memory, workers=1)
    assert refining.wait(10)
    user = threading.Thread(target=use, args=(stream,))
    user.start()
    time.sleep(3.1)
    assert user.is_alive()  # what is being decoded is waited for
    release.set()
    user.join(10)
    assert [memory.held[1, layer] for layer in range(4)] == [1, 0, 0, 0]
    refined = stream.report()[-1]
    assert (refined.finished, refined.dropped_segments) == (False, 3)


def test_nothing_changes_once_a_layer_was_read(start: Any, scripted: Any):
    memory = Memory(decode_s=0.02)
    refinements = [Refinement(chunk, 1, 0, 0.2) for chunk in (0, 1, 2)]
    stream = start(scripted((0,) * 3, refinements), memory)
    use(stream)
    seen = dict(memory.held)
    time.sleep(0.2)
    assert memory.held == seen
    assert set(seen.values()) <= {0, 1}


@pytest.mark.parametrize("damage", [0, 2])
def test_link_that_fails_in_a_refinement_leaves_the_base(
    start: Any, scripted: Any, made_up: Path, slow_store: Any, threads_end: Any, damage: int
):
    store = slow_store(made_up, gated=True)
    for _ in range(3):
        store.gate.release()
    memory = Memory()
    stream = start(scripted((0,) * 3, [Refinement(2, 1, 0, LATER)]), memory, store=store)
    while len(memory.events) < 12:
        time.sleep(0.01)
    if damage:
        store.damage_next(damage)
    else:
        store.closed = True
    store.gate.release(10)
    use(stream)
    assert memory.levels(2) == {0}
    assert threads_end()


def test_segments_that_carry_too_few_layers_are_an_error_and_no_hang(
    made_up: Path, slow_store: Any, scripted: Any
):
    def decode(chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        return () if layer == 3 else (layer,)

    stream = ChunkStream(Artifact.open(slow_store(made_up)), scripted((0, 0, 0)), ALL, decode)
    with pytest.raises(FormatError, match=r"none that carries layers \[3\]"):
        stream.wait_layer(3)


def test_state_tells_what_things_cost(start: Any, scripted: Any):
    rates = MachineRates()
    rates.prefill = PrefillCost(0.0, 0.25, 0.0)
    policy, memory = scripted((0, TEXT, 1), [Refinement(0, 1, 0, LATER)]), Memory(decode_s=0.02)
    started = time.monotonic()
    stream = start(policy, memory, rates=rates)
    stream.costs.prompt_tokens = 10
    while len(policy.states) < 3:
        time.sleep(0.001)  # so that nobody has come to recompute the second by then
    use(stream)
    longest_s = time.monotonic() - started
    first, second, third, refining, *_, last = policy.states
    assert first.recompute_s == [pytest.approx(2.0 * PASS_MARGIN)] * 3  # 8 tokens each
    assert first.decode_s == [[0.0, 0.0]] * 3
    assert second.throughputs_bytes_per_s
    assert third.compute_free_s >= third.elapsed_s + 1.5
    assert refining.tail_s >= 2.5
    assert 4 * 0.02 / 2 <= last.decode_s[0][0] < longest_s
    steps = stream.report()
    assert steps[0].predicted_transfer_s is None
    assert steps[2].predicted_transfer_s > 0
    assert steps[1].predicted_recompute_s == pytest.approx(2.0)
    assert 4 * 0.02 / 2 <= steps[0].decode_s < longest_s


def test_second_stream_knows_the_link(start: Any, scripted: Any):
    rates, policy = MachineRates(), scripted((0, 0, 0))
    start(scripted((0, 0, 0)), Memory(), rates=rates).wait_transfers()
    use(start(policy, Memory(), rates=rates))
    assert len(policy.states[0].throughputs_bytes_per_s) == 1


def test_only_recomputable_chunks_have_a_cost(start: Any, scripted: Any):
    rates = MachineRates()
    rates.prefill = PrefillCost(1.0, 0.0, 0.0)
    policy = scripted((TEXT, 0, 0), [Refinement(1, 1, 0, LATER)])
    use(start(policy, Memory(), rates=rates, holds_past=(True, False, False)))
    finite = [[cost < LATER for cost in state.recompute_s] for state in policy.states]
    # Each may follow the one before, until chunk 1 was fetched, so that nothing can follow it.
    assert changes(finite) == [[True, True, True], [True, True, False]]


def test_closing_while_a_refinement_waits(
    start: Any, scripted: Any, made_up: Path, slow_store: Any, threads_end: Any
):
    store = slow_store(made_up, gated=True)
    for _ in range(3):
        store.gate.release()
    stream = start(scripted((0,) * 3, [Refinement(2, 1, 0, LATER)]), Memory(), store=store)
    closer = threading.Timer(0.1, stream.close)
    closer.start()
    with contextlib.suppress(StoreError):  # unless the bases were in place in time
        use(stream)
    closer.join()
    assert threads_end()


def test_chunk_that_does_not_arrive_at_all_is_recomputed_instead(
    start: Any, made_up: Path, slow_store: Any, threads_end: Any, monkeypatch: pytest.MonkeyPatch
):
    """The link stands still from the second chunk on, and nobody waits for it to time out."""
    monkeypatch.setattr("hf_cachegen.streaming.pipeline.RECONSIDER_S", 0.1)
    monkeypatch.setattr("hf_cachegen.streaming.meter.RECENT_S", 0.1)
    store = slow_store(made_up, gated=True)
    store.gate.release(1)
    asked: list[tuple[int, float]] = []
    still_s: list[float] = []

    class Patient(Policy):
        def choose(self, state: StreamState) -> int:
            late = state.next_chunk > 0
            late &= [chunk for chunk, _ in asked].count(state.next_chunk) == 3
            asked.append((state.next_chunk, state.throughputs_bytes_per_s[-1:]))
            if state.next_chunk == 2:
                still_s.append(state.elapsed_s - state.compute_free_s)
            return TEXT if late else 0

    memory = Memory()
    stream = start(Patient(), memory, store=store)
    started = time.monotonic()
    use(stream)
    assert time.monotonic() - started < 15  # the gate stays closed
    assert [memory.levels(chunk) for chunk in range(3)] == [{0}, {TEXT}, {TEXT}]
    steps = [(step.chunk, step.level, step.finished) for step in stream.report()]
    assert steps == [(0, 0, True), (1, 0, False), (1, TEXT, True), (2, 0, False), (2, TEXT, True)]
    rates = [rate for chunk, (rate,) in asked[1:] if chunk == 1][1:]
    assert rates == sorted(rates, reverse=True)  # the longer it stands, the slower it seems
    assert still_s[0] > 0.3, "it may do so for as long again"
    stream.close()
    assert threads_end()


class SlowMeter(Meter):
    """Every transfer takes longer than was expected."""

    def recent_bytes_per_s(self) -> float:
        return 1.0


def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have policies asked again with each segment, and only then."""
    monkeypatch.setattr("hf_cachegen.streaming.pipeline.RECONSIDER_S", 60.0)
    monkeypatch.setattr("hf_cachegen.streaming.pipeline.Meter", SlowMeter)
    monkeypatch.setattr("hf_cachegen.streaming.receiving.AHEAD", 1)


def test_chunk_that_arrives_too_slowly_is_recomputed_instead(
    start: Any, made_up: Path, slow_store: Any, monkeypatch: pytest.MonkeyPatch
):
    """The policy takes a level, and sees after two segments that text would have been better."""
    slow_link(monkeypatch)
    states: list[StreamState] = []

    class Regretful(Policy):
        def choose(self, state: StreamState) -> int:
            states.append(state)
            return TEXT if state.next_chunk == 1 and state.sizes_bytes[1][0] < 600 else 0

    memory = Memory()
    stream = start(Regretful(), memory)
    use(stream)
    assert [memory.levels(chunk) for chunk in range(3)] == [{0}, {TEXT}, {0}]
    steps = [(step.chunk, step.level, step.finished) for step in stream.report()]
    assert steps == [(0, 0, True), (1, 0, False), (1, TEXT, True), (2, 0, True)]
    assert 2 * 260 <= stream.report()[1].size_bytes < 3 * 260
    asked = [state.sizes_bytes[1] for state in states if state.next_chunk == 1]
    assert [sizes[0] // 260 for sizes in asked] == [4, 2, 1]  # a piece of the next segment came
    assert asked[0] == (1040, 2080)
    assert [sizes[1] // 520 for sizes in asked] == [4, 3, 2]  # of layers that were not handed over
    assert stream.sources() == ["exact"] * 3


def test_chunk_that_arrives_too_slowly_goes_on_at_a_coarser_level(
    start: Any, made_up: Path, slow_store: Any, monkeypatch: pytest.MonkeyPatch
):
    """Layers that have the finer one keep it, and nothing of them is fetched again."""
    slow_link(monkeypatch)

    class Humbled(Policy):
        def choose(self, state: StreamState) -> int:
            return int(state.next_chunk != 1 or state.sizes_bytes[1][1] > 1200)

    memory = Memory()
    stream = start(Humbled(), memory)
    use(stream)
    assert [memory.levels(chunk) for chunk in (0, 2)] == [{1}, {1}]
    assert [memory.held[1, layer] for layer in range(4)] == [1, 1, 0, 0]
    steps = [(step.chunk, step.level, step.finished) for step in stream.report()]
    assert steps == [(0, 1, True), (1, 1, False), (1, 0, True), (2, 1, True)]
    assert stream.report()[2].size_bytes == 2 * 260


def test_chunk_goes_on_in_another_codec_that_has_layers_together(
    make_up: Any, segment: Any, slow_store: Any, monkeypatch: pytest.MonkeyPatch
):
    """The first of two layers that it has in one segment was handed over: both are needed."""
    slow_link(monkeypatch)
    levels = [LevelRecord(name=codec, codec=codec, exact=True) for codec in ("lossless", "raw")]

    class Humbled(Policy):
        def choose(self, state: StreamState) -> int:
            return int(state.sizes_bytes[0][1] > 1800)

    class InPairs(Memory):
        def decode(self, chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
            if level == 1:
                return super().decode(chunk, level, layer, data)
            if layer % 2:
                return ()
            super().decode(chunk, level, layer + 1, data)
            return (*super().decode(chunk, level, layer, data), layer + 1)

    for recompute in (True, False):
        memory, folder = InPairs(), make_up(levels, 1, segment)
        stream = ChunkStream(
            Artifact.open(slow_store(folder)),
            Humbled(),
            ALL[:1],
            memory.decode,
            recompute=memory.recompute if recompute else None,
            workers=2,
        )
        use(stream)
        # Without a model that recomputes, layers may be in use before all have come.
        assert memory.levels(0) == {0 if recompute else 1}
        assert [step.level for step in stream.report()] == ([1, 0] if recompute else [1])
        stream.close()


def test_chunk_that_was_given_up_for_its_text_is_not_fetched_again(
    start: Any, monkeypatch: pytest.MonkeyPatch
):
    """Decoders may still be writing what it was handed over of."""
    slow_link(monkeypatch)

    class Regretful(Policy):
        def choose(self, state: StreamState) -> int:
            return TEXT if state.next_chunk or state.sizes_bytes[0][0] < 600 else 0

        def instead_of_text(self, state: StreamState) -> int | None:
            return 0

    memory = Memory(decode_s=0.02)
    stream = start(Regretful(), memory)
    use(stream)
    steps = [(step.chunk, step.level, step.finished) for step in stream.report()]
    assert steps[:2] == [(0, 0, False), (0, TEXT, True)]
    assert memory.levels(0) == {TEXT}
    assert all(step.finished for step in stream.report()[1:])


def test_chunks_asked_for_ahead_come_once_whatever_becomes_of_the_one_before(
    start: Any, made_up: Path, slow_store: Any, monkeypatch: pytest.MonkeyPatch
):
    slow_link(monkeypatch)
    asked, all_asked = [], threading.Event()

    class Distant(slow_store):  # type: ignore[misc]
        latency_s = 100.0

        def _pieces(self, path: str, *span: Any) -> Generator[bytes, None, None]:
            if path.startswith("chunks/"):
                asked.append(path)
                if len(asked) == 3:
                    all_asked.set()
                assert all_asked.wait(60)
            yield from super()._pieces(path, *span)

    class Humbled(Policy):
        def choose(self, state: StreamState) -> int:
            return int(state.next_chunk > 0 or state.sizes_bytes[0][1] > 1800)

    memory, rates, store = Memory(), MachineRates(), Distant(made_up)
    rates.note_link(store.location, 1e6)
    stream = start(Humbled(), memory, store=store, rates=rates)
    use(stream)
    steps = [(step.chunk, step.level, step.finished) for step in stream.report()]
    assert sorted(steps) == [(0, 0, True), (0, 1, False), (1, 1, True), (2, 1, True)]
    assert [memory.levels(chunk) for chunk in (1, 2)] == [{1}, {1}]
    assert sorted(map(asked.count, set(asked))) == [2, 2, 3]  # the index, then the level


class TextFirst(Policy):
    """Everything as text, unless the link brings it while the processor is busy with others."""

    def choose(self, state: StreamState) -> int:
        return TEXT

    def instead_of_text(self, state: StreamState) -> int | None:
        assert len(state.sizes_bytes) == state.next_chunk + 1
        return 0 if state.chosen and state.compute_free_s > state.elapsed_s else None


def slow_passes() -> MachineRates:
    """A processor that is thought to be busy for long with whatever it has begun."""
    rates = MachineRates()
    rates.prefill = PrefillCost(0.0, 1e3, 0.0)
    return rates


def test_stream_fills_from_the_back_while_text_comes_from_the_front(start: Any):
    """While the first chunk is recomputed, the link brings the others, the last one first."""
    memory, release = Memory(), threading.Event()

    def recompute(chunk: int) -> Iterator[None]:
        assert release.wait(20)
        yield from Memory.recompute(memory, chunk)

    memory.recompute = recompute  # type: ignore[method-assign]
    stream = start(TextFirst(), memory, workers=1, rates=slow_passes())
    user = threading.Thread(target=use, args=(stream,))
    user.start()
    stop = time.monotonic() + 10
    while len(memory.events) < 8 and time.monotonic() < stop:
        time.sleep(0.01)
    release.set()
    user.join()
    chunks = [chunk for _, chunk, _ in memory.events]
    assert chunks == [2] * 4 + [1] * 4 + [0]
    assert [memory.levels(chunk) for chunk in range(3)] == [{TEXT}, {0}, {0}]
    steps = [(step.chunk, step.level, step.finished) for step in stream.report()]
    assert steps == [(0, TEXT, True), (2, 0, True), (1, 0, True)]


def test_what_nobody_waits_for_is_fetched_as_far_as_it_is_queued(start: Any, threads_end: Any):
    memory = Memory()
    stream = start(TextFirst(), memory, workers=1, rates=slow_passes())
    stream.wait_transfers()
    use(stream)
    assert [memory.levels(chunk) for chunk in range(3)] == [{TEXT}, {0}, {0}]
    assert threads_end()


@pytest.mark.parametrize("damage", [0, 2])
def test_chunk_that_does_not_come_sooner_is_recomputed_after_all(
    start: Any,
    made_up: Path,
    slow_store: Any,
    threads_end: Any,
    monkeypatch: pytest.MonkeyPatch,
    damage: int,
):
    """The link stands still, or brings wrong bytes; the processor gets to the last chunk."""
    monkeypatch.setattr("hf_cachegen.streaming.pipeline.RECONSIDER_S", 0.1)
    monkeypatch.setattr("hf_cachegen.streaming.meter.RECENT_S", 0.1)
    store = slow_store(made_up, gated=not damage, damage=damage)
    memory = Memory()
    stream = start(TextFirst(), memory, store=store, rates=slow_passes())
    use(stream)
    assert [memory.levels(chunk) for chunk in range(3)] == [{TEXT}] * 3
    assert [chunk for _, chunk, _ in memory.events if _ == TEXT] == [0, 1, 2]
    steps = [(step.chunk, step.level, step.finished) for step in stream.report()]
    assert steps == [(0, TEXT, True), (1, TEXT, True), (2, 0, False), (2, TEXT, True)]
    assert stream.sources() == ["exact"] * 3
    stream.close()
    assert threads_end()


def test_chunk_is_not_in_place_once_its_refinement_could_not_be_decoded(
    start: Any, scripted: Any, threads_end: Any
):
    """It may be written over in part, by a decoder that finds the damage at the end."""

    class Damaged(Memory):
        def decode(self, chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
            if (chunk, level, layer) == (1, 1, 2):
                raise FormatError("bad bytes")
            return super().decode(chunk, level, layer, data)

    stream = start(scripted((0,) * 3, [Refinement(1, 1, 0, LATER)]), Damaged())
    for layer in (2, 0, 2):
        with pytest.raises(FormatError, match="level high, layer 2: bad bytes"):
            stream.wait_layer(layer)
    assert threads_end()
