"""Streamed contexts in quantised caches: compressed on the wire and in memory.

Needs the packages that quantise; ``make test-versions`` brings them along.
"""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import QuantizedCache

from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.hf.joining import fill_cache

NEW_TOKENS = 12
GROUPWISE = {"nbits": 4, "q_group_size": 16, "residual_length": 8}  # full twice in NEW_TOKENS

fp8 = pytest.param(
    "fp8",
    {},
    marks=pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.22"), reason="new in transformers 5.22"
    ),
)
hqq = pytest.param(
    "hqq",
    {**GROUPWISE, "axis_key": 1, "axis_value": 1},
    marks=pytest.mark.skipif(importlib.util.find_spec("hqq") is None, reason="no hqq"),
)
quanto = pytest.param(
    "quanto",
    GROUPWISE,
    marks=pytest.mark.skipif(
        importlib.util.find_spec("optimum") is None or not all(map(shutil.which, ("c++", "ninja"))),
        reason="no optimum-quanto, or no compiler for its kernels",
    ),
)
backends = pytest.mark.parametrize(("backend", "options"), [fp8, hqq, quanto])


def quantised(model: Any, backend: str, options: dict[str, int]) -> QuantizedCache:
    """An empty quantised cache of a model."""
    return QuantizedCache(backend, config=model.config, **options)


def answer(model: Any, cache: Any, prompts: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sequences, logits [steps, B, V]) of tokens that follow prompts ``[B, T]``."""
    output = model.generate(
        input_ids=prompts,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **{cache_argument(model): cache},
    )
    return output.sequences, torch.stack(output.logits)


@torch.no_grad()
@backends
def test_it_goes_on_as_a_native_quantised_cache(
    llama: Any, backend: str, options: dict[str, int]
) -> None:
    model, prompt = llama.model, torch.cat((llama.ids, torch.tensor([7, 9, 11])))[None]
    native = quantised(model, backend, options)
    model(input_ids=llama.ids[None], **{cache_argument(model): native})
    ours, mask = fill_cache(quantised(model, backend, options), llama.load())
    assert torch.equal(mask, torch.ones(1, 70, dtype=torch.long))
    ones = torch.ones_like(prompt)
    for found, expected in zip(
        answer(model, ours, prompt, ones), answer(model, native, prompt, ones), strict=True
    ):
        assert torch.equal(found, expected)


@torch.no_grad()
@backends
def test_batch_of_contexts_is_about_as_exact_as_one(
    llama: Any, backend: str, options: dict[str, int]
) -> None:
    # Padding shares a scale with the tokens beside it.
    model, new = llama.model, torch.tensor([[7, 9, 11]])
    short = llama.load()
    short.crop(-9)
    prompts = torch.stack(
        (
            torch.cat((torch.zeros(9, dtype=torch.long), llama.ids[:61], new[0])),
            torch.cat((llama.ids, new[0])),
        )
    )
    cache, mask = fill_cache(quantised(model, backend, options), short, llama.load())
    mask = torch.cat((mask, torch.ones(2, 3, dtype=torch.long)), dim=1)
    _, found = answer(model, cache, prompts, mask)
    _, exact = answer(model, None, prompts, mask)
    single, _ = fill_cache(quantised(model, backend, options), llama.load())
    _, alone = answer(model, single, prompts[1:], mask[1:])
    lossy = (alone[0, 0] - exact[0, 1]).norm()
    assert lossy > 0
    for row in range(2):
        assert (found[0, row] - exact[0, row]).norm() < 2 * lossy


@backends
def test_sliding_windows_are_refused(gemma: Any, backend: str, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="full attention"):
        quantised(gemma.model, backend, options)
