from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from kernel_samples import ROPES, START, assert_rounds, decode_on_gpu, rope_of, rotary_of
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_cachegen.codec import kernel_codec
from hf_cachegen.codec import transform_triton as gpu
from hf_cachegen.codec.bank import IntegerBank, TableBank, normalise_counts
from hf_cachegen.codec.base import PlacedSegment
from hf_cachegen.codec.channels import store_channels
from hf_cachegen.codec.importance import Importance
from hf_cachegen.codec.planes import ByteReader
from hf_cachegen.codec.rope import rotate
from hf_cachegen.codec.scale_classes import N_CLASSES, n_coded
from hf_cachegen.codec.transform import TransformCodec
from hf_cachegen.codec.transform_matrices import scaled_basis, synthesis_matrix, unwhiteners
from hf_cachegen.codec.transform_tables import (
    THIRDS_STARTS,
    GroupTables,
    TransformConfig,
    TransformTables,
)
from hf_cachegen.errors import FormatError
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec
from hf_cachegen.triton_kernels import transform as kernels
from hf_cachegen.triton_kernels.pairs import Place

TABLE = Path(__file__).parents[2] / "model_tables" / "HuggingFaceTB--SmolLM2-135M-Instruct"


def draw_planes(n_rows, tokens, dtype=torch.int16, seed=0, largest=100):
    """Coefficients that levels of ``n_rows`` add to one another: integers, low bits and thirds."""
    generator = torch.Generator().manual_seed(seed)
    below = [0, *n_rows[:-1]]

    def draw(low, high, rows):
        return torch.randint(low, high, (rows, tokens), generator=generator).to(dtype)

    coded = [draw(-largest, largest + 1, n - b) for n, b in zip(n_rows, below, strict=True)]
    coded[0][:, ::3] = 0
    low_bits = torch.arange(min(3, n_rows[0]), 0, -1).to(torch.uint8)
    low = [draw(0, 1 << int(bits), 1) for bits in low_bits]
    thirds = [draw(0, 3, b) for b in below]
    return coded, (torch.cat(low) if low else draw(0, 1, 0)), low_bits, thirds


def joined(coded, low, low_bits, thirds):
    """Coefficients int32 [K, T], with the arithmetic of the codec's own decoder."""
    q = coded[0].int()
    q[: len(low)] = q[: len(low)] << low_bits[:, None].int() | low.int()
    for fresh, third in zip(coded[1:], thirds[1:], strict=True):
        third = third.int() - 1
        q = torch.cat([3 * q + torch.where(q < 0, -third, third), fresh.int()])
    return q


def as_float16(coefficients):
    scaled = coefficients.float() * kernels.COEFFICIENT_SCALE
    return scaled.clamp(-65504, 65504).half()


class Layout:
    """Planes of several kinds, laid out one after another behind some padding."""

    def __init__(self):
        self.parts, self.size = [], 0

    def add(self, plane):
        self.parts.append(plane.flatten())
        self.size += plane.numel()
        return self.size - plane.numel()

    def place(self, planes, row, columns, low_at):
        coded, low, _, thirds = planes
        levels, n_rows = [], 0
        for fresh, third in zip(coded, thirds, strict=True):
            n_rows += len(fresh)
            levels.append(kernels.LevelPlanes(self.add(fresh), self.add(third), n_rows))
        place = (row, columns, self.add(low), len(low), low_at)
        return kernels.CoefficientPlane(coded[0].shape[1], *place, levels)

    def integers(self, device):
        return torch.cat(self.parts).to(device)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("n_rows", [[5], [0], [65, 65], [0, 3], [3, 70, 130, 131]], ids=str)
@pytest.mark.parametrize("tokens", [1, 31, 33])
def test_coefficients_are_joined_as_the_codec_joins_them(tokens, n_rows, dtype, device, poisoned):
    planes = draw_planes(n_rows, tokens, dtype)
    layout, columns = Layout(), n_rows[-1] + 6
    layout.add(torch.zeros(7, dtype=dtype))
    plane = layout.place(planes, row=2, columns=columns, low_at=0)
    out = poisoned((tokens + 5, columns + 3), torch.float16)
    before = out.clone()
    kernels.join(layout.integers(device), [plane], planes[2].to(device), out)
    expected = as_float16(joined(*planes)).T
    found = out[2 : 2 + tokens, :columns]
    assert torch.equal(found[:, : n_rows[-1]].cpu(), expected)
    assert (found[:, n_rows[-1] :] == 0).all()
    found.copy_(before[2 : 2 + tokens, :columns])
    assert torch.equal(out.view(torch.int16), before.view(torch.int16))


def test_planes_of_different_tokens_and_columns_are_joined_in_one_launch(device, guards):
    sizes = [(40, [2, 9]), (0, [4, 6]), (1, [0, 0]), (3, [7, 80])]
    layout, placed, expected, row, bits = Layout(), [], [], 0, []
    for seed, (tokens, n_rows) in enumerate(sizes):
        planes = draw_planes(n_rows, tokens, seed=seed)
        placed.append(layout.place(planes, row, 80, sum(map(len, bits))))
        bits.append(planes[2])
        row += tokens
        rows = torch.zeros(tokens, 80, dtype=torch.float16)
        rows[:, : n_rows[-1]] = as_float16(joined(*planes)).T
        expected.append(rows)
    out = torch.full((row, 80), 9.0, dtype=torch.float16, device=device)
    kernels.join(layout.integers(device), placed, torch.cat(bits).to(device), out)
    assert torch.equal(out.cpu(), torch.cat(expected))
    assert guards["transform_join_kernel"].launches == 1


@pytest.mark.parametrize("value", [2**11, 2**20 + 1, 2**30, -(2**30), 2**31 - 1, -(2**31)])
def test_all_that_the_codec_codes_is_a_finite_float16(value, device):
    """To 11 bits; the largest magnitude that may be coded is 2^30."""
    integers = torch.tensor([value], dtype=torch.int32, device=device)
    plane = kernels.CoefficientPlane(1, 0, 1, 0, 0, 0, [kernels.LevelPlanes(0, 0, 1)])
    out = torch.empty((1, 1), dtype=torch.float16, device=device)
    low_bits = torch.empty(0, dtype=torch.uint8, device=device)
    kernels.join(integers, [plane], low_bits, out)
    found = float(out) / kernels.COEFFICIENT_SCALE
    assert np.isfinite(found)
    if abs(value) <= 2**30:
        assert abs(found - value) <= abs(value) * 2.0**-11


GOOD_PLANE = kernels.CoefficientPlane(
    10, 0, 6, 0, 1, 0, [kernels.LevelPlanes(10, 0, 4), kernels.LevelPlanes(50, 60, 5)]
)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": 11},
        {"tokens": 2**62},
        {"row": 1},
        {"row": -1},
        {"row": 2**63 - 1},
        {"columns": 4},
        {"columns": 9},
        {"columns": 2**40},
        {"low": 91},
        {"low": -1},
        {"n_low": 5},
        {"n_low": 2},
        {"low_bits": 1},
        {"low_bits": 2**62},
        {"levels": [kernels.LevelPlanes(61, 0, 4), kernels.LevelPlanes(50, 60, 5)]},
        {"levels": [kernels.LevelPlanes(10, 0, 4), kernels.LevelPlanes(91, 60, 5)]},
        {"levels": [kernels.LevelPlanes(10, 0, 4), kernels.LevelPlanes(50, 61, 5)]},
        {"levels": [kernels.LevelPlanes(10, 0, 4), kernels.LevelPlanes(50, 60, 3)]},
        {"levels": [kernels.LevelPlanes(10, 0, 4), kernels.LevelPlanes(50, 60, 7)]},
        {"levels": [kernels.LevelPlanes(10, -1, 4), kernels.LevelPlanes(50, 60, 5)]},
    ],
    ids=str,
)
def test_planes_outside_are_refused_before_the_launch(change, device, guards):
    integers = torch.zeros(100, dtype=torch.int16, device=device)
    low_bits = torch.zeros(1, dtype=torch.uint8, device=device)
    out = torch.zeros(10, 8, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="planes inside 100 integers"):
        kernels.join(integers, [GOOD_PLANE._replace(**change)], low_bits, out)
    assert guards["transform_join_kernel"].launches == 0
    kernels.join(integers, [GOOD_PLANE], low_bits, out)
    assert guards["transform_join_kernel"].launches == 1


def stored_values(product, segment, channels, rope, heads):
    """Values float32 [H, T, D] of a segment, by the codec's own arithmetic."""
    values, rows, scales = (tensor.cpu() for tensor in product)
    tokens = segment.place.tokens
    where = slice(segment.token, segment.token + tokens)
    width = len(channels.mean)
    x = values[rows[where].long(), channels.first : channels.first + width]
    x = x * (scales[where, None] * channels.scale.cpu()) + channels.mean.cpu()
    x = x.view(tokens, heads, width // heads).transpose(0, 1)
    return x if rope is None else rotate(x, rope, START + segment.place.position)


def draw_product(tokens, width, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, width, generator=generator)
    rows = torch.randperm(tokens, generator=generator).to(torch.int32)
    scales = torch.rand(tokens, generator=generator) + 0.5
    return kernels.TransformProduct(*(t.to(device) for t in (values, rows, scales)))


def draw_channels(n, first, device):
    generator = torch.Generator().manual_seed(n)
    mean, scale = torch.randn(2, n, generator=generator).to(device)
    return kernels.TransformChannels(mean.contiguous(), scale.contiguous(), first)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 33])
def test_values_are_stored_in_place(tokens, dtype, rope, device, poisoned):
    """Into the middle of tensors of any strides, of two contexts, from segments in any order."""
    heads, dim, first = 2, 8, 3
    whole = poisoned((45, 2, dim + 1, heads), dtype)
    out = whole[:, :, :dim].permute(1, 3, 0, 2)
    before = whole.clone()
    segments = [
        kernels.TransformSegment(5, Place(tokens, 1, 10, 10)),
        kernels.TransformSegment(0, Place(5, 0, 2, 2)),
        kernels.TransformSegment(5, Place(0, 0, 9, 9)),
    ]
    product = draw_product(5 + tokens, first + heads * dim + 2, device)
    channels = draw_channels(heads * dim, first, device)
    kernels.store(product, segments, channels, rotary_of(rope, 45, device), out)
    for segment in segments:
        n, batch, first_token, _ = segment.place
        held = out[batch, :, first_token : first_token + n]
        assert_rounds(held, stored_values(product, segment, channels, rope, heads))
        untouched = before[:, :, :dim].permute(1, 3, 0, 2)
        held.copy_(untouched[batch, :, first_token : first_token + n])
    assert torch.equal(whole.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 5), (1, 130)])
def test_any_head(heads, dim, device, poisoned):
    product = draw_product(9, heads * dim, device)
    channels = draw_channels(heads * dim, 0, device)
    out = poisoned((1, heads, 9, dim), torch.float32)
    segment = kernels.TransformSegment(0, Place(9))
    rope = rope_of(dim // 4, "half") if dim > 4 else None
    kernels.store(product, [segment], channels, rotary_of(rope, 9, device), out)
    assert_rounds(out[0], stored_values(product, segment, channels, rope, heads))


@pytest.mark.parametrize(
    ("segment", "first", "match"),
    [
        (kernels.TransformSegment(0, Place(21)), 0, "segments inside"),
        (kernels.TransformSegment(1, Place(20)), 0, "segments inside"),
        (kernels.TransformSegment(-1, Place(20)), 0, "segments inside"),
        (kernels.TransformSegment(0, Place(20, batch=1)), 0, "segments inside"),
        (kernels.TransformSegment(0, Place(20, first_token=6)), 0, "segments inside"),
        (kernels.TransformSegment(0, Place(20, position=1)), 0, "segments inside"),
        (kernels.TransformSegment(2**63 - 1, Place(20)), 0, "segments inside"),
        (kernels.TransformSegment(0, Place(20)), 1, "channels of 6"),
        (kernels.TransformSegment(0, Place(20)), -1, "channels of 6"),
    ],
)
def test_segments_outside_are_refused_before_the_launch(segment, first, match, device, guards):
    product, channels = draw_product(20, 6, device), draw_channels(6, first, device)
    out = torch.zeros((1, 1, 25, 6), device=device)
    rotary = rotary_of(rope_of(3, "half"), 20, device)
    with pytest.raises(ValueError, match=match):
        kernels.store(product, [segment], channels, rotary, out)
    assert guards["transform_store_kernel"].launches == 0
    good = kernels.TransformSegment(0, Place(20))
    kernels.store(product, [good], channels._replace(first=0), rotary, out)
    assert guards["transform_store_kernel"].launches == 1


def test_the_product_on_a_gpu_has_float32_sums():
    """As far as that shows without one: torch knows the overload."""
    with FakeTensorMode():
        a, b = (torch.empty(size, dtype=torch.float16, device="cuda") for size in ((5, 4), (4, 8)))
        kernels.multiply(a, b, torch.empty((5, 8), device="cuda"))
    assert kernels.MIXED_PRODUCTS


def real_group(index):
    """A group of the table of SmolLM2-135M, and its config; whatever else the table holds."""
    arrays = safetensors.numpy.load_file(TABLE / "transform.safetensors")
    record = json.loads((TABLE / "table.json").read_text())
    params = next(c["params"] for c in record["codecs"] if c["codec"] == "transform")
    fields = {name: arrays[f"group{index}.{name}"] for name in GroupTables.__dataclass_fields__}
    return GroupTables(**fields), TransformConfig.model_validate(params)


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("index", [1, 4])
def test_float16_products_add_far_less_error_than_the_quantiser(index, level):
    """In the metric that the quantiser is optimal in, for coefficients as real ones are."""
    table, config = real_group(index)
    widths, cpu = [len(table.mean) // 5] * 5, torch.device("cpu")
    sigma = table.sigma[: n_coded(table.sigma, config.scale(level, 0))]
    scale = config.scale(level, 0)
    rng = np.random.default_rng(0)
    y = torch.from_numpy(rng.laplace(0, sigma / np.sqrt(2), (64, len(sigma))) / scale).float()
    basis = scaled_basis(table, cpu, len(sigma)).double()
    basis *= torch.from_numpy(table.coefficient_scale[: len(sigma)])[:, None]
    triangles = [u.double() for u in unwhiteners(table, widths, cpu)]
    exact = y.round().double() @ torch.cat(
        [part @ u for part, u in zip(basis.split(widths, 1), triangles, strict=True)], dim=1
    )
    matrix = synthesis_matrix(table, widths, cpu)
    product = torch.empty(exact.shape)
    columns = matrix.basis[: len(sigma)]
    kernels.multiply(as_float16(y.round()), columns, product)
    found = product * (matrix.scale / kernels.COEFFICIENT_SCALE)
    added = torch.cat(
        [
            torch.linalg.solve_triangular(u, part, upper=False, left=False)
            for part, u in zip((found - exact).split(widths, 1), triangles, strict=True)
        ],
        dim=1,
    )
    quantised = (y - y.round()).square().sum().sqrt()
    assert added.square().sum().sqrt() < 0.06 * quantised


GROUPS = (range(1), range(1, 3))
LEVELS = range(3)


def small_layout(dtype):
    """A layer of its own window, then a group of two with tensors of different heads."""
    ropes = {"half": rope_of(3, "half"), "inter": rope_of(1, "interleaved")}
    keys = TensorSpec(name="keys", heads=2, dim=6, rope="half")
    values = TensorSpec(name="values", heads=2, dim=5)
    latent = TensorSpec(name="latent", heads=1, dim=7, rope="inter")
    sliding = LayerSpec(kind="sliding_attention", tensors=(values,), window=64)
    full = [LayerSpec(kind="full_attention", tensors=t) for t in ((keys, values), (latent,))]
    return KVLayout(dtype=dtype, ropes=ropes, layers=(sliding, *full))


def small_tables():
    """Random bases, and coefficients from far above the step to far below it."""
    layout, rng = small_layout("float32"), np.random.default_rng(0)
    config = TransformConfig(group=2, step=0.5, sinks=2, levels=len(LEVELS), max_exponent=1)
    sizes = np.full(N_CLASSES, 40)
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    spread = np.geomspace(0.3, 20, N_CLASSES)[:, None]
    counts = np.exp(-np.abs(np.arange(40) - 20) / spread)
    freqs = normalise_counts(counts.ravel(), starts, keep=starts[1:] - 1)
    thirds = normalise_counts(np.tile([1, 3, 1], N_CLASSES), THIRDS_STARTS)
    return TransformTables(
        config,
        tuple(small_group(rng, [layout.layers[layer].channels for layer in g]) for g in GROUPS),
        IntegerBank(freqs, starts, np.full(N_CLASSES, -20, np.int32)),
        TableBank(thirds, THIRDS_STARTS),
        np.ones(len(LEVELS), np.float32),
    )


def small_group(rng, widths):
    width, kept = sum(widths), sum(widths) - 1
    basis = np.linalg.qr(rng.normal(size=(width, width)))[0][:kept]
    scale = np.abs(basis).max(1) / 127
    rounded = np.rint(basis / scale[:, None])
    triangles = [np.tril(rng.normal(size=(w, w)) / 3) + np.eye(w) for w in widths]
    largest = [np.abs(triangle).max() for triangle in triangles]
    packed = [t[np.tril_indices(len(t))] / m for t, m in zip(triangles, largest, strict=True)]
    return GroupTables(
        mean=rng.normal(size=width).astype(np.float32),
        unwhitener=np.concatenate(packed).astype(np.float16),
        unwhitener_scale=np.array(largest, np.float32),
        basis=rounded.astype(np.int8),
        basis_low=np.zeros((2, width), np.int8),
        coefficient_scale=scale.astype(np.float32),
        sigma=np.geomspace(15, 0.02, kept).astype(np.float32),
        importance=np.zeros(1, np.float32),
        recency=np.zeros(1, np.float32),
    )


def small_codecs(level, dtype="float32", seed=0):
    """The codecs of a level and those that it refines; tokens have all steps that there are."""
    generator = torch.Generator().manual_seed(seed)
    importance = Importance("flat", 200, 6 * torch.rand(2000, generator=generator) - 3)
    layout, tables = small_layout(dtype), small_tables()
    return [TransformCodec(layout, tables, n, importance) for n in range(level + 1)]


def small_cache(codec, layer, tokens, start=START, seed=1):
    """Coefficients of the spread that the tables expect; one of another magnitude in token 0."""
    generator, group = torch.Generator().manual_seed(seed), codec._group_of[layer]
    sigma = torch.from_numpy(codec._tables.groups[group].sigma)
    y = sigma * torch.randn(tokens, len(sigma), generator=generator)
    y[0, 1] = 3e4
    matrix = codec._tables.synthesis.get(group, codec._widths(layer), torch.device("cpu"))
    x = matrix.mean + matrix.scale * (y @ matrix.basis[: len(sigma)].float())
    specs = codec.specs(layer)
    tensors = [torch.empty(spec.heads, tokens, spec.dim, dtype=codec.dtype) for spec in specs]
    store_channels(codec.layout, specs, x, tensors, start)
    return tensors


def encode(codecs, layer, tensors, start):
    return b"".join(codec.encode(layer, tensors, start) for codec in codecs)


def decode_on_cpu(codec, layer, data, tensors, start):
    out = [torch.empty_like(tensor) for tensor in tensors]
    codec.decode_into(layer, data, out, start)
    return out


def rms(x):
    return float(x.square().mean().sqrt())


def assert_close(found, expected):
    """To the rounding of the product's two operands and of a dtype, token 0 apart."""
    precision = 2 * 2.0**-11 + 2 * torch.finfo(expected[0].dtype).eps
    for a, b in zip(found, expected, strict=True):
        a, b = a.float().cpu(), b.float()
        for part in (slice(0, 1), slice(1, None)):
            if b[:, part].numel():
                assert rms((a - b)[:, part]) <= precision * rms(b[:, part])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_a_segment_decodes_to_what_the_cpu_gives(tokens, level, layer, device, poisoned, guards):
    codecs = small_codecs(level)
    tensors = small_cache(codecs[0], layer, tokens)
    data = encode(codecs, layer, tensors, START)
    expected = decode_on_cpu(codecs[-1], layer, data, tensors, START)
    out = [poisoned(tensor.shape, torch.float32) for tensor in tensors]
    decode_on_gpu(codecs[-1], layer, data, out, START)
    assert_close(out, expected)
    assert guards["rans_decode_kernel"].launches == 1
    assert guards["fill_escapes_kernel"].launches == 1
    assert guards["transform_join_kernel"].launches == 1
    assert guards["transform_store_kernel"].launches == len(out)


def test_tensors_on_a_gpu_are_filled_by_the_kernels(device, poisoned, guards, monkeypatch):
    """Behind the sinks, which are copied."""
    if device.type == "cpu":
        monkeypatch.setattr(kernel_codec, "takes_kernels", lambda out: True)
    codecs = small_codecs(1)
    tensors = small_cache(codecs[0], 1, 12, start=0)
    data = encode(codecs, 1, tensors, 0)
    out = [poisoned(tensor.shape, torch.float32) for tensor in tensors]
    codecs[-1].decode_into(1, data, out, 0)
    assert guards["transform_store_kernel"].launches == len(out)
    monkeypatch.undo()
    assert_close(out, decode_on_cpu(codecs[-1], 1, data, tensors, 0))
    for found, tensor in zip(out, tensors, strict=True):
        assert torch.equal(found[:, :2].cpu(), tensor[:, :2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype, device, poisoned):
    codecs = small_codecs(2, dtype)
    tensors = small_cache(codecs[0], 1, 20)
    data = encode(codecs, 1, tensors, START)
    expected = decode_on_cpu(codecs[-1], 1, data, tensors, START)
    out = [poisoned(tensor.shape, tensor.dtype) for tensor in tensors]
    decode_on_gpu(codecs[-1], 1, data, out, START)
    assert_close(out, expected)


@pytest.mark.parametrize("batch_tokens", [1, 35])
def test_segments_of_several_chunks_and_contexts_in_one_launch(
    batch_tokens, device, poisoned, guards, monkeypatch
):
    """However many of them are multiplied at once."""
    monkeypatch.setattr(gpu, "BATCH_TOKENS", batch_tokens)
    monkeypatch.setattr(gpu, "PRODUCT_TOKENS", 4)
    codecs, layer = small_codecs(1), 1
    codec = codecs[-1]
    chunks = [(20, 0, 12), (12, 1, 3), (9, 0, 2)]
    out = [poisoned((2, spec.heads, 50, spec.dim), torch.float32) for spec in codec.specs(layer)]
    whole = [tensor.clone() for tensor in out]
    segments, decoded = [], []
    for tokens, batch, place in chunks:
        tensors = small_cache(codec, layer, tokens, START + place, seed=tokens)
        data = encode(codecs, layer, tensors, START + place)
        expected = decode_on_cpu(codec, layer, data, tensors, START + place)
        decoded.append((expected, batch, place))
        reader = ByteReader(data, "segment")
        planes = codec._read_planes(reader, tokens)
        segments.append(gpu.CodedSegment(planes, tokens, batch, place))
    group = codec._gpu_group(layer, device)
    specs = codec.specs(layer)
    gpu.launch_segments(group, codec.layout, specs, segments, out, START)()
    for expected, batch, place in decoded:
        held = slice(place, place + expected[0].shape[1])
        assert_close([tensor[batch, :, held] for tensor in out], expected)
        for tensor, before in zip(out, whole, strict=True):
            tensor[batch, :, held] = before[batch, :, held]
    for tensor, before in zip(out, whole, strict=True):
        assert torch.equal(tensor.view(torch.int32), before.view(torch.int32))
    assert guards["rans_decode_kernel"].launches == 1
    n_batches = {1: 3, 35: 2}[batch_tokens]
    assert guards["transform_join_kernel"].launches == n_batches
    assert guards["transform_store_kernel"].launches == n_batches * len(out)


def test_no_segments_launch_nothing(device, guards):
    codec = small_codecs(1)[-1]
    out = [torch.zeros((1, s.heads, 9, s.dim), device=device) for s in codec.specs(1)]
    group = codec._gpu_group(1, device)
    gpu.launch_segments(group, codec.layout, codec.specs(1), [], out, START)()
    assert all(proxy.launches == 0 for proxy in guards.values())


def plane_of(tokens, n_rows):
    return kernels.CoefficientPlane(tokens, 0, 0, 0, 0, 0, [kernels.LevelPlanes(0, 0, n_rows)])


@pytest.mark.parametrize(
    ("planes", "columns", "bounds"),
    [
        ([], [], []),
        ([(0, 5, 0)], [8], [(0, 5, 8)]),
        ([(-1, 200, 9), (0, 200, 8)], [16, 8], [(0, 200, 16), (200, 400, 8)]),
        # Equal steps are never parted, and a few tokens join the next coarser ones.
        ([(0, 200, 9), (0, 200, 9)], [16, 16], [(0, 400, 16)]),
        ([(-2, 100, 30), (-1, 20, 20), (0, 10, 8)], [32, 32, 32], [(0, 130, 32)]),
        ([(-2, 100, 30), (-1, 28, 20), (0, 1, 8)], [32, 32, 8], [(0, 128, 32), (128, 129, 8)]),
    ],
)
def test_rows_are_shared_out_to_products(planes, columns, bounds):
    products = gpu._products([(e, plane_of(tokens, n_rows)) for e, tokens, n_rows in planes])
    assert products.columns == columns
    assert products.bounds == bounds


@pytest.mark.parametrize("level", [0, 1])
def test_damaged_segments_are_refused_or_give_a_cache(level, device, poisoned):
    """Refused where the CPU refuses them, and never written outside a buffer."""
    codecs, layer, tokens = small_codecs(level), 1, 9
    codec = codecs[-1]
    tensors = small_cache(codec, layer, tokens)
    data = encode(codecs, layer, tensors, START)
    rng, refused = np.random.default_rng(level), 0
    bits = rng.choice(8 * len(data), 4, replace=False)
    hostile = [data[: len(data) * n // 7] for n in range(7)] + [data + bytes(2)]
    hostile += [flip(data, int(bit)) for bit in bits]
    for bad in hostile:
        out = [poisoned(tensor.shape, torch.float32) for tensor in tensors]
        found = refuses(lambda bad=bad, out=out: decode_on_gpu(codec, layer, bad, out, START))
        expected = refuses(lambda bad=bad: decode_on_cpu(codec, layer, bad, tensors, START))
        assert found == expected
        refused += found
    assert refused >= 8 + 2


def flip(data, bit):
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def refuses(run):
    try:
        run()
    except FormatError:
        return True
    return False


@pytest.mark.parametrize("chunks", [[(0, 1), (1, 20), (40, 9), (21, 3)], [(0, 2)]], ids=str)
def test_many_segments_decode_to_what_each_does(chunks, device, poisoned, guards, monkeypatch):
    """In one launch, of chunks with and without sinks, and nothing between them is written."""
    if device.type == "cpu":
        monkeypatch.setattr(kernel_codec, "takes_kernels", lambda out: True)
    codecs, layer, segments = small_codecs(1), 1, []
    codec = codecs[-1]
    out = [poisoned((spec.heads, 50, spec.dim), torch.float32) for spec in codec.specs(layer)]
    before, parts = [tensor.clone() for tensor in out], []
    for first, tokens in chunks:
        tensors = small_cache(codec, layer, tokens, first, seed=tokens)
        segments.append(PlacedSegment(encode(codecs, layer, tensors, first), first, tokens))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_codec, "takes_kernels", lambda out: False)
            parts.append(decode_on_cpu(codec, layer, segments[-1].data, tensors, first))
    codec.decode_many_into(layer, segments, out, 0)
    for (first, tokens), part in zip(chunks, parts, strict=True):
        held = slice(first, first + tokens)
        assert_close([tensor[:, held] for tensor in out], part)
        for tensor, poison in zip(out, before, strict=True):
            tensor[:, held] = poison[:, held]
    for tensor, poison in zip(out, before, strict=True):
        assert torch.equal(tensor.view(torch.int32), poison.view(torch.int32))
    launches = int(any(first + tokens > 2 for first, tokens in chunks))
    assert guards["rans_decode_kernel"].launches == launches
    assert guards["transform_store_kernel"].launches == launches * len(out)
