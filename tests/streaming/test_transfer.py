"""Segments of a level and of what it refines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_cachegen.artifact import Artifact, LevelRecord
from hf_cachegen.errors import FormatError, StoreError
from hf_cachegen.streaming.meter import Meter
from hf_cachegen.streaming.transfer import SegmentReader

LAYERS = [0, 1, 2, 3]
EMPTY = 2
"""The layer whose values are in the segment of the one before it."""

CHAINS = {0: (0,), 1: (0, 1), 2: (0, 1, 2), 3: (3,), 4: (0, 4)}


Segment = Callable[[int, int, int], bytes]


def part(segment: Segment, chunk: int, level: int, layer: int) -> bytes:
    return b"" if layer == EMPTY else segment(chunk, level, layer)


@pytest.fixture(scope="module")
def nested(make_up: Any, segment: Segment) -> Path:
    """Two chunks: a base, two refinements in a row, an exact level, another refinement."""
    refines = {"base": None, "fine": "base", "finer": "fine", "exact": None, "beside": "base"}
    levels = [
        LevelRecord(name=name, codec="raw", exact=name == "exact", refines=refined)
        for name, refined in refines.items()
    ]
    return make_up(levels, 2, partial(part, segment))


@pytest.fixture
def reader(nested: Path, slow_store: Any) -> Callable[..., tuple[Any, SegmentReader]]:
    """``reader(keep=..., **tricks)``: the store and a reader on it."""

    def reader(*, keep: bool = False, **tricks: Any) -> tuple[Any, SegmentReader]:
        store = slow_store(nested, **tricks)
        return store, SegmentReader(Artifact.open(store), keep=keep)

    return reader


def fetch(
    segments: SegmentReader, chunk: int, level: int, layers: list[int] = LAYERS
) -> tuple[list[tuple[int, bytes]], int]:
    """What a read yields, and how many bytes were fetched for it."""
    meter = Meter()
    return list(segments.read(chunk, level, layers, meter)), meter.size_bytes


def expected(
    segment: Segment, chunk: int, level: int, layers: list[int] = LAYERS
) -> list[tuple[int, bytes]]:
    chain = CHAINS[level]
    return [(j, b"".join(part(segment, chunk, i, j) for i in chain)) for j in layers]


def size_of(segment: Segment, chunk: int, *levels: int) -> int:
    return sum(len(part(segment, chunk, level, layer)) for level in levels for layer in LAYERS)


@pytest.mark.parametrize("level", CHAINS)
@pytest.mark.parametrize("layers", [LAYERS, [1, 2], [0, 3]])
@pytest.mark.parametrize("keep", [False, True])
def test_a_level_comes_after_all_that_it_refines(
    reader: Any, segment: Segment, level: int, layers: list[int], keep: bool
) -> None:
    _, segments = reader(keep=keep)
    for chunk in (1, 0):
        found, size = fetch(segments, chunk, level, layers)
        assert found == expected(segment, chunk, level, layers)
        assert size == sum(len(data) for _, data in found)


def test_levels_side_by_side_are_one_transfer(reader: Any) -> None:
    store, segments = reader()
    for level, requests in ((0, 1), (1, 1), (2, 1), (3, 1), (4, 2)):
        store.reads.clear()
        segments.forget()
        fetch(segments, 0, level)
        assert len(store.reads) == requests


@pytest.mark.parametrize(("level", "requests"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 3)])
def test_the_index_comes_with_the_first_levels(
    nested: Path, recording_store: Any, level: int, requests: int
) -> None:
    store = recording_store(nested)
    segments = SegmentReader(Artifact.open(store))
    store.reads.clear()
    fetch(segments, 0, level)
    assert len(store.reads) == requests


@pytest.mark.parametrize(("first", "then"), [(0, 1), (0, 2), (1, 2), (0, 4)])
def test_refining_what_was_kept_fetches_only_what_it_lacks(
    reader: Any, segment: Segment, first: int, then: int
) -> None:
    store, segments = reader(keep=True)
    fetch(segments, 0, first)
    store.reads.clear()
    found, size = fetch(segments, 0, then)
    assert found == expected(segment, 0, then)
    assert size == size_of(segment, 0, *(i for i in CHAINS[then] if i not in CHAINS[first]))
    assert sum(size for _, size in store.reads) == size


def test_one_refinement_after_another_reads_every_byte_once(reader: Any, segment: Segment) -> None:
    store, segments = reader(keep=True)
    for level in (0, 1, 2):
        assert fetch(segments, 1, level) == (
            expected(segment, 1, level),
            size_of(segment, 1, level),
        )
    assert sum(size for _, size in store.reads) == size_of(segment, 1, 0, 1, 2)


def test_what_was_not_kept_or_is_forgotten_is_fetched_again(reader: Any, segment: Segment) -> None:
    for keep in (False, True):
        _, segments = reader(keep=keep)
        fetch(segments, 0, 0)
        segments.forget()
        found, size = fetch(segments, 0, 1)
        assert found == expected(segment, 0, 1)
        assert size == size_of(segment, 0, 0, 1)


def test_other_branches_and_exact_levels_are_not_built_on_what_was_kept(
    reader: Any, segment: Segment
) -> None:
    _, segments = reader(keep=True)
    sizes = []
    for level in (2, 4, 3, 0, 3, 1):
        found, size = fetch(segments, 0, level)
        assert found == expected(segment, 0, level)
        sizes.append(size)
    exact = size_of(segment, 0, 3)
    assert sizes == [size_of(segment, 0, 0, 1, 2), size_of(segment, 0, 4), exact, 0, exact, 0]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("n_read", [0, 1, 3])
def test_a_coarser_level_of_what_was_given_up_is_there_already(
    reader: Any, segment: Segment, keep: bool, n_read: int
) -> None:
    """Of all layers: the coarser levels of all of them come before the finest of any."""
    _, segments = reader(keep=keep)
    assert segments.missing_bytes(0, 1, LAYERS) == size_of(segment, 0, 0, 1)
    finer = segments.read(0, 2, LAYERS, Meter())
    for layer in range(n_read):
        assert next(finer)[0] == layer
    finer.close()
    missing = 0 if n_read else size_of(segment, 0, 0, 1)
    assert segments.missing_bytes(0, 1, LAYERS[n_read:]) == missing
    left = LAYERS[n_read:]
    assert fetch(segments, 0, 1, left) == (expected(segment, 0, 1, left), missing)
    segments.forget(0)
    assert segments.missing_bytes(0, 1, LAYERS) == size_of(segment, 0, 0, 1)


def test_a_read_that_was_closed_early_goes_on_from_what_it_had(
    reader: Any, segment: Segment
) -> None:
    """Layers that are at different levels are each completed."""
    _, segments = reader(keep=True)
    fetch(segments, 0, 0)
    partly = segments.read(0, 1, LAYERS, Meter())
    assert [next(partly)[0] for _ in range(2)] == [0, 1]
    partly.close()
    found, size = fetch(segments, 0, 2)
    assert found == expected(segment, 0, 2)
    assert size == size_of(segment, 0, 2) + len(part(segment, 0, 1, 3))


def test_a_layer_without_values_of_its_own_costs_no_transfer(reader: Any) -> None:
    store, segments = reader()
    assert fetch(segments, 0, 2, [EMPTY]) == ([(EMPTY, b"")], 0)
    assert sum(size for _, size in store.reads) == 0


def test_a_damaged_part_of_a_chain_is_asked_for_once_more(reader: Any, segment: Segment) -> None:
    store, segments = reader(damage=1)
    size = size_of(segment, 0, 0, 1, 2)
    assert fetch(segments, 0, 2) == (expected(segment, 0, 2), size)  # what was damaged left out
    store.damage_next(2)
    with pytest.raises(FormatError, match=r"level base, layer 0"):
        fetch(segments, 1, 2)


def test_a_read_that_is_given_up_ends_with_the_next_bytes(reader: Any) -> None:
    """In the middle of a segment, which may be large: nobody waits for its end."""
    _, segments = reader()
    meter = Meter()
    reading = segments.read(0, 0, LAYERS, meter)
    next(reading)
    arrived = meter.size_bytes
    meter.give_up()
    with pytest.raises(StoreError, match="given up"):
        list(reading)
    assert meter.size_bytes == arrived
