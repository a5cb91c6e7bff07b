from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_samples import ROPES, START, assert_rounds, decode_on_gpu, rope_of, rotary_of

from hf_cachegen.codec import kernel_codec
from hf_cachegen.codec.bank import IntegerBank, normalise_counts
from hf_cachegen.codec.base import PlacedSegment
from hf_cachegen.codec.delta import DeltaCodec, DeltaConfig, DeltaTables
from hf_cachegen.codec.rope import rotate
from hf_cachegen.errors import FormatError
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec
from hf_cachegen.triton_kernels.delta import DeltaChannels, DeltaSegment, reconstruct
from hf_cachegen.triton_kernels.pairs import Place, Rotary
from hf_cachegen.triton_kernels.transform import CoefficientPlane, LevelPlanes, join


def expected_values(anchors, differences, channels, group, rope, heads):
    """Values float32 [H, T, D] by the codec's own arithmetic."""
    mean, step, bins = (vector[:, None] for vector in channels)
    tokens = anchors.shape[1] + differences.shape[1]
    x = mean.repeat(1, tokens)
    is_difference = torch.ones(tokens, dtype=torch.bool)
    if group:
        x = (mean + anchors * step).repeat_interleave(group, dim=1)[:, :tokens]
        is_difference[::group] = False
    x[:, is_difference] = x[:, is_difference] + differences * bins
    values = x.view(heads, len(mean) // heads, tokens).transpose(1, 2)
    return values if rope is None else rotate(values, rope, START)


def sample(channels, tokens, group, dtype=torch.int16):
    generator = torch.Generator().manual_seed(channels * 1000 + tokens)
    n_groups = -(-tokens // group) if group else 0

    def draw(high, width):
        shape = (channels, width)
        return torch.randint(-high, high + 1, shape, generator=generator, dtype=dtype)

    parameters = [torch.rand(channels, generator=generator) + 0.1 for _ in range(3)]
    return draw(127, n_groups), draw(40, tokens - n_groups), parameters


def run(anchors, differences, parameters, group, rope, out):
    device = out.device
    integers = torch.cat([anchors.flatten(), differences.flatten()]).to(device)
    tokens = anchors.shape[1] + differences.shape[1]
    channels = DeltaChannels(*(p.to(device) for p in parameters), first=0, total=len(anchors))
    segment = DeltaSegment(0, anchors.numel(), Place(tokens))
    reconstruct(integers, [segment], channels, group, rotary_of(rope, tokens, device), out[None])


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("group", [0, 10])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 63, 150])
def test_values_are_those_of_the_codec(tokens, group, rope, device, poisoned):
    anchors, differences, parameters = sample(16, tokens, group)
    out = poisoned((2, tokens, 8), torch.float32)
    run(anchors, differences, parameters, group, rope, out)
    assert_rounds(out, expected_values(anchors, differences, parameters, group, rope, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 5), (1, 80), (1, 130)])
def test_any_head_and_dtype(heads, dim, dtype, device, poisoned):
    anchors, differences, parameters = sample(heads * dim, 33, 10, torch.int32)
    rope = rope_of(dim // 4, "half") if dim > 4 else None
    out = poisoned((heads, 33, dim), dtype)
    run(anchors, differences, parameters, 10, rope, out)
    assert_rounds(out, expected_values(anchors, differences, parameters, 10, rope, heads))


VIEWS = {
    "tokens first": ((33, 2, 6), lambda whole: whole.transpose(0, 1)),
    "channels first": ((2, 6, 33), lambda whole: whole.transpose(1, 2)),
    "heads last": ((33, 6, 2), lambda whole: whole.permute(2, 0, 1)),
    "inside": ((2, 37, 9), lambda whole: whole[:, 1:34, 2:8]),
}


@pytest.mark.parametrize(("shape", "view_of"), VIEWS.values(), ids=VIEWS)
def test_any_strides_and_nothing_else_is_written(shape, view_of, device, poisoned):
    heads, tokens, dim = 2, 33, 6
    whole = poisoned(shape, torch.float16)
    view = view_of(whole)
    before = whole.clone()
    anchors, differences, parameters = sample(heads * dim, tokens, 10)
    rope = rope_of(2, "half")
    run(anchors, differences, parameters, 10, rope, view)
    assert_rounds(view, expected_values(anchors, differences, parameters, 10, rope, heads))
    view.copy_(before.as_strided(view.shape, view.stride(), view.storage_offset()))
    assert torch.equal(whole.view(torch.int16), before.view(torch.int16))


def test_extreme_integers_become_floats_as_torch_casts_them(device, poisoned):
    anchors, differences, parameters = sample(4, 31, 10, torch.int32)
    differences[0, :4] = torch.tensor([2**31 - 1, -(2**31), 2**24 + 1, -(2**24) - 1])
    out = poisoned((1, 31, 4), torch.float32)
    run(anchors, differences, parameters, 10, None, out)
    expected = expected_values(anchors, differences, parameters, 10, None, 1)
    torch.testing.assert_close(out.cpu(), expected, rtol=3e-7, atol=1e-5)


def test_segments_of_several_chunks_and_contexts_in_one_launch(device, poisoned, guards):
    """The tensor is the second of its layer; the chunks lie in any order, one of them empty."""
    first, total, heads, dim = 3, 9, 1, 6
    chunks = [(33, 0, 12), (12, 1, 3), (0, 0, 5), (10, 0, 2)]
    out = poisoned((2, heads, 50, dim), torch.float32)
    expected = out.clone()
    pieces, segments, at = [], [], 0
    rope = rope_of(3, "half")
    for tokens, batch, place in chunks:
        anchors, differences, _ = sample(total, tokens, 10)
        segments.append(DeltaSegment(at, at + anchors.numel(), Place(tokens, batch, place, 0)))
        pieces += [anchors.flatten(), differences.flatten()]
        at += anchors.numel() + differences.numel()
        rows = slice(first, first + heads * dim)
        _, _, shared = sample(total, 1, 10)
        part = [p[rows] for p in shared]
        expected[batch, :, place : place + tokens] = expected_values(
            anchors[rows], differences[rows], part, 10, rope, heads
        ).to(device)
    channels = DeltaChannels(*(p.to(device) for p in part), first=first, total=total)
    rotary = rotary_of(rope, 40, device)
    reconstruct(torch.cat(pieces).to(device), segments, channels, 10, rotary, out)
    written = expected.view(torch.int32) != out.view(torch.int32)
    torch.testing.assert_close(out[written], expected[written], rtol=1e-6, atol=1e-5)
    assert guards["delta_kernel"].launches == 1


def test_no_segments_launch_nothing(device, guards):
    _, _, parameters = sample(6, 1, 10)
    channels = DeltaChannels(*(p.to(device) for p in parameters), first=0, total=6)
    integers = torch.empty(0, dtype=torch.int16, device=device)
    reconstruct(integers, [], channels, 10, None, torch.empty((1, 1, 9, 6), device=device))
    assert guards["delta_kernel"].launches == 0


GOOD = {
    "segment": DeltaSegment(0, 12, Place(20)),
    "first": 0,
    "group": 10,
    "positions": 20,
    "pairs": 2,
}


@pytest.mark.parametrize(
    ("hostile", "match"),
    [
        ({"segment": DeltaSegment(-1, 12, Place(20))}, "segments inside"),
        ({"segment": DeltaSegment(109, 12, Place(20))}, "segments inside"),
        ({"segment": DeltaSegment(0, 13, Place(20))}, "segments inside"),
        ({"segment": DeltaSegment(0, 12, Place(21))}, "segments inside"),
        ({"segment": DeltaSegment(0, 12, Place(20, batch=1))}, "segments inside"),
        ({"segment": DeltaSegment(0, 12, Place(20, first_token=6))}, "segments inside"),
        ({"segment": DeltaSegment(0, 12, Place(20, position=1))}, "segments inside"),
        ({"segment": DeltaSegment(0, 12, Place(2**62))}, "segments inside"),
        ({"segment": DeltaSegment(2**63 - 1, 12, Place(20))}, "segments inside"),
        ({"segment": DeltaSegment(0, 12, Place(20, first_token=2**63 - 1))}, "segments inside"),
        ({"group": -1}, "a group of 0 or more"),
        ({"first": 1}, "channels of 6"),
        ({"pairs": 4}, "pairs of 6 channels"),
    ],
)
def test_what_lies_outside_is_refused_before_the_launch(hostile, match, device, guards):
    case = {**GOOD, **hostile}
    _, _, parameters = sample(6, 1, 10)
    channels = DeltaChannels(*(p.to(device) for p in parameters), first=case["first"], total=6)
    table = torch.ones((case["positions"], case["pairs"]), device=device)
    integers = torch.zeros(120, dtype=torch.int16, device=device)
    out = torch.zeros((1, 1, 25, 6), device=device)
    arguments = (channels, case["group"], Rotary(table, table, "half"), out)
    with pytest.raises(ValueError, match=match):
        reconstruct(integers, [case["segment"]], *arguments)
    assert guards["delta_kernel"].launches == 0
    reconstruct(integers, [GOOD["segment"]], channels._replace(first=0), 10, None, out)
    assert guards["delta_kernel"].launches == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda integers: integers.long(),
        lambda integers: integers.to(torch.uint8),
        lambda integers: integers.repeat_interleave(2)[::2],
        lambda integers: integers.view(2, -1),
    ],
)
def test_integers_of_another_kind_are_refused_before_the_launch(change, device, guards):
    _, _, parameters = sample(6, 1, 10)
    channels = DeltaChannels(*(p.to(device) for p in parameters), first=0, total=6)
    integers = torch.zeros(120, dtype=torch.int16, device=device)
    out = torch.zeros((1, 1, 25, 6), device=device)
    with pytest.raises(ValueError, match="contiguous integers"):
        reconstruct(change(integers), [GOOD["segment"]], channels, 10, None, out)
    plane = CoefficientPlane(10, 0, 6, 0, 0, 0, [LevelPlanes(0, 0, 4)])
    coefficients = torch.zeros(10, 8, dtype=torch.float16, device=device)
    low_bits = torch.zeros(0, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="contiguous integers"):
        join(change(integers), [plane], low_bits, coefficients)
    assert guards["delta_kernel"].launches == guards["transform_join_kernel"].launches == 0
    reconstruct(integers, [GOOD["segment"]], channels, 10, None, out)
    join(integers, [plane], low_bits, coefficients)
    assert guards["delta_kernel"].launches == guards["transform_join_kernel"].launches == 1


def small_codec(sinks=0):
    """A codec of two tensors with 24 channels, and a segment in which some integers escape."""
    specs = (TensorSpec(name="k", heads=2, dim=8, rope="r"), TensorSpec(name="v", heads=2, dim=4))
    layer = LayerSpec(kind="full_attention", tensors=specs)
    layout = KVLayout(dtype="float16", ropes={"r": rope_of(4, "half")}, layers=(layer,))
    config = DeltaConfig(factors=(1.0,), bins=(0.2,), sinks=sinks, tables="tensor")
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.rand(24, generator=generator).numpy() + 0.1 for _ in range(3)]
    tables = DeltaTables(config, *vectors, laplace_bank(256, -128), (laplace_bank(12, -6),))
    tensors = [torch.randn((2, 43, d), generator=generator).to(torch.float16) for d in (8, 4)]
    codec = DeltaCodec(layout, tables, 0)
    return codec, codec.encode(0, tensors, START)


def laplace_bank(size, lo):
    weights = np.tile(np.exp(-np.abs(np.arange(size) + lo) / 20), 2)
    starts = np.array([0, size, 2 * size], np.int32)
    freqs = normalise_counts(weights, starts, keep=starts[1:] - 1)
    return IntegerBank(freqs, starts, np.array([lo, lo], np.int32))


def test_a_segment_decodes_to_what_the_cpu_gives(device, poisoned, guards):
    codec, data = small_codec()
    expected = [torch.empty((2, 43, d), dtype=torch.float16) for d in (8, 4)]
    codec.decode_into(0, data, expected, START)
    out = [poisoned((2, 43, d), torch.float16) for d in (8, 4)]
    decode_on_gpu(codec, 0, data, out)
    for found, tensor in zip(out, expected, strict=True):
        assert_rounds(found, tensor.float())
    assert guards["fill_escapes_kernel"].launches == 1


def test_tensors_on_a_gpu_are_filled_by_the_kernels(device, poisoned, guards, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(kernel_codec, "takes_kernels", lambda out: True)
    codec, data = small_codec()
    out = [poisoned((2, 43, d), torch.float16) for d in (8, 4)]
    codec.decode_into(0, data, out, START)
    assert guards["delta_kernel"].launches == 2


def test_a_damaged_segment_is_refused(device, poisoned):
    codec, data = small_codec()
    out = [poisoned((2, 43, d), torch.float16) for d in (8, 4)]
    with pytest.raises(FormatError, match="damaged"):
        decode_on_gpu(codec, 0, data[:-1] + bytes([data[-1] ^ 1]), out)


CHUNKS = [(0, 2), (2, 20), (40, 9), (22, 1)]
"""First token and tokens; the first is all sinks, the second in part. Some between are missing."""


def test_many_segments_decode_to_what_each_does(device, poisoned, guards, monkeypatch):
    """In one launch, and nothing between them is written."""
    if device.type == "cpu":
        monkeypatch.setattr(kernel_codec, "takes_kernels", lambda out: True)
    codec, segments = small_codec(sinks=3)[0], []
    out = [poisoned((2, 50, d), torch.float16) for d in (8, 4)]
    expected = [tensor.cpu().clone() for tensor in out]
    for first, tokens in CHUNKS:
        generator = torch.Generator().manual_seed(tokens)
        shapes = [(2, tokens, d) for d in (8, 4)]
        tensors = [torch.randn(shape, generator=generator).half() for shape in shapes]
        segments.append(PlacedSegment(codec.encode(0, tensors, first), first, tokens))
        whole = [torch.empty(shape, dtype=torch.float16) for shape in shapes]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_codec, "takes_kernels", lambda out: False)
            codec.decode_into(0, segments[-1].data, whole, first)
        for tensor, part in zip(expected, whole, strict=True):
            tensor[:, first : first + tokens] = part
    codec.decode_many_into(0, segments, out, 0)
    for found, tensor in zip(out, expected, strict=True):
        assert_rounds(found, tensor.float())
    assert guards["rans_decode_kernel"].launches == 1
    assert guards["delta_kernel"].launches == len(out)


def test_a_damaged_segment_among_several_is_refused(device, poisoned, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(kernel_codec, "takes_kernels", lambda out: True)
    codec, data = small_codec()
    out = [poisoned((2, 86, d), torch.float16) for d in (8, 4)]
    segments = [PlacedSegment(data, 0, 43), PlacedSegment(data, 43, 43)]
    codec.decode_many_into(0, segments, out, START)
    segments[1] = segments[1]._replace(data=data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FormatError, match="damaged"):
        codec.decode_many_into(0, segments, out, START)
    segments[1] = segments[1]._replace(data=data + b"\0")
    with pytest.raises(FormatError):
        codec.decode_many_into(0, segments, out, START)
