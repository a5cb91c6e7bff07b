"""What tests of several kernels share: rotations, and how close is close enough."""

from __future__ import annotations

import torch

from hf_cachegen.codec.base import PlacedSegment
from hf_cachegen.codec.rope import cos_sin
from hf_cachegen.layout import RopeSpec
from hf_cachegen.triton_kernels.pairs import Rotary

START = 1000
"""Position of the first token."""


def rope_of(n, pairing):
    inv_freq = tuple((10_000.0 ** -(torch.arange(n) / n)).tolist())
    return RopeSpec(inv_freq=inv_freq, attention_scaling=1.2, pairing=pairing)


ROPES = {
    "none": None,
    "half": rope_of(4, "half"),
    "half partial": rope_of(3, "half"),
    "interleaved": rope_of(4, "interleaved"),
    "interleaved partial": rope_of(1, "interleaved"),
}


def rotary_of(rope, tokens, device):
    if rope is None:
        return None
    like = torch.empty(1, tokens, 1)
    return Rotary(*(table.to(device) for table in cos_sin(rope, START, like)), rope.pairing)


def assert_rounds(found, expected):
    """To the dtype's precision: fp32 operations may fuse, and bf16 is cut off when interpreted."""
    ulp = 2 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float().cpu(), expected, rtol=ulp, atol=1e-5 + 0.1 * ulp)


def decode_on_gpu(codec, layer, data, out, start=START):
    codec._decode_on_gpu(layer, [PlacedSegment(data, 0, out[0].shape[1])], out, start)
