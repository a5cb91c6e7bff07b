"""What is measured on the clock, on a machine that others may use, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

ATTEMPTS = 10

LiesBetween = Callable[[Callable[[], float], float, float], bool]


def _lies_between(measure: Callable[[], float], low_s: float, high_s: float) -> bool:
    """Whether no measurement is below ``low_s``, and one of several below ``high_s``.

    Whoever uses this machine, too, makes some of them longer, and none shorter.
    """
    for _ in range(ATTEMPTS):
        seconds = measure()
        if seconds < high_s:
            return seconds > low_s
    return False


@pytest.fixture(scope="session")
def lies_between() -> LiesBetween:
    """``lies_between(measure, low_s, high_s)``, see :func:`_lies_between`."""
    return _lies_between


@pytest.fixture(scope="session")
def seconds_at_once() -> Callable[[Callable[[], object], int], float]:
    """``seconds_at_once(call, count)``: how long several calls take, each in its own thread."""

    def seconds_at_once(call: Callable[[], object], count: int) -> float:
        threads = [threading.Thread(target=call) for _ in range(count)]
        started_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started_s

    return seconds_at_once
