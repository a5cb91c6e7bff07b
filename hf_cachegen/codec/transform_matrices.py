"""The matrix products of ``transform``: coefficients to channels, and back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from hf_cachegen.codec.transform_tables import GroupTables

Coefficients = tuple[float, NDArray[np.int64], NDArray[np.int32]]
"""step * w, int64 [T'] tokens that have it, int32 [K', T'] their coefficients."""


def settle_threads() -> None:
    """Have products in this thread run on as many threads as torch was set to.

    A new thread takes that setting over with its first parallel operation, and a product before it
    may round otherwise than the same product after it.
    """
    torch.get_num_threads()


def synthesise(
    table: GroupTables,
    widths: Sequence[int],
    coefficients: Sequence[Coefficients],
    tokens: int,
    device: torch.device,
) -> Tensor:
    """mean + U V' (step * w * q), float32 ``[T, C]``.

    Parameters
    ----------
    table, widths
        The group's statistics, and the channels of each of its layers.
    coefficients
        Every token is in one of them.
    """
    rows, mean = (
        torch.from_numpy(array).to(device) for array in (table.coefficient_scale, table.mean)
    )
    n_rows = max((len(q) for _, _, q in coefficients), default=0)
    basis = scaled_basis(table, device, n_rows)
    triangles = unwhiteners(table, widths, device)
    settle_threads()
    # U multiplies whichever has fewer rows: the basis, or the tokens.
    if n_rows < tokens:
        basis = _unwhiten(basis, triangles)
    x = torch.empty(tokens, len(mean), device=device)
    for scale, where, q in coefficients:
        y = torch.from_numpy(q).to(device) * (rows[: len(q), None] * scale)
        x[torch.from_numpy(where).to(device)] = y.T @ basis[: len(q)]
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
        rows, columns = torch.tril_indices(width, width, device=device)
        triangle[rows, columns] = values * float(scale)
        triangles.append(triangle)
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


class AnalysisMatrices:
    """A of each group and device, built when first used and shared by a model's codecs."""

    def __init__(self, groups: Sequence[GroupTables]) -> None:
        self._groups = groups
        self._built: dict[tuple[int, torch.device], Tensor] = {}
        self._lock = threading.Lock()

    def get(self, group: int, widths: Sequence[int], device: torch.device) -> Tensor:
        """A', float32 ``[C, K]``; ``widths`` are the channels of each layer of the group."""
        with self._lock:
            if (group, device) not in self._built:
                built = analysis_matrix(self._groups[group], widths, device)
                self._built[group, device] = built
            return self._built[group, device]
