"""Refinements are planned greedily, and in little time however many chunks there are."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.streaming import layered
from hf_cachegen.streaming.layered import CAUTION, LayeredPolicy
from hf_cachegen.streaming.policy import TEXT, StreamState

LOSSES = (0.2, 0.05, 0.01, 0.001, 0.0)
N_LEVELS = len(LOSSES)
INSTANT_S = 1e-9


@st.composite
def streams_with_bases(draw: st.DrawFn) -> StreamState:
    """Every chunk is there at some level; finer levels are larger and take longer to decode.

    Few different sizes, so that steps are often worth the same.
    """
    size_steps = st.lists(st.integers(1, 3), min_size=N_LEVELS, max_size=N_LEVELS)
    decode_steps = st.lists(st.integers(0, 3), min_size=N_LEVELS, max_size=N_LEVELS)
    n_chunks = draw(st.integers(1, 8))
    chunks = st.integers(TEXT, N_LEVELS - 1)

    def growing(steps: Sequence[int], unit: float) -> list[float]:
        return [unit * sum(steps[: level + 1]) for level in range(N_LEVELS)]

    return StreamState(
        sizes_bytes=[[int(n) for n in growing(draw(size_steps), 10**6)] for _ in range(n_chunks)],
        chosen=draw(st.lists(chunks, min_size=n_chunks, max_size=n_chunks)),
        elapsed_s=draw(st.floats(0, 2)),
        throughputs_bytes_per_s=draw(st.lists(st.floats(1e5, 1e9), min_size=1, max_size=6)),
        decode_s=[growing(draw(decode_steps), 0.01) for _ in range(n_chunks)],
        compute_free_s=draw(st.floats(0, 2)),
    )


def tried_one_by_one(
    state: StreamState, target_s: float, nested: int, byte_s: float
) -> tuple[int, int] | None:
    """The refinement of the greedy plan, for which every step is tried again after each."""

    def bytes_between(chunk: int, held: int, level: int) -> int:
        sizes = state.sizes_bytes[chunk]
        return sizes[level] - (sizes[held] if level < nested else 0)

    def costs(chunk: int, level: int) -> tuple[float, float, float]:
        held = state.chosen[chunk]
        if level == held:
            return 0.0, 0.0, 0.0
        gain = state.sizes_bytes[chunk][0] * (LOSSES[held] - LOSSES[level])
        return gain, bytes_between(chunk, held, level) * byte_s, state.decode_s[chunk][level]

    def is_on_the_way(chunk: int, level: int) -> bool:
        """Whether there is time for a level beside all that is planned."""
        more = (
            bytes_between(chunk, level, plan[chunk])
            + bytes_between(chunk, state.chosen[chunk], level)
            - bytes_between(chunk, state.chosen[chunk], plan[chunk])
        )
        return 0 < state.decode_s[chunk][level] <= compute_s and (
            more == 0 or more * byte_s <= link_s
        )

    def worth(gain: float, link_s: float, compute_s: float) -> float:
        return gain / max(link_s, compute_s, INSTANT_S)

    link_s, compute_s = target_s - state.elapsed_s, target_s - state.compute_free_s
    plan = {chunk: held for chunk, held in enumerate(state.chosen) if held != TEXT}
    while True:
        steps = []
        for chunk in reversed(plan):
            now = costs(chunk, plan[chunk])
            for level in range(plan[chunk] + 1, N_LEVELS):
                step = tuple(a - b for a, b in zip(costs(chunk, level), now, strict=True))
                if step[1] <= link_s and step[2] <= compute_s:
                    steps.append((chunk, level, step))
        if not steps:
            break
        chunk, level, step = max(steps, key=lambda found: worth(*found[2]))
        plan[chunk] = level
        link_s, compute_s = link_s - step[1], compute_s - step[2]
    refined = [
        (chunk, plan[chunk]) for chunk in reversed(plan) if plan[chunk] > state.chosen[chunk]
    ]
    # Rounded as the policy rounds.
    link_s = target_s - state.elapsed_s - sum(costs(*found)[1] for found in refined)
    compute_s = target_s - state.compute_free_s - sum(costs(*found)[2] for found in refined)
    on_the_way = [
        (chunk, level)
        for chunk, final in refined
        for level in range(state.chosen[chunk] + 1, final)
        if is_on_the_way(chunk, level)
    ]
    return max(refined + on_the_way, key=lambda found: worth(*costs(*found)), default=None)


@given(streams_with_bases(), st.floats(0.1, 5), st.integers(0, N_LEVELS))
def test_the_plan_is_that_of_trying_every_step(state: StreamState, target_s: float, nested: int):
    found = LayeredPolicy(target_s, LOSSES, nested).refine(state)
    estimate = state.estimate()
    assert estimate is not None
    careful = math.exp(-(estimate.log_mean - CAUTION * estimate.log_spread))
    expected = tried_one_by_one(state, target_s, nested, careful) or tried_one_by_one(
        state, target_s, nested, math.exp(-estimate.log_mean)
    )
    assert (found and (found.chunk, found.level)) == expected


def test_of_equal_worth_the_last_chunks_are_refined():
    """Where two of four can be, at 1 MB/s for a second."""
    state = StreamState(
        sizes_bytes=[[10**5, 5 * 10**5]] * 4,
        chosen=[0] * 4,
        elapsed_s=0.0,
        throughputs_bytes_per_s=[10**6] * 8,
    )
    refinement = LayeredPolicy(1.0, (0.2, 0.05), nested=2).refine(state)
    assert refinement is not None
    assert (refinement.chunk, refinement.level) == (3, 1)


def instructions(policy: LayeredPolicy, state: StreamState) -> int:
    """How many bytecode instructions planning takes: as good as its time, and always the same."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != layered.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert policy.refine(state) is not None
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("share", [0.05, 0.5, 3.0], ids=["a few fit", "half fits", "all fits"])
@pytest.mark.parametrize("decode_s", [0.0, 0.5], ids=["link", "processor"])
def test_planning_takes_work_in_proportion_to_the_chunks(share: float, decode_s: float):
    """Where ``share`` of the finest level can be transferred, for 20 times the chunks."""

    def work(n_chunks: int) -> int:
        sizes = [
            [10**5 * 2**level + 7 * chunk for level in range(N_LEVELS)] for chunk in range(n_chunks)
        ]
        state = StreamState(
            sizes_bytes=sizes,
            chosen=[0] * n_chunks,
            elapsed_s=0.0,
            throughputs_bytes_per_s=[share * sum(chunk[-1] for chunk in sizes)] * 8,
            decode_s=[[decode_s * (1 + level) / n_chunks for level in range(N_LEVELS)]] * n_chunks,
        )
        return instructions(LayeredPolicy(1.0, LOSSES, nested=N_LEVELS), state)

    assert work(400) < 2 * 20 * work(20)


@pytest.mark.parametrize(
    ("decode_s", "rate", "level"),
    [
        ((0.1, 0.2, 0.4, 0.55, 2.0), 1e9, 3),  # there is no time for the bases besides
        ((0.1, 0.2, 0.4, 0.5, 0.6), 1e9, 4),
        ((0.1, 0.2, 0.3, 0.3, 0.3), 1e9, 0),  # there is time for both
        ((0.1, 0.2, 0.4, 0.55, 2.0), 7e6, 0),  # but the link may be too slow for it
        ((0.0,) * N_LEVELS, 1e9, 0),
    ],
)
def test_a_base_is_finer_where_the_processor_decodes_only_once(
    decode_s: Sequence[float], rate: float, level: int
) -> None:
    state = StreamState(
        sizes_bytes=[[10**6 * (level + 1) for level in range(N_LEVELS)]] * 5,
        chosen=[],
        elapsed_s=0.0,
        throughputs_bytes_per_s=[rate] * 4,
        decode_s=[decode_s] * 5,
    )
    assert LayeredPolicy(3.0, LOSSES, 4).choose(state) == level
