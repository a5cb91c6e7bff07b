"""The matrix products of ``transform``: coefficients to channels, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_cachegen.codec.gpu import Built, PerDevice

if TYPE_CHECKING:
    from hf_cachegen.codec.transform_tables import GroupTables


class Coefficients(NamedTuple):
    """The coefficients of the tokens that share a step.

    Attributes
    ----------
    scale
        step * w.
    tokens
        int64 [T']: which of the segment's they are, sinks not counted.
    q
        int32 [K', T']: in units of ``scale``.
    """

    scale: float
    tokens: NDArray[np.int64]
    q: NDArray[np.int32]


LARGE_STEPS = 40
"""Standard deviation from which on a coefficient is large, in quantiser steps. Its products are in
float32: what is rounded off a row of the basis is an error in one direction for all tokens."""


def settle_threads() -> None:
    """Have products in this thread run on as many threads as torch was set to.

    A new thread takes that setting over with its first parallel operation, and a product before it
    may round otherwise than the same product after it.
    """
    torch.get_num_threads()


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the products of small coefficients are computed in, for a cache of this dtype.

    bfloat16 for a cache that is rounded to it anyway, where the processor multiplies it several
    times faster than float32; others emulate it slower.
    """
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    fast = known.get("avx512_bf16") or known.get("amx_bf16")
    return torch.bfloat16 if fast and dtype == torch.bfloat16 else torch.float32


def synthesise(
    table: GroupTables,
    widths: Sequence[int],
    coefficients: Sequence[Coefficients],
    tokens: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """mean + U V' (step * w * q), float32 ``[T, C]``.

    Parameters
    ----------
    table, widths
        The group's statistics, and the channels of each of its layers.
    coefficients
        Every token is in one of them.
    tokens
        T.
    device
        Where the products are computed.
    dtype
        Of the products with the rows of V whose coefficients are small, see :data:`LARGE_STEPS`.
    """
    rows, mean = (
        torch.from_numpy(array).to(device) for array in (table.coefficient_scale, table.mean)
    )
    n_rows = max((len(part.q) for part in coefficients), default=0)
    basis = scaled_basis(table, device, n_rows)
    n_fine = n_rows
    if dtype != torch.float32 and coefficients:
        finest = min(part.scale for part in coefficients)
        n_fine = min(int(np.count_nonzero(table.sigma >= LARGE_STEPS * finest)), n_rows)
    fine, coarse = basis[:n_fine], basis[n_fine:].to(dtype)
    triangles = unwhiteners(table, widths, device)
    settle_threads()
    # U multiplies whichever has fewer rows: the basis, or the tokens.
    if n_rows < tokens:
        fine = _unwhiten(fine, triangles)
        coarse = _unwhiten(coarse, [triangle.to(dtype) for triangle in triangles])
    x = torch.empty(tokens, len(mean), device=device)
    for scale, where, q in coefficients:
        y = torch.from_numpy(q).to(device) * (rows[: len(q), None] * scale)
        part = y[:n_fine].T @ fine[: len(q)]
        if len(q) > n_fine:
            part += y[n_fine:].T.to(dtype) @ coarse[: len(q) - n_fine]
        x[torch.from_numpy(where).to(device)] = part
    return (x if n_rows < tokens else _unwhiten(x, triangles)).add_(mean)


def _unwhiten(x: Tensor, triangles: Sequence[Tensor]) -> Tensor:
    """Each layer's part of ``x`` ``[rows, C]`` times its U'."""
    parts = torch.split(x, [len(triangle) for triangle in triangles], dim=1)
    return torch.cat([part @ u for part, u in zip(parts, triangles, strict=True)], dim=1)


def scaled_basis(table: GroupTables, device: torch.device, n_rows: int) -> Tensor:
    """The first rows of V, each over its ``coefficient_scale``, float32 ``[n_rows, C]``."""
    basis = torch.from_numpy(table.basis[:n_rows]).to(device).float()
    low = torch.from_numpy(table.basis_low[:n_rows]).to(device)
    basis[: len(low)] += low / 256
    return basis


def unwhiteners(table: GroupTables, widths: Sequence[int], device: torch.device) -> list[Tensor]:
    """U' of each layer of a group, float32 ``[c, c]``, lower triangular."""
    packed = torch.from_numpy(table.unwhitener).to(device).float()
    sizes = [width * (width + 1) // 2 for width in widths]
    triangles = []
    for width, scale, values in zip(
        widths, table.unwhitener_scale, torch.split(packed, sizes), strict=True
    ):
        triangle = torch.zeros(width, width, device=device)
        lower = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        triangles.append(triangle.masked_scatter_(lower, values * float(scale)))
    return triangles


def analysis_matrix(table: GroupTables, widths: Sequence[int], device: torch.device) -> Tensor:
    """A' float32 ``[C, K]``, the inverse of what :func:`synthesise` does: y = A (x - mean).

    Whitening inverts the stored triangles, so their rounding costs nothing; the rows of the basis
    are orthonormal but for theirs.
    """
    basis = scaled_basis(table, device, len(table.basis))
    basis *= torch.from_numpy(table.coefficient_scale).to(device)[:, None]
    inverse = torch.linalg.solve(basis @ basis.T, basis)  # [K, C]
    blocks = [
        torch.linalg.solve_triangular(triangle, part.T, upper=False)
        for triangle, part in zip(
            unwhiteners(table, widths, device),
            torch.split(inverse, list(widths), dim=1),
            strict=True,
        )
    ]
    return torch.cat(blocks)


class SynthesisMatrix(NamedTuple):
    """What a GPU multiplies coefficients with: x = mean + scale * (basis' (step * w * q)).

    Attributes
    ----------
    basis
        float16 ``[K, C]``, with zeros for rows up to a multiple of :data:`BASIS_UNIT`: U V', each
        channel over its largest entry, so that 11 bits are enough.
    scale, mean
        float32 ``[C]``.
    """

    basis: Tensor
    scale: Tensor
    mean: Tensor


BASIS_UNIT = 8


def synthesis_matrix(
    table: GroupTables, widths: Sequence[int], device: torch.device
) -> SynthesisMatrix:
    """U V' with the scales of the rows of V in it, see :class:`SynthesisMatrix`."""
    exact = scaled_basis(table, device, len(table.basis))
    exact *= torch.from_numpy(table.coefficient_scale).to(device)[:, None]
    exact = _unwhiten(exact, unwhiteners(table, widths, device))
    scale = exact.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny)
    n_rows = -(-len(exact) // BASIS_UNIT) * BASIS_UNIT
    basis = torch.zeros(n_rows, exact.shape[1], dtype=torch.float16, device=device)
    basis[: len(exact)] = exact / scale
    return SynthesisMatrix(basis, scale, torch.from_numpy(table.mean).to(device))


class GroupMatrices(Generic[Built]):
    """Matrices of each group and device, built when first used and shared by a model's codecs.

    Parameters
    ----------
    groups
        The model's.
    build
        Called with a group's tables, the channels of each of its layers, and a device.
    """

    def __init__(
        self,
        groups: Sequence[GroupTables],
        build: Callable[[GroupTables, Sequence[int], torch.device], Built],
    ) -> None:
        self._groups = groups
        self._build = build
        self._built = PerDevice[Built]()

    def get(self, group: int, widths: Sequence[int], device: torch.device) -> Built:
        """Those of a group, whose layers have ``widths`` channels."""
        return self._built.get(
            group, device, lambda: self._build(self._groups[group], widths, device)
        )
