"""How fast a model prefills on this machine, measured once per model and process."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_cachegen.codec.entropy import warm_up
from hf_cachegen.hf.compat import (
    cache_argument,
    new_cache,
    running_device,
    text_config,
    token_layers,
)
from hf_cachegen.streaming.rates import MachineRates, PrefillCost

SHORT_TOKENS = 16
MAX_LONG_TOKENS = 256
LONG_S = 0.25
"""About how long a long pass may take, which has at least twice as many tokens as a short one."""

LONGER = 1.5
"""How many times as long as a short pass a long one has to take: what tokens cost could not be told
from noise otherwise. Where it is faster, it gets more tokens, up to :data:`MOST_TOKENS`."""

MOST_TOKENS = 2048

REPEATS = 2
"""Passes of a kind, of which the fastest counts: any one may have been held up by something."""

PAST_TOKENS = 2048
"""How far into a context the last pass is."""

_rates: weakref.WeakKeyDictionary[PreTrainedModel, MachineRates] = weakref.WeakKeyDictionary()


def machine_rates(model: PreTrainedModel) -> MachineRates:
    """What streams of a model know of this machine, and add to."""
    return _rates.setdefault(model, MachineRates())


def calibrate(model: PreTrainedModel) -> MachineRates:
    """Measure how fast a model prefills, unless that is known, and load the entropy coder.

    It takes seven short passes or a few more, somewhat under a second. The first cache that is
    streamed under a target does it; a service does it before, so that no user waits for it.

    Parameters
    ----------
    model
        The model, where it will run.
    """
    rates = machine_rates(model)
    warm_up()  # which would disturb the measurement if it went on meanwhile
    if rates.prefill is None:
        rates.prefill = _measure(model)
    return rates


@torch.no_grad()
def _measure(model: PreTrainedModel) -> PrefillCost:
    _pass(model, new_cache(model), SHORT_TOKENS)  # sets up kernels and buffers
    short_s, _ = _fastest(model, SHORT_TOKENS)
    # Positions that are learned or stored in a table end somewhere.
    end = getattr(text_config(model), "max_position_embeddings", None) or PAST_TOKENS
    affordable = int(SHORT_TOKENS * LONG_S / short_s)
    n_long = min(max(affordable, 2 * SHORT_TOKENS), MAX_LONG_TOKENS, end // 2)
    long_s, cache = _fastest(model, n_long)
    while long_s < LONGER * short_s and 2 * n_long <= min(MOST_TOKENS, end // 2):
        n_long *= 2
        long_s, cache = _fastest(model, n_long)
    # If it never takes so long, something has held up all short ones.
    short_s = min(short_s, long_s / LONGER)
    n_late = n_long // 2
    for layer in (cache.layers[index] for index in token_layers(cache.layers)):
        repeats = (1, 1, min(PAST_TOKENS, end - REPEATS * n_late) // n_long - 1, 1)
        layer.update(layer.keys.repeat(repeats), layer.values.repeat(repeats))
    lates = []
    for _ in range(REPEATS):
        past = cache.get_seq_length()
        lates.append((past, n_late, _pass(model, cache, n_late)))
    late = min(lates, key=lambda measured: measured[-1])
    return PrefillCost.fit([(0, SHORT_TOKENS, short_s), (0, n_long, long_s), late])


def _fastest(model: PreTrainedModel, n_tokens: int) -> tuple[float, Cache]:
    """Seconds of the fastest of some passes over new caches, and the last of the caches."""
    seconds = []
    for _ in range(REPEATS):
        cache = new_cache(model)
        seconds.append(_pass(model, cache, n_tokens))
    return min(seconds), cache


def _pass(model: PreTrainedModel, cache: Cache, n_tokens: int) -> float:
    """Seconds of one forward pass over arbitrary tokens."""
    vocabulary = text_config(model).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, n_tokens), generator=generator).to(running_device(model))
    arguments: dict[str, Any] = {cache_argument(model): cache}
    started = time.perf_counter()
    output = model.forward(input_ids=ids, use_cache=True, logits_to_keep=1, **arguments)
    output.logits[0, -1, 0].item()  # waits for the device
    return time.perf_counter() - started
