"""Statistics for ``transform`` from caches of sample text and gradients on them.

Three steps, each a pass over samples with bounded memory: covariances of the stacked channels and
outer products of gradients (:meth:`TransformProfiler.observe`,
:meth:`TransformProfiler.observe_gradients`), the regression of token importance
(:meth:`TransformProfiler.observe_importance`), and counts of the coded integers
(:meth:`TransformProfiler.observe_counts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_cachegen.codec.bank import IntegerBank, TableBank, normalise_counts
from hf_cachegen.codec.channels import channels
from hf_cachegen.codec.importance import importance_features
from hf_cachegen.codec.integer_tables import LIMIT, build_integer_bank, integer_bits
from hf_cachegen.codec.kernel_codec import split_sinks
from hf_cachegen.codec.scale_classes import CLASS_RATIOS, LOWEST_RATIO, N_CLASSES
from hf_cachegen.codec.transform import TransformCodec
from hf_cachegen.codec.transform_matrices import LARGE_STEPS
from hf_cachegen.codec.transform_tables import (
    REFINEMENT,
    THIRDS_STARTS,
    GroupTables,
    TransformConfig,
    TransformTables,
    group_specs,
    layer_groups,
)
from hf_cachegen.layout import KVLayout

FINEST_EXPONENT = 2
"""Coefficients that only tokens with a finer w would code are not stored: few tokens have one."""

SMALLEST_SENSITIVITY = 1e-20
SMALLEST_IMPORTANCE = 1e-12
SMALLEST_SIGMA = 1e-20

PRIOR_COUNT = 1000
"""Integers of a class that its table takes for granted: far fewer than a sample brings."""

REGRESSION_RIDGE = 1e-3
"""Relative to the features' mean square."""


class TransformProfiler:
    """Builds :class:`~hf_cachegen.codec.transform_tables.TransformTables`.

    Call, for every group of layers of every sample, :meth:`observe`, and for some samples
    :meth:`observe_gradients`; then :meth:`observe_importance` for samples with gradients; then
    :meth:`observe_counts`; then :meth:`finish`. Tensors are all those of a group's layers, in
    order, as :meth:`TransformCodec.encode` takes them.

    Parameters
    ----------
    layout
        What the model caches.
    config
        The codec's parameters.
    """

    def __init__(self, layout: KVLayout, config: TransformConfig) -> None:
        self.layout = layout
        self.config = config
        self.groups = layer_groups(layout, config.group)
        self._widths = [[layout.layers[layer].channels for layer in group] for group in self.groups]
        self._tokens = np.zeros(len(self.groups))
        self._origins = [torch.zeros(sum(widths)) for widths in self._widths]
        self._sums = [torch.zeros(sum(widths), dtype=torch.float64) for widths in self._widths]
        self._products = [torch.zeros(sum(widths), sum(widths)) for widths in self._widths]
        self._gradient_tokens = np.zeros(len(self.groups))
        self._gradients = [[torch.zeros(c, c) for c in widths] for widths in self._widths]
        self._regressions = [
            _Regression(sum(spec.heads for spec in group_specs(layout, group)))
            for group in self.groups
        ]
        self._counts = np.zeros((config.levels, N_CLASSES, 2 * LIMIT + 2), np.int64)
        self._third_counts = np.zeros((config.levels, N_CLASSES, REFINEMENT), np.int64)
        self._low_bits = np.zeros(1)
        self._counted_values = np.zeros(1)
        self._whitening: dict[int, list[Tensor]] = {}
        self._codecs: list[TransformCodec] = []

    def observe(self, group: int, tensors: Sequence[Tensor], start: int) -> None:
        """Add a sample's values to the group's mean and covariance."""
        x = self._channels(group, tensors, start)
        if not self._tokens[group] and len(x):
            # Products around about the mean: around zero, those of a large mean drown the spread.
            self._origins[group].copy_(x.mean(0))
        x = x - self._origins[group].to(x.device)
        self._tokens[group] += len(x)
        self._sums[group] += x.sum(0, dtype=torch.float64).cpu()
        self._products[group] += (x.T @ x).cpu()

    def observe_gradients(self, group: int, gradients: Sequence[Tensor], start: int) -> None:
        """Add a sample's gradients of the next-token loss to the group's sensitivities.

        Parameters
        ----------
        gradients
            With respect to the tensors as they are cached, ``[H, T, D]`` each, of the loss summed
            over n predicted tokens and divided by the square root of n.
        """
        g = self._gradient_channels(group, gradients, start)
        self._gradient_tokens[group] += len(g)
        layers = torch.split(g, self._widths[group], dim=1)
        for total, layer in zip(self._gradients[group], layers, strict=True):
            total += (layer.T @ layer).cpu()

    def observe_importance(
        self, group: int, tensors: Sequence[Tensor], gradients: Sequence[Tensor], start: int
    ) -> None:
        """Fit the group's prediction of a token's sensitivity; after all of the above."""
        g = self._gradient_channels(group, gradients, start)
        layers = torch.split(g, self._widths[group], dim=1)
        sensitivity = torch.zeros(len(g), device=g.device)
        for factor, layer in zip(self._factors(group), layers, strict=True):
            whitened = torch.linalg.solve_triangular(factor.to(layer), layer.T, upper=False)
            sensitivity += whitened.square().sum(0)
        sensitivity /= sum(self._widths[group])  # 1 on average
        _, rest, first = split_sinks(self.config.sinks, tensors, start)
        features = importance_features(rest, first, n_tokens=first + len(g))
        target = sensitivity.clamp_min(SMALLEST_IMPORTANCE).log().cpu()
        self._regressions[group].add(features, target)

    def observe_counts(self, group: int, tensors: Sequence[Tensor], start: int) -> None:
        """Count what the codec codes at every level; after all of the above."""
        if not self._codecs:
            levels = range(self.config.levels)
            self._codecs = [TransformCodec(self.layout, self._solved, level) for level in levels]
        _, rest, _ = split_sinks(self.config.sinks, tensors, start)
        self._counted_values += sum(tensor.numel() for tensor in rest)
        for codec, counts, third_counts in zip(
            self._codecs, self._counts, self._third_counts, strict=True
        ):
            for plane in codec.coded_planes(self.groups[group].start, tensors, start):
                q = plane.integers
                columns = np.where(np.abs(q) <= LIMIT, q + LIMIT, 2 * LIMIT + 1)
                _count(counts, plane.classes[len(plane.thirds) :], columns)
                _count(third_counts, plane.classes[: len(plane.thirds)], plane.thirds)
                self._low_bits += int(plane.low_bits.sum()) * q.shape[1]

    def accumulators(self) -> dict[str, NDArray[Any]]:
        """Every array that samples are added to, in place, by name: all that a checkpoint needs."""
        arrays: dict[str, NDArray[Any]] = {
            "tokens": self._tokens,
            "gradient_tokens": self._gradient_tokens,
            "counts": self._counts,
            "third_counts": self._third_counts,
            "low_bits": self._low_bits,
            "counted_values": self._counted_values,
        }
        for group in range(len(self.groups)):
            arrays[f"origins{group}"] = self._origins[group].numpy()
            arrays[f"sums{group}"] = self._sums[group].numpy()
            arrays[f"products{group}"] = self._products[group].numpy()
            arrays[f"normal{group}"] = self._regressions[group].normal
            arrays[f"target{group}"] = self._regressions[group].target
            for member, gradients in enumerate(self._gradients[group]):
                arrays[f"gradients{group}.{member}"] = gradients.numpy()
        return arrays

    def finish(self) -> TransformTables:
        """The tables of all that was observed."""
        counts = self._counts.sum(0) + _prior_counts()
        classes = build_integer_bank(counts, -LIMIT)
        thirds = _thirds_bank(self._third_counts.sum(0))
        return replace(
            self._solved, classes=classes, thirds=thirds, rates=self._rates(classes, thirds)
        )

    def _rates(self, classes: IntegerBank, thirds: TableBank) -> NDArray[np.float32]:
        """Bits per value of each level with those it refines, entropy coding taken as ideal."""
        bits = [
            integer_bits(counts, -LIMIT, classes) + thirds.entropy_bits(third_counts.ravel())
            for counts, third_counts in zip(self._counts, self._third_counts, strict=True)
        ]
        bits[0] += self._low_bits[0]
        return (np.cumsum(bits) / max(self._counted_values[0], 1)).astype(np.float32)

    @cached_property
    def _solved(self) -> TransformTables:
        """All but the probability tables, which do not matter for which integers are coded."""
        return TransformTables(
            self.config,
            tuple(self._group_tables(group) for group in range(len(self.groups))),
            build_integer_bank(self._counts[0], -LIMIT),
            _thirds_bank(self._third_counts[0]),
            np.zeros(self.config.levels, np.float32),
        )

    def _group_tables(self, group: int) -> GroupTables:
        offset = (self._sums[group] / self._tokens[group]).float()
        mean = self._origins[group] + offset
        covariance = self._products[group] / self._tokens[group] - torch.outer(offset, offset)
        inverses = [torch.linalg.inv(factor) for factor in self._factors(group)]
        scales = [inverse.abs().max().float() for inverse in inverses]
        stored = [(u / scale).half() for u, scale in zip(inverses, scales, strict=True)]
        # Of what is stored: what rounding it to 16 bits turns, the basis turns back.
        factors = [torch.linalg.inv(u.double() * s) for u, s in zip(stored, scales, strict=True)]
        whitener = torch.block_diag(*factors).float()  # type: ignore[no-untyped-call]
        variance, vectors = torch.linalg.eigh(whitener.T @ covariance @ whitener)
        sigma = variance.flip(0).clamp_min(0).sqrt()
        finest = self.config.scale(self.config.levels - 1, FINEST_EXPONENT)
        kept = max(1, int((sigma >= LOWEST_RATIO * finest).sum()))
        n_fine = int((sigma[:kept] >= LARGE_STEPS * self.config.steps[-1]).sum())
        basis, low, scale = _quantise_rows(vectors.flip(1)[:, :kept].T, n_fine)
        packed = [triangle[*torch.tril_indices(*triangle.shape)] for triangle in stored]
        return GroupTables(
            mean=mean.numpy(),
            unwhitener=torch.cat(packed).numpy(),
            unwhitener_scale=torch.stack(scales).numpy(),
            basis=basis.numpy(),
            basis_low=low.numpy(),
            coefficient_scale=scale.numpy(),
            sigma=sigma[:kept].clamp_min(SMALLEST_SIGMA).numpy(),
            importance=self._regressions[group].solve(recency=False),
            recency=self._regressions[group].solve(recency=True),
        )

    def _factors(self, group: int) -> list[Tensor]:
        """L of each layer of a group, float64 ``[c, c]``: F = L L', so that L' whitens."""
        if group not in self._whitening:
            members = range(len(self._widths[group]))
            self._whitening[group] = [
                torch.linalg.cholesky(self._sensitivity(group, member)) for member in members
            ]
        return self._whitening[group]

    def _sensitivity(self, group: int, member: int) -> Tensor:
        """F of one layer with its ridge, float64 ``[c, c]``."""
        if not self._gradient_tokens[group]:
            raise ValueError("expected at least one sample with gradients, got none")
        f = self._gradients[group][member].double() / self._gradient_tokens[group]
        # A layer that nothing attended to in the samples has no gradient: any error is free.
        ridge = self.config.ridge * f.diagonal().mean().clamp_min(SMALLEST_SENSITIVITY)
        return f + ridge * torch.eye(len(f), dtype=f.dtype)

    def _channels(
        self, group: int, tensors: Sequence[Tensor], start: int, layout: KVLayout | None = None
    ) -> Tensor:
        """Channels before RoPE, float32 ``[T, C]``, of the tokens after the sinks."""
        specs = group_specs(self.layout, self.groups[group])
        _, rest, first = split_sinks(self.config.sinks, tensors, start)
        x = channels(layout or self.layout, specs, rest, first)
        if not torch.isfinite(x).all():
            raise ValueError(
                f"layers {self.groups[group]}: a sample's cache or gradients hold NaN or "
                "infinity; expected a model and dtype that give finite ones"
            )
        return x

    def _gradient_channels(self, group: int, gradients: Sequence[Tensor], start: int) -> Tensor:
        """Gradients with respect to the channels before RoPE.

        With K = s R k of the rotated channels, the gradient at k is s R' times that at K, which is
        to un-rotate what 1 / s had scaled.
        """
        ropes = {
            name: rope.model_copy(update={"attention_scaling": 1 / rope.attention_scaling})
            for name, rope in self.layout.ropes.items()
        }
        transposed = self.layout.model_copy(update={"ropes": ropes})
        return self._channels(group, gradients, start, transposed)


class _Regression:
    """Ridge regression with a constant, from running sums; with and without the last feature."""

    def __init__(self, features: int) -> None:
        self.normal = np.zeros((features + 2, features + 2))
        self.target = np.zeros(features + 2)

    def add(self, features: Tensor, target: Tensor) -> None:
        """Count in features ``[T, features + 1]`` and what they should predict ``[T]``."""
        rows = torch.cat((features, torch.ones(len(features), 1)), dim=1).double().numpy()
        self.normal += rows.T @ rows
        self.target += rows.T @ target.double().numpy()

    def solve(self, *, recency: bool) -> NDArray[np.float32]:
        """The weights, then the constant; zeros if nothing was observed."""
        used = np.ones(len(self.target), bool)
        used[-2] = recency
        normal, target = self.normal[np.ix_(used, used)], self.target[used]
        if not normal.any():
            return np.zeros(len(target), np.float32)
        ridge = REGRESSION_RIDGE * np.eye(len(target)) * np.trace(normal) / len(target)
        ridge[-1, -1] = 0
        return np.linalg.solve(normal + ridge, target).astype(np.float32)


def _quantise_rows(rows: Tensor, n_fine: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows float32 ``[K, C]`` as int8, 256ths of the first ``n_fine`` as int8, and their scales."""
    scale = rows.abs().amax(1) / 127
    exact = rows / scale[:, None]
    rounded = exact.round()
    low = ((exact - rounded)[:n_fine] * 256).round().clamp(-128, 127)
    return rounded.to(torch.int8), low.to(torch.int8), scale


def _count(counts: NDArray[np.int64], ids: NDArray[np.int32], columns: NDArray[np.generic]) -> None:
    """Add symbols ``[rows, T]`` to the histograms ``[tables, n]`` that ``ids`` [rows] names."""
    cells = ids[:, None].astype(np.int64) * counts.shape[1] + columns
    counts += np.bincount(cells.ravel(), minlength=counts.size).reshape(counts.shape)


def _thirds_bank(counts: NDArray[np.int64]) -> TableBank:
    """Tables of the refinement from counts [classes, 3]; a third that no sample had may occur."""
    freqs = normalise_counts((counts + 1).ravel(), THIRDS_STARTS, keep=slice(None))
    return TableBank(freqs, THIRDS_STARTS)


def _prior_counts() -> NDArray[np.int64]:
    """Counts [classes, integers and others] that every table begins with.

    Of a Laplacian of each class's spread (Lam & Goodman, A Mathematical Analysis of the DCT
    Coefficient Distributions for Images, 2000): a class that no sample had must not escape.
    """
    edges = np.arange(-LIMIT, LIMIT + 2) - 0.5
    decay = math.sqrt(2) / (CLASS_RATIOS * 2.0**0.125)[:, None]
    tail = np.exp(-np.abs(edges) * decay) / 2
    below = np.where(edges < 0, tail, 1 - tail)
    inside = np.diff(below, axis=1)
    counts = PRIOR_COUNT * np.concatenate((inside, 1 - inside.sum(1, keepdims=True)), axis=1)
    return np.round(counts).astype(np.int64)
