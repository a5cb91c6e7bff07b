"""Rates from measurements: of prefills, of decoding, of links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.artifact import LevelRecord
from hf_cachegen.streaming import rates as rates_module
from hf_cachegen.streaming.rates import MachineRates, PrefillCost

PASSES = ((0, 16), (0, 256), (2048, 128))


def level(name: str, codec: str = "delta") -> LevelRecord:
    return LevelRecord(name=name, codec=codec, exact=False)


@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.floats(0, 1e-5))
def test_costs_are_found_again(overhead_s: float, token_s: float, pair_s: float):
    true = PrefillCost(overhead_s, token_s, pair_s)
    found = PrefillCost.fit([(start, n, true.seconds(start, n)) for start, n in PASSES])
    for start, n in (*PASSES, (6000, 1500), (0, 1)):
        # What a pass does not depend on is found up to rounding, not to the last digit.
        assert found.seconds(start, n) == pytest.approx(true.seconds(start, n), rel=1e-3, abs=1e-6)


@given(st.tuples(*[st.floats(1e-4, 10)] * 3))
def test_costs_are_never_negative(seconds: tuple[float, ...]):
    """Whatever noise did to the measurements, more tokens take no less time."""
    found = PrefillCost.fit([(*p, s) for p, s in zip(PASSES, seconds, strict=True)])
    assert min(found.overhead_s, found.token_s, found.pair_s) >= 0
    assert found.seconds(6000, 1500) >= found.seconds(0, 1500) >= found.seconds(0, 10) > 0


@given(st.floats(0.001, 10), st.floats(1.5, 100), st.floats(1, 4), st.sampled_from([32, 256, 2048]))
def test_tokens_are_never_free(short_s: float, share: float, late_share: float, n_long: int):
    """However much noise there was: many times as many take several times as long."""
    long_s = short_s * share
    late_s = late_share * (short_s + long_s) / 2
    found = PrefillCost.fit(
        [(0, 16, short_s), (0, n_long, long_s), (2048, n_long // 2, late_s)],
    )
    assert found.seconds(0, 64 * n_long) > 8 * min(long_s, late_s)


def test_prefill_is_unknown_until_measured_and_then_learns():
    rates = MachineRates()
    assert rates.prefill_s(0, 100) is None
    rates.note_prefill(0, 100, 5.0)  # nothing to compare it with
    rates.prefill = PrefillCost(0.0, 0.01, 0.0)
    assert rates.prefill_s(0, 100) == pytest.approx(1.0)
    for _ in range(20):
        rates.note_prefill(0, 100, 2.0)
    assert rates.prefill_s(0, 50) == pytest.approx(1.0, rel=1e-3)


def test_decoding_is_the_median_of_what_was_seen():
    rates = MachineRates()
    assert rates.decode_s(level("a"), 1000, 99) == rates.segment_s(level("a")) == 0
    for seconds in (9.0, 0.1, 0.1):  # the first waited for a compiler
        rates.note_decode(level("a"), 100, 10, seconds)
    assert rates.decode_s(level("a"), 1000, 99) == pytest.approx(1.0)
    assert all(rates.decode_s(level(name), 0, 0) == 0 for name in "ab"), "outside of a window"


def test_most_segments_take_no_longer():
    rates = MachineRates()
    for number in range(64):
        rates.note_decode(level("a"), 100, 10, 0.3 if number % 12 == 0 else 0.1 + number / 1000)
    assert 0.15 < rates.segment_s(level("a")) < 0.3
    assert rates.segment_s(level("b")) == 0


def test_levels_that_were_not_decoded_are_like_their_kin():
    """Between two by their bytes; beyond them the costlier of the same per value and per byte."""
    rates = MachineRates()
    rates.note_decode(level("x", codec="lossless"), 1, 10, 8.0)
    assert rates.decode_s(level("a"), 1, 5) == pytest.approx(8.0)
    assert rates.decode_s(level("a"), 1, 20) == pytest.approx(16.0)
    rates.note_decode(level("a"), 10, 20, 10.0)
    assert rates.decode_s(level("b"), 1, 1) == pytest.approx(1.0)
    assert rates.decode_s(level("b"), 1, 6) == pytest.approx(3.0)
    rates.note_decode(level("c"), 1, 6, 2.0)
    assert rates.decode_s(level("b"), 2, 8) == pytest.approx(2 * 1.5)
    rates.note_decode(level("b"), 1, 4, 1.8)
    assert rates.decode_s(level("b"), 2, 8) == pytest.approx(2 * 1.8)


def test_links_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch):
    rates, now = MachineRates(), [1000.0]
    monkeypatch.setattr(rates_module.time, "monotonic", lambda: now[0])
    assert rates.link_bytes_per_s("host") == []
    for rate in (1e6, 2e6, 3e6, 4e6, 5e6):
        rates.note_link("host", rate)
        now[0] += 1
    assert rates.link_bytes_per_s("host") == [2e6, 3e6, 4e6, 5e6]
    assert rates.link_bytes_per_s("other") == []
    now[0] += rates_module.REMEMBERED_S - 2
    assert rates.link_bytes_per_s("host") == [5e6]
