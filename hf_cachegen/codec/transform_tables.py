"""A model's statistics for the ``transform`` codec: what they hold, and their arrays in files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from hf_cachegen.codec.bank import IntegerBank, TableBank
from hf_cachegen.codec.integer_tables import BANK_FIELDS, bank_from_arrays, bank_to_arrays
from hf_cachegen.codec.scale_classes import N_CLASSES
from hf_cachegen.codec.table_arrays import check_names, read_array
from hf_cachegen.codec.transform_matrices import (
    GroupMatrices,
    SynthesisMatrix,
    analysis_matrix,
    synthesis_matrix,
)
from hf_cachegen.errors import FormatError
from hf_cachegen.layout import KVLayout, Record, TensorSpec

REFINEMENT = 3
"""A quantiser with a bin at zero nests in one whose step is an odd number of times larger."""

THIRDS_STARTS = np.arange(0, N_CLASSES * REFINEMENT + 1, REFINEMENT, dtype=np.int32)
"""Tables of the refinement in their bank: three symbols a scale class."""


class TransformConfig(Record):
    """Parameters of the codec, fixed when a table is profiled.

    Attributes
    ----------
    group
        Layers per group.
    step
        Quantiser step of level 0, in units of the whitened coefficients: the square root of nats
        per predicted token and coefficient. Each further level divides it by :data:`REFINEMENT`.
    levels
        How many there are.
    ridge
        Share of F's mean diagonal that is added to it.
    importance_power
        beta in w = s^(-beta / 2), s the predicted sensitivity of a token.
    max_exponent
        w lies in sqrt(2)^[-max_exponent, max_exponent].
    sinks
        First tokens of a context that are stored as they are.
    """

    group: int = Field(default=5, ge=1, le=64)
    step: float = Field(default=3e-4, gt=0)
    levels: int = Field(default=5, ge=1, le=8)
    ridge: float = Field(default=0.01, gt=0)
    importance_power: float = Field(default=0.8, ge=0)
    max_exponent: int = Field(default=6, ge=0, le=16)
    sinks: int = Field(default=1, ge=0, le=64)

    @property
    def steps(self) -> tuple[float, ...]:
        """Quantiser step of each level, coarse to fine."""
        return tuple(self.step / REFINEMENT**level for level in range(self.levels))

    def scale(self, level: int, exponent: int) -> float:
        """step * w of the tokens of an exponent."""
        half = math.sqrt(2) if exponent % 2 else 1.0
        return self.steps[level] * math.ldexp(half, int(exponent) // 2)


def layer_groups(layout: KVLayout, group: int) -> list[range]:
    """Runs of at most ``group`` adjacent layers that hold the same tokens.

    The layers of a stretch of equal windows are shared out evenly.
    """
    windows = [layer.window for layer in layout.layers]
    changes = [i for i in range(1, len(windows)) if windows[i] != windows[i - 1]]
    groups: list[range] = []
    for start, end in zip([0, *changes], [*changes, len(windows)], strict=True):
        n_groups = -(-(end - start) // group)
        bounds = [start + (end - start) * i // n_groups for i in range(n_groups + 1)]
        groups += [range(a, b) for a, b in pairwise(bounds)]
    return groups


def group_specs(layout: KVLayout, group: range) -> list[TensorSpec]:
    """The tensors of a group's layers, in order."""
    return [spec for layer in group for spec in layout.layers[layer].tensors]


@dataclass(frozen=True)
class GroupTables:
    """What the codec knows of a group of L layers: C channels, K coefficients that it codes.

    Attributes
    ----------
    mean
        float32 [C].
    unwhitener
        float16: each layer's U' = inverse of the Cholesky factor of its F, lower triangular, row by
        row without the zeros, over its scale; one layer after another. Rounding it costs nothing,
        since the encoder whitens with its inverse.
    unwhitener_scale
        float32 [L], above 0: the largest magnitude of each layer's U.
    basis
        int8 [K, C]: the Karhunen-Loeve basis of the whitened channels, orthonormal rows over their
        scale.
    basis_low
        int8 [R, C]: 256ths to add to the first R rows. What 8 bits round off a row is an error in
        the same direction for all tokens, which costs more than as much noise would; it matters for
        large coefficients.
    coefficient_scale
        float32 [K], above 0: scale of each row.
    sigma
        float32 [K], descending, above 0: standard deviation of each coefficient.
    importance
        float32 [features + 1]: ridge regression of a token's log sensitivity, then its constant.
        Used in encoding only.
    recency
        float32 [features + 2]: the same with the log of a token's distance from the end.
    """

    mean: NDArray[np.float32]
    unwhitener: NDArray[np.float16]
    unwhitener_scale: NDArray[np.float32]
    basis: NDArray[np.int8]
    basis_low: NDArray[np.int8]
    coefficient_scale: NDArray[np.float32]
    sigma: NDArray[np.float32]
    importance: NDArray[np.float32]
    recency: NDArray[np.float32]


@dataclass(frozen=True)
class TransformTables:
    """A model's statistics for ``transform``.

    Attributes
    ----------
    groups
        One entry per :func:`layer_groups`.
    classes
        Probability tables of integers by scale class, shared by all coefficients and levels.
    thirds
        The same for the refinement of a bin to one of its three.
    rates
        float32 [levels]: bits per value that each level, with those it refines, took on the
        profiled samples.
    """

    config: TransformConfig
    groups: tuple[GroupTables, ...]
    classes: IntegerBank
    thirds: TableBank
    rates: NDArray[np.float32]

    @cached_property
    def analysis(self) -> GroupMatrices[Tensor]:
        """The encoder's matrices."""
        return GroupMatrices(self.groups, analysis_matrix)

    @cached_property
    def synthesis(self) -> GroupMatrices[SynthesisMatrix]:
        """A GPU decoder's matrices."""
        return GroupMatrices(self.groups, synthesis_matrix)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Named arrays for a safetensors file."""
        arrays = {f"classes.{key}": array for key, array in bank_to_arrays(self.classes).items()}
        arrays |= {"thirds": self.thirds.freqs.reshape(N_CLASSES, REFINEMENT), "rates": self.rates}
        for index, group in enumerate(self.groups):
            arrays |= {f"group{index}.{key}": array for key, array in vars(group).items()}
        return arrays

    @classmethod
    def from_arrays(
        cls, config: TransformConfig, arrays: Mapping[str, NDArray[Any]], layout: KVLayout
    ) -> TransformTables:
        """Inverse of :meth:`to_arrays`; checks every array.

        Raises
        ------
        FormatError
            An array is missing, superfluous, of another shape or dtype, or holds impossible values.
        """
        groups = layer_groups(layout, config.group)
        fields = GroupTables.__dataclass_fields__
        expected = {"thirds", "rates", *(f"classes.{key}" for key in BANK_FIELDS)}
        expected |= {f"group{i}.{key}" for i in range(len(groups)) for key in fields}
        check_names(arrays, expected)
        bank = {key: arrays[f"classes.{key}"] for key in BANK_FIELDS}
        freqs = read_array(arrays, "thirds", np.uint16, (N_CLASSES, REFINEMENT), above_zero=True)
        thirds = TableBank(freqs.reshape(-1), THIRDS_STARTS)
        thirds.validate()
        return cls(
            config,
            tuple(_read_group(arrays, f"group{i}.", layout, g) for i, g in enumerate(groups)),
            bank_from_arrays(bank, N_CLASSES),
            thirds,
            read_array(arrays, "rates", np.float32, (config.levels,)),
        )


def _read_group(
    arrays: Mapping[str, NDArray[Any]], prefix: str, layout: KVLayout, group: range
) -> GroupTables:
    widths = [layout.layers[layer].channels for layer in group]
    features = sum(spec.heads for spec in group_specs(layout, group))
    channels, kept = sum(widths), arrays[prefix + "sigma"].size
    row_ends = np.cumsum(np.concatenate([np.arange(1, width + 1) for width in widths]))
    fine = len(np.atleast_1d(arrays[prefix + "basis_low"]))

    def read(name: str, dtype: type[Any], *shape: int, above_zero: bool = False) -> NDArray[Any]:
        return read_array(arrays, prefix + name, dtype, shape, above_zero=above_zero)

    tables = GroupTables(
        mean=read("mean", np.float32, channels),
        unwhitener=read("unwhitener", np.float16, int(row_ends[-1])),
        unwhitener_scale=read("unwhitener_scale", np.float32, len(group), above_zero=True),
        basis=read("basis", np.int8, kept, channels),
        basis_low=read("basis_low", np.int8, min(fine, kept), channels),
        coefficient_scale=read("coefficient_scale", np.float32, kept, above_zero=True),
        sigma=read("sigma", np.float32, kept, above_zero=True),
        importance=read("importance", np.float32, features + 1),
        recency=read("recency", np.float32, features + 2),
    )
    if not 1 <= kept <= channels or (np.diff(tables.sigma) > 0).any():
        raise FormatError(
            f"table array {prefix + 'sigma'!r}: expected 1 to {channels} descending values"
        )
    if (tables.unwhitener[row_ends - 1] <= 0).any():
        raise FormatError(f"table array {prefix + 'unwhitener'!r}: expected diagonals above 0")
    return tables
