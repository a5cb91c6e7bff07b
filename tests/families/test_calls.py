"""Every way of calling generate with a streamed cache: right, or refused with the right call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import StaticCache
from warm import generate

from hf_cachegen import UnsupportedError
from hf_cachegen.hf.guard import guard_generate
from hf_cachegen.hf.joining import fill_cache


def test_family_in_every_call(family: Any, warm_of: Any, calls: Any) -> None:
    for call in calls:
        since = family.calls_since.get(call.what, call.since)
        if Version(transformers.__version__) >= Version(since):
            check(call, family, warm_of)


def check(call: Any, family: Any, warm_of: Any) -> None:
    """That a call is right with a family, or refused with its message."""
    warm = warm_of(family)
    guard_generate(warm.model)
    refused = None if call.what in family.right_calls else call.refused.get(family.kind)
    if call.what in family.refused_calls:
        with pytest.raises(Exception, match=family.refused_calls[call.what]):
            call.run(warm)
        return
    if refused is not None:
        with pytest.raises(call.error, match=refused):
            call.run(warm)
        return
    ours, expected = call.run(warm)
    if not isinstance(ours[0], torch.Tensor):
        assert ours == expected, call
    elif call.near:
        for pair in zip(ours, expected, strict=True):
            assert torch.allclose(*pair, atol=family.tolerance), call
    else:
        assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True)), call


def test_longrope_is_refused_where_it_rotates_otherwise(warm_of: Any, families: Any) -> None:
    warm = warm_of(next(family for family in families if family.name == "phi3, longrope"))
    guard_generate(warm.model)
    long = torch.cat((warm.ids, torch.arange(10, 70)))[None]
    with pytest.raises(UnsupportedError, match=r"past 128 tokens.*without the cache"):
        warm.generate(warm.load(), long)
    with pytest.raises(UnsupportedError, match="pass the whole prompt"):
        warm.generate(
            warm.load(),
            long[:, 70:120],
            attention_mask=torch.ones(1, 120, dtype=torch.long),
            max_new_tokens=9,
        )
    short, cold = (warm.generate(cache, long[:, :120]) for cache in (warm.load(), None))
    assert torch.equal(short[0], cold[0])


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_compiled_model_with_a_static_cache(name: str, warm_of: Any, families: Any) -> None:
    warm = warm_of(next(family for family in families if family.name == name))
    model = copy.deepcopy(warm.model)
    cache, _ = fill_cache(StaticCache(config=model.config, max_cache_len=128), warm.load())
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    prompt = torch.cat((warm.ids, torch.tensor([7, 9, 11])))[None]
    for ours, native in zip(
        generate(model, cache, prompt), warm.generate(warm.native(), prompt), strict=True
    ):
        assert torch.allclose(ours, native, atol=1e-5)
