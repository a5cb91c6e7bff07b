from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from codec_samples import (
    DTYPES,
    GOLDEN,
    HUGE,
    decode,
    decode_or_refuse,
    empty_tensors,
    peak_bytes,
    sinks_of,
    to_tensors,
)
from codec_samples import layout_of as samples_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cachegen.codec import entropy, kernel_codec, transform
from hf_cachegen.codec.bank import ESCAPE_BITS, PROB_BITS, to_symbols
from hf_cachegen.codec.channels import channels
from hf_cachegen.codec.importance import Importance, importance_features
from hf_cachegen.codec.planes import ByteReader
from hf_cachegen.codec.transform import LARGEST, TransformCodec, encode_ladder
from hf_cachegen.codec.transform_matrices import Coefficients, synthesise
from hf_cachegen.codec.transform_profile import TransformProfiler
from hf_cachegen.codec.transform_tables import TransformConfig, TransformTables, group_specs
from hf_cachegen.layout import KVLayout

LEADERS = (0, 1, 3)  # of the groups [0], [1, 2] and [3, 4]
LEVELS = range(3)
CONFIG = TransformConfig(group=2, step=0.1, sinks=4, levels=len(LEVELS))


layout_of = partial(samples_layout, sliding=True)


def specs_of(layout, layer):
    return TransformCodec(layout, make_tables(), 0).specs(layer)


def make_channels(group, specs, tokens, seed, decay=0.65):
    """Correlated channels [T, C] of a group: directions of falling magnitude around a mean."""
    width = sum(spec.channels for spec in specs)
    fixed = torch.Generator().manual_seed(group)
    directions = torch.linalg.qr(torch.randn(width, width, generator=fixed))[0]
    mean = torch.randn(width, generator=fixed)
    noise = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1000 + seed))
    return mean + (noise * 16 * decay ** torch.arange(width)) @ directions


def make_cache(layout, layer, tokens, start=0, seed=0):
    """The tensors of the group that a layer leads."""
    specs = specs_of(layout, layer)
    return to_tensors(layout, specs, make_channels(layer, specs, tokens, seed), start)


def make_gradients(layout, group, specs, tokens, seed):
    """As of a loss that some channels matter to a hundred times more than others."""
    x = make_channels(100 + group, specs, tokens, seed, decay=0.9)
    return to_tensors(layout, specs, x * 0.05, 0)


@cache
def profiled():
    """Tables of two samples; they serve every dtype."""
    layout = layout_of("float32")
    profiler = TransformProfiler(layout, CONFIG)
    samples = [
        [
            (
                to_tensors(layout, specs, make_channels(group.start, specs, 300, seed), 0),
                make_gradients(layout, index, specs, 300, seed),
            )
            for index, group in enumerate(profiler.groups)
            for specs in [group_specs(layout, group)]
        ]
        for seed in (100, 101)
    ]
    for sample in samples:
        for index, (tensors, gradients) in enumerate(sample):
            profiler.observe(index, tensors, 0)
            profiler.observe_gradients(index, gradients, 0)
    for sample in samples:
        for index, (tensors, gradients) in enumerate(sample):
            profiler.observe_importance(index, tensors, gradients, 0)
    for sample in samples:
        for index, (tensors, _) in enumerate(sample):
            profiler.observe_counts(index, tensors, 0)
    return profiler.finish()


def make_tables(**changes):
    tables = profiled()
    return replace(tables, config=tables.config.model_copy(update=changes))


def make_codecs(dtype="bfloat16", importance=None, **changes):
    """The codec of every level."""
    tables = make_tables(**changes)
    layout = layout_of(dtype)
    return [TransformCodec(layout, tables, level, importance) for level in LEVELS]


def encode(codecs, layer, tensors, start=0):
    """What reading the last of these levels takes."""
    return b"".join(codec.encode(layer, tensors, start) for codec in codecs)


def widths_of(codec, layer):
    """Channels of each layer of a group."""
    return [codec.layout.layers[member].channels for member in codec.members(layer)]


def coefficients(codec, layer, data, tokens, start):
    """(exponents [T], {exponent: Coefficients}) that a segment's bytes hold, after the sinks."""
    reader = ByteReader(data, "segment")
    sinks = sinks_of(codec.config, start, tokens)
    n_values = sum(spec.channels for spec in codec.specs(layer)) * sinks
    reader.take(n_values * codec.dtype.itemsize)
    if tokens == sinks:
        return np.zeros(0, int), {}
    planes = codec._decode_coefficients(reader, layer, tokens - sinks)
    reader.finish()
    exponents = np.zeros(tokens - sinks, int)
    for exponent, plane in planes.items():
        exponents[plane.tokens] = exponent
    return exponents, planes


segments = st.fixed_dictionaries(
    {
        "layer": st.sampled_from(LEADERS),
        "tokens": st.one_of(st.integers(0, 25), st.integers(80, 120)),
        "start": st.sampled_from([0, 1, 3, 4, 1500]),
        "seed": st.integers(0, 5),
    }
)
ways = st.fixed_dictionaries(
    {
        "sinks": st.sampled_from([0, 4, 64]),
        "max_exponent": st.sampled_from([0, 1, 6, 16]),
        "importance_power": st.sampled_from([0.0, 0.6, 5.0]),
    }
)
MAGNITUDES = [0.0, 1e-3, 1.0, 1e3]


@given(segments, ways, st.sampled_from(MAGNITUDES), st.sampled_from(LEVELS))
def test_errors_of_coded_coefficients_are_at_most_half_a_step(where, way, magnitude, level):
    """Of step * w, plus the rounding of float32 arithmetic.

    Values far from what was profiled are as exact as any, through escapes.
    """
    codecs = make_codecs("float32", **way)[: level + 1]
    codec, layer, start = codecs[-1], where["layer"], where["start"]
    tensors = [tensor * magnitude for tensor in make_cache(codec.layout, **where)]
    data = encode(codecs, layer, tensors, start)
    out = decode(codec, layer, data, tensors, start)
    sinks = sinks_of(codec.config, start, where["tokens"])
    before, after = (
        channels(codec.layout, codec.specs(layer), [t[:, sinks:] for t in side], start + sinks)
        for side in (tensors, out)
    )
    group = LEADERS.index(layer)
    analysis = codec._tables.analysis.get(group, widths_of(codec, layer), torch.device("cpu"))
    error = ((after - before) @ analysis).numpy()
    rounding = 2.0**-16 * float((before @ analysis).abs().max()) if before.numel() else 0
    exponents, planes = coefficients(codec, layer, data, where["tokens"], start)
    assert sum(len(plane.tokens) for plane in planes.values()) == len(exponents)
    assert np.abs(exponents).max(initial=0) <= way["max_exponent"]
    for scale, which, q in planes.values():
        assert (np.abs(error[which, : len(q)]) <= 0.501 * scale + rounding).all()


@given(segments, ways, st.sampled_from(MAGNITUDES))
def test_levels_are_nested(where, way, magnitude):
    """What is decoded over the coarser levels is what each level's quantiser chose."""
    codecs, layer, start = make_codecs("float32", **way), where["layer"], where["start"]
    tensors = [tensor * magnitude for tensor in make_cache(codecs[0].layout, **where)]
    sinks, found = sinks_of(codecs[0].config, start, where["tokens"]), []
    for level, codec in enumerate(codecs):
        data = encode(codecs[: level + 1], layer, tensors, start)
        exponents, planes = coefficients(codec, layer, data, where["tokens"], start)
        rest = [tensor[:, sinks:] for tensor in tensors]
        chosen = codec._quantise(layer, rest, start + sinks)
        assert list(chosen) == sorted(planes)
        for exponent, finest in chosen.items():
            assert planes[exponent].scale == codec.config.scale(level, exponent)
            assert np.array_equal(planes[exponent].tokens, finest.tokens)
            assert np.array_equal(planes[exponent].q, codec._nested(layer, exponent, finest))
        found.append((exponents, planes))
    for (exponents, coarse), (same, fine) in pairwise(found):
        assert np.array_equal(exponents, same)
        for exponent, plane in coarse.items():
            q, finer = plane.q, fine[exponent].q
            assert len(q) <= len(finer)
            assert np.array_equal((finer[: len(q)] + 1) // 3, q)
            assert (np.abs(finer[len(q) :]) <= LARGEST).all()


@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
def test_coefficients_at_the_edge_of_a_bin_nest_too(tokens):
    """A product of few rows rounds otherwise than one of many, so every level takes the same."""
    layout, layer, group = layout_of("float32"), 1, 1
    tables = make_tables()
    kept = len(tables.groups[group].sigma)
    sigma = np.array([50.0, *np.linspace(5e-3, 4e-3, kept - 1)], np.float32)
    groups = list(tables.groups)
    groups[group] = table = replace(groups[group], sigma=sigma)
    tables = replace(tables, groups=tuple(groups))
    codecs = [TransformCodec(layout, tables, level, Importance("flat")) for level in LEVELS]
    widths, one = widths_of(codecs[0], layer), np.ones((1, 1), np.int32)
    unit = Coefficients(1.0, np.zeros(1, int), one)
    direction = synthesise(table, widths, [unit], 1, torch.device("cpu"))
    direction -= torch.from_numpy(table.mean)
    edges = (torch.arange(tokens) - tokens // 2 + 0.5) * CONFIG.step
    x = torch.from_numpy(table.mean) + edges[:, None] * direction
    tensors = to_tensors(layout, codecs[0].specs(layer), x, 4)
    first, last = (
        codec._nested(layer, 0, codec._quantise(layer, tensors, 4)[0])
        for codec in (codecs[0], codecs[2])
    )
    assert len(first) == 1 < len(last)
    assert np.array_equal((last[:1] + 4) // 9, first)


@given(segments, st.sampled_from(["bfloat16", "float16"]), st.sampled_from(LEVELS))
def test_sixteen_bits_decode_to_the_rounded_float32(where, dtype, level):
    """And bfloat16 to about that, since products may be in it too: see product_dtype."""
    small, wide = (
        make_codecs(name, sinks=0)[: level + 1] for name in (dtype, "float32")
    )  # sinks' bytes are of another width
    layer, start = where["layer"], where["start"]
    tensors = make_cache(small[0].layout, **where)
    data = encode(small, layer, tensors, start)
    floats = [tensor.float() for tensor in tensors]
    assert data == encode(wide, layer, floats, start)
    exact = decode(wide[-1], layer, data, floats, start)
    largest = max((float(t.abs().max()) for t in floats if t.numel()), default=0.0)
    atol = {"float16": 0.0, "bfloat16": 2.0**-6 * largest}
    for found, expected in zip(decode(small[-1], layer, data, tensors, start), exact, strict=True):
        expected = expected.to(found.dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=atol[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "tokens"), [(0, 2), (0, 4), (0, 30), (3, 30)])
@pytest.mark.parametrize("level", LEVELS)
def test_sinks_are_exact_even_if_not_finite(dtype, start, tokens, level):
    codecs = make_codecs(dtype)[: level + 1]
    tensors = make_cache(codecs[0].layout, 1, tokens, start)
    tensors[0][0, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    out = decode(codecs[-1], 1, encode(codecs, 1, tensors, start), tensors, start)
    for before, after in zip(tensors, out, strict=True):
        bits = torch.int32 if dtype == "float32" else torch.int16
        sinks = 4 - start
        assert torch.equal(before[:, :sinks].view(bits), after[:, :sinks].view(bits))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tensor", [0, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_the_callers_mistake(bad, tensor, level):
    codec = make_codecs()[level]
    tensors = make_cache(codec.layout, 1, 20)
    tensors[tensor][0, 7, 3] = bad
    with pytest.raises(ValueError, match=r"layer 1: .*NaN or infinity.*`lossless`"):
        codec.encode(1, tensors, 0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("magnitude", [1e12, 1e30, 3e38])
def test_values_beyond_every_escape_are_refused_not_clipped(magnitude, level):
    """At every level, so that an artefact does not lack its finer ones."""
    codec = make_codecs("float32")[level]
    tensors = make_cache(codec.layout, 1, 20)
    tensors[1][1, 9, 4] = magnitude
    with pytest.raises(ValueError, match=r"layer 1: .*`lossless`"):
        codec.encode(1, tensors, 0)


def test_far_values_do_not_cost_their_neighbours():
    codecs = make_codecs("float32")
    tensors = make_cache(codecs[0].layout, 1, 20)
    usual = decode(codecs[-1], 1, encode(codecs, 1, tensors), tensors)
    tensors[1][1, 9, 4] = 1e6
    out = decode(codecs[-1], 1, encode(codecs, 1, tensors), tensors)
    assert out[1][1, 9, 4] > 1e5, "as much of it as lies in what is coded"
    for before, after in zip(usual, out, strict=True):
        assert torch.equal(before[:, 10:], after[:, 10:])
        assert torch.equal(before[:, :9], after[:, :9])


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_and_outputs_may_have_any_strides(dtype):
    codecs = make_codecs(dtype)
    tensors = make_cache(codecs[0].layout, 0, 33)
    data = encode(codecs, 0, tensors)
    strided = [t.permute(2, 1, 0).contiguous().permute(2, 1, 0) for t in tensors]
    assert encode(codecs, 0, strided) == data
    buffers = [torch.full((40, t.shape[2] * 2, t.shape[0]), 9.0, dtype=t.dtype) for t in tensors]
    views = [buffer[5:38, ::2].permute(2, 0, 1) for buffer in buffers]
    codecs[-1].decode_into(0, data, views, 0)
    expected = decode(codecs[-1], 0, data, tensors)
    for view, found, buffer in zip(views, expected, buffers, strict=True):
        assert torch.equal(view, found)
        view.fill_(9.0)
        assert (buffer == 9).all(), "nothing outside the view was written"


def test_tensors_that_do_not_fit_the_layout_are_the_callers_mistake():
    codec = make_codecs()[0]
    tensors = make_cache(codec.layout, 1, 12)
    data = codec.encode(1, tensors, 0)
    shorter = [*tensors[:3], tensors[3][:, :-1]]
    wider = [tensor.float() for tensor in tensors]
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    own = tensors[:1]  # of the first layer alone
    for wrong in ([], own, tensors[::-1], shorter, wider, flat):
        with pytest.raises(ValueError, match=r"layer 1: expected tensors \[H, T, D\]"):
            codec.encode(1, wrong, 0)
        with pytest.raises(ValueError, match=r"layer 1: expected tensors \[H, T, D\]"):
            codec.decode_into(1, data, wrong, 0)


@pytest.mark.parametrize("layer", [2, 4])
def test_a_layer_that_another_carries_has_no_segment(layer):
    codec = make_codecs()[0]
    assert list(codec.members(layer)) == []
    tensors = empty_tensors(codec.layout, codec.layout.layers[layer].tensors, 5)
    for call in (
        lambda: codec.encode(layer, tensors, 0),
        lambda: codec.decode_into(layer, b"", tensors, 0),
    ):
        with pytest.raises(ValueError, match=f"layer {layer}: .*first layer of its group"):
            call()


def test_every_layer_is_carried_once():
    codec = make_codecs()[0]
    assert [list(codec.members(layer)) for layer in range(5)] == [[0], [1, 2], [], [3, 4], []]


def test_bytes_are_the_same_from_every_backend_thread_and_order(monkeypatch):
    codecs = make_codecs()
    tensors = make_cache(codecs[0].layout, 1, 200)
    tensors[0][0, 50, 0] = 1e4  # an escape
    expected = [codec.encode(1, tensors, 0) for codec in codecs]
    alone = replace(make_tables())  # builds its matrices anew
    for level in reversed(LEVELS):
        assert (
            TransformCodec(codecs[0].layout, alone, level).encode(1, tensors, 0) == expected[level]
        )
    with ThreadPoolExecutor(4) as pool:
        coded = pool.map(lambda level: codecs[level].encode(1, tensors, 0), [2, 1, 0] * 4)
        assert list(coded) == expected[::-1] * 4
    data = b"".join(expected)
    compiled = decode(codecs[-1], 1, data, tensors)
    monkeypatch.setattr(entropy, "AUTO_ORDER", ("numpy",))
    assert [codec.encode(1, tensors, 0) for codec in codecs] == expected
    plain = decode(codecs[-1], 1, data, tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_decoding_on_more_threads_gives_the_same_values(threads):
    """The integers to the bit; what is made of them but for the rounding of matrix products."""
    codecs = make_codecs("float32")
    tensors = make_cache(codecs[0].layout, 1, 700)
    data = encode(codecs, 1, tensors)
    expected = decode(codecs[-1], 1, data, tensors)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = decode(codecs[-1], 1, data, tensors)
        planes = coefficients(codecs[-1], 1, data, 700, 0)[1]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-18 * 100)
    for exponent, plane in coefficients(codecs[-1], 1, data, 700, 0)[1].items():
        assert np.array_equal(planes[exponent].q, plane.q)


def test_a_piece_decodes_to_what_its_tokens_decode_to_anywhere():
    """Nothing of a segment depends on where its tokens lie but the sinks and the rotation."""
    codecs = make_codecs("float32", importance=Importance("flat"))
    specs = codecs[0].specs(1)
    x = make_channels(1, specs, 40, seed=3)
    found = []
    for start in (4, 1500):
        tensors = to_tensors(codecs[0].layout, specs, x, start)
        out = decode(codecs[-1], 1, encode(codecs, 1, tensors, start), tensors, start)
        found.append(channels(codecs[0].layout, specs, out, start))
    torch.testing.assert_close(found[0], found[1], atol=0.05, rtol=0)


def test_one_codec_serves_many_threads_at_once():
    codecs = make_codecs()
    starts = range(0, 1500, 150)
    caches = [make_cache(codecs[0].layout, 0, 150, start, seed=start) for start in starts]

    def round_trip(start):
        tensors = caches[start // 150]
        out = decode(codecs[-1], 0, encode(codecs, 0, tensors, start), tensors, start)
        return torch.cat([tensor.flatten() for tensor in out])

    with ThreadPoolExecutor(4) as pool:
        parallel = list(pool.map(round_trip, starts))
    assert all(
        torch.equal(round_trip(start), out) for start, out in zip(starts, parallel, strict=True)
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layer", LEADERS)
def test_the_size_is_the_entropy_of_the_tables_plus_an_overhead_per_stream(layer, level):
    codec = make_codecs(importance=Importance("flat"))[level]
    tensors = make_cache(codec.layout, layer, 1500, start=4)
    data = codec.encode(layer, tensors, 4)
    ideal_bits, overhead_bytes = 0.0, 2 * 4
    if level == 0:
        overhead_bytes += 4 + 2 * 13 + 4 + 2 * 64  # the steps of the tokens
    for plane in codec.coded_planes(layer, tensors, 4):
        below, bank = len(plane.thirds), codec._tables.classes
        symbols, escapes = to_symbols(plane.integers, plane.classes[below:], bank)
        for coded, ids, tables in (
            (plane.thirds, plane.classes[:below], codec._tables.thirds),
            (symbols, plane.classes[below:], bank),
        ):
            freqs = tables.freqs[tables.starts[ids][:, None] + coded].astype(np.float64)
            ideal_bits += (PROB_BITS - np.log2(freqs)).sum()
            overhead_bytes += 4 + -(-len(ids) // 21) * (4 + 4 * 32)
        assert plane.low_bits.any() == (level == 0)
        ideal_bits += ESCAPE_BITS * len(escapes) + int(plane.low_bits.sum()) * 1500
        overhead_bytes += -(-np.count_nonzero(plane.low_bits) // 21) * (4 + 4 * 32)
    assert ideal_bits / 8 - 1 < len(data) <= 1.02 * ideal_bits / 8 + overhead_bytes


@given(segments, ways, st.lists(st.sampled_from(LEVELS), min_size=1, max_size=4))
def test_a_ladder_is_what_its_levels_are_alone(where, way, levels):
    """Whichever of them are encoded at once, in whatever order."""
    codecs = [make_codecs("float32", **way)[level] for level in levels]
    layer, start = where["layer"], where["start"]
    tensors = make_cache(codecs[0].layout, **where)
    found = encode_ladder(codecs, layer, tensors, start)
    assert found == [codec.encode(layer, tensors, start) for codec in codecs]


def test_finer_levels_add_bytes_and_are_closer():
    codecs = make_codecs("float32")
    tensors = make_cache(codecs[0].layout, 1, 500)
    errors, sizes = [], []
    for level in LEVELS:
        data = encode(codecs[: level + 1], 1, tensors)
        out = decode(codecs[level], 1, data, tensors)
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(tensors, out, strict=True)))
        sizes.append(len(data))
    assert sizes == sorted(sizes)
    assert errors[1] < errors[0] / 3
    assert errors[2] < errors[1] / 2
    assert sizes[0] < 500 * 36 * 4 / 8, "under 4 bits a value at the coarsest"


@given(st.integers(1, 6), st.integers(0, 40))
def test_importance_chooses_the_steps(power, seed):
    """w = s^(-power / 2), s being e^log_weights here: a power of sqrt(2), in its bounds."""
    weights = 4 * torch.randn(60, generator=torch.Generator().manual_seed(seed))
    importance = Importance("flat", 60, weights)
    codec = make_codecs("float32", importance, importance_power=power / 3)[0]
    tensors = make_cache(codec.layout, 0, 50, start=10)
    exponents, _ = coefficients(codec, 0, codec.encode(0, tensors, 10), 50, 10)
    wanted = -power / 3 * weights[10:].numpy() / np.log(2)
    inside = np.abs(wanted) < 6
    assert (np.abs(exponents - wanted)[inside] <= 0.501).all()
    assert (exponents[wanted > 6.6] == 6).all()
    assert (exponents[wanted < -6.6] == -6).all()


def test_modes_of_importance():
    tensors = make_cache(layout_of("float32"), 0, 120, start=4)
    found = {}
    for mode in ("flat", "predicted", "recent"):
        codec = make_codecs("float32", Importance(mode, 124), importance_power=3.0)[0]
        data = codec.encode(0, tensors, 4)
        found[mode], _ = coefficients(codec, 0, data, 120, 4)
        plain = make_codecs("float32", importance_power=3.0)[0]
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                decode(codec, 0, data, tensors, 4), decode(plain, 0, data, tensors, 4), strict=True
            )
        ), "a decoder need not know"
    assert (found["flat"] == 0).all()
    assert len(np.unique(found["predicted"])) > 1
    assert not np.array_equal(found["predicted"], found["recent"])


@pytest.mark.parametrize("weight", [1e30, -1e30, float("inf"), -float("inf"), float("nan")])
def test_extreme_weights_are_clipped(weight):
    codec = make_codecs("float32", Importance("flat", 8, torch.full((8,), weight)))[0]
    tensors = make_cache(codec.layout, 0, 4, start=4)
    exponents, _ = coefficients(codec, 0, codec.encode(0, tensors, 4), 4, 4)
    expected = 0 if np.isnan(weight) else -6 * np.sign(weight)
    assert (exponents == expected).all()


def test_importance_labels_tell_weights_apart():
    weights = torch.linspace(-1, 1, 9)
    labels = [
        Importance(mode, 9, given).label
        for mode in ("flat", "predicted", "recent")
        for given in (None, weights, weights.flip(0))
    ]
    assert len(set(labels)) == len(labels)
    assert labels[0] == "flat"
    assert Importance("flat", 9, weights.double()).label == labels[1]


def test_importance_is_checked():
    with pytest.raises(ValueError, match=r"'flat', 'predicted', 'recent'.*'best'"):
        Importance("best")
    with pytest.raises(ValueError, match="n_tokens"):
        Importance("recent")


def test_features_are_log_norms_of_heads_and_the_distance_from_the_end():
    tensors = make_cache(layout_of("float32"), 0, 5, start=7)
    features = importance_features(tensors, 7, n_tokens=11)
    assert features.shape == (5, 2 + 2 + 1)
    for column, norm in enumerate(torch.cat([t.square().sum(-1) for t in tensors])):
        torch.testing.assert_close(features[:, column], norm.log())
    assert features[:, -1].exp().round().tolist() == [4, 3, 2, 1, 1]
    assert torch.equal(importance_features(tensors, 7, None), features[:, :-1])


@pytest.mark.parametrize("level", LEVELS)
def test_truncated_longer_and_flipped_segments_are_refused_or_give_a_cache(level):
    codecs = make_codecs(max_exponent=1)[: level + 1]
    codec, layer, tokens = codecs[-1], 3, 9
    tensors = make_cache(codec.layout, layer, tokens)
    tensors[0][0, 7, 0] = 3e3  # an escape
    data = encode(codecs, layer, tensors)
    for size in range(len(data)):
        assert decode_or_refuse(codec, layer, data[:size], tokens) is None
    assert decode_or_refuse(codec, layer, data + b"\0", tokens) is None
    sink_bytes = 4 * 32 * 2
    refused = 0
    bits = range(8 * sink_bytes, 8 * len(data), level + 1)
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        refused += decode_or_refuse(codec, layer, bytes(damaged), tokens) is None
    assert refused > 0.85 * len(bits)


@pytest.mark.parametrize("level", LEVELS)
@given(data=st.binary(max_size=600), tokens=st.integers(0, 12), sinks=st.sampled_from([0, 4]))
def test_random_bytes_are_refused_or_give_a_cache(level, data, tokens, sinks):
    decode_or_refuse(make_codecs(sinks=sinks)[level], 1, data, tokens)


@settings(max_examples=200)
@given(st.data())
def test_mutated_segments_are_refused_or_give_a_cache(data):
    codecs = make_codecs(max_exponent=2)
    segment = bytearray(encode(codecs, 3, make_cache(codecs[0].layout, 3, 11, 4), 4))
    start = data.draw(st.integers(0, len(segment)))
    stop = data.draw(st.integers(start, min(start + 8, len(segment))))
    segment[start:stop] = data.draw(st.binary(max_size=8))
    decode_or_refuse(codecs[-1], 3, bytes(segment), 11, 4)


@pytest.mark.parametrize(
    ("layer", "tokens", "start"), [(1, 21, 0), (1, 23, 0), (0, 22, 0), (3, 22, 0), (1, 22, 1)]
)
@pytest.mark.parametrize("level", LEVELS)
def test_a_segment_of_other_tokens_or_another_layer_is_refused(layer, tokens, start, level):
    codecs = make_codecs()[: level + 1]
    data = encode(codecs, 1, make_cache(codecs[0].layout, 1, 22))
    assert decode_or_refuse(codecs[-1], 1, data, 22) is not None
    assert decode_or_refuse(codecs[-1], layer, data, tokens, start) is None


def test_only_the_chain_of_a_level_decodes():
    codecs = make_codecs()
    tensors = make_cache(codecs[0].layout, 1, 22)
    parts = [codec.encode(1, tensors, 0) for codec in codecs]
    wrong = [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (1, 0, 2), (0, 2, 1), (0, 0, 0)]
    for chain in [*wrong, (0, 1, 2, 2), (0, 1, 2, 0)]:
        data = b"".join(parts[part] for part in chain)
        assert decode_or_refuse(codecs[2], 1, data, 22) is None, chain
    assert decode_or_refuse(codecs[0], 1, parts[0] + parts[1], 22) is None


STEPS = struct.pack("<13H", 0, 0, 0, 0, 0, 0, 4096, *[0] * 6)  # all of w = 1
NO_STREAM = STEPS + bytes(4) + struct.pack("<32I", *[1 << 16] * 32)
COUNTED = struct.pack("<I", len(NO_STREAM)) + NO_STREAM


@pytest.mark.parametrize(
    "body",
    [
        b"",
        HUGE,
        HUGE * 40,
        struct.pack("<I", 26) + STEPS,
        struct.pack("<I", 26) + HUGE * 7,
        struct.pack("<I", 30) + STEPS + HUGE,
        COUNTED,
        COUNTED + HUGE,
        COUNTED + struct.pack("<I", 4) + HUGE + bytes(4),
        COUNTED + struct.pack("<I", 8) + bytes(4) + HUGE + bytes(4),
        COUNTED + struct.pack("<I", 4) + bytes(4) + HUGE,
    ],
)
def test_counts_that_promise_too_much_are_refused_without_allocating_it(body):
    codec = make_codecs(sinks=0)[0]
    tensors = make_cache(codec.layout, 1, 30)
    decode(codec, 1, codec.encode(1, tensors, 0), tensors)  # compiles
    found = []
    assert peak_bytes(lambda: found.append(decode_or_refuse(codec, 1, body, 30))) < 1 << 17
    assert found == [None]


GOLDEN_CASES = json.loads((GOLDEN / "transform.json").read_text())


@pytest.mark.parametrize(
    "case", GOLDEN_CASES, ids=[f"{c['values']}-{c['level']}" for c in GOLDEN_CASES]
)
def test_golden_segments(case, monkeypatch):
    """Version 1 of the format: these bytes decode for ever, to values within float rounding.

    An encoder's matrix products round as the machine likes, so that a coefficient at the edge of a
    bin may be coded otherwise than here, but no more.
    """
    monkeypatch.setattr(transform, "product_dtype", lambda dtype: torch.float32)
    layout = KVLayout.model_validate(case["layout"])
    config = TransformConfig.model_validate(case["config"])
    arrays = safetensors.numpy.load((GOLDEN / case["table"]).read_bytes())
    tables = TransformTables.from_arrays(config, arrays, layout)
    codec = TransformCodec(layout, tables, case["level"])
    stored = safetensors.torch.load((GOLDEN / case["values"]).read_bytes())
    n_tensors = len(codec.specs(case["layer"]))
    values = [stored[f"{index}"] for index in range(n_tensors)]
    expected = [stored[f"{index}.decoded{case['level']}"] for index in range(n_tensors)]
    data = b"".join((GOLDEN / name).read_bytes() for name in case["segments"])
    decoded = decode(codec, case["layer"], data, values, case["start"])
    torch.testing.assert_close(decoded, expected, rtol=2.0**-7, atol=1e-3)
    codecs = [TransformCodec(layout, tables, level) for level in range(case["level"] + 1)]
    again = decode(
        codec,
        case["layer"],
        encode(codecs, case["layer"], values, case["start"]),
        values,
        case["start"],
    )
    for found, want in zip(again, decoded, strict=True):
        assert torch.isclose(found, want, rtol=2.0**-7, atol=1e-3).float().mean() > 0.95


@pytest.mark.parametrize("start", [0, 2, 40])
@pytest.mark.parametrize("level", LEVELS)
def test_kept_tokens_are_coded_as_if_they_were_in_a_row(start, level):
    layout, tokens = layout_of("float32"), 60
    kept = torch.arange(start + tokens) * 3 + torch.arange(5)[:, None, None]
    in_a_row = make_cache(layout, 0, tokens, start, seed=7)
    plain, specs = make_codecs("float32")[: level + 1], specs_of(layout, 0)
    codecs = [
        TransformCodec(layout, make_tables(), codec.level, codec.importance, kept)
        for codec in plain
    ]
    x = channels(layout, specs, in_a_row, start)
    places = codecs[0].positions(0, start, tokens)
    tensors = to_tensors(layout, specs, x, places)
    expected = channels(
        layout, specs, decode(plain[-1], 0, encode(plain, 0, in_a_row, start), in_a_row, start),
        start,
    )  # fmt: skip
    found = channels(
        layout, specs, decode(codecs[-1], 0, encode(codecs, 0, tensors, start), tensors, start),
        places,
    )  # fmt: skip
    # Rounding takes a coefficient at the edge of a bin to the next one now and then.
    near = torch.isclose(found, expected, atol=1e-3, rtol=1e-4)
    assert near.float().mean() > 0.97
    torch.testing.assert_close(found[: max(4 - start, 0)], x[: max(4 - start, 0)])


def test_kept_tokens_are_left_to_torch_on_a_gpu(monkeypatch):
    # The kernels rotate tokens in a row.
    monkeypatch.setattr(kernel_codec, "takes_kernels", lambda out: True)
    layout = layout_of("float32")
    codec = TransformCodec(layout, make_tables(), 0, kept=torch.arange(0, 60, 2)[None, None])
    tensors = make_cache(layout, 0, 30)
    data = codec.encode(0, tensors, 0)
    monkeypatch.setattr(codec, "_decode_on_gpu", lambda *_: pytest.fail("took the kernels"))
    assert all(tensor.isfinite().all() for tensor in decode(codec, 0, data, tensors))
