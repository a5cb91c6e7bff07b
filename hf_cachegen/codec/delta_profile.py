"""Statistics for ``delta`` from caches of sample text, in two passes and bounded memory.

Pass 1 takes each channel's mean and standard deviation, which place the anchors; its difference
spread needs reconstructed anchors, but differences to the unquantised anchor have the same spread
to within the anchor's step, so one pass serves both. Pass 2 counts the integers that the codec
will code, at every level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_cachegen.codec.channels import channels, kept_positions
from hf_cachegen.codec.delta import (
    DeltaConfig,
    DeltaTables,
    anchors_and_differences,
    difference_tokens,
    layer_rows,
    table_ids,
)
from hf_cachegen.codec.integer_tables import LIMIT, build_integer_bank
from hf_cachegen.codec.kernel_codec import split_sinks
from hf_cachegen.layout import KVLayout


class _Moments:
    """Running mean and variance per row, merged chunk by chunk (Chan et al. 1979)."""

    def __init__(self, rows: int) -> None:
        self.count = np.zeros(rows)
        self.mean = np.zeros(rows)
        self.squares = np.zeros(rows)

    def add(self, rows: slice, x: Tensor) -> None:
        """Count in the columns of ``x`` ``[rows, T]``."""
        if x.shape[1] == 0:
            return
        n, old = x.shape[1], self.count[rows]
        mean = x.double().mean(dim=1).cpu().numpy()
        squares = x.double().var(dim=1, correction=0).cpu().numpy() * n
        shift = mean - self.mean[rows]
        self.squares[rows] += squares + shift**2 * old * n / (old + n)
        self.mean[rows] += shift * n / (old + n)
        self.count[rows] += n

    def deviation(self) -> NDArray[np.float32]:
        """Standard deviation per row; a channel that never moved gets a small one."""
        deviation = np.sqrt(self.squares / np.maximum(self.count, 1))
        # An escape reaches 2^31 bins. With this floor, any usual value of a channel that was
        # constant in the samples lies well within that, and so does it if there were no samples.
        typical = deviation.mean() or 1.0
        floor = np.maximum(np.abs(self.mean) * 2.0**-16, typical * 2.0**-12)
        return np.maximum(deviation, floor).astype(np.float32)


class DeltaProfiler:
    """Builds :class:`~hf_cachegen.codec.delta.DeltaTables`.

    Call :meth:`observe_moments` for every layer of every sample, then :meth:`observe_counts` for
    the same samples again, then :meth:`finish`.

    Parameters
    ----------
    layout
        What the model caches.
    config
        The codec's parameters.
    kept
        As for :class:`~hf_cachegen.codec.base.SegmentCodec`, if the only sample is of such a
        context.
    """

    def __init__(self, layout: KVLayout, config: DeltaConfig, kept: Tensor | None = None) -> None:
        self.layout = layout
        self.config = config
        self._kept = kept
        self._rows = layer_rows(layout)
        n_rows = self._rows[-1].stop
        self._values = _Moments(n_rows)
        self._differences = _Moments(n_rows)
        self._statistics: tuple[NDArray[np.float32], ...] | None = None
        self._table_ids = table_ids(layout, config)
        # The last column counts what is out of range.
        shape = (int(self._table_ids[-1][-1]) + 1, 2 * LIMIT + 2)
        self._anchor_counts = np.zeros(shape, np.int32)
        self._counts = [np.zeros(shape, np.int32) for _ in config.factors]

    def observe_moments(self, layer: int, tensors: Sequence[Tensor], start: int) -> None:
        """Pass 1. Arguments as :meth:`hf_cachegen.codec.base.SegmentCodec.encode`."""
        x, group = self._channels(layer, tensors, start), self.config.group
        self._values.add(self._rows[layer], x)
        if group:
            anchors = x[:, ::group].repeat_interleave(group, dim=1)[:, : x.shape[1]]
            mask = difference_tokens(x.shape[1], group, x.device)
            self._differences.add(self._rows[layer], (x - anchors)[:, mask])

    def observe_counts(self, layer: int, tensors: Sequence[Tensor], start: int) -> None:
        """Pass 2. Arguments as :meth:`observe_moments`."""
        x, rows = self._channels(layer, tensors, start), self._rows[layer]
        mean, step, spread = (
            torch.from_numpy(vector[rows, None]).to(x.device) for vector in self._finished()
        )
        anchors, differences = anchors_and_differences(x, mean, step, self.config.group)
        if anchors is not None:
            _count(self._anchor_counts, self._table_ids[layer], anchors)
        bins = spread * self.config.bin(layer, len(self.layout.layers))
        for counts, factor in zip(self._counts, self.config.factors, strict=True):
            _count(counts, self._table_ids[layer], torch.round(differences / (bins * factor)))

    def accumulators(self) -> dict[str, NDArray[Any]]:
        """Every array that samples are added to, in place, by name: all that a checkpoint needs."""
        arrays: dict[str, NDArray[Any]] = {"anchor_counts": self._anchor_counts}
        arrays |= {f"counts{level}": counts for level, counts in enumerate(self._counts)}
        for name, moments in (("values", self._values), ("differences", self._differences)):
            arrays |= {f"{name}.{key}": array for key, array in vars(moments).items()}
        return arrays

    def finish(self) -> DeltaTables:
        """The tables of all that was observed."""
        mean, anchor_step, spread = self._finished()
        return DeltaTables(
            config=self.config,
            mean=mean,
            anchor_step=anchor_step,
            spread=spread,
            anchors=build_integer_bank(self._anchor_counts, -LIMIT) if self.config.group else None,
            differences=tuple(build_integer_bank(counts, -LIMIT) for counts in self._counts),
        )

    def _channels(self, layer: int, tensors: Sequence[Tensor], start: int) -> Tensor:
        """Channels float32 ``[C, T]`` of the tokens after the sinks."""
        _, rest, start = split_sinks(self.config.sinks, tensors, start)
        positions = kept_positions(self.layout, [layer], self._kept, start, rest[0].shape[1])
        x = channels(self.layout, self.layout.layers[layer].tensors, rest, positions)
        x = x.T.contiguous()
        if not torch.isfinite(x).all():
            raise ValueError(
                f"layer {layer}: the sample's cache holds NaN or infinity; expected a model and "
                "dtype that give finite ones"
            )
        return x

    def _finished(self) -> tuple[NDArray[np.float32], ...]:
        if self._statistics is None:
            deviation = self._values.deviation()
            span = 2 * self.config.anchor_range / (2**self.config.anchor_bits - 1)
            spread = self._differences.deviation() if self.config.group else deviation
            step = (deviation * np.float32(span)).astype(np.float32)
            self._statistics = (self._values.mean.astype(np.float32), step, spread)
        return self._statistics


def _count(counts: NDArray[np.int32], ids: NDArray[np.int32], q: Tensor) -> None:
    """Add the integers ``q`` ``[C, T]`` to the histograms ``[tables, 2 LIMIT + 2]`` of ``ids``."""
    first, n_tables = int(ids[0]), int(ids[-1] - ids[0]) + 1  # a layer's tables are consecutive
    columns = torch.where(q.abs() <= LIMIT, q + LIMIT, 2 * LIMIT + 1).long()
    rows = torch.from_numpy(ids - first).to(q.device, torch.int64)
    found = torch.bincount(
        (columns + rows[:, None] * counts.shape[1]).flatten(), minlength=n_tables * counts.shape[1]
    )
    counts[first : first + n_tables] += found.view(n_tables, -1).cpu().numpy().astype(np.int32)
