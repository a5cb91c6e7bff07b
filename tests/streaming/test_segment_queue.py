from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_cachegen.streaming.segment_queue import QueuedSegment, SegmentQueue
from hf_cachegen.streaming.steps import StreamStep


def segment(chunk: int, level: int, layer: int) -> QueuedSegment:
    step = StreamStep(chunk=chunk, level=level, started_s=0.0)
    return QueuedSegment(step, layer, b"%d" % chunk)


def places(segments: list[QueuedSegment]) -> list[tuple[int, int, int]]:
    return [(s.step.chunk, s.step.level, s.layer) for s in segments]


CAME = [(0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 0), (3, 1, 1)]


def test_one_by_one_in_order() -> None:
    queue = SegmentQueue(together=False)
    for place in CAME:
        queue.put(segment(*place))
    taken = [queue.take() for _ in range(len(CAME) + 1)]
    assert [places(batch) for batch in taken] == [[place] for place in CAME] + [[]]


def test_all_of_a_level_and_layer_together() -> None:
    queue = SegmentQueue(together=True)
    for place in CAME:
        queue.put(segment(*place))
    assert places(queue.take()) == [(0, 1, 0), (2, 1, 0), (3, 1, 0)]
    queue.put(segment(4, 1, 1))
    assert places(queue.take()) == [(0, 1, 1), (3, 1, 1), (4, 1, 1)]
    assert places(queue.take()) == [(1, 0, 0)]
    assert places(queue.take()) == [(1, 0, 1)]
    assert queue.take() == []


@pytest.mark.parametrize("together", [False, True])
def test_nothing_is_lost_or_taken_twice(together: bool) -> None:
    queue = SegmentQueue(together=together)

    def come_and_go(chunk: int) -> list[QueuedSegment]:
        for layer in range(3):
            queue.put(segment(chunk, 0, layer))
        return [taken for _ in range(3) for taken in queue.take()]

    with ThreadPoolExecutor(8) as pool:
        taken = [s for batch in pool.map(come_and_go, range(200)) for s in batch]
    assert sorted(places(taken)) == [
        (chunk, 0, layer) for chunk in range(200) for layer in range(3)
    ]
