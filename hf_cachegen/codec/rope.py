"""Undo and redo the rotary position embedding of cached keys.

Rotation turns each pair (a, b) of channels by the angle position * inv_freq and scales it by the
attention scaling s, so its inverse turns back and divides by s: with c = s cos, d = s sin,

    rotate    a' = a c - b d,            b' = b c + a d
    unrotate  a  = (a' c + b' d) / s^2,  b  = (b' c - a' d) / s^2

Method: RoFormer (Su et al. 2021); scaling: YaRN (Peng et al. 2023). Channels past the rotated ones
(partial rotary) pass through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cachegen.layout import RopeSpec


def rotate(x: Tensor, spec: RopeSpec, positions: int | Tensor) -> Tensor:
    """Rotate ``x`` ``[H, T, D]``; returns float32.

    ``positions`` is that of the first of consecutive tokens, or those of all, ``[T]`` or
    ``[H or 1, T]``.
    """
    cos, sin = cos_sin(spec, positions, x)
    a, b = _pairs(x, spec)
    return _join(x, spec, a * cos - b * sin, b * cos + a * sin)


def unrotate(x: Tensor, spec: RopeSpec, positions: int | Tensor) -> Tensor:
    """Inverse of :func:`rotate`; takes any float dtype, returns float32."""
    cos, sin = cos_sin(spec, positions, x)
    cos, sin = cos / spec.attention_scaling**2, sin / spec.attention_scaling**2
    a, b = _pairs(x, spec)
    return _join(x, spec, a * cos + b * sin, b * cos - a * sin)


def cos_sin(spec: RopeSpec, positions: int | Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled cos and sin ``[..., T, len(inv_freq)]`` as transformers computes them: in float32.

    ``positions`` as for :func:`rotate`.
    """
    # On a GPU behind what is queued there, without waiting for it.
    inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32)
    inv_freq = inv_freq.to(x.device, non_blocking=x.is_cuda)
    if not isinstance(positions, Tensor):
        positions = torch.arange(positions, positions + x.shape[-2], device=x.device)
    angles = positions.to(x.device, torch.float32)[..., None] * inv_freq
    return angles.cos() * spec.attention_scaling, angles.sin() * spec.attention_scaling


def _pairs(x: Tensor, spec: RopeSpec) -> tuple[Tensor, Tensor]:
    n = len(spec.inv_freq)
    rotated = x[..., : 2 * n].float()
    if spec.pairing == "half":
        return rotated[..., :n], rotated[..., n:]
    return rotated[..., 0::2], rotated[..., 1::2]


def _join(x: Tensor, spec: RopeSpec, a: Tensor, b: Tensor) -> Tensor:
    n = len(spec.inv_freq)
    if spec.pairing == "half":
        rotated = torch.cat((a, b), dim=-1)
    else:
        rotated = torch.stack((a, b), dim=-1).flatten(-2)
    if 2 * n == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., 2 * n :].float()), dim=-1)
