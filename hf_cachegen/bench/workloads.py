"""Coded segments in the shape of a large model, from random values, for timing the GPU decoders."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_cachegen.bench.entropy import fit_bank
from hf_cachegen.bench.roofline import DELTA_GROUP, MEASURED_STEPS, Shape
from hf_cachegen.codec import delta_triton, transform_triton
from hf_cachegen.codec.bank import IntegerBank, TableBank, normalise_counts
from hf_cachegen.codec.channels import store_channels
from hf_cachegen.codec.entropy import encode_integers
from hf_cachegen.codec.importance import Importance
from hf_cachegen.codec.kernel_codec import CodedSegment
from hf_cachegen.codec.planes import ByteReader, rows_per_stream
from hf_cachegen.codec.rans_triton import DecodeCheck, PlaneBytes, coded_planes, launch_planes
from hf_cachegen.codec.rope import rotate
from hf_cachegen.codec.scale_classes import CLASS_RATIOS, LOWEST_RATIO, N_CLASSES
from hf_cachegen.codec.transform import TransformCodec
from hf_cachegen.codec.transform_tables import (
    THIRDS_STARTS,
    GroupTables,
    TransformConfig,
    TransformTables,
)
from hf_cachegen.config import CHUNK_TOKENS
from hf_cachegen.layout import KVLayout, LayerSpec, RopeSpec, TensorSpec
from hf_cachegen.triton_kernels.streams import PlaneShape

LARGEST_RATIO = 30.0
"""Of a coefficient's standard deviation to the step at level 0, in tables that have 0.8 bits."""

LIMIT = 31
"""Largest integer of a synthetic table: 64 symbols."""

TOLERANCE = 0.02
"""Allowed difference to the values on the CPU, in their standard deviation: bfloat16 rounds, and so
do the product's operands."""


def synthetic_layout(shape: Shape, layers: int) -> KVLayout:
    """Layers of rotated keys and values."""
    specs = tuple(TensorSpec(name=n, heads=shape.heads, dim=shape.dim) for n in "kv")
    rope = RopeSpec(
        inv_freq=tuple(5e5 ** -(np.arange(0, shape.dim, 2) / shape.dim)),
        attention_scaling=1.0,
        pairing="half",
    )
    tensors = (specs[0].model_copy(update={"rope": "r"}), specs[1])
    layer = LayerSpec(kind="full_attention", tensors=tensors)
    return KVLayout(dtype="bfloat16", ropes={"r": rope}, layers=(layer,) * layers)


def _outputs(shape: Shape, n_tensors: int, device: torch.device) -> list[Tensor]:
    size = (shape.contexts, shape.heads, shape.tokens, shape.dim)
    return [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(n_tensors)]


class DeltaLayer:
    """Laplacian integers in the shape of one layer of all contexts."""

    n_layers = 1

    def __init__(self, shape: Shape, device: torch.device) -> None:
        rng = np.random.default_rng(0)
        channels = shape.channels
        self.device = device
        self.layout = synthetic_layout(shape, 1)
        self.specs = self.layout.layers[0].tensors
        self._integers = [_laplace(rng, channels, width) for width in shape.planes]
        banks = [fit_bank(q) for q in self._integers[:2]]
        rows = np.arange(channels)
        coded = [
            encode_integers(q, rows, banks[index % 2], rows_per_stream(q.shape[1]))
            for index, q in enumerate(self._integers)
        ]
        self.bits_per_value = 8 * sum(map(len, coded)) / (channels * shape.tokens)
        self.vectors = [torch.rand(channels) + 0.5 for _ in range(3)]
        self.planes = delta_triton.DeltaPlanes.build(banks, rows, self.vectors, DELTA_GROUP, device)
        self.segments = [
            CodedSegment(coded[2 * k : 2 * k + 2], tokens, batch, k * CHUNK_TOKENS)
            for batch in range(shape.contexts)
            for k, tokens in enumerate(shape.chunks)
        ]
        self.out = _outputs(shape, 2, device)

    def decode(self) -> DecodeCheck:
        """As :class:`~hf_cachegen.bench.kernels.Workload`."""
        return delta_triton.launch_segments(
            self.planes, self.layout, self.specs, self.segments, self.out, 0
        )

    def decode_integers(self) -> None:
        """As :class:`~hf_cachegen.bench.kernels.Workload`."""
        n_rows = len(self.vectors[0])
        shapes = [
            PlaneShape(n_rows, q.shape[1], rows_per_stream(q.shape[1]), index % 2 * n_rows)
            for index, q in enumerate(self._integers)
        ]
        coded = [plane for segment in self.segments for plane in segment.planes]
        shapes *= len(coded) // len(shapes)
        parts = [PlaneBytes(data, shape, True) for data, shape in zip(coded, shapes, strict=True)]
        launch_planes(coded_planes(parts), self.planes.tables)

    def check(self) -> None:
        """Raise RuntimeError unless every chunk decodes to the values that its integers mean."""
        self.decode()()
        for number, segment in enumerate(self.segments):
            index = 2 * number % len(self._integers)
            for tensor, expected in zip(self.out, self._expected(index, segment), strict=True):
                end = segment.first_token + segment.tokens
                found = tensor[segment.batch, :, segment.first_token : end]
                if not torch.allclose(found.float(), expected, rtol=0.01, atol=0.01):
                    raise _wrong()

    def _expected(self, index: int, segment: CodedSegment) -> list[Tensor]:
        anchors, differences = (
            torch.from_numpy(q).to(self.device) for q in self._integers[index : index + 2]
        )
        mean, step, bins = (vector.to(self.device)[:, None] for vector in self.vectors)
        x = (mean + anchors * step).repeat_interleave(DELTA_GROUP, dim=1)[:, : segment.tokens]
        coded = torch.arange(segment.tokens, device=self.device) % DELTA_GROUP != 0
        x[:, coded] += differences * bins
        shape = self.out[0].shape
        values = [part.view(shape[1], shape[3], -1).transpose(1, 2) for part in x.chunk(2)]
        return [rotate(values[0], self.layout.ropes["r"], segment.first_token), values[1]]


class TransformLayers:
    """The largest group of layers of all contexts, with steps and coefficients as measured."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.n_layers = max(shape.groups)
        self.layout = synthetic_layout(shape, self.n_layers)
        level = len(MEASURED_STEPS[0].known) - 1
        tables = _synthetic_tables(self.n_layers * shape.channels, self.n_layers, level + 1)
        importance = Importance("flat", shape.tokens, _log_weights(shape.tokens, tables.config))
        codecs = [
            TransformCodec(self.layout, tables, index, importance) for index in range(level + 1)
        ]
        self._codec = codecs[-1]
        self._specs = self._codec.specs(0)
        self.out = _outputs(shape, len(self._specs), device)
        self.group = self._codec._gpu_group(0, device)
        self._data = [
            b"".join(
                codec.encode(0, self._values(tokens, index), index * CHUNK_TOKENS)
                for codec in codecs
            )
            for index, tokens in enumerate(shape.chunks)
        ]
        n_values = self.n_layers * shape.channels * shape.tokens
        self.bits_per_value = 8 * sum(map(len, self._data)) / n_values
        self.segments = [
            CodedSegment(
                self._codec._read_planes(ByteReader(data, "segment"), tokens),
                tokens,
                batch,
                index * CHUNK_TOKENS,
            )
            for batch in range(shape.contexts)
            for index, (data, tokens) in enumerate(zip(self._data, shape.chunks, strict=True))
        ]

    def decode(self) -> DecodeCheck:
        """As :class:`~hf_cachegen.bench.kernels.Workload`."""
        return transform_triton.launch_segments(
            self.group, self.layout, self._specs, self.segments, self.out, 0
        )

    def decode_integers(self) -> None:
        """As :class:`~hf_cachegen.bench.kernels.Workload`."""
        planes, _ = transform_triton.plan_segments(self.group, self.segments)
        launch_planes(planes, self.group.tables)

    def check(self) -> None:
        """Raise RuntimeError unless every chunk decodes to what the CPU makes of it."""
        self.decode()()
        for index, data in enumerate(self._data):
            chunks = [s for s in self.segments if s.first_token == index * CHUNK_TOKENS]
            first, end = chunks[0].first_token, chunks[0].first_token + chunks[0].tokens
            expected = [
                torch.empty_like(tensor[0, :, first:end], device="cpu") for tensor in self.out
            ]
            self._codec.decode_into(0, data, expected, first)
            for segment in chunks:
                for tensor, values in zip(self.out, expected, strict=True):
                    found = tensor[segment.batch, :, first:end].cpu().float()
                    allowed = TOLERANCE * values.float().std()
                    if not ((found - values.float()).square().mean().sqrt() <= allowed):
                        raise _wrong()

    def _values(self, tokens: int, index: int) -> list[Tensor]:
        """Random tensors ``[H, T, D]`` with the statistics of the tables, on their device."""
        table, (basis, scale, mean) = self._codec._tables.groups[0], self.group.synthesis
        generator = torch.Generator().manual_seed(index)
        # Laplacian, as coefficients of a Karhunen-Loeve transform are.
        uniform = torch.rand(tokens, len(table.sigma), generator=generator) - 0.5
        y = -uniform.sign() * torch.log1p(-2 * uniform.abs()) / math.sqrt(2)
        y = (y * torch.from_numpy(table.sigma)).to(basis.device)
        x = (y @ basis[: y.shape[1]].float()) * scale + mean
        shape = [(spec.heads, tokens, spec.dim) for spec in self._specs]
        tensors = [torch.empty(s, dtype=torch.bfloat16, device=basis.device) for s in shape]
        store_channels(self.layout, self._specs, x, tensors, index * CHUNK_TOKENS)
        return tensors


def _synthetic_tables(channels: int, layers: int, levels: int) -> TransformTables:
    """A random basis, and a spectrum of which each level codes as much as was measured."""
    rng, config = np.random.default_rng(0), TransformConfig(step=1.0, levels=levels, sinks=0)
    # Where the spectrum falls below each step that was measured.
    points = {
        known * channels: LOWEST_RATIO * config.scale(level, part.exponent)
        for part in MEASURED_STEPS
        for level, known in enumerate(part.known)
    }
    ends = [0.0, *sorted(points)]
    ratios = [LARGEST_RATIO, *(points[end] for end in ends[1:])]
    sigma = np.exp(np.interp(np.arange(int(ends[-1])), ends, np.log(ratios)))
    basis = rng.integers(-127, 128, (len(sigma), channels), dtype=np.int8)
    width = channels // layers
    triangle = np.zeros((width, width), np.float16)
    np.fill_diagonal(triangle, 1)
    table = GroupTables(
        mean=rng.normal(size=channels).astype(np.float32),
        unwhitener=np.tile(triangle[np.tril_indices(width)], layers),
        unwhitener_scale=np.ones(layers, np.float32),
        basis=basis,
        basis_low=np.zeros((0, channels), np.int8),
        # Rows of length 1, as those of an orthonormal basis.
        coefficient_scale=np.full(len(sigma), 1 / (127 * math.sqrt(channels / 3)), np.float32),
        sigma=sigma.astype(np.float32),
        importance=np.zeros(1, np.float32),
        recency=np.zeros(1, np.float32),
    )
    size = 2 * LIMIT + 2
    starts = np.arange(0, N_CLASSES * size + 1, size, dtype=np.int32)
    decay = math.sqrt(2) / (CLASS_RATIOS * 2.0**0.125)[:, None]
    counts = np.exp(-np.abs(np.arange(size) - LIMIT) * decay)
    freqs = normalise_counts(counts.ravel(), starts, keep=starts[1:] - 1)
    lo = np.full(N_CLASSES, -LIMIT, np.int32)
    thirds = normalise_counts(np.tile([1, 2, 1], N_CLASSES), THIRDS_STARTS)
    return TransformTables(
        config,
        (table,),
        IntegerBank(freqs, starts, lo),
        TableBank(thirds, THIRDS_STARTS),
        np.zeros(levels, np.float32),
    )


def _log_weights(tokens: int, config: TransformConfig) -> Tensor:
    """What gives tokens their measured steps, shuffled."""
    shares = np.cumsum([part.share for part in MEASURED_STEPS])
    drawn = np.searchsorted(shares / shares[-1], np.random.default_rng(1).random(tokens))
    exponents = np.array([part.exponent for part in MEASURED_STEPS])[drawn]
    return torch.from_numpy(-exponents * math.log(2) / config.importance_power).float()


def _laplace(rng: np.random.Generator, rows: int, tokens: int) -> NDArray[np.int32]:
    return np.rint(rng.laplace(0, 2, (rows, tokens))).astype(np.int32)


def _wrong() -> RuntimeError:
    return RuntimeError("the GPU does not give back what was encoded")
