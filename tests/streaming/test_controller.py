"""What each policy chooses, from numbers alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.streaming.controller import (
    TEXT,
    FixedLevel,
    LayeredPolicy,
    PaperPolicy,
    Policy,
    RobustPolicy,
    Soonest,
    StreamState,
    TextOnly,
    policy_for,
)

N_LEVELS = 4
LOSSES = (0.2, 0.05, 0.01, 0.001)
SIZES = [(10, 20, 40, 80)] * 4
"""A context of four chunks, in megabytes."""


def state(**known: object) -> StreamState:
    """The context before anything was chosen, on a link that is not measured yet."""
    values: dict[str, object] = {
        "sizes_bytes": [tuple(10**6 * size for size in chunk) for chunk in SIZES],
        "chosen": (),
        "elapsed_s": 0.0,
        **known,
    }
    return StreamState(**values)  # type: ignore[arg-type]


@st.composite
def states(draw: st.DrawFn, *, text: bool = False) -> StreamState:
    """Streams under way, levels of growing size, at least one chunk to go."""
    steps = st.lists(st.integers(1, 10**7), min_size=N_LEVELS, max_size=N_LEVELS)
    chunks = draw(st.lists(steps, min_size=1, max_size=6))
    sizes = [tuple(sum(chunk[: level + 1]) for level in range(N_LEVELS)) for chunk in chunks]
    seconds = st.floats(0, 0.5)
    n_chosen = draw(st.integers(0, len(chunks) - 1))
    levels = st.integers(0, N_LEVELS - 1)
    return StreamState(
        sizes_bytes=sizes,
        chosen=draw(st.lists(levels, min_size=n_chosen, max_size=n_chosen)),
        elapsed_s=draw(st.floats(0, 2)),
        throughputs_bytes_per_s=draw(st.lists(st.floats(1e4, 1e9), max_size=6)),
        decode_s=[(draw(seconds),) * N_LEVELS for _ in chunks],
        recompute_s=[draw(seconds) for _ in chunks] if text else (),
        compute_free_s=draw(st.floats(0, 2)),
        tail_s=draw(st.floats(0, 0.2)),
    )


def adaptive(target_s: float) -> list[Policy]:
    return [
        PaperPolicy(target_s, first_level=1),
        RobustPolicy(target_s, LOSSES, first_level=1),
    ]


def quality(choice: int) -> float:
    """Choices from worst to best; text is lossless."""
    return math.inf if choice == TEXT else choice


def test_fixed_and_text():
    assert FixedLevel(2).choose(state()) == 2
    assert TextOnly().choose(state()) == TEXT
    assert FixedLevel(2).refine(state(chosen=(2, 2, 2, 2))) is None


def test_paper_before_a_throughput_is_known():
    assert PaperPolicy(1.0, first_level=2).choose(state()) == 2


@pytest.mark.parametrize(
    ("megabytes_per_s", "level"), [(1000, 3), (161, 2), (159, 1), (41, 0), (39, 0)]
)
def test_paper_at_a_throughput(megabytes_per_s: float, level: int):
    measured = state(throughputs_bytes_per_s=[1.0, megabytes_per_s * 1e6])
    assert PaperPolicy(1.0, first_level=2).choose(measured) == level


def test_paper_takes_text_when_all_of_it_fits():
    policy = PaperPolicy(1.0, first_level=2)
    assert policy.choose(state(recompute_s=[0.25] * 4)) == TEXT
    assert policy.choose(state(recompute_s=[0.26] * 4)) == 2
    assert policy.choose(state(recompute_s=[0.25] * 4, compute_free_s=0.1)) == 2
    assert policy.choose(state(recompute_s=[0.25] * 4, tail_s=0.1)) == 2


def test_robust_recomputes_instead_of_an_exact_level_once_the_link_is_dead():
    """The only level is exact. Of a link that is alive it is as good as text."""
    policy = RobustPolicy(1.0, (0.0,), first_level=0)
    sizes = [(10**7,)] * 4
    known = state(sizes_bytes=sizes, recompute_s=[0.5] * 4, decode_s=[(0.0,)] * 4)
    alive = dataclasses.replace(known, throughputs_bytes_per_s=[1e9] * 8)
    assert policy.choose(alive) == 0
    dead = dataclasses.replace(known, throughputs_bytes_per_s=[1.0] * 8, elapsed_s=0.5)
    assert policy.choose(dead) == TEXT


def test_soonest_recomputes_what_is_there_no_later_that_way():
    """40 MB a chunk at level 2, and 100 MB/s: four chunks take 1.6 s, three 1.2 s."""
    known = state(throughputs_bytes_per_s=[1e8], recompute_s=[0.6] * 4, decode_s=[(0.0,) * 4] * 4)
    assert Soonest(2).choose(known) == TEXT
    # One more would be there after 1.19 s, and the three chunks that are left take 1.2 s.
    again = dataclasses.replace(known, chosen=(TEXT,), compute_free_s=0.59)
    assert Soonest(2).choose(again) == TEXT
    assert Soonest(2).choose(dataclasses.replace(again, compute_free_s=0.61)) == 2
    assert Soonest(0).choose(again) == 0
    # Nothing is known of the link, or chunks cannot be recomputed.
    assert Soonest(2).choose(dataclasses.replace(known, throughputs_bytes_per_s=())) == 2
    assert Soonest(2).choose(dataclasses.replace(known, recompute_s=())) == 2


@given(states(), st.floats(0.1, 5))
def test_paper_takes_the_finest_level_that_fits(known: StreamState, target_s: float):
    level = PaperPolicy(target_s, first_level=1).choose(known)
    if not known.throughputs_bytes_per_s:
        assert level == 1
        return
    remaining_s = max(target_s - known.tail_s - known.elapsed_s, 0)
    budget = remaining_s * known.throughputs_bytes_per_s[-1]
    fits = [sum(known.remaining_bytes(one)) <= budget for one in range(N_LEVELS)]
    assert level == (max(i for i, fit in enumerate(fits) if fit) if any(fits) else 0)


@given(states(), st.floats(0.1, 5))
def test_robust_risks_no_more_than_its_bound(known: StreamState, target_s: float):
    policy = RobustPolicy(target_s, LOSSES, first_level=1)
    level = policy.choose(known)
    estimate = known.estimate()
    if estimate is None or level == known.smallest_level():
        return
    budget_s = target_s - known.tail_s - known.elapsed_s
    planned = known.remaining_bytes(level)
    risky = [planned[0], *known.smallest_remaining_bytes()[1:]]
    assert estimate.median_s(sum(planned)) <= budget_s
    assert estimate.late_probability(risky, budget_s) <= policy.miss_bound


@given(states(), st.floats(0.1, 5), st.floats(1, 10))
def test_more_throughput_is_never_worse(known: StreamState, target_s: float, factor: float):
    rates = [rate * factor for rate in known.throughputs_bytes_per_s]
    faster = dataclasses.replace(known, throughputs_bytes_per_s=rates)
    for policy in adaptive(target_s):
        assert policy.choose(faster) >= policy.choose(known)


@given(states(text=True), st.floats(0.1, 5), st.floats(0, 5))
def test_more_time_is_never_worse(known: StreamState, target_s: float, more_s: float):
    for policy, later in zip(adaptive(target_s), adaptive(target_s + more_s), strict=True):
        if known.text_saves_time(target_s - known.tail_s):
            continue  # hopeless: all that counts is to be soon, which text may be
        assert quality(later.choose(known)) >= quality(policy.choose(known))


@given(states(text=True), st.floats(0.1, 5))
def test_equal_states_give_equal_choices(known: StreamState, target_s: float):
    again = dataclasses.replace(known, chosen=list(known.chosen))
    for policy in [*adaptive(target_s), LayeredPolicy(target_s, LOSSES, nested=N_LEVELS)]:
        assert policy.choose(known) == policy.choose(again)
        assert policy.refine(known) == policy.refine(again)


def test_robust_is_more_careful_on_an_erratic_link():
    policy = RobustPolicy(1.0, LOSSES, first_level=1)
    steady, erratic = [200e6] * 4, [50e6, 800e6, 50e6, 800e6]
    assert policy.choose(state(throughputs_bytes_per_s=steady)) == 2
    assert policy.choose(state(throughputs_bytes_per_s=erratic)) < 2


def test_robust_recomputes_while_the_processor_has_time():
    policy = RobustPolicy(1.0, LOSSES, first_level=1)
    assert policy.choose(state(recompute_s=[0.4] * 4)) == TEXT
    assert policy.choose(state(chosen=(TEXT,), recompute_s=[0.4] * 4, compute_free_s=0.4)) == TEXT
    assert policy.choose(state(chosen=(TEXT,), recompute_s=[0.4] * 4, compute_free_s=0.7)) == 1


def test_robust_leaves_the_processor_time_to_decode():
    policy = RobustPolicy(1.0, LOSSES, first_level=1)
    decode_s = [(0.15,) * 4] * 4
    assert policy.choose(state(recompute_s=[0.5] * 4, decode_s=decode_s)) == TEXT
    assert policy.choose(state(recompute_s=[0.6] * 4, decode_s=decode_s)) == 1


def test_robust_takes_no_level_that_decodes_too_slowly():
    policy = RobustPolicy(1.0, LOSSES, first_level=1)
    fast = state(throughputs_bytes_per_s=[10e9], decode_s=[(0.1, 0.2, 0.3, 0.3)] * 4)
    assert policy.choose(fast) == 1
    assert policy.choose(dataclasses.replace(fast, compute_free_s=0.3)) == 0


def test_robust_needs_no_text_where_an_exact_level_fits():
    policy = RobustPolicy(1.0, (0.2, 0.05, 0.01, 0.0), first_level=1)
    fast = state(throughputs_bytes_per_s=[10e9], recompute_s=[0.1] * 4)
    assert policy.choose(fast) == 3


def test_a_hopeless_link_is_left_for_text():
    stuck = state(throughputs_bytes_per_s=[1e3], recompute_s=[2.0] * 4)
    assert RobustPolicy(1.0, LOSSES, first_level=1).choose(stuck) == TEXT
    assert LayeredPolicy(1.0, LOSSES).choose(stuck) == TEXT
    assert (
        RobustPolicy(1.0, LOSSES, first_level=1).choose(dataclasses.replace(stuck, recompute_s=()))
        == 0
    )


def test_layered_fetches_every_base_first():
    policy = LayeredPolicy(1.0, LOSSES, nested=4)
    assert policy.choose(state()) == 0
    assert policy.choose(state(throughputs_bytes_per_s=[10e9], recompute_s=[0.2] * 4)) == 0


def test_layered_recomputes_when_bases_would_be_late():
    policy = LayeredPolicy(1.0, LOSSES, nested=4)
    slow = state(throughputs_bytes_per_s=[42e6], recompute_s=[0.5] * 4)
    assert policy.choose(slow) == TEXT
    assert policy.choose(dataclasses.replace(slow, compute_free_s=0.6)) == 0


def test_nested_refinements_cost_the_difference():
    here = state(chosen=(0, 0, 0, 0), elapsed_s=0.2, throughputs_bytes_per_s=[100e6] * 4)
    nested = LayeredPolicy(1.0, LOSSES, nested=4).refine(here)
    replaced = LayeredPolicy(1.0, LOSSES, nested=0).refine(here)
    assert nested is not None
    assert replaced is not None
    assert (nested.chunk, nested.level, nested.size_bytes, nested.stop_s) == (3, 1, 10 * 10**6, 1.0)
    assert replaced.size_bytes == 20 * 10**6


@given(states(), st.floats(0.1, 5), st.integers(0, N_LEVELS))
def test_refinements_improve_and_are_expected_in_time(
    known: StreamState, target_s: float, nested: int
):
    levels = [*known.chosen, *[0] * (len(known.sizes_bytes) - len(known.chosen))]
    known = dataclasses.replace(known, chosen=levels)
    found = LayeredPolicy(target_s, LOSSES, nested).refine(known)
    if found is None:
        return
    estimate = known.estimate()
    assert estimate is not None
    assert found.level > levels[found.chunk]
    assert found.stop_s == target_s - known.tail_s
    assert known.elapsed_s + estimate.median_s(found.size_bytes) <= found.stop_s
    full, held = (known.sizes_bytes[found.chunk][i] for i in (found.level, levels[found.chunk]))
    assert found.size_bytes == (full - held if found.level < nested else full)


def test_nothing_is_refined_past_the_deadline_or_without_a_measurement():
    policy = LayeredPolicy(1.0, LOSSES, nested=4)
    done = state(chosen=(0, 0, 0, 0), elapsed_s=1.1, throughputs_bytes_per_s=[1e9])
    assert policy.refine(done) is None
    assert policy.refine(state(chosen=(0, 0, 0, 0))) is None
    finest = state(chosen=(3, 3, 3, 3), throughputs_bytes_per_s=[1e12])
    assert policy.refine(finest) is None
    backlog = state(chosen=(0, 0, 0, 0), compute_free_s=1.1, throughputs_bytes_per_s=[1e9])
    assert policy.refine(backlog) is None


def test_a_refinement_that_is_expected_too_late_is_not_begun():
    policy = LayeredPolicy(1.0, LOSSES, nested=4)
    known = {"chosen": (0,) * 4, "throughputs_bytes_per_s": [25e6]}
    # The cheapest takes 0.4 s.
    assert policy.refine(state(elapsed_s=0.59, **known)) is not None
    assert policy.refine(state(elapsed_s=0.61, **known)) is None


def test_nothing_is_refined_to_what_loses_as_much():
    policy = LayeredPolicy(1.0, (0.2, 0.05, 0.0, 0.0))
    exact = state(chosen=(2, 2, 2, 2), throughputs_bytes_per_s=[1e12])
    assert policy.refine(exact) is None


@pytest.mark.parametrize(("rate", "level"), [(50e6, 1), (250e6, 2), (1e9, 3)])
def test_chunks_are_refined_in_one_go_as_far_as_all_of_them_can_be(rate: float, level: int):
    policy = LayeredPolicy(1.0, LOSSES, nested=4)
    known = state(chosen=(0,) * 4, throughputs_bytes_per_s=[rate] * 8)
    levels = [0] * 4
    while found := policy.refine(dataclasses.replace(known, chosen=levels)):
        took_s = found.size_bytes / rate
        known = dataclasses.replace(known, elapsed_s=known.elapsed_s + took_s)
        levels[found.chunk] = found.level
        if sum(held > 0 for held in levels) <= 4 and 0 in levels:
            assert found.level == level
    assert min(levels) == level


def test_processor_bounds_what_is_refined():
    """Each refinement decodes a chunk for 0.1 s, whatever its level."""
    policy = LayeredPolicy(1.0, LOSSES, nested=4)
    known = state(
        chosen=(0,) * 4, throughputs_bytes_per_s=[10e9], decode_s=[(0.1,) * 4] * 4, tail_s=0.2
    )
    for free_s, refines in [(0.65, True), (0.75, False)]:
        assert bool(policy.refine(dataclasses.replace(known, compute_free_s=free_s))) == refines
    # What comes last is decoded within the tail.
    late = dataclasses.replace(known, compute_free_s=0.75, tail_decode_s=0.1)
    assert policy.refine(late) is not None


def test_layered_recomputes_what_costs_no_decoding():
    """From the start, before the link is known: the processor has nothing else to do."""
    policy = LayeredPolicy(1.0, LOSSES)
    known = state(decode_s=[(0.05, 0.1, 0.1, 0.1)] * 4, recompute_s=[0.4] * 4)
    assert policy.choose(known) == TEXT
    # One more would leave 0.2 s for two chunks, which is enough; a third has no time at all.
    again = dataclasses.replace(known, chosen=(TEXT,), compute_free_s=0.4)
    assert policy.choose(again) == TEXT
    assert policy.choose(dataclasses.replace(again, compute_free_s=0.41)) == 0
    # What follows a lossy chunk is no better than that.
    behind = dataclasses.replace(known, chosen=(0,), throughputs_bytes_per_s=[1e9])
    assert policy.choose(behind) == 0
    # Nothing is known of the time to decode, or it would not suffice.
    assert policy.choose(dataclasses.replace(known, decode_s=[(0.0,) * 4] * 4)) == 0
    assert policy.choose(dataclasses.replace(known, decode_s=[(0.05, 0.1, 0.1, 0.3)] * 4)) == 0


def test_what_nests_is_decoded_as_a_base_and_once_more():
    policy = LayeredPolicy(1.0, LOSSES, nested=4)
    known = state(decode_s=[(0.05, 0.1, 0.1, 0.1)] * 4, recompute_s=[0.4] * 4)
    assert policy.choose(known) == TEXT  # 0.4 s, and three times 0.15 s
    assert policy.choose(dataclasses.replace(known, compute_free_s=0.16)) == 0


def test_on_the_way_to_the_finest_level_every_chunk_is_refined_a_little():
    """Should the link fail then, all of them are better than their base."""
    policy = LayeredPolicy(1.0, LOSSES, nested=4)
    known = state(
        chosen=(0,) * 4, throughputs_bytes_per_s=[1e9] * 8, decode_s=[(0.02, 0.02, 0.02, 0.02)] * 4
    )
    taken = []
    while refinement := policy.refine(known):
        chosen = list(known.chosen)
        chosen[refinement.chunk] = refinement.level
        taken.append((refinement.chunk, refinement.level))
        elapsed_s = known.elapsed_s + refinement.size_bytes / 1e9
        known = dataclasses.replace(
            known,
            chosen=chosen,
            elapsed_s=elapsed_s,
            compute_free_s=max(known.compute_free_s, elapsed_s) + 0.02,
        )
    assert taken[:4] == [(chunk, 1) for chunk in (3, 2, 1, 0)]
    assert sorted(taken[-4:]) == [(chunk, 3) for chunk in range(4)]


def test_refining_is_worth_more_for_more_tokens():
    known = {"elapsed_s": 0.2, "throughputs_bytes_per_s": [10e9], "decode_s": [(0.1,) * 4] * 4}
    sizes = [[10**6 * n for n in level] for level in ((20, 40, 80, 160), *[(10, 20, 40, 80)] * 3)]
    found = LayeredPolicy(1.0, LOSSES, nested=4).refine(
        state(chosen=(0,) * 4, **{**known, "sizes_bytes": sizes})
    )
    assert found is not None
    assert found.chunk == 0


def test_policies_by_name():
    names = ["coarse", "medium", "fine", "exact"]
    known = {"levels": names, "losses": (0.2, 0.05, 0.01, 0.0)}
    assert policy_for("fixed:fine", **known) == FixedLevel(2)
    assert policy_for("soonest:finest", **known) == Soonest(3)
    assert policy_for("fixed:coarsest", **known) == FixedLevel(0)
    assert policy_for("text", **known) == TextOnly()
    assert policy_for("paper", target_s=1.0, **known) == PaperPolicy(1.0, first_level=1)
    assert isinstance(policy_for("robust", target_s=1.0, **known), RobustPolicy)
    layered = policy_for("layered", target_s=1.0, nested=3, **known)
    assert isinstance(layered, LayeredPolicy)
    assert layered.nested == 3


@pytest.mark.parametrize(
    ("name", "target_s", "message"),
    [
        ("fixed:best", 1.0, "unknown level 'best'; expected one of coarse, fine"),
        ("fixed", 1.0, "'fixed' lacks its level; expected fixed:<level>"),
        ("", 1.0, "unknown policy ''; expected fixed:<level>, soonest:<level>, text, paper"),
        ("greedy", 1.0, "unknown policy 'greedy'"),
        ("paper", None, "needs a target"),
        ("layered", 0.0, "needs a target"),
    ],
)
def test_a_wrong_name_or_target(name: str, target_s: float | None, message: str):
    with pytest.raises(ValueError, match=message):
        policy_for(name, levels=["coarse", "fine"], losses=(0.1, 0.0), target_s=target_s)


def test_robust_does_not_compress_where_that_only_costs_time():
    """Two exact levels, of which the larger needs no decoding."""
    policy = RobustPolicy(9.0, (0.2, 0.05, 0.0, 0.0), first_level=1)
    decode_s = [(0.3, 0.3, 0.3, 0.0)] * 4
    fast = state(throughputs_bytes_per_s=[10e9] * 4, decode_s=decode_s)
    slow = dataclasses.replace(fast, throughputs_bytes_per_s=[100e6] * 4)
    assert policy.choose(fast) == 3
    assert policy.choose(slow) == 2


def test_robust_takes_the_soonest_level_where_none_is_in_time():
    policy = RobustPolicy(0.1, LOSSES, first_level=1)
    decode_s = [(0.9, 0.5, 0.3, 0.1)] * 4
    assert policy.choose(state(throughputs_bytes_per_s=[10e9] * 4, decode_s=decode_s)) == 3
    assert policy.choose(state(throughputs_bytes_per_s=[1e6] * 4, decode_s=decode_s)) == 0


def test_chunks_that_cannot_be_recomputed_are_fetched():
    never = [math.inf] * 4
    for policy in (*adaptive(9.0), LayeredPolicy(9.0, LOSSES)):
        for rate in (1e3, 1e9):
            known = state(recompute_s=never, throughputs_bytes_per_s=[rate])
            assert policy.choose(known) != TEXT
            held = dataclasses.replace(known, chosen=(0,) * 4)
            refinement = policy.refine(held)
            assert refinement is None or refinement.level != TEXT


def test_only_fixed_choices_need_no_measurements():
    assert not FixedLevel(0).adapts
    assert not TextOnly().adapts
    assert all(policy.adapts for policy in (*adaptive(1.0), LayeredPolicy(1.0, LOSSES)))


def test_only_layered_makes_anyone_wait_for_refinements():
    known = state(tail_s=0.2)
    assert LayeredPolicy(1.0, LOSSES).refines_until_s(known) == 0.8
    assert all(policy.refines_until_s(known) == 0 for policy in (*adaptive(1.0), TextOnly()))


def test_text_in_front_shortens_a_stream_that_will_be_late():
    """10 MB/s for 40 MB: one chunk less is a second less, and the processor is idle."""
    slow = state(throughputs_bytes_per_s=[10e6] * 4, recompute_s=[1.5, 2.0, 2.5, 3.0])
    late = [RobustPolicy(0.1, LOSSES, first_level=1), LayeredPolicy(0.1, LOSSES)]
    for policy in late:
        assert policy.choose(slow) == TEXT
        # Then the link has three chunks to bring in three seconds, and recomputing one more of them
        # would take until 3.5.
        busy = dataclasses.replace(slow, chosen=(TEXT,), compute_free_s=1.5)
        assert policy.choose(busy) == 0
        # Nothing is decoded for nothing.
        busy = dataclasses.replace(slow, decode_s=[(1.0,) * 4] * 4)
        assert policy.choose(busy) == 0


NESTED = (0, 0, 5_000_000, 45_000_000)
"""What is left of a chunk at each level when three of its levels nest and half of it has come."""


@pytest.mark.parametrize("policy", [*adaptive(10.0), LayeredPolicy(10.0, LOSSES, nested=3)])
def test_late_chunk_goes_on_as_long_as_the_target_is_not_at_stake(policy: Policy):
    """It is a half slower than the others: there is time for it, and for the smallest of them."""
    known = state(chosen=(2,), throughputs_bytes_per_s=[40e6] * 8)
    assert policy.reconsider(known.while_arriving(NESTED, 20e6), 2) is None


@pytest.mark.parametrize("policy", [*adaptive(10.0), LayeredPolicy(10.0, LOSSES, nested=3)])
def test_late_chunk_makes_way_for_what_is_in_time(policy: Policy):
    """The link has become so slow that no level is in time, and two levels have come already."""
    known = state(chosen=(2,), elapsed_s=8.0, throughputs_bytes_per_s=[40e6] * 8)
    late = known.while_arriving(NESTED, 1e5)
    assert policy.reconsider(late, 2) == 1
    if not isinstance(policy, PaperPolicy):  # its rule knows text only if all of it is in time
        recompute_s = (1.0,) * 4
        assert policy.reconsider(dataclasses.replace(late, recompute_s=recompute_s), 2) == TEXT


@given(states(text=True), st.floats(0.1, 5), st.integers(0, N_LEVELS - 1), st.floats(1e4, 1e9))
def test_only_less_is_fetched_instead(
    known: StreamState, target_s: float, level: int, bytes_per_s: float
):
    late = known.while_arriving(known.sizes_bytes[known.next_chunk], bytes_per_s)
    policies = [*adaptive(target_s), LayeredPolicy(target_s, LOSSES), Soonest(level)]
    for policy in policies:
        instead = policy.reconsider(late, level)
        assert instead is None or instead < level
        tried = policy.instead_of_text(late)
        assert tried != TEXT


def test_link_is_tried_while_the_processor_is_busy():
    """The last chunk waits for its recomputation, and the link is thought to be too slow for it."""
    waiting = state(
        sizes_bytes=[(10**7,) * 4] * 2,
        chosen=(TEXT,),
        recompute_s=(3.0, 3.0),
        throughputs_bytes_per_s=[1e5] * 8,
        elapsed_s=1.0,
        compute_free_s=3.0,
    )
    idle = dataclasses.replace(waiting, compute_free_s=1.0)
    sooner = dataclasses.replace(idle, throughputs_bytes_per_s=[1e8] * 8)
    for policy, level in [(Soonest(2), 2), (RobustPolicy(2.0, LOSSES, first_level=1), 0)]:
        assert policy.instead_of_text(waiting) == level
        assert policy.instead_of_text(idle) is None
        assert policy.instead_of_text(sooner) is not None
    generous = RobustPolicy(20.0, LOSSES, first_level=1)
    assert generous.instead_of_text(waiting) is None, "text is exact, and in time"
    assert FixedLevel(2).instead_of_text(waiting) is None
