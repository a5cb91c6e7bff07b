"""What part of a transfer tells the link's rate."""

from __future__ import annotations

import pytest

from hf_cachegen.streaming import meter as module
from hf_cachegen.streaming.meter import MIN_SAMPLE_BYTES, RECENT_S, LinkCount, Meter

MANY = 5 * MIN_SAMPLE_BYTES


class Clock:
    """Time to set."""

    now_s = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture
def meter(clock: Clock) -> Meter:
    return Meter()


def receive(meter: Meter, clock: Clock, size_bytes: int, at_s: float) -> None:
    """Bytes that were waited for until then."""
    meter.wait()
    clock.now_s = at_s
    meter.received(size_bytes)


def test_an_undisturbed_transfer_counts_as_a_whole(meter: Meter, clock: Clock) -> None:
    assert meter.bytes_per_s() is None
    receive(meter, clock, 1000, 2.0)
    assert meter.bytes_per_s() == 500


def test_the_wait_for_the_first_bytes_is_not_the_links_rate(meter: Meter, clock: Clock) -> None:
    receive(meter, clock, 1000, 3.0)
    receive(meter, clock, MANY, 5.0)
    assert meter.latency_s == 3.0
    assert meter.bytes_per_s() == MANY / 2
    assert meter.size_bytes == 1000 + MANY


def test_what_comes_after_a_hold_up_does_not_count(meter: Meter, clock: Clock) -> None:
    receive(meter, clock, MIN_SAMPLE_BYTES, 2.0)
    meter.hold_up()
    receive(meter, clock, MANY, 10.0)
    meter.hold_up()
    clock.now_s = 10.1
    assert meter.bytes_per_s() == MIN_SAMPLE_BYTES / 2
    assert meter.seconds == pytest.approx(10.1)


def test_too_little_before_a_hold_up_tells_nothing(meter: Meter, clock: Clock) -> None:
    receive(meter, clock, MIN_SAMPLE_BYTES - 1, 2.0)
    meter.hold_up()
    receive(meter, clock, MANY, 10.0)
    assert meter.bytes_per_s() is None


def test_a_transfer_that_was_held_up_before_it_began_tells_nothing(
    meter: Meter, clock: Clock
) -> None:
    meter.hold_up()
    meter.restart(2 * MANY)
    receive(meter, clock, MANY, 1.0)
    receive(meter, clock, MANY, 2.0)
    assert meter.bytes_per_s() is None


def test_a_link_that_becomes_slow_is_slow_after_as_long(meter: Meter, clock: Clock) -> None:
    receive(meter, clock, 0, 1.0)
    for tenth in range(11, 31):
        receive(meter, clock, 1000, tenth / 10)
    assert meter.recent_bytes_per_s() == pytest.approx(10_000)
    for tenth in range(31, 51):
        receive(meter, clock, 10, tenth / 10)
    assert meter.recent_bytes_per_s() == pytest.approx(100)


def test_a_link_that_stands_still_is_slower_the_longer_it_does(meter: Meter, clock: Clock) -> None:
    for tenth in range(1, 11):
        receive(meter, clock, 1000, tenth / 10)
    meter.wait()
    rates = []
    for tenth in range(11, 21):
        clock.now_s = tenth / 10
        rates.append(meter.recent_bytes_per_s())
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0


@pytest.mark.parametrize("patience_s", [0.0, 3.0])
def test_a_server_is_given_its_time_to_answer(clock: Clock, patience_s: float) -> None:
    meter, wait_s = Meter(MANY, patience_s), max(RECENT_S, patience_s)
    clock.now_s = 0.9 * wait_s
    assert meter.recent_bytes_per_s() is None
    clock.now_s = wait_s
    assert meter.recent_bytes_per_s() == 0
    receive(meter, clock, 1000, wait_s + 1)  # which is no part of the rate
    assert meter.recent_bytes_per_s() is None
    receive(meter, clock, 1000, wait_s + 1 + RECENT_S)
    assert meter.recent_bytes_per_s() == 1000 / RECENT_S


def test_what_is_left_is_known_throughout(meter: Meter) -> None:
    meter.restart(10)
    meter.expect_more(100)
    meter.progress(60)
    assert meter.left_bytes == 50
    meter.progress(-20)  # it was damaged
    assert meter.left_bytes == 70
    meter.restart(10)
    assert meter.left_bytes == 10
    meter.expect(30)
    meter.received(40)
    assert meter.left_bytes == 0


def test_time_in_which_nobody_waits_does_not_make_a_link_slow(meter: Meter, clock: Clock) -> None:
    receive(meter, clock, 0, 0.0)
    receive(meter, clock, 1000, 1.0)
    clock.now_s = 100.0
    assert meter.recent_bytes_per_s() == 1000
    assert meter.waited_s == 1.0
    receive(meter, clock, 1000, 100.5)
    assert meter.waited_s == 100.5 - 100.0 + 1.0


def test_what_others_receive_at_the_same_time_counts_for_the_link(clock: Clock) -> None:
    link = LinkCount()
    meter, other = Meter(3 * MANY, link=link), Meter(2 * MANY, link=link)
    receive(other, clock, MANY, 0.5)
    receive(meter, clock, MANY, 1.0)
    meter.wait()
    receive(other, clock, MANY, 1.5)
    receive(meter, clock, MANY, 2.0)
    assert meter.size_bytes == 2 * MANY
    assert meter.bytes_per_s() == 2 * MANY  # since its first bytes came
    assert meter.recent_bytes_per_s() == 2 * MANY


def test_a_transfer_is_over_with_its_last_byte(clock: Clock) -> None:
    """Whenever it is taken note of: another one may have its turn first."""
    meter = Meter(2 * MANY)
    receive(meter, clock, MANY, 1.0)
    receive(meter, clock, MANY, 2.0)
    clock.now_s = 50.0
    assert meter.bytes_per_s() == MANY


def test_time_counts_from_a_transfers_turn(clock: Clock) -> None:
    """What was asked for ahead has to wait until others have come."""
    link = LinkCount()
    meter, other = Meter(MANY, patience_s=3.0, link=link), Meter(MANY, link=link)
    receive(other, clock, MANY, 10.0)
    meter.take_turn()
    assert (meter.waited_s, meter.seconds) == (0, 0)
    clock.now_s = 12.9
    assert meter.recent_bytes_per_s() is None
    clock.now_s = 13.0
    assert meter.recent_bytes_per_s() == 0
    assert (meter.waited_s, meter.seconds) == (3, 3)
    receive(meter, clock, MANY, 14.0)
    assert meter.latency_s == 14.0
    assert meter.seconds == 4


def test_a_link_that_is_silent_for_others_is_for_who_comes_next(clock: Clock) -> None:
    link = LinkCount()
    meter, other = (Meter(MANY, patience_s=3.0, link=link) for _ in range(2))
    receive(other, clock, 1000, 1.0)
    clock.now_s = 3.9
    meter.take_turn()
    assert meter.recent_bytes_per_s() is None
    clock.now_s = 4.0
    assert meter.recent_bytes_per_s() == 0
