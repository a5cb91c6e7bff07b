"""The distribution of transfer times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.streaming.estimate import PRIOR_SPREAD, RECENT, RateEstimate

rates = st.lists(st.floats(1e3, 1e10), min_size=1, max_size=12)
sizes = st.lists(st.integers(1, 10**9), min_size=1, max_size=8)


def test_one_throughput_has_the_prior_spread():
    estimate = RateEstimate.from_throughputs([5e6])
    assert estimate.log_spread == pytest.approx(PRIOR_SPREAD)
    assert estimate.median_s(10e6) == pytest.approx(2.0)


def test_equal_throughputs_make_the_estimate_surer():
    spreads = [RateEstimate.from_throughputs([5e6] * n).log_spread for n in (1, 2, 4, 8)]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] > 0


def test_only_recent_throughputs_count():
    recent = [2e6, 3e6] * (RECENT // 2)
    assert RateEstimate.from_throughputs([1.0, *recent]) == RateEstimate.from_throughputs(recent)


@pytest.mark.parametrize("throughputs", [[], [0.0], [1e6, -1.0]])
def test_throughputs_must_be_positive(throughputs: list[float]):
    with pytest.raises(ValueError, match="expected positive throughputs"):
        RateEstimate.from_throughputs(throughputs)


@given(rates, sizes, st.floats(1e-3, 1e4), st.floats(1, 100))
def test_probability_to_be_late(
    throughputs: list[float], chunks: list[int], budget_s: float, factor: float
):
    estimate = RateEstimate.from_throughputs(throughputs)
    late = estimate.late_probability(chunks, budget_s)
    assert 0 <= late <= 1
    assert estimate.late_probability(chunks, budget_s * factor) <= late
    faster = RateEstimate.from_throughputs([rate * factor for rate in throughputs])
    assert faster.log_spread == pytest.approx(estimate.log_spread, rel=1e-6, abs=1e-6)
    assert faster.late_probability(chunks, budget_s) <= late + 1e-6


def test_no_time_and_nothing_to_do():
    estimate = RateEstimate.from_throughputs([1e6])
    assert estimate.late_probability([1], 0) == 1
    assert estimate.late_probability([0], 0) == 0


def test_known_rates_are_late_or_not():
    certain = RateEstimate(math.log(1e6), 0.0, 4)
    assert certain.late_probability([10**6, 10**6], 1.99) == 1
    assert certain.late_probability([10**6, 10**6], 2.01) == 0


@pytest.mark.parametrize("budget_s", [0.8, 1.0, 1.5, 2.0])
def test_probability_agrees_with_sampling(budget_s: float):
    estimate = RateEstimate(math.log(5e6), 0.4, 5)
    chunks = [10**6] * 5
    rng = np.random.default_rng(0)
    means = estimate.log_mean + 0.4 / math.sqrt(5) * rng.standard_normal(100_000)
    logs = means[:, None] + 0.4 * rng.standard_normal((100_000, 5))
    sampled = (1e6 / np.exp(logs)).sum(1) > budget_s
    assert estimate.late_probability(chunks, budget_s) == pytest.approx(sampled.mean(), abs=0.01)
