"""What people do without a codec: raw dumps, a general compressor, uniform quantisation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
import zstandard
from torch import Tensor
from transformers.cache_utils import Cache

from hf_cachegen.hf.contents import CachedLayer

ZSTD_LEVEL = 3
"""zstd's own default."""

SCALE_BITS = 16


@dataclass(frozen=True)
class Baseline:
    """A way to store a cache.

    Attributes
    ----------
    encode
        Size in bytes of the stored tensors, and what they become ``[H, T, D]`` each.
    exact
        Whether they come back bit by bit.
    """

    name: str
    level: str
    exact: bool
    encode: Callable[[Sequence[Tensor]], tuple[int, list[Tensor]]]


def uniform(bits: int) -> Callable[[Sequence[Tensor]], tuple[int, list[Tensor]]]:
    """Symmetric quantisation with a 16-bit scale per token and head, packed without a gap."""

    def encode(tensors: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
        steps = 2 ** (bits - 1) - 1
        decoded, size_bits = [], 0
        for tensor in tensors:
            scale = (tensor.float().abs().amax(-1, keepdim=True) / steps).clamp_min(1e-12)
            scale = scale.bfloat16().float()
            q = (tensor.float() / scale).round().clamp(-steps, steps)
            decoded.append((q * scale).to(tensor.dtype))
            size_bits += tensor.numel() * bits + scale.numel() * SCALE_BITS
        return size_bits // 8, decoded

    return encode


def bfloat16(tensors: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """16-bit values."""
    decoded = [tensor.bfloat16().to(tensor.dtype) for tensor in tensors]
    return sum(2 * tensor.numel() for tensor in tensors), decoded


def safetensors_zstd(tensors: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """16-bit values in a safetensors file, through zstd."""
    _, decoded = bfloat16(tensors)
    payload = safetensors.torch.save(
        {str(i): tensor.bfloat16().contiguous() for i, tensor in enumerate(tensors)}
    )
    return len(zstandard.compress(payload, ZSTD_LEVEL)), decoded


def baselines(dtype: torch.dtype) -> list[Baseline]:
    """All baselines for a cache of ``dtype``."""
    exact = dtype == torch.bfloat16
    return [
        Baseline("bf16", "raw", exact, bfloat16),
        Baseline("safetensors+zstd", f"zstd-{ZSTD_LEVEL}", exact, safetensors_zstd),
        Baseline("uniform", "8-bit", False, uniform(8)),
        Baseline("uniform", "4-bit", False, uniform(4)),
    ]


def encode_layers(
    baseline: Baseline, layers: Sequence[CachedLayer]
) -> tuple[int, list[list[Tensor]]]:
    """Total size in bytes of a cache, and its decoded tensors per layer."""
    encoded = [baseline.encode(layer.tensors) for layer in layers]
    return sum(size for size, _ in encoded), [tensors for _, tensors in encoded]


def decoded_cache(
    baseline: Baseline, cache: Cache, layers: Sequence[CachedLayer]
) -> tuple[int, Cache]:
    """Size in bytes of a cache with these layers, and a copy of it as it comes back."""
    size, decoded = encode_layers(baseline, layers)
    other = copy.deepcopy(cache)
    for layer, (keys, values) in zip(other.layers, decoded, strict=True):
        layer.keys, layer.values = keys[None], values[None]
    return size, other
