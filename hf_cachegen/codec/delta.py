"""The ``delta`` codec: CacheGen's transform (Liu et al., SIGCOMM 2024), complete.

Keys are un-rotated first. Tokens go in groups; the first of a group, the anchor, is quantised per
channel to ``anchor_bits``; the others are coded as differences to the reconstructed anchor. Bins
are a multiple of each channel's difference spread that grows with the layer's depth, and are
scaled by the level's factor. Every channel of every layer has its own static probability tables,
for anchors and, per level, for differences (:class:`DeltaTables`, profiled once per model).

The first ``sinks`` tokens of a context are stored as they are: attention sinks are orders of
magnitude larger than any other token.

Segment::

    raw values of the sinks that fall into the segment, per tensor [H, t, D]
    u32 n | entropy-coded anchors, n bytes, plane [C, ceil(T / group)]        (none if group is 0)
    entropy-coded differences, plane [C, T - ceil(T / group)]

with C over the layer's tensors in order (channel h * D + d of each) and T the tokens after sinks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from hf_cachegen.codec.bank import IntegerBank
from hf_cachegen.codec.channels import channels, store_channels
from hf_cachegen.codec.entropy import decode_integers, encode_integers
from hf_cachegen.codec.exact import tensor_bytes
from hf_cachegen.codec.gpu import PerDevice
from hf_cachegen.codec.integer_tables import BANK_FIELDS, bank_from_arrays, bank_to_arrays
from hf_cachegen.codec.kernel_codec import CodedSegment, KernelCodec
from hf_cachegen.codec.planes import ByteReader, rows_per_stream
from hf_cachegen.errors import FormatError
from hf_cachegen.layout import KVLayout, Record

if TYPE_CHECKING:
    from hf_cachegen.codec.delta_triton import DeltaPlanes
    from hf_cachegen.codec.rans_triton import DecodeCheck

LARGEST = 2.0**31 - 128
"""Largest magnitude of a coded integer: the last float32 that fits an int32."""


class DeltaConfig(Record):
    """Parameters of the codec, fixed when a table is profiled.

    Attributes
    ----------
    group
        Tokens per anchor. 0 codes no anchors: differences to the channel's profiled mean.
    anchor_bits
        Resolution of anchors over ``anchor_range`` standard deviations either way.
    bins
        Bin widths of the layers' equal parts from shallow to deep, in spreads of the difference.
    factors
        Factor on ``bins`` of each level, coarse to fine.
    sinks
        First tokens of a context that are stored as they are.
    tables
        Probability tables for every ``channel`` (the paper's), or one for all channels of a
        ``tensor`` in a layer, for when a table must be small.
    """

    group: int = Field(default=10, ge=0, le=1024)
    anchor_bits: int = Field(default=8, ge=2, le=8)
    anchor_range: float = Field(default=4.5, gt=0)
    bins: tuple[float, ...] = Field(default=(0.5, 1.0, 1.5), min_length=1, strict=False)
    factors: tuple[float, ...] = Field(default=(1.0, 0.5, 0.35, 0.2), min_length=1, strict=False)
    sinks: int = Field(default=4, ge=0, le=64)
    tables: Literal["channel", "tensor"] = "channel"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if min(self.bins) <= 0 or min(self.factors) <= 0:
            raise ValueError(f"expected positive bins and factors, got {self.bins}, {self.factors}")
        if list(self.factors) != sorted(set(self.factors), reverse=True):
            raise ValueError(f"expected factors that decrease, coarse to fine, got {self.factors}")
        return self

    def bin(self, layer: int, n_layers: int) -> float:
        """Bin width of a layer in spreads, before the level's factor."""
        return self.bins[layer * len(self.bins) // n_layers]


def row_offsets(layout: KVLayout) -> list[int]:
    """First table row of each layer, then the number of rows: a row is one channel of one layer."""
    return list(accumulate((layer.channels for layer in layout.layers), initial=0))


def table_ids(layout: KVLayout, config: DeltaConfig) -> list[NDArray[np.int32]]:
    """Probability table of every channel of each layer, int32 [C] a layer."""
    channels = [[spec.channels for spec in layer.tensors] for layer in layout.layers]
    if config.tables == "channel":
        offsets = row_offsets(layout)
        return [np.arange(*bounds, dtype=np.int32) for bounds in pairwise(offsets)]
    first = accumulate((len(layer) for layer in channels), initial=0)
    return [
        np.repeat(np.arange(start, start + len(layer), dtype=np.int32), layer)
        for start, layer in zip(first, channels, strict=False)
    ]


@dataclass(frozen=True)
class DeltaTables:
    """A model's statistics for ``delta``; rows as :func:`row_offsets` counts them.

    Attributes
    ----------
    mean, anchor_step, spread
        float32 [rows]: the channel's mean, the anchors' bin width, the standard deviation of
        differences.
    anchors
        Probability tables of anchors; None without anchors.
    differences
        Probability tables of differences, one bank per level.
    """

    config: DeltaConfig
    mean: NDArray[np.float32]
    anchor_step: NDArray[np.float32]
    spread: NDArray[np.float32]
    anchors: IntegerBank | None
    differences: tuple[IntegerBank, ...]

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Named arrays for a safetensors file."""
        arrays: dict[str, NDArray[Any]] = {
            "mean": self.mean,
            "anchor_step": self.anchor_step,
            "spread": self.spread,
        }
        for name, bank in self._banks().items():
            arrays.update({f"{name}.{key}": value for key, value in bank_to_arrays(bank).items()})
        return arrays

    @classmethod
    def from_arrays(
        cls, config: DeltaConfig, arrays: Mapping[str, NDArray[Any]], layout: KVLayout
    ) -> DeltaTables:
        """Inverse of :meth:`to_arrays`; checks every array.

        Raises
        ------
        FormatError
            An array is missing, superfluous, of another shape or dtype, or not a valid table.
        """
        rows = row_offsets(layout)[-1]
        vectors = {}
        for name in ("mean", "anchor_step", "spread"):
            found = arrays.get(name)
            if found is None or found.shape != (rows,) or found.dtype != np.float32:
                raise FormatError(
                    f"table array {name!r}: expected float32 [{rows}], found "
                    f"{None if found is None else (found.dtype, found.shape)}"
                )
            if not np.isfinite(found).all() or (name != "mean" and (found <= 0).any()):
                raise FormatError(f"table array {name!r}: expected finite values, steps above 0")
            vectors[name] = found
        names = [*(["anchors"] if config.group else []), *_level_names(config)]
        expected = {*vectors, *(f"{name}.{key}" for name in names for key in BANK_FIELDS)}
        if set(arrays) != expected:
            raise FormatError(f"table arrays: expected {sorted(expected)}, found {sorted(arrays)}")
        banks = {}
        n_tables = int(table_ids(layout, config)[-1][-1]) + 1
        for name in names:
            fields = {key: arrays[f"{name}.{key}"] for key in BANK_FIELDS}
            banks[name] = bank_from_arrays(fields, n_tables)
        return cls(
            config,
            **vectors,
            anchors=banks.get("anchors"),
            differences=tuple(banks[name] for name in _level_names(config)),
        )

    def _banks(self) -> dict[str, IntegerBank]:
        anchors = {} if self.anchors is None else {"anchors": self.anchors}
        return {**anchors, **dict(zip(_level_names(self.config), self.differences, strict=True))}


def _level_names(config: DeltaConfig) -> list[str]:
    return [f"differences{level}" for level in range(len(config.factors))]


class DeltaTransform:
    """Channel planes of one layer to (anchors, differences) and back; the codec's float part."""

    def __init__(self, config: DeltaConfig, mean: Tensor, anchor_step: Tensor) -> None:
        self.config = config
        self.mean = mean[:, None]
        self.anchor_step = anchor_step[:, None]

    def anchors(self, x: Tensor) -> Tensor:
        """Quantised anchors, float ``[C, ceil(T / group)]``, of planes ``x`` float32 ``[C, T]``."""
        return torch.round((x[:, :: self.config.group] - self.mean) / self.anchor_step)

    def references(self, anchors: Tensor | None, tokens: int) -> Tensor:
        """What differences are taken to: anchors, repeated; or the mean, ``[C, 1]``."""
        if anchors is None:
            return self.mean
        values = self.mean + anchors * self.anchor_step
        return values.repeat_interleave(self.config.group, dim=1)[:, :tokens]

    def is_difference(self, tokens: int, device: torch.device) -> Tensor:
        """Mask of the tokens that are not anchors, bool ``[T]``."""
        mask = torch.ones(tokens, dtype=torch.bool, device=device)
        if self.config.group:
            mask[:: self.config.group] = False
        return mask


class DeltaCodec(KernelCodec):
    """One level of ``delta``.

    Parameters
    ----------
    layout
        What the model caches.
    tables
        The model's statistics.
    level
        Index into ``tables.config.factors``.
    kept
        As for :class:`~hf_cachegen.codec.base.SegmentCodec`.
    """

    name = "delta"

    def __init__(
        self, layout: KVLayout, tables: DeltaTables, level: int, kept: Tensor | None = None
    ) -> None:
        super().__init__(layout, tables.config.sinks, kept)
        self.config = tables.config
        self._offsets = row_offsets(layout)
        self._table_ids = table_ids(layout, tables.config)
        self._anchors = tables.anchors
        self._differences = tables.differences[level]
        self._mean = torch.from_numpy(tables.mean)
        self._anchor_step = torch.from_numpy(tables.anchor_step)
        n_layers, factor = len(layout.layers), tables.config.factors[level]
        bins = [self.config.bin(layer, n_layers) * factor for layer in range(n_layers)]
        per_row = np.repeat(np.array(bins, np.float32), np.diff(self._offsets))
        self._bin = torch.from_numpy(tables.spread * per_row)
        self._on_gpu: PerDevice[DeltaPlanes] = PerDevice()

    def encode(self, layer: int, tensors: Sequence[Tensor], start: int) -> bytes:
        self.check_tensors(layer, tensors)
        sinks = self._sinks(start, tensors[0].shape[1])
        parts = [tensor_bytes(tensor[:, :sinks]) for tensor in tensors]
        rest = [tensor[:, sinks:] for tensor in tensors]
        positions = self.positions(layer, start + sinks, rest[0].shape[1])
        x = channels(self.layout, self.specs(layer), rest, positions).T.contiguous()
        if x.shape[1] == 0:
            return b"".join(parts)
        transform, bins = self._on(layer, x.device)
        anchors = transform.anchors(x) if self.config.group else None
        difference = x - transform.references(anchors, x.shape[1])
        difference = difference[:, transform.is_difference(x.shape[1], x.device)]
        if anchors is not None:
            coded = self._encode_plane(self._anchors, layer, anchors)
            parts.append(struct.pack("<I", len(coded)) + coded)
        parts.append(self._encode_plane(self._differences, layer, torch.round(difference / bins)))
        return b"".join(parts)

    def _decode_rest(
        self, reader: ByteReader, layer: int, out: Sequence[Tensor], start: int
    ) -> None:
        tokens = out[0].shape[1]
        x = self._decode_planes(reader, layer, tokens, out[0].device)
        positions = self.positions(layer, start, tokens)
        store_channels(self.layout, self.specs(layer), x.T, out, positions)

    def _read_planes(self, reader: ByteReader, tokens: int) -> list[bytes]:
        """The anchors' plane, if there are anchors, and the differences'."""
        anchors = [reader.take(reader.unpack("<I")[0])] if self.config.group else []
        return [*anchors, reader.rest()]

    def _launch(
        self, layer: int, segments: Sequence[CodedSegment], out: Sequence[Tensor], start: int
    ) -> DecodeCheck:
        from hf_cachegen.codec import delta_triton as gpu

        planes, batch = self._gpu_planes(layer, out[0].device), [tensor[None] for tensor in out]
        return gpu.launch_segments(planes, self.layout, self.specs(layer), segments, batch, start)

    def _gpu_planes(self, layer: int, device: torch.device) -> DeltaPlanes:
        from hf_cachegen.codec import delta_triton as gpu

        rows = slice(self._offsets[layer], self._offsets[layer + 1])
        return self._on_gpu.get(
            layer,
            device,
            lambda: gpu.DeltaPlanes.build(
                [bank for bank in (self._anchors, self._differences) if bank is not None],
                self._table_ids[layer],
                [vector[rows] for vector in (self._mean, self._anchor_step, self._bin)],
                self.config.group,
                device,
            ),
        )

    def _decode_planes(
        self, reader: ByteReader, layer: int, tokens: int, device: torch.device
    ) -> Tensor:
        """Channel planes float32 ``[C, T]`` from a segment's integers."""
        transform, bins = self._on(layer, device)
        *anchors_plane, plane = self._read_planes(reader, tokens)
        if not anchors_plane:
            q = self._decode_plane(self._differences, layer, plane, tokens, device)
            return torch.addcmul(transform.mean, q, bins)
        group = self.config.group
        n_groups = -(-tokens // group)
        anchors = self._decode_plane(self._anchors, layer, anchors_plane[0], n_groups, device)
        q = self._decode_plane(self._differences, layer, plane, tokens - n_groups, device)
        # A short last group is padded, so that all groups are one reshape.
        q = torch.nn.functional.pad(q, (0, n_groups * (group - 1) - q.shape[1]))
        values = transform.mean + anchors * transform.anchor_step
        x = values[:, :, None].repeat(1, 1, group)
        x[:, :, 1:].addcmul_(q.view(len(q), n_groups, group - 1), bins[:, :, None])
        return x.flatten(1)[:, :tokens]

    def _on(self, layer: int, device: torch.device) -> tuple[DeltaTransform, Tensor]:
        rows = slice(self._offsets[layer], self._offsets[layer + 1])
        transform = DeltaTransform(
            self.config, self._mean[rows].to(device), self._anchor_step[rows].to(device)
        )
        return transform, self._bin[rows, None].to(device)

    def _encode_plane(self, bank: IntegerBank | None, layer: int, q: Tensor) -> bytes:
        assert bank is not None
        # Written so that NaN fails it too.
        if not bool((q.abs() <= LARGEST).all()):
            raise ValueError(
                f"layer {layer}: the cache holds NaN, infinity or a value {LARGEST:.0e} bins away "
                "from all that was profiled, which `delta` cannot represent; use `lossless`"
            )
        integers = q.to(torch.int32).cpu().numpy()
        ids = self._table_ids[layer]
        return encode_integers(integers, ids, bank, rows_per_stream(integers.shape[1]))

    def _decode_plane(
        self, bank: IntegerBank | None, layer: int, data: bytes, tokens: int, device: torch.device
    ) -> Tensor:
        assert bank is not None
        ids = self._table_ids[layer]
        shape = (len(ids), tokens)
        integers = decode_integers(data, shape, ids, bank, rows_per_stream(tokens))
        return torch.from_numpy(integers).to(device).float()
