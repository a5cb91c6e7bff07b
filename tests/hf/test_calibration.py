"""The measured speed of a model, once per model."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_cachegen.hf import calibration
from hf_cachegen.hf.calibration import calibrate, machine_rates
from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.streaming.rates import PrefillCost


def test_speed_is_that_of_the_model(published: Any) -> None:
    """A tiny model's pass is mostly overhead, so this holds for passes of any length."""
    model = copy.deepcopy(published.model)
    rates = calibrate(model)
    seconds = []
    for _ in range(5):
        cache = DynamicCache(config=model.config)
        started = time.perf_counter()
        with torch.no_grad():
            model(input_ids=torch.ones(1, 200, dtype=torch.long), **{cache_argument(model): cache})
        seconds.append(time.perf_counter() - started)
    predicted = rates.prefill_s(0, 200)
    assert predicted is not None
    assert min(seconds) / 5 < predicted < 5 * max(seconds)
    assert rates.prefill_s(4000, 1000) >= rates.prefill_s(0, 1000) >= rates.prefill_s(0, 10)


def test_it_is_measured_once_per_model(llama: Any) -> None:
    model = copy.deepcopy(llama.model)
    passes = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    rates = calibrate(model)
    measured = len(passes)
    assert measured
    assert calibrate(model) is rates is machine_rates(model)
    assert len(passes) == measured
    assert machine_rates(llama.model) is not rates


def test_rates_end_with_their_model(llama: Any) -> None:
    model = copy.deepcopy(llama.model)
    rates = weakref.ref(calibrate(model))
    del model
    gc.collect()
    assert rates() is None


@pytest.mark.parametrize("policy", ["fixed:delta-1", "text"])
def test_policies_that_do_not_adapt_measure_nothing(llama: Any, policy: str) -> None:
    model = llama.model
    machine_rates(model).prefill = None
    llama.load(None, policy=policy).close()
    assert machine_rates(model).prefill is None
    llama.load(None, policy="paper", ttft_target_s=9.0).close()
    assert machine_rates(model).prefill is not None


MACHINES = {
    "processor": PrefillCost(0.045, 1.4e-3, 8e-7),
    "slow processor": PrefillCost(2.0, 0.15, 2e-6),
    "fast GPU": PrefillCost(0.02, 2e-5, 1e-10),
    "tiny model": PrefillCost(0.001, 1e-6, 1e-10),
}


class Clock:
    """Time as it passes for a model of known cost, of which one pass may be held up.

    Attributes
    ----------
    passes
        How many there were.
    """

    def __init__(self, model: Any, cost: PrefillCost, held_up: int | None, by_s: float) -> None:
        self.passes = 0
        self._forward, self._cost = model.forward, cost
        self._cache_argument = cache_argument(model)
        self._held_up, self._by_s = held_up, by_s
        self._now_s = 0.0

    def perf_counter(self) -> float:
        return self._now_s

    def forward(self, input_ids: Any, **arguments: Any) -> Any:
        past = arguments[self._cache_argument].get_seq_length()
        self._now_s += self._cost.seconds(past, input_ids.shape[1])
        self._now_s += self._by_s * (self.passes == self._held_up)
        self.passes += 1
        return self._forward(input_ids=input_ids, **arguments)


@pytest.mark.parametrize("machine", MACHINES)
def test_one_pass_that_is_held_up_changes_little(
    llama: Any, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, and for however long."""
    cost = MACHINES[machine]

    def calibrated(held_up: int | None = None, by_s: float = 0.0) -> tuple[Any, int]:
        model = copy.deepcopy(llama.model)
        clock = Clock(model, cost, held_up, by_s)
        monkeypatch.setattr(calibration, "time", clock)
        monkeypatch.setattr(model, "forward", clock.forward)
        return calibrate(model), clock.passes

    rates, n_passes = calibrated()
    assert rates.prefill_s(0, 1500) == pytest.approx(cost.seconds(0, 1500), rel=0.01)
    for held_up in range(n_passes):
        for by_s in (0.05, 0.4, 5.0):
            rates, _ = calibrated(held_up, by_s)
            ratio = rates.prefill_s(0, 1500) / cost.seconds(0, 1500)
            assert 0.5 < ratio < 2, (held_up, by_s, ratio)
