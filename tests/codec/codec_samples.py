"""What tests of several codecs share: layouts, round trips, damage."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import torch

from hf_cachegen.codec.channels import store_channels
from hf_cachegen.errors import FormatError
from hf_cachegen.layout import KVLayout, LayerSpec, RopeSpec, TensorSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "segments_v1"
DTYPES = ["bfloat16", "float16", "float32"]
HUGE = b"\xff" * 4
"""A count that promises too much."""


def layout_of(dtype, *, sliding=False):
    """Layers of different widths: grouped heads with a scaled rope, one latent, partial rope.

    Three of them; if ``sliding``, two behind them have a window.
    """
    ropes = {
        "half": RopeSpec(inv_freq=(1.0, 0.1, 0.01), attention_scaling=1.2, pairing="half"),
        "partial": RopeSpec(inv_freq=(0.5,), attention_scaling=1.0, pairing="interleaved"),
    }
    keys = TensorSpec(name="keys", heads=2, dim=6, rope="half")
    values = TensorSpec(name="values", heads=2, dim=5)
    latent = TensorSpec(name="latent", heads=1, dim=7, rope="partial")
    full = [
        LayerSpec(kind="full_attention", tensors=tensors)
        for tensors in ([keys, values], [latent], [values, keys, latent])
    ]
    windowed = [
        LayerSpec(kind="sliding_attention", tensors=tensors, window=16)
        for tensors in ([values], [keys, values])
    ]
    return KVLayout(dtype=dtype, ropes=ropes, layers=[*full, *(windowed if sliding else [])])


def empty_tensors(layout, specs, tokens):
    dtype = getattr(torch, layout.dtype)
    return [torch.empty(spec.heads, tokens, spec.dim, dtype=dtype) for spec in specs]


def to_tensors(layout, specs, x, positions):
    """Channels [T, C] before RoPE as tensors [H, T, D]."""
    tensors = empty_tensors(layout, specs, len(x))
    store_channels(layout, specs, x, tensors, positions)
    return tensors


def sinks_of(config, start, tokens):
    """How many of so many tokens are sinks."""
    return min(max(config.sinks - start, 0), tokens)


def decode(codec, layer, data, like, start=0):
    out = [torch.empty_like(tensor) for tensor in like]
    codec.decode_into(layer, data, out, start)
    return out


def decode_or_refuse(codec, layer, data, tokens, start=0):
    """Decoded tensors, or None; only FormatError may say no."""
    like = empty_tensors(codec.layout, codec.specs(layer), tokens)
    try:
        return decode(codec, layer, data, like, start)
    except FormatError:
        return None


def peak_bytes(call):
    """The most that a call allocates at once on the host, of what Python counts."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def without(name):
    """Damage to a table's arrays: one is missing."""
    return lambda arrays: arrays.pop(name)


def changed(name, change):
    """Damage to a table's arrays: what ``change`` makes of one."""
    return lambda arrays: arrays.update({name: change(arrays[name].copy())})


def put(value, at=1):
    """For :func:`changed`: another value in a place."""

    def change(array):
        array[at] = value
        return array

    return change
