"""The ``delta`` codec's decoder for GPUs: :mod:`hf_cachegen.codec.delta` on Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_cachegen.codec.bank import IntegerBank
from hf_cachegen.codec.cache_triton import cache_tensors, place_of
from hf_cachegen.codec.kernel_codec import CodedSegment
from hf_cachegen.codec.planes import rows_per_stream
from hf_cachegen.codec.rans_triton import (
    DecodeCheck,
    PlaneBytes,
    coded_planes,
    entry_tables,
    launch_planes,
)
from hf_cachegen.layout import KVLayout, TensorSpec
from hf_cachegen.triton_kernels.delta import DeltaChannels, DeltaSegment, reconstruct
from hf_cachegen.triton_kernels.streams import EntryTables, PlaneShape


@dataclass(frozen=True, eq=False)
class DeltaPlanes:
    """What a layer's segments are decoded with, on one device.

    Attributes
    ----------
    tables
        Of the anchors' rows, then of the differences'.
    mean, anchor_step, bins
        float32 [C].
    group
        Tokens per anchor, 0 for none.
    """

    tables: EntryTables
    mean: Tensor
    anchor_step: Tensor
    bins: Tensor
    group: int

    @classmethod
    def build(
        cls,
        banks: Sequence[IntegerBank],
        table_ids: NDArray[np.integer[Any]],
        parameters: Sequence[Tensor],
        group: int,
        device: torch.device,
    ) -> DeltaPlanes:
        """From the banks of anchors, if there are any, and differences; and mean, steps, bins."""
        tables = entry_tables([(bank, table_ids, len(table_ids)) for bank in banks])
        mean, step, bins = (vector.to(device).contiguous() for vector in parameters)
        return cls(tables.to(device), mean, step, bins, group)


def launch_segments(
    planes: DeltaPlanes,
    layout: KVLayout,
    specs: Sequence[TensorSpec],
    segments: Sequence[CodedSegment],
    out: Sequence[Tensor],
    start: int,
) -> DecodeCheck:
    """Launch the decoding of segments of one layer on the current stream.

    Parameters
    ----------
    planes
        The layer's.
    layout, specs
        Its tensors.
    segments
        Of any chunks and contexts; together they fill a GPU better than one by one.
    out
        Tensors ``[B, H, T, D]`` on the device of ``planes``, any strides.
    start
        Position of their first token.

    Returns
    -------
    DecodeCheck
        Waits, and raises FormatError if a segment is damaged: ``out`` is undefined then.

    Raises
    ------
    FormatError
        The bytes are not planes of these shapes.
    """
    n_channels = len(planes.mean)
    coded, places, at = [], [], 0
    for segment in segments:
        n_groups = -(-segment.tokens // planes.group) if planes.group else 0
        widths = [n_groups, segment.tokens - n_groups] if planes.group else [segment.tokens]
        for kind, (data, width) in enumerate(zip(segment.planes, widths, strict=True)):
            shape = PlaneShape(n_channels, width, rows_per_stream(width), kind * n_channels)
            coded.append(PlaneBytes(data, shape, True))
        places.append(DeltaSegment(at, at + n_channels * n_groups, place_of(segment)))
        at += n_channels * segment.tokens
    integers, check = launch_planes(coded_planes(coded), planes.tables)
    for rows, rotary, tensor in cache_tensors(layout, specs, out, start):
        vectors = (planes.mean[rows], planes.anchor_step[rows], planes.bins[rows])
        channels = DeltaChannels(*vectors, rows.start, n_channels)
        reconstruct(integers, places, channels, planes.group, rotary, tensor)
    return check
