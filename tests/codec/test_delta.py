"""Speed, for orientation: on one busy CPU core, ``delta`` encodes about 50 MB/s of bf16 and decodes
about 110 MB/s, whatever the level.
"""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from codec_samples import (
    DTYPES,
    GOLDEN,
    HUGE,
    changed,
    decode,
    decode_or_refuse,
    layout_of,
    peak_bytes,
    put,
    sinks_of,
    to_tensors,
    without,
)
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hf_cachegen.codec import entropy, kernel_codec
from hf_cachegen.codec.bank import ESCAPE_BITS, PROB_BITS, to_symbols
from hf_cachegen.codec.channels import channels, kept_positions
from hf_cachegen.codec.delta import (
    LARGEST,
    DeltaCodec,
    DeltaConfig,
    DeltaTables,
    layer_rows,
    table_ids,
)
from hf_cachegen.codec.delta_profile import DeltaProfiler
from hf_cachegen.codec.planes import rows_per_stream
from hf_cachegen.errors import FormatError
from hf_cachegen.layout import KVLayout

N_LAYERS = 3


def make_cache(layout, layer, tokens, start=0, seed=0):
    """A layer's tensors: channels of their own mean and magnitude, drifting from token to token."""
    generator = torch.Generator().manual_seed(seed)
    rows = layout.layers[layer].channels
    drift = torch.randn(rows, tokens, generator=generator).cumsum(1) * 0.2
    noise = torch.randn(rows, tokens, generator=generator)
    channel = torch.arange(rows)[:, None]
    x = (drift + noise) * torch.exp2(channel % 4 - 2.0) + channel % 3 - 1
    return to_tensors(layout, layout.layers[layer].tensors, x.T, start)


@cache
def profiled(group, kind):
    """Tables of two samples; they serve every dtype."""
    layout = layout_of("float32")
    profiler = DeltaProfiler(layout, DeltaConfig(group=group, tables=kind))
    for observe in (profiler.observe_moments, profiler.observe_counts):
        for seed in (100, 101):
            for layer in range(N_LAYERS):
                observe(layer, make_cache(layout, layer, 300, seed=seed), 0)
    return profiler.finish()


def make_tables(group=10, kind="channel", sinks=4):
    tables = profiled(group, kind)
    return replace(tables, config=tables.config.model_copy(update={"sinks": sinks}))


def make_codec(dtype="bfloat16", level=1, **options):
    return DeltaCodec(layout_of(dtype), make_tables(**options), level)


def half_bins(codec, tables, layer, level, tokens):
    """What each value may be off by, float32 [C, T] of the tokens after the sinks."""
    rows = layer_rows(codec.layout)[layer]
    config = tables.config
    width = config.bin(layer, N_LAYERS) * config.factors[level]
    bins = np.repeat(tables.spread[rows, None] * np.float32(width), tokens, axis=1)
    if config.group:
        bins[:, :: config.group] = tables.anchor_step[rows, None]
    return torch.from_numpy(bins / 2)


@st.composite
def segments(draw):
    """Where in which context, coded how."""
    return {
        "layer": draw(st.integers(0, N_LAYERS - 1)),
        "tokens": draw(st.one_of(st.integers(0, 25), st.integers(80, 120))),
        "start": draw(st.sampled_from([0, 1, 3, 4, 1500])),
        "seed": draw(st.integers(0, 5)),
    }, {
        "level": draw(st.integers(0, 3)),
        "group": draw(st.sampled_from([0, 1, 2, 10])),
        "kind": draw(st.sampled_from(["channel", "tensor"])),
        "sinks": draw(st.sampled_from([0, 4, 64])),
    }


@given(segments(), st.sampled_from([1e-3, 1.0, 3e3]))
def test_errors_are_at_most_half_a_bin(segment, magnitude):
    """Before RoPE, plus the rounding of float32 arithmetic: 2^-20 of the largest value.

    Values far from what was profiled are as exact as any, through escapes.
    """
    where, how = segment
    codec = make_codec("float32", **how)
    layer, start = where["layer"], where["start"]
    tensors = [tensor * magnitude for tensor in make_cache(codec.layout, **where)]
    out = decode(codec, layer, codec.encode(layer, tensors, start), tensors, start)
    sinks = sinks_of(codec.config, start, where["tokens"])
    before, after = (
        channels(codec.layout, codec.specs(layer), [t[:, sinks:] for t in side], start + sinks).T
        for side in (tensors, out)
    )
    tables = make_tables(how["group"], how["kind"])
    allowed = half_bins(codec, tables, layer, how["level"], before.shape[1])
    rounding = 2.0**-20 * before.abs().amax() if before.numel() else 0
    assert ((after - before).abs() <= allowed + rounding).all()


@given(segments(), st.sampled_from(["bfloat16", "float16"]))
def test_sixteen_bits_decode_to_the_rounded_float32(segment, dtype):
    where, how = segment
    how["sinks"] = 0  # whose bytes are of another width
    small, wide = make_codec(dtype, **how), make_codec("float32", **how)
    layer, start = where["layer"], where["start"]
    tensors = make_cache(small.layout, **where)
    data = small.encode(layer, tensors, start)
    assert data == wide.encode(layer, [tensor.float() for tensor in tensors], start)
    exact = decode(wide, layer, data, [tensor.float() for tensor in tensors], start)
    for found, expected in zip(decode(small, layer, data, tensors, start), exact, strict=True):
        assert torch.equal(found, expected.to(found.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "tokens"), [(0, 2), (0, 4), (0, 30), (3, 30)])
def test_sinks_are_exact_even_if_not_finite(dtype, start, tokens):
    codec = make_codec(dtype)
    tensors = make_cache(codec.layout, 2, tokens, start)
    tensors[0][0, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    out = decode(codec, 2, codec.encode(2, tensors, start), tensors, start)
    for before, after in zip(tensors, out, strict=True):
        bits = torch.int32 if dtype == "float32" else torch.int16
        sinks = 4 - start
        assert torch.equal(before[:, :sinks].view(bits), after[:, :sinks].view(bits))


@pytest.mark.parametrize("group", [0, 1, 10])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("token", [4, 7, 14])
def test_values_that_are_not_finite_are_the_callers_mistake(bad, token, group):
    codec = make_codec(group=group)
    tensors = make_cache(codec.layout, 1, 20)
    tensors[0][0, token, 3] = bad
    with pytest.raises(ValueError, match=r"layer 1: .*NaN, infinity.*`lossless`"):
        codec.encode(1, tensors, 0)


@pytest.mark.parametrize("group", [0, 1, 10])
@pytest.mark.parametrize("token", [4, 7])
def test_values_beyond_every_escape_are_refused_not_clipped(token, group):
    """A clipped anchor would also spoil the tokens that are coded as differences to it."""
    codec, tables = make_codec("float32", group=group), make_tables(group)
    tensors = make_cache(codec.layout, 1, 20)
    for bins, fits in ((0.9, True), (1.1, False)):
        allowed = half_bins(codec, tables, 1, 1, 16)[6, token - 4]
        tensors[0][0, token, 6] = far = float(2 * allowed * LARGEST * bins)
        if fits:
            out = decode(codec, 1, codec.encode(1, tensors, 0), tensors)
            assert out[0][0, token, 6] == pytest.approx(far, rel=1e-6)
            torch.testing.assert_close(out[0][0, 14:, 6], tensors[0][0, 14:, 6], atol=1, rtol=0)
        else:
            with pytest.raises(ValueError, match=r"layer 1: .*`lossless`"):
                codec.encode(1, tensors, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_and_outputs_may_have_any_strides(dtype):
    codec = make_codec(dtype)
    tensors = make_cache(codec.layout, 0, 33)
    expected = decode(codec, 0, codec.encode(0, tensors, 0), tensors)
    strided = [t.permute(2, 1, 0).contiguous().permute(2, 1, 0) for t in tensors]
    buffers = [torch.full((40, t.shape[2] * 2, t.shape[0]), 9.0, dtype=t.dtype) for t in tensors]
    views = [buffer[5:38, ::2].permute(2, 0, 1) for buffer in buffers]
    codec.decode_into(0, codec.encode(0, strided, 0), views, 0)
    for view, found, buffer in zip(views, expected, buffers, strict=True):
        assert torch.equal(view, found)
        view.fill_(9.0)
        assert (buffer == 9).all(), "nothing outside the view was written"


def test_tensors_that_do_not_fit_the_layout_are_the_callers_mistake():
    codec = make_codec()
    tensors = make_cache(codec.layout, 0, 12)
    data = codec.encode(0, tensors, 0)
    shorter = [tensors[0], tensors[1][:, :-1]]
    wider = [tensor.float() for tensor in tensors]
    for wrong in ([], tensors[:1], tensors[::-1], shorter, wider):
        with pytest.raises(ValueError, match=r"layer 0: expected tensors \[H, T, D\]"):
            codec.encode(0, wrong, 0)
        with pytest.raises(ValueError, match=r"layer 0: expected tensors \[H, T, D\]"):
            codec.decode_into(0, data, wrong, 0)


@pytest.mark.parametrize("group", [0, 10])
def test_bytes_are_the_same_from_every_backend_and_thread(monkeypatch, group):
    codec = make_codec(group=group)
    tensors = make_cache(codec.layout, 2, 200)
    tensors[0][0, 50, 0] = 1e4  # an escape
    with ThreadPoolExecutor(4) as pool:
        coded = set(pool.map(lambda _: codec.encode(2, tensors, 0), range(8)))
    compiled = decode(codec, 2, next(iter(coded)), tensors)
    monkeypatch.setattr(entropy, "AUTO_ORDER", ("numpy",))
    coded.add(codec.encode(2, tensors, 0))
    assert len(coded) == 1
    plain = decode(codec, 2, coded.pop(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


def test_one_codec_serves_many_threads_at_once():
    codec = make_codec()
    starts = range(0, 1500, 150)
    caches = [make_cache(codec.layout, 0, 150, start, seed=start) for start in starts]

    def round_trip(start):
        tensors = caches[start // 150]
        out = decode(codec, 0, codec.encode(0, tensors, start), tensors, start)
        return torch.cat([tensor.flatten() for tensor in out])

    with ThreadPoolExecutor(4) as pool:
        parallel = list(pool.map(round_trip, starts))
    assert all(
        torch.equal(round_trip(start), out) for start, out in zip(starts, parallel, strict=True)
    )


def split(codec, layer, data, tokens):
    """A segment after its sinks, as the format says: [(bank, table ids, coded, shape)]."""
    ids = table_ids(codec.layout, codec.config)[layer]
    if not codec.config.group:
        return [(codec._differences, ids, data, (len(ids), tokens))]
    n_groups = -(-tokens // codec.config.group)
    (size,) = struct.unpack_from("<I", data)
    return [
        (codec._anchors, ids, data[4 : 4 + size], (len(ids), n_groups)),
        (codec._differences, ids, data[4 + size :], (len(ids), tokens - n_groups)),
    ]


@pytest.mark.parametrize("group", [0, 2, 10])
@pytest.mark.parametrize("kind", ["channel", "tensor"])
def test_the_size_is_the_entropy_of_the_tables_plus_an_overhead_per_stream(group, kind):
    codec = make_codec(group=group, kind=kind)
    tensors = make_cache(codec.layout, 2, 1500, start=4)
    data = codec.encode(2, tensors, 4)
    ideal_bits, overhead_bytes = 0.0, 4 if group else 0
    for bank, ids, coded, shape in split(codec, 2, data, 1500):
        rows = rows_per_stream(shape[1])
        q = entropy.decode_integers(coded, shape, ids, bank, rows)
        symbols, escapes = to_symbols(q, ids, bank)
        freqs = bank.freqs[bank.starts[ids][:, None] + symbols].astype(np.float64)
        ideal_bits += (PROB_BITS - np.log2(freqs)).sum() + ESCAPE_BITS * len(escapes)
        overhead_bytes += 4 + -(-len(ids) // rows) * (4 + 4 * 32)
    assert ideal_bits / 8 - 1 < len(data) <= 1.02 * ideal_bits / 8 + overhead_bytes


def test_finer_levels_are_larger_and_closer():
    sizes, errors = [], []
    for level in range(4):
        codec = make_codec("float32", level=level)
        tensors = make_cache(codec.layout, 0, 500)
        data = codec.encode(0, tensors, 0)
        out = decode(codec, 0, data, tensors)
        sizes.append(len(data))
        errors.append(sum((a - b).square().sum() for a, b in zip(tensors, out, strict=True)))
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    assert sizes[0] < 500 * 22 * 4 / 32 * 5, "under 5 bits a value at the coarsest"


@pytest.mark.parametrize("group", [0, 1, 10])
def test_truncated_longer_and_flipped_segments_are_refused_or_give_a_cache(group):
    codec = make_codec(group=group)
    tensors = make_cache(codec.layout, 1, 17)
    tensors[0][0, 9, 0] = 3e3  # an escape
    data = codec.encode(1, tensors, 0)
    for size in range(len(data)):
        assert decode_or_refuse(codec, 1, data[:size], 17) is None
    assert decode_or_refuse(codec, 1, data + b"\0", 17) is None
    sink_bytes = 4 * 7 * 2
    refused = 0
    for bit in range(8 * sink_bytes, 8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        refused += decode_or_refuse(codec, 1, bytes(damaged), 17) is None
    assert refused > 0.9 * 8 * (len(data) - sink_bytes)


@pytest.mark.parametrize("group", [0, 1, 10])
@given(data=st.binary(max_size=600), tokens=st.integers(0, 12))
def test_random_bytes_are_refused_or_give_a_cache(group, data, tokens):
    decode_or_refuse(make_codec(group=group), 1, data, tokens)


@pytest.mark.parametrize(
    ("tokens", "layer", "start"), [(21, 1, 0), (23, 1, 0), (22, 0, 0), (22, 1, 1)]
)
def test_a_segment_of_other_tokens_or_another_layer_is_refused(tokens, layer, start):
    codec = make_codec()
    data = codec.encode(1, make_cache(codec.layout, 1, 22), 0)
    assert decode_or_refuse(codec, 1, data, 22) is not None
    assert decode_or_refuse(codec, layer, data, tokens, start) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        HUGE,
        HUGE * 3,
        struct.pack("<I", 4) + HUGE,
        struct.pack("<I", 8) + bytes(4) + HUGE,
        struct.pack("<I", 4 + 132) + bytes(4) + HUGE + bytes(128),
        struct.pack("<I", 0) + HUGE,
    ],
)
@pytest.mark.parametrize("group", [0, 10])
def test_counts_that_promise_too_much_are_refused_without_allocating_it(body, group):
    codec = make_codec(group=group, sinks=0)
    tensors = make_cache(codec.layout, 1, 30)
    decode(codec, 1, codec.encode(1, tensors, 0), tensors)  # compiles
    found = []
    assert peak_bytes(lambda: found.append(decode_or_refuse(codec, 1, body, 30))) < 1 << 17
    assert found == [None]


@pytest.mark.parametrize("kind", ["channel", "tensor"])
@pytest.mark.parametrize("group", [0, 10])
def test_tables_survive_a_file(group, kind):
    tables = make_tables(group, kind)
    data = safetensors.numpy.save(tables.to_arrays())
    back = DeltaTables.from_arrays(
        tables.config, safetensors.numpy.load(data), layout_of("bfloat16")
    )
    codec = DeltaCodec(layout_of("bfloat16"), back, 1)
    tensors = make_cache(codec.layout, 2, 60)
    assert codec.encode(2, tensors, 0) == make_codec(group=group, kind=kind).encode(2, tensors, 0)


@pytest.mark.parametrize(
    "damage",
    [
        *(without(name) for name in ("mean", "spread", "anchors.freqs", "differences3.lo")),
        lambda arrays: arrays.update(extra=np.zeros(1)),
        lambda arrays: arrays.update({"differences4.lo": arrays["differences3.lo"]}),
        *(changed(name, lambda a: a[:-1]) for name in ("mean", "anchors.lo", "anchors.sizes")),
        *(changed(name, lambda a: a[None]) for name in ("mean", "anchors.lo", "anchors.freqs")),
        *(changed(name, lambda a: a.astype(np.float64)) for name in ("mean", "anchors.freqs")),
        *(changed("mean", put(value)) for value in (np.nan, np.inf)),
        *(changed("spread", put(value)) for value in (np.nan, np.inf, 0, -1)),
        *(changed("anchor_step", put(value)) for value in (-np.inf, 0, -1)),
        *(changed("anchors.sizes", put(value)) for value in (0, 1, 257, 65535)),
        *(changed("differences0.freqs", put(value)) for value in (4095, 65535)),
        changed("differences0.freqs", lambda a: a[:-1]),
        changed("differences0.freqs", lambda a: a[::-1].copy() + np.uint16(1)),
    ],
)
def test_damaged_tables_are_refused(damage):
    tables = make_tables()
    arrays = tables.to_arrays()
    damage(arrays)
    with pytest.raises(FormatError):
        DeltaTables.from_arrays(tables.config, arrays, layout_of("bfloat16"))


@pytest.mark.parametrize(
    "other",
    [
        {"group": 0},
        {"tables": "tensor"},
        {"factors": (1.0,)},
        {"factors": (1.0, 0.5, 0.4, 0.3, 0.2)},
    ],
)
def test_tables_of_other_parameters_are_refused(other):
    tables = make_tables()
    config = tables.config.model_copy(update=other)
    with pytest.raises(FormatError):
        DeltaTables.from_arrays(config, tables.to_arrays(), layout_of("bfloat16"))


@pytest.mark.parametrize(
    "params",
    [
        {"bins": ()},
        {"bins": (0.5, 0.0)},
        {"factors": (1.0, -0.5)},
        {"factors": (0.5, 1.0)},
        {"factors": (0.5, 0.5)},
        {"factors": (float("inf"), 1.0)},
        {"group": -1},
        {"anchor_bits": 9},
        {"anchor_range": 0.0},
        {"sinks": 65},
        {"tables": "layer"},
        {"unknown": 1},
    ],
)
def test_parameters_are_checked(params):
    with pytest.raises(ValidationError):
        DeltaConfig(**params)


def test_bins_grow_with_depth_in_equal_parts():
    config = DeltaConfig(bins=(0.5, 1.0, 1.5))
    assert [config.bin(layer, 7) for layer in range(7)] == [0.5, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    assert [config.bin(layer, 2) for layer in range(2)] == [0.5, 1.0]


def test_every_channel_or_every_tensor_has_a_table():
    layout = layout_of("float32")
    assert layer_rows(layout) == [slice(0, 22), slice(22, 29), slice(29, 58)]
    by_channel = table_ids(layout, DeltaConfig())
    assert np.concatenate(by_channel).tolist() == list(range(58))
    by_tensor = table_ids(layout, DeltaConfig(tables="tensor"))
    assert [ids.tolist() for ids in by_tensor] == [
        [0] * 12 + [1] * 10,
        [2] * 7,
        [3] * 10 + [4] * 12 + [5] * 7,
    ]


GOLDEN_CASES = json.loads((GOLDEN / "delta.json").read_text())


@pytest.mark.parametrize("case", GOLDEN_CASES, ids=[case["segment"] for case in GOLDEN_CASES])
def test_golden_segments(case):
    """Version 1 of the format: these bytes decode for ever, to values within float rounding.

    Without RoPE all of an encoder's arithmetic is IEEE operations one by one, so that the bytes are
    the same on every machine; sines and cosines may differ in their last bit.
    """
    layout = KVLayout.model_validate(case["layout"])
    config = DeltaConfig.model_validate(case["config"])
    arrays = safetensors.numpy.load((GOLDEN / case["table"]).read_bytes())
    tables = DeltaTables.from_arrays(config, arrays, layout)
    codec = DeltaCodec(layout, tables, case["level"])
    stored = safetensors.torch.load((GOLDEN / case["values"]).read_bytes())
    specs = layout.layers[case["layer"]].tensors
    values = [stored[spec.name] for spec in specs]
    expected = [stored[f"{spec.name}.decoded"] for spec in specs]
    data = (GOLDEN / case["segment"]).read_bytes()
    decoded = decode(codec, case["layer"], data, values, case["start"])
    torch.testing.assert_close(decoded, expected, rtol=2.0**-8, atol=1e-5)
    if not layout.ropes:
        assert codec.encode(case["layer"], values, case["start"]) == data


@given(segments(), st.integers(1, 9))
def test_errors_of_kept_tokens_are_at_most_half_a_bin(segment, stride):
    where, how = segment
    layer, start, tokens = where["layer"], where["start"], where["tokens"]
    kept = torch.arange(start + tokens) * stride + torch.arange(N_LAYERS)[:, None, None]
    layout = layout_of("float32")
    codec = DeltaCodec(layout, make_tables(how["group"], how["kind"]), how["level"], kept)
    specs = codec.specs(layer)
    places = kept_positions(layout, [layer], kept, start, tokens)
    x = channels(layout, specs, make_cache(layout, **where), start)
    tensors = to_tensors(layout, specs, x, places)
    out = decode(codec, layer, codec.encode(layer, tensors, start), tensors, start)
    sinks = sinks_of(codec.config, start, tokens)
    after = channels(layout, specs, out, places)[sinks:].T
    allowed = half_bins(codec, make_tables(how["group"]), layer, how["level"], tokens - sinks)
    rounding = 2.0**-18 * x.abs().amax() if x.numel() else 0
    assert ((after - x[sinks:].T).abs() <= allowed + rounding).all()


def test_kept_tokens_are_left_to_torch_on_a_gpu(monkeypatch):
    # The kernels rotate tokens in a row.
    monkeypatch.setattr(kernel_codec, "takes_kernels", lambda out: True)
    codec = DeltaCodec(layout_of("float32"), make_tables(), 1, torch.arange(0, 60, 2)[None, None])
    tensors = make_cache(codec.layout, 0, 30)
    data = codec.encode(0, tensors, 0)
    monkeypatch.setattr(codec, "_decode_on_gpu", lambda *_: pytest.fail("took the kernels"))
    assert all(tensor.isfinite().all() for tensor in decode(codec, 0, data, tensors))
