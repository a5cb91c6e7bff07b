"""The ``transform`` codec's decoder for GPUs: :mod:`hf_cachegen.codec.transform` on Triton kernels.

All planes of a launch are decoded at once, then joined and multiplied batch by batch. A row of a
product is a token, and tokens are sorted by their step: those of a coarse one have fewer
coefficients, so runs of about equal steps are multiplied apart, each with as many rows of the basis
as it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_cachegen.codec.cache_triton import CacheTensor, cache_tensors, place_of
from hf_cachegen.codec.kernel_codec import CodedSegment
from hf_cachegen.codec.planes import rows_per_stream
from hf_cachegen.codec.rans_triton import (
    DecodeCheck,
    PlaneBytes,
    coded_planes,
    entry_tables,
    launch_planes,
)
from hf_cachegen.codec.scale_classes import UNIFORM
from hf_cachegen.codec.transform import CodedTokens
from hf_cachegen.codec.transform_matrices import BASIS_UNIT, SynthesisMatrix
from hf_cachegen.codec.transform_tables import TransformTables
from hf_cachegen.layout import KVLayout, TensorSpec
from hf_cachegen.triton_kernels import transform as kernels
from hf_cachegen.triton_kernels.streams import CodedPlanes, EntryTables, PlaneShape, to_device

BATCH_TOKENS = 16_384
"""Tokens whose product is held at once, at 4 bytes a value; more only if one segment has more."""

PRODUCT_TOKENS = 128
"""Fewer tokens are multiplied together with those of coarser steps: a tile of a product has as
many."""

RowsOf = Callable[[int, int], tuple[NDArray[np.int32], NDArray[np.int32], int]]
"""Called with (exponent, level); returns scale class and low bits of each coefficient that is coded
at the level, int32 [R] each, and how many of them the level below codes too."""


class RowSpan(NamedTuple):
    """Where what belongs to the planes of a level and an exponent begins.

    Attributes
    ----------
    n_rows, below
        Coefficients that are coded at this level, and how many of them the level below codes too.
    n_low
        How many of them have low bits: none but at level 0.
    integers, thirds, low
        First row of each plane in the tables.
    low_bits
        Number of low bits of the first coefficient.
    """

    n_rows: int
    below: int
    n_low: int
    integers: int
    thirds: int
    low: int
    low_bits: int


@dataclass(frozen=True, eq=False)
class TransformGroup:
    """What a group's segments of one level are decoded with, on one device.

    Attributes
    ----------
    tables
        Of the rows of all planes that there can be.
    spans
        By (level, exponent).
    low_bits
        uint8 [m].
    synthesis
        The group's.
    scales
        step * w by exponent.
    """

    tables: EntryTables
    spans: Mapping[tuple[int, int], RowSpan]
    low_bits: Tensor
    synthesis: SynthesisMatrix
    scales: Mapping[int, float]

    @classmethod
    def build(
        cls, tables: TransformTables, synthesis: SynthesisMatrix, level: int, rows_of: RowsOf
    ) -> TransformGroup:
        """On the device of ``synthesis``."""
        limit, device = tables.config.max_exponent, synthesis.basis.device
        exponents = range(-limit, limit + 1)
        empty: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        integers, thirds, low = empty[:], empty[:], empty[:]
        spans: dict[tuple[int, int], RowSpan] = {}
        for at_level in range(level + 1):
            for exponent in exponents:
                classes, low_bits, below = rows_of(exponent, at_level)
                n_low = int(np.count_nonzero(low_bits))
                begins = [sum(map(len, ids)) for ids in (integers, thirds, low, low)]
                spans[at_level, exponent] = RowSpan(len(classes), below, n_low, *begins)
                integers.append(classes[below:])
                thirds.append(classes[:below])
                low.append(low_bits[:n_low])
        ids = [np.concatenate(parts) for parts in (integers, thirds, low)]
        banks = (tables.classes, tables.thirds, UNIFORM)
        entries = entry_tables([(b, i, len(i)) for b, i in zip(banks, ids, strict=True)])
        first_third, first_low = len(ids[0]), len(ids[0]) + len(ids[1])
        return cls(
            entries.to(device),
            {
                key: span._replace(thirds=first_third + span.thirds, low=first_low + span.low)
                for key, span in spans.items()
            },
            to_device(torch.from_numpy(ids[2].astype(np.uint8)), device),
            synthesis,
            {exponent: tables.config.scale(level, exponent) for exponent in exponents},
        )


def launch_segments(
    group: TransformGroup,
    layout: KVLayout,
    specs: Sequence[TensorSpec],
    segments: Sequence[CodedSegment],
    out: Sequence[Tensor],
    start: int,
) -> DecodeCheck:
    """Launch the decoding of segments of one group of layers on the current stream.

    ``specs`` and ``out`` are the tensors of all its layers. Other parameters, result and errors are
    those of :func:`hf_cachegen.codec.delta_triton.launch_segments`.
    """
    planes, tokens = plan_segments(group, segments)
    integers, check = launch_planes(planes, group.tables)
    tensors = cache_tensors(layout, specs, out, start)
    for batch in _batches(segments):
        *firsts, n_tokens = accumulate((segments[index].tokens for index in batch), initial=0)
        members = [
            (part, firsts[part.segment - batch.start] + part.tokens)
            for part in tokens
            if part.segment in batch
        ]
        places = [
            kernels.TransformSegment(first, place_of(segments[index]))
            for index, first in zip(batch, firsts, strict=True)
        ]
        _store(group, _multiply(group, integers, members, n_tokens), places, tensors)
    return check


class PlacedTokens(NamedTuple):
    """The tokens of the segment of an index that share a step, and how their planes are joined."""

    segment: int
    tokens: NDArray[np.int64]
    exponent: int
    plane: kernels.CoefficientPlane


def plan_segments(
    group: TransformGroup, segments: Sequence[CodedSegment]
) -> tuple[CodedPlanes, list[PlacedTokens]]:
    """All planes of some segments, and where their integers will be, once they are decoded.

    Raises
    ------
    FormatError
        The bytes are not planes of these shapes.
    """
    collected = _PlaneCollector(group)
    tokens = [
        PlacedTokens(index, coded.tokens, coded.exponent, collected.add(coded))
        for index, segment in enumerate(segments)
        for coded in segment.planes
    ]
    return coded_planes(collected.parts), tokens


class _PlaneCollector:
    """Collects the planes of a launch, and where their symbols will be."""

    def __init__(self, group: TransformGroup) -> None:
        self.parts: list[PlaneBytes] = []
        self._group = group
        self._n_symbols = 0

    def add(self, coded: CodedTokens) -> kernels.CoefficientPlane:
        """The planes of tokens; returns how to join them, to no rows or columns yet."""
        spans = [self._group.spans[level, coded.exponent] for level in range(len(coded.levels))]
        n_tokens, levels = len(coded.tokens), []
        rows = rows_per_stream(n_tokens)
        low = thirds = 0
        for level, (span, (first, second)) in enumerate(zip(spans, coded.levels, strict=True)):
            if level:
                shape = PlaneShape(span.below, n_tokens, rows, span.thirds)
                thirds = self._add(first, shape, False)
            shape = PlaneShape(span.n_rows - span.below, n_tokens, rows, span.integers)
            fresh = self._add(second if level else first, shape, True)
            if not level:
                low = self._add(second, PlaneShape(span.n_low, n_tokens, rows, span.low), False)
            levels.append(kernels.LevelPlanes(fresh, thirds, span.n_rows))
        return kernels.CoefficientPlane(
            n_tokens, 0, 0, low, spans[0].n_low, spans[0].low_bits, levels
        )

    def _add(self, data: bytes, shape: PlaneShape, holds_integers: bool) -> int:
        self.parts.append(PlaneBytes(data, shape, holds_integers))
        at = self._n_symbols
        self._n_symbols += shape.n_rows * shape.tokens
        return at


def _batches(segments: Sequence[CodedSegment]) -> Iterator[range]:
    """Runs of segments of at most :data:`BATCH_TOKENS`, each of at least one segment."""
    begin = n_tokens = 0
    for end, segment in enumerate(segments):
        if begin < end and n_tokens + segment.tokens > BATCH_TOKENS:
            yield range(begin, end)
            begin, n_tokens = end, 0
        n_tokens += segment.tokens
    yield range(begin, len(segments))


def _multiply(
    group: TransformGroup,
    integers: Tensor,
    members: Sequence[tuple[PlacedTokens, NDArray[np.int64]]],
    n_tokens: int,
) -> kernels.TransformProduct:
    """The product of ``n_tokens`` tokens, with the numbers [T'] that each of its members has."""
    basis, device = group.synthesis.basis, integers.device
    rows, scales = np.empty(n_tokens, np.int32), np.empty(n_tokens, np.float32)
    planes, row = [], 0
    # The finest steps first: they have most coefficients.
    ordered = sorted(members, key=lambda member: member[0].exponent)
    products = _products([(part.exponent, part.plane) for part, _ in ordered])
    for (part, numbers), columns in zip(ordered, products.columns, strict=True):
        rows[numbers] = np.arange(row, row + part.plane.tokens)
        scales[numbers] = group.scales[part.exponent] / kernels.COEFFICIENT_SCALE
        planes.append(part.plane._replace(row=row, columns=columns))
        row += part.plane.tokens
    shape = (n_tokens, max(products.columns, default=0))
    coefficients = torch.empty(shape, dtype=torch.float16, device=device)
    kernels.join(integers, planes, group.low_bits, coefficients)
    values = torch.empty((n_tokens, basis.shape[1]), device=device)
    for begin, end, columns in products.bounds:
        kernels.multiply(coefficients[begin:end, :columns], basis[:columns], values[begin:end])
    on_device = (to_device(torch.from_numpy(array), device) for array in (rows, scales))
    return kernels.TransformProduct(values, *on_device)


class _Products(NamedTuple):
    """How rows are shared out to products.

    Attributes
    ----------
    columns
        Of each plane: what its product has.
    bounds
        First row, end and columns of each product.
    """

    columns: list[int]
    bounds: list[tuple[int, int, int]]


def _products(planes: Sequence[tuple[int, kernels.CoefficientPlane]]) -> _Products:
    """Share out planes, sorted by exponent, to products."""
    found, row, last = _Products([], []), 0, None
    for exponent, plane in planes:
        begin, _, columns = found.bounds[-1] if found.bounds else (0, 0, 0)
        if last is None or (exponent != last and row - begin >= PRODUCT_TOKENS):
            begin = row
            columns = max(-(-plane.levels[-1].n_rows // BASIS_UNIT), 1) * BASIS_UNIT
        else:
            found.bounds.pop()
        row, last = row + plane.tokens, exponent
        found.columns.append(columns)
        found.bounds.append((begin, row, columns))
    return found


def _store(
    group: TransformGroup,
    product: kernels.TransformProduct,
    places: Sequence[kernels.TransformSegment],
    tensors: Sequence[CacheTensor],
) -> None:
    """Launch the last step for every tensor."""
    _, scale, mean = group.synthesis
    for rows, rotary, tensor in tensors:
        channels = kernels.TransformChannels(mean[rows], scale[rows], rows.start)
        kernels.store(product, places, channels, rotary, tensor)
