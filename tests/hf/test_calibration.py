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

from hf_cachegen.hf.calibration import calibrate, machine_rates
from hf_cachegen.hf.compat import cache_argument


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
    assert rates.prefill_s(4000, 1000) > rates.prefill_s(0, 1000) >= rates.prefill_s(0, 10)


def test_it_is_measured_once_per_model(llama: Any) -> None:
    model = copy.deepcopy(llama.model)
    passes = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    rates = calibrate(model)
    assert len(passes) == 4
    assert calibrate(model) is rates is machine_rates(model)
    assert len(passes) == 4
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
