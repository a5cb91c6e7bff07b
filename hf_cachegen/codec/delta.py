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
from hf_cachegen.codec.planes import ByteReader, rows_per_stream, sized
from hf_cachegen.codec.table_arrays import check_names, read_array
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


def layer_rows(layout: KVLayout) -> list[slice]:
    """Rows of each layer: a row is one channel of one layer."""
    bounds = accumulate((layer.channels for layer in layout.layers), initial=0)
    return [slice(first, end) for first, end in pairwise(bounds)]


def table_ids(layout: KVLayout, config: DeltaConfig) -> list[NDArray[np.int32]]:
    """Probability table of every channel of each layer, int32 [C] a layer."""
    if config.tables == "channel":
        return [np.arange(rows.start, rows.stop, dtype=np.int32) for rows in layer_rows(layout)]
    channels = [[spec.channels for spec in layer.tensors] for layer in layout.layers]
    first = accumulate((len(layer) for layer in channels), initial=0)
    return [
        np.repeat(np.arange(start, start + len(layer), dtype=np.int32), layer)
        for start, layer in zip(first, channels, strict=False)
    ]


@dataclass(frozen=True)
class DeltaTables:
    """A model's statistics for ``delta``; rows as :func:`layer_rows` counts them.

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
        n_rows = layer_rows(layout)[-1].stop
        names = [*(["anchors"] if config.group else []), *_level_names(config)]
        above_zero = {"mean": False, "anchor_step": True, "spread": True}
        check_names(arrays, {*above_zero, *(f"{n}.{key}" for n in names for key in BANK_FIELDS)})
        vectors = {
            name: read_array(arrays, name, np.float32, (n_rows,), above_zero=above)
            for name, above in above_zero.items()
        }
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


def difference_tokens(tokens: int, group: int, device: torch.device) -> Tensor:
    """Mask of the tokens that are not anchors, bool ``[T]``."""
    mask = torch.ones(tokens, dtype=torch.bool, device=device)
    if group:
        mask[::group] = False
    return mask


def anchors_and_differences(
    x: Tensor, mean: Tensor, anchor_step: Tensor, group: int
) -> tuple[Tensor | None, Tensor]:
    """The codec's transform.

    Parameters
    ----------
    x
        Channels of a layer before RoPE, float32 ``[C, T]``.
    mean, anchor_step
        Float32 ``[C, 1]``.
    group
        Tokens per anchor; 0 for none.

    Returns
    -------
    anchors
        Quantised, float32 ``[C, ceil(T / group)]``; None without anchors.
    differences
        Of the other tokens to what their anchor decodes to, or to the mean; not quantised, float32
        ``[C, rest]``.
    """
    anchors, reference = None, mean
    if group:
        anchors = torch.round((x[:, ::group] - mean) / anchor_step)
        decoded = mean + anchors * anchor_step
        reference = decoded.repeat_interleave(group, dim=1)[:, : x.shape[1]]
    return anchors, (x - reference)[:, difference_tokens(x.shape[1], group, x.device)]


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
        self._rows = layer_rows(layout)
        self._table_ids = table_ids(layout, tables.config)
        self._anchors = tables.anchors
        self._differences = tables.differences[level]
        self._mean = torch.from_numpy(tables.mean)
        self._anchor_step = torch.from_numpy(tables.anchor_step)
        n_layers, factor = len(layout.layers), tables.config.factors[level]
        bins = [self.config.bin(layer, n_layers) * factor for layer in range(n_layers)]
        n_rows = [layer.channels for layer in layout.layers]
        per_row = np.repeat(np.array(bins, np.float32), n_rows)
        self._bins = torch.from_numpy(tables.spread * per_row)
        self._on_gpu: PerDevice[DeltaPlanes] = PerDevice()

    def encode(self, layer: int, tensors: Sequence[Tensor], start: int) -> bytes:
        self.check_tensors(layer, tensors)
        sinks, rest, start = self._split(tensors, start)
        parts = [tensor_bytes(tensor) for tensor in sinks]
        positions = self.positions(layer, start, rest[0].shape[1])
        x = channels(self.layout, self.specs(layer), rest, positions).T.contiguous()
        if x.shape[1] == 0:
            return b"".join(parts)
        mean, anchor_step, bins = self._parameters(layer, x.device)
        anchors, differences = anchors_and_differences(x, mean, anchor_step, self.config.group)
        if anchors is not None:
            parts.append(sized(self._encode_plane(self._anchors, layer, anchors)))
        parts.append(self._encode_plane(self._differences, layer, torch.round(differences / bins)))
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
        anchors = [reader.take_sized()] if self.config.group else []
        return [*anchors, reader.rest()]

    def _launch(
        self, layer: int, segments: Sequence[CodedSegment], out: Sequence[Tensor], start: int
    ) -> DecodeCheck:
        from hf_cachegen.codec import delta_triton as gpu

        planes, batch = self._gpu_planes(layer, out[0].device), [tensor[None] for tensor in out]
        return gpu.launch_segments(planes, self.layout, self.specs(layer), segments, batch, start)

    def _gpu_planes(self, layer: int, device: torch.device) -> DeltaPlanes:
        from hf_cachegen.codec import delta_triton as gpu

        rows = self._rows[layer]
        return self._on_gpu.get(
            layer,
            device,
            lambda: gpu.DeltaPlanes.build(
                [bank for bank in (self._anchors, self._differences) if bank is not None],
                self._table_ids[layer],
                [vector[rows] for vector in (self._mean, self._anchor_step, self._bins)],
                self.config.group,
                device,
            ),
        )

    def _decode_planes(
        self, reader: ByteReader, layer: int, tokens: int, device: torch.device
    ) -> Tensor:
        """Channel planes float32 ``[C, T]`` from a segment's integers."""
        mean, anchor_step, bins = self._parameters(layer, device)
        *anchors_plane, plane = self._read_planes(reader, tokens)
        if not anchors_plane:
            q = self._decode_plane(self._differences, layer, plane, tokens, device)
            return torch.addcmul(mean, q, bins)
        group = self.config.group
        n_groups = -(-tokens // group)
        anchors = self._decode_plane(self._anchors, layer, anchors_plane[0], n_groups, device)
        q = self._decode_plane(self._differences, layer, plane, tokens - n_groups, device)
        # A short last group is padded, so that all groups are one reshape.
        q = torch.nn.functional.pad(q, (0, n_groups * (group - 1) - q.shape[1]))
        values = mean + anchors * anchor_step
        x = values[:, :, None].repeat(1, 1, group)
        x[:, :, 1:].addcmul_(q.view(len(q), n_groups, group - 1), bins[:, :, None])
        return x.flatten(1)[:, :tokens]

    def _parameters(self, layer: int, device: torch.device) -> list[Tensor]:
        """Mean, anchor step and bin width of a layer's channels, float32 ``[C, 1]``."""
        rows = self._rows[layer]
        return [
            vector[rows, None].to(device) for vector in (self._mean, self._anchor_step, self._bins)
        ]

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
