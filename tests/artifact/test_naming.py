"""Chunk names: the same for the same prefix, and for nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.artifact import Identity, LevelRecord, chunk_names
from hf_cachegen.artifact.manifest import chunk_bounds, skips_at_most
from hf_cachegen.artifact.naming import plan_chunks

Levels = tuple[LevelRecord, ...]
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def names(identity: Identity, levels: Levels, tokens: list[int], chunk_tokens: int) -> list[str]:
    skipped = [()] * len(chunk_bounds(len(tokens), chunk_tokens))
    return chunk_names(identity, levels, chunk_tokens, np.array(tokens, np.int32), skipped)


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_names_are_shared_exactly_up_to_the_common_prefix(
    identity: Identity, levels: Levels, one: list[int], two: list[int], chunk_tokens: int
) -> None:
    ones = names(identity, levels, one, chunk_tokens)
    twos = names(identity, levels, two, chunk_tokens)
    ends = [end for _, end in chunk_bounds(len(one), chunk_tokens)]
    same_ends = {end for _, end in chunk_bounds(len(two), chunk_tokens)}
    for end, name in zip(ends, ones, strict=True):
        assert (name in twos) == (end in same_ends and one[:end] == two[:end])
    assert len(set(ones)) == len(ones)


def test_everything_that_decides_the_bytes_is_in_the_name(
    identity: Identity, levels: Levels
) -> None:
    tokens = np.arange(8, dtype=np.int32)
    other_identity = identity.model_copy(update={"weights": "ff" * 16})
    other_levels = (levels[0].model_copy(update={"params": {"bits": 4}}), levels[1])
    found = [
        chunk_names(identity, levels, 8, tokens, [()]),
        chunk_names(other_identity, levels, 8, tokens, [()]),
        chunk_names(identity, other_levels, 8, tokens, [()]),
        chunk_names(identity, levels[::-1], 8, tokens, [()]),
        chunk_names(identity, levels, 9, tokens, [()]),
        chunk_names(identity, levels, 8, tokens, [((1, 3),)]),
        chunk_names(identity, levels, 8, tokens, [((1, 3), (2, 3))]),
    ]
    assert len({name for (name,) in found}) == len(found)


@given(st.integers(1, 60), st.integers(1, 9))
def test_plan_holds_what_the_layers_need(
    identity: Identity, levels: Levels, n_tokens: int, chunk_tokens: int
) -> None:
    plans = plan_chunks(identity, levels, chunk_tokens, np.zeros(n_tokens, np.int32))
    held = [
        token
        for plan in plans
        for token in range(plan.start + dict(plan.skipped).get(1, 0), plan.end)
    ]
    assert held == list(range(max(0, n_tokens - 5), n_tokens))
    assert all(layer == 1 for plan in plans for layer, _ in plan.skipped)
    assert [(plan.start, plan.end) for plan in plans] == list(chunk_bounds(n_tokens, chunk_tokens))


def test_skips_at_most() -> None:
    assert skips_at_most((), ((1, 3),))
    assert skips_at_most(((1, 3),), ((1, 3), (2, 1)))
    assert not skips_at_most(((1, 4),), ((1, 3),))
    assert not skips_at_most(((0, 1),), ((1, 3),))


@pytest.mark.parametrize("chunk_tokens", [0, -1, (1 << 20) + 1])
def test_chunk_length_outside_the_format(
    identity: Identity, levels: Levels, chunk_tokens: int
) -> None:
    with pytest.raises(ValueError, match="tokens per chunk"):
        plan_chunks(identity, levels, chunk_tokens, np.zeros(4, np.int32))
