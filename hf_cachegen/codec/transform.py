"""The ``transform`` codec: a sensitivity-whitened KLT over groups of layers, in nested levels.

Keys are un-rotated, the values of a group of adjacent layers are stacked to one vector x a token,
and with the model's statistics (:mod:`hf_cachegen.codec.transform_tables`)

    encode   y = V L' (x - mean)             q = round(y / (step * w))
    decode   x = mean + U V' (step * w * q)

L' whitens each layer: L L' = F, the mean outer product of the gradient of the next-token loss with
respect to what is cached, and U is the inverse of L'. V is the Karhunen-Loeve basis of the whitened
vector. In that basis an error costs the same in every coefficient, so one step serves all of them,
and reverse water-filling falls out: coefficients smaller than the step are zero and not coded
(Cover & Thomas, Elements of Information Theory, ch. 10; whitening by a Fisher estimate as in
optimal brain damage, LeCun et al. 1990).

w, a power of sqrt(2) a token and group, is the token's own step: finer for tokens that matter more.
It is sent as side information, so an encoder may choose it as it likes (:class:`Importance`).

Levels are nested: each divides the step by 3, so that a bin of one level is exactly three bins of
the next, and a segment holds only what its level adds to the levels below it. Decoding a level
takes the segments of all of them.

Coefficients are coded with the static tables of scale classes
(:mod:`hf_cachegen.codec.scale_classes`). Tokens of equal w form a plane.

The first ``sinks`` tokens of a context are stored as they are.

Segment, of a group's first layer (the group's other layers have empty segments), at level 0::

    raw values of the sinks that fall into the segment, per tensor [H, t, D]
    u32 n | u16 frequencies [2 * max_exponent + 1] and entropy-coded w of each token, n bytes:
            plane [1, T] of exponent + max_exponent
    per exponent that occurs, ascending:
        u32 n | integer plane [coded coefficients, tokens] of q >> low bits, n bytes
        u32 n | symbol plane [coefficients with low bits, tokens] of the low bits, n bytes

and at every later one::

    per exponent that occurs, ascending:
        u32 n | symbol plane [coefficients coded below, tokens] of the third of the bin, n bytes:
                0 to 2, from zero outwards
        u32 n | integer plane [coefficients that this level begins to code, tokens] of q, n bytes
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_cachegen.codec.bank import TableBank, normalise_counts
from hf_cachegen.codec.channels import channels, store_channels
from hf_cachegen.codec.entropy import (
    decode_integers,
    decode_symbols,
    encode_integers,
    encode_symbols,
)
from hf_cachegen.codec.exact import tensor_bytes
from hf_cachegen.codec.gpu import PerDevice
from hf_cachegen.codec.importance import Importance, importance_features
from hf_cachegen.codec.kernel_codec import CodedSegment, KernelCodec
from hf_cachegen.codec.planes import ByteReader, rows_per_stream, sized
from hf_cachegen.codec.scale_classes import UNIFORM, classify, n_coded
from hf_cachegen.codec.transform_matrices import (
    Coefficients,
    product_dtype,
    settle_threads,
    synthesise,
)
from hf_cachegen.codec.transform_tables import (
    REFINEMENT,
    TransformTables,
    layer_groups,
)
from hf_cachegen.errors import FormatError
from hf_cachegen.layout import KVLayout

if TYPE_CHECKING:
    from hf_cachegen.codec.rans_triton import DecodeCheck
    from hf_cachegen.codec.transform_triton import TransformGroup

LARGEST = 2.0**30
"""Largest magnitude of a coded integer."""

ROWS_PER_PRODUCT = 256
"""Coefficients that are computed at a time. A matrix product of another size may round otherwise,
and a coefficient at the edge of a bin would then not lie in the bins of the levels below."""


class TransformCodec(KernelCodec):
    """One level of ``transform``.

    Parameters
    ----------
    layout
        What the model caches.
    tables
        The model's statistics.
    level
        0, or how many refinements of it.
    importance
        How the encoder tells tokens apart; a decoder does not need it.
    kept
        As for :class:`~hf_cachegen.codec.base.SegmentCodec`.
    """

    name = "transform"

    def __init__(
        self,
        layout: KVLayout,
        tables: TransformTables,
        level: int,
        importance: Importance | None = None,
        kept: Tensor | None = None,
    ) -> None:
        super().__init__(layout, tables.config.sinks, kept)
        self.config = tables.config
        self.level = level
        self.importance = importance or Importance()
        self._tables = tables
        self._groups = layer_groups(layout, tables.config.group)
        self._group_of = {group.start: index for index, group in enumerate(self._groups)}
        self._on_gpu: PerDevice[TransformGroup] = PerDevice()

    def members(self, layer: int) -> Sequence[int]:
        return self._groups[self._group_of[layer]] if layer in self._group_of else ()

    def encode(self, layer: int, tensors: Sequence[Tensor], start: int) -> bytes:
        return encode_ladder([self], layer, tensors, start)[0]

    def _decode_rest(
        self, reader: ByteReader, layer: int, out: Sequence[Tensor], start: int
    ) -> None:
        tokens = out[0].shape[1]
        x = synthesise(
            self._tables.groups[self._group_of[layer]],
            self._widths(layer),
            list(self._decode_coefficients(reader, layer, tokens).values()),
            tokens,
            out[0].device,
            product_dtype(self.dtype),
        )
        positions = self.positions(layer, start, tokens)
        store_channels(self.layout, self.specs(layer), x, out, positions)

    def coded_planes(
        self, layer: int, tensors: Sequence[Tensor], start: int
    ) -> Iterator[CodedPlane]:
        """What :meth:`encode` codes with tables of scale classes, for counting."""
        _, rest, start = self._split(tensors, start)
        for exponent, finest in self._quantise(layer, rest, start).items():
            yield self._coded_plane(layer, exponent, finest)

    def _widths(self, layer: int) -> list[int]:
        """Channels of each layer of a group."""
        return [self.layout.layers[member].channels for member in self.members(layer)]

    def _sigma(self, layer: int) -> NDArray[np.float32]:
        return self._tables.groups[self._group_of[layer]].sigma

    def _rows(
        self, layer: int, exponent: int, level: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Scale class and low bits of each coefficient coded at a level, and how many below it."""
        sigma = self._sigma(layer)
        scale = self.config.scale(level, exponent)
        below = n_coded(sigma, self.config.scale(level - 1, exponent)) if level else 0
        classes, low_bits = classify(sigma[: n_coded(sigma, scale)], scale)
        return classes, low_bits if level == 0 else np.zeros_like(low_bits), below

    def _quantise(
        self, layer: int, tensors: Sequence[Tensor], start: int
    ) -> dict[int, Coefficients]:
        """The coefficients that this level codes, of tokens after the sinks, by exponent.

        In steps of the last level, whichever this is.
        """
        positions = self.positions(layer, start, tensors[0].shape[1])
        x = channels(self.layout, self.specs(layer), tensors, positions)
        if not torch.isfinite(x).all():
            raise ValueError(
                f"layer {layer}: the cache holds NaN or infinity, which `transform` cannot "
                "represent; use the level `lossless`"
            )
        if not len(x):
            return {}
        exponents = self._exponents(layer, tensors, start)
        sigma, finest = self._sigma(layer), self.config.levels - 1
        n_rows = n_coded(sigma, self.config.scale(self.level, int(exponents.min())))
        y = self._analyse(layer, x, n_rows)
        found = {}
        for exponent in np.unique(exponents).tolist():
            tokens = np.flatnonzero(exponents == exponent)
            rows = n_coded(sigma, self.config.scale(self.level, exponent))
            part = y[torch.from_numpy(tokens).to(x.device), :rows].T
            scale = self.config.scale(finest, exponent)
            q = torch.round(part / scale)
            if not bool((q.abs() <= LARGEST).all()):
                raise ValueError(
                    f"layer {layer}: the cache holds a value {LARGEST:.0e} steps away from all "
                    "that was profiled, which `transform` cannot represent; use `lossless`"
                )
            found[exponent] = Coefficients(scale, tokens, q.int().cpu().numpy())
        return found

    def _analyse(self, layer: int, x: Tensor, n_rows: int) -> Tensor:
        """``n_rows`` coefficients or more of channels ``[T, C]``, float32 ``[T, K']``."""
        group = self._group_of[layer]
        mean = torch.from_numpy(self._tables.groups[group].mean).to(x.device)
        analysis = self._tables.analysis.get(group, self._widths(layer), x.device)
        settle_threads()
        # Products of one size, so that a coefficient is the same to the bit at every level.
        n_products = max(1, -(-n_rows // ROWS_PER_PRODUCT))
        centred, blocks = x - mean, torch.split(analysis, ROWS_PER_PRODUCT, dim=1)
        return torch.cat([centred @ block for block in blocks[:n_products]], dim=1)

    def _nested(self, layer: int, exponent: int, finest: Coefficients) -> NDArray[np.int32]:
        """The integers of this level's coefficients, whose bins are made of those of the last."""
        rows = n_coded(self._sigma(layer), self.config.scale(self.level, exponent))
        coarse = REFINEMENT ** (self.config.levels - 1 - self.level)
        return (finest.q[:rows] + coarse // 2) // coarse

    def _coded_plane(self, layer: int, exponent: int, finest: Coefficients) -> CodedPlane:
        """What this level codes of coefficients in steps of the last level."""
        classes, low_bits, below = self._rows(layer, exponent, self.level)
        q, n_low = self._nested(layer, exponent, finest), int(np.count_nonzero(low_bits))
        return CodedPlane(
            classes,
            low_bits,
            thirds=_thirds(q[:below]),
            integers=q[below:] >> low_bits[below:, None],
            low=(q[:n_low] & ((1 << low_bits[:n_low, None]) - 1)).astype(np.uint8),
        )

    def _exponents(self, layer: int, tensors: Sequence[Tensor], start: int) -> NDArray[np.int64]:
        """log_sqrt2 of each token's w."""
        table = self._tables.groups[self._group_of[layer]]
        n_tokens = tensors[0].shape[1]
        log_sensitivity = torch.zeros(n_tokens)
        if self.importance.mode != "flat":
            features = importance_features(tensors, start, self.importance.n_tokens)
            weights = table.recency if self.importance.mode == "recent" else table.importance
            used = features[:, : len(weights) - 1]
            log_sensitivity += used @ torch.from_numpy(weights[:-1]) + weights[-1]
        if self.importance.log_weights is not None:
            log_sensitivity += self.importance.log_weights[start : start + n_tokens].float().cpu()
        exponents = torch.round(-self.config.importance_power * log_sensitivity / math.log(2))
        limit = self.config.max_exponent
        return torch.nan_to_num(exponents).clamp(-limit, limit).long().numpy()

    def _encode_planes(self, layer: int, found: Mapping[int, Coefficients]) -> Iterator[bytes]:
        """Everything of a segment but the sinks, in parts, of what :meth:`_quantise` returns."""
        if self.level == 0 and found:
            yield _encode_exponents(found, self.config.max_exponent)
        for exponent, finest in found.items():
            yield from self._encode_plane(self._coded_plane(layer, exponent, finest))

    def _encode_plane(self, plane: CodedPlane) -> tuple[bytes, bytes]:
        rows, below = rows_per_stream(plane.integers.shape[1]), len(plane.thirds)
        integers = encode_integers(
            plane.integers, plane.classes[below:], self._tables.classes, rows
        )
        if self.level:
            thirds = self._tables.thirds
            return encode_symbols(plane.thirds, plane.classes[:below], thirds, rows), integers
        low_bits = plane.low_bits[: len(plane.low)]
        return integers, encode_symbols(plane.low, low_bits, UNIFORM, rows)

    def _decode_coefficients(
        self, reader: ByteReader, layer: int, tokens: int
    ) -> dict[int, Coefficients]:
        """By exponent."""
        return {
            coded.exponent: Coefficients(
                self.config.scale(self.level, coded.exponent),
                coded.tokens,
                self._decode_plane(layer, coded),
            )
            for coded in self._read_planes(reader, tokens)
        }

    def _read_planes(self, reader: ByteReader, tokens: int) -> list[CodedTokens]:
        """What is coded of the tokens of each exponent that occurs."""
        coded = reader.take_sized()
        exponents = _decode_exponents(coded, tokens, self.config.max_exponent)
        found = [
            CodedTokens(exponent, np.flatnonzero(exponents == exponent), [])
            for exponent in np.unique(exponents).tolist()
        ]
        for _ in range(self.level + 1):
            for part in found:
                part.levels.append((reader.take_sized(), reader.take_sized()))
        return found

    def _decode_plane(self, layer: int, coded: CodedTokens) -> NDArray[np.int32]:
        q = np.empty((0, len(coded.tokens)), np.int32)
        for level in range(len(coded.levels)):
            q = self._decode_level(layer, coded, level, q)
        return q

    def _decode_level(
        self, layer: int, coded: CodedTokens, level: int, coarse: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Integers as a level refines them."""
        classes, low_bits, below = self._rows(layer, coded.exponent, level)
        n_tokens = len(coded.tokens)
        rows, (first, second) = rows_per_stream(n_tokens), coded.levels[level]
        shape = (len(classes) - below, n_tokens)
        integers = second if level else first
        q = decode_integers(integers, shape, classes[below:], self._tables.classes, rows)
        if level:
            thirds = decode_symbols(
                first, (below, n_tokens), classes[:below], self._tables.thirds, rows
            )
            return np.concatenate((_refine(coarse, thirds), q))
        n_low = int(np.count_nonzero(low_bits))
        low = decode_symbols(second, (n_low, n_tokens), low_bits[:n_low], UNIFORM, rows)
        q[:n_low] = (q[:n_low] << low_bits[:n_low, None]) | low
        return q

    def _launch(
        self, layer: int, segments: Sequence[CodedSegment], out: Sequence[Tensor], start: int
    ) -> DecodeCheck:
        from hf_cachegen.codec import transform_triton as gpu

        group, batch = self._gpu_group(layer, out[0].device), [tensor[None] for tensor in out]
        return gpu.launch_segments(group, self.layout, self.specs(layer), segments, batch, start)

    def _gpu_group(self, layer: int, device: torch.device) -> TransformGroup:
        from hf_cachegen.codec import transform_triton as gpu

        group, widths = self._group_of[layer], self._widths(layer)
        return self._on_gpu.get(
            layer,
            device,
            lambda: gpu.TransformGroup.build(
                self._tables,
                self._tables.synthesis.get(group, widths, device),
                self.level,
                partial(self._rows, layer),
            ),
        )


def encode_ladder(
    codecs: Sequence[TransformCodec], layer: int, tensors: Sequence[Tensor], start: int
) -> list[bytes]:
    """Encode a segment at several levels of one table and importance: the segment of each.

    Other parameters and errors as for :meth:`SegmentCodec.encode`. What costs most, the product
    that gives the coefficients, is done once.
    """
    finest = max(codecs, key=lambda codec: codec.level)
    finest.check_tensors(layer, tensors)
    sinks, rest, start = finest._split(tensors, start)
    exact = [tensor_bytes(tensor) for tensor in sinks]
    found = finest._quantise(layer, rest, start)
    segments = []
    for codec in codecs:
        parts = [] if codec.level else list(exact)
        parts += map(sized, codec._encode_planes(layer, found))
        segments.append(b"".join(parts))
    return segments


class CodedTokens(NamedTuple):
    """What a segment holds of the tokens that share a step.

    Attributes
    ----------
    exponent
        log_sqrt2 of their w.
    tokens
        int64 [T']: which of the segment's they are, sinks not counted.
    levels
        The two planes of each level, coarse to fine.
    """

    exponent: int
    tokens: NDArray[np.int64]
    levels: list[tuple[bytes, bytes]]


class CodedPlane(NamedTuple):
    """What is coded of the tokens of one exponent at one level.

    Attributes
    ----------
    classes, low_bits
        int32 [R]: scale class and low bits of every coefficient coded at this level.
    thirds
        uint8 [rows, T']: the first of them, which the level below codes too.
    integers
        int32 [rows, T']: the others, without their low bits.
    low
        uint8 [rows, T']: low bits of the first of them, which are none but at level 0.
    """

    classes: NDArray[np.int32]
    low_bits: NDArray[np.int32]
    thirds: NDArray[np.uint8]
    integers: NDArray[np.int32]
    low: NDArray[np.uint8]


def _thirds(q: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Which third of the coarser level's bin each ``q`` lies in, counted from zero outwards."""
    third = (q + 1) % REFINEMENT - 1  # -1, 0, 1
    return (np.where(q < -1, -third, third) + 1).astype(np.uint8)


def _refine(q: NDArray[np.int32], thirds: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Inverse of :func:`_thirds`, from the coarser level's ``q``."""
    third = thirds.astype(np.int32) - 1
    return REFINEMENT * q + np.where(q < 0, -third, third)


def _encode_exponents(found: Mapping[int, Coefficients], limit: int) -> bytes:
    """Frequencies of the 2 * limit + 1 exponents, then the plane coded with them."""
    symbols = np.empty((1, sum(len(part.tokens) for part in found.values())), np.uint8)
    for exponent, part in found.items():
        symbols[0, part.tokens] = exponent + limit
    counts = np.bincount(symbols[0], minlength=2 * limit + 1)
    freqs = normalise_counts(counts, keep=np.flatnonzero(counts))
    bank = TableBank(freqs, np.array([0, len(freqs)], np.int32))
    return freqs.astype("<u2").tobytes() + encode_symbols(symbols, np.zeros(1, int), bank, 1)


def _decode_exponents(data: bytes, tokens: int, limit: int) -> NDArray[np.int64]:
    """Inverse of :func:`_encode_exponents`: the exponent of each token."""
    n_table = 2 * (2 * limit + 1)
    if len(data) < n_table:
        raise FormatError(f"token steps: expected at least {n_table} bytes, found {len(data)}")
    freqs = np.frombuffer(data[:n_table], "<u2").astype(np.uint16)
    bank = TableBank(freqs, np.array([0, len(freqs)], np.int32))
    bank.validate()
    symbols = decode_symbols(data[n_table:], (1, tokens), np.zeros(1, int), bank, 1)
    return symbols[0].astype(np.int64) - limit
