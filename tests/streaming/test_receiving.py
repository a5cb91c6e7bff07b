"""Items of a generator that runs in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from hf_cachegen.errors import StoreError
from hf_cachegen.streaming.receiving import AHEAD, Receiving


def test_pauses_are_told_between_what_comes() -> None:
    go_on = threading.Event()

    def slow() -> Generator[int, None, None]:
        yield 1
        go_on.wait(20)
        yield 2

    found: list[int | None] = []
    receiving = Receiving(slow(), 0.05)
    for item in receiving:
        found.append(item)
        if 1 in found and found[-3:] == [None] * 3:
            go_on.set()
    receiving.close()
    assert [item for item in found if item is not None] == [1, 2]
    assert found[-1] == 2
    assert found.index(2) > found.index(1) + 3


def test_it_goes_no_further_ahead_than_there_is_room_for(threads_end: Any) -> None:
    seen: list[int | str] = []

    def source() -> Generator[int, None, None]:
        try:
            for number in range(100):
                seen.append(number)
                yield number
        finally:
            seen.append("closed")

    receiving = Receiving(source(), 10.0)
    items = iter(receiving)
    assert [next(items), next(items)] == [0, 1]
    deadline = time.monotonic() + 20
    while len(seen) < AHEAD + 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)  # for what must not come
    receiving.close()
    assert threads_end()
    assert seen == [*range(AHEAD + 1), "closed"]


def test_the_first_item_is_on_its_way_before_anyone_asks(threads_end: Any) -> None:
    begun = threading.Event()

    def source() -> Generator[int, None, None]:
        begun.set()
        yield 1

    receiving = Receiving(source(), None)
    assert begun.wait(20)
    assert list(receiving) == [1]
    receiving.close()
    assert threads_end()


def test_pauses_hand_on_errors(threads_end: Any) -> None:
    def broken() -> Generator[int, None, None]:
        yield 1
        raise StoreError("gone")

    receiving = Receiving(broken(), 10.0)
    with pytest.raises(StoreError, match="gone"):
        list(receiving)
    receiving.close()
    assert threads_end()
