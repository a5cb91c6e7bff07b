from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cachegen.codec.channels import kept_positions, store_channels
from hf_cachegen.codec.delta import DeltaCodec, DeltaConfig, DeltaTables
from hf_cachegen.codec.delta_profile import DeltaProfiler
from hf_cachegen.codec.integer_tables import LIMIT
from hf_cachegen.layout import KVLayout, LayerSpec, RopeSpec, TensorSpec

# Nothing is rotated, so that a channel's statistics are those of the numbers given.
LAYOUT = KVLayout(
    dtype="float32",
    ropes={},
    layers=(
        LayerSpec(
            kind="full_attention",
            tensors=(TensorSpec(name="k", heads=2, dim=3), TensorSpec(name="v", heads=1, dim=5)),
        ),
        LayerSpec(kind="full_attention", tensors=(TensorSpec(name="latent", heads=1, dim=4),)),
    ),
)
ROWS = 2 * 3 + 5 + 4


def sample(tokens, seed=0):
    """One context: per layer its tensors, channels of different mean and magnitude."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for layer in LAYOUT.layers:
        tensors = []
        for spec in layer.tensors:
            channel = torch.arange(spec.channels).view(spec.heads, 1, spec.dim)
            noise = torch.randn(spec.heads, tokens, spec.dim, generator=generator)
            tensors.append(channel - 2 + noise * torch.exp2(channel % 5 - 3.0))
        layers.append(tensors)
    return layers


def profile(config, samples, start=0):
    profiler = DeltaProfiler(LAYOUT, config)
    for observe in (profiler.observe_moments, profiler.observe_counts):
        for layers in samples:
            for layer, tensors in enumerate(layers):
                observe(layer, tensors, start)
    return profiler.finish()


def planes(layers):
    """All channels of a sample, float64 [ROWS, T]."""
    flat = [t.transpose(1, 2).flatten(0, 1) for tensors in layers for t in tensors]
    return torch.cat(flat).double().numpy()


def assert_same(a, b):
    a, b = a.to_arrays(), b.to_arrays()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert np.array_equal(a[name], b[name])


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(lambda sizes: max(sizes) > 10),
    st.sampled_from([0, 3, 10]),
    st.sampled_from([0, 2, 1000]),
)
def test_moments_of_pieces_are_those_of_the_whole(sizes, group, start):
    samples = [sample(tokens, seed) for seed, tokens in enumerate(sizes)]
    config = DeltaConfig(group=group)
    tables = profile(config, samples, start)
    kept = [planes(layers)[:, max(4 - start, 0) :] for layers in samples]
    whole = np.concatenate(kept, axis=1)
    np.testing.assert_allclose(tables.mean, whole.mean(axis=1), rtol=1e-4, atol=1e-6)
    span = 2 * config.anchor_range / (2**config.anchor_bits - 1)
    np.testing.assert_allclose(tables.anchor_step, whole.std(axis=1) * span, rtol=1e-4)
    spread = whole
    if group:
        parts = [
            (x - np.repeat(x[:, ::group], group, axis=1)[:, : x.shape[1]])[:, column::group]
            for x in kept
            for column in range(1, group)
        ]
        spread = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(tables.spread, spread.std(axis=1), rtol=1e-4)


@pytest.mark.parametrize("group", [0, 1, 10])
@pytest.mark.parametrize("kind", ["channel", "tensor"])
def test_tables_are_valid_and_the_same_every_time(group, kind):
    config = DeltaConfig(group=group, tables=kind)
    tables = profile(config, [sample(40), sample(30, seed=1)])
    assert_same(tables, profile(config, [sample(40), sample(30, seed=1)]))
    assert_same(tables, DeltaTables.from_arrays(config, tables.to_arrays(), LAYOUT))
    assert (tables.anchors is None) == (group == 0)
    assert [len(bank) for bank in tables.differences] == [ROWS if kind == "channel" else 3] * 4


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_anchors_alphabets_fit_their_bits(bits):
    """Values inside the range have 2^bits steps; past it the tables give out to escapes."""
    samples = [sample(800, seed) for seed in range(2)]
    tables = profile(DeltaConfig(group=2, anchor_bits=bits, anchor_range=6.0), samples)
    steps = tables.anchor_step * (2**bits - 1) / 12
    assert all(
        (np.abs(planes(layers) - tables.mean[:, None]) < 6 * steps[:, None]).all()
        for layers in samples
    ), "the samples should lie inside the range"
    bank = tables.anchors
    first, last = bank.lo, bank.lo + bank.sizes - 2
    smoothed = 20  # how far the tail of a symbol reaches
    assert (first >= max(-(2 ** (bits - 1)) - smoothed, -LIMIT)).all()
    assert (last <= min(2 ** (bits - 1) + smoothed, LIMIT)).all()
    for row, x in enumerate(np.concatenate([planes(layers)[:, 4::2] for layers in samples], 1)):
        q = np.rint((x - tables.mean[row]) / tables.anchor_step[row])
        assert first[row] <= q.min() <= q.max() <= last[row]


def assert_usable(tables, layers, start=0):
    """The tables survive a file, and every level codes a cache to within half a bin."""
    tables = DeltaTables.from_arrays(tables.config, tables.to_arrays(), LAYOUT)
    for level, factor in enumerate(tables.config.factors):
        codec = DeltaCodec(LAYOUT, tables, level)
        out = [[torch.empty_like(t) for t in tensors] for tensors in layers]
        data = [codec.encode(layer, layers[layer], start) for layer in range(2)]
        for layer in range(2):
            codec.decode_into(layer, data[layer], out[layer], start)
        error = np.abs(planes(out) - planes(layers))
        widest = np.maximum(tables.anchor_step, tables.spread * max(tables.config.bins) * factor)
        rounding = 2.0**-20 * np.abs(planes(layers)).max(initial=0)
        assert (error <= widest[:, None] / 2 + rounding).all()


@pytest.mark.parametrize("group", [0, 1, 10])
@pytest.mark.parametrize("kind", ["channel", "tensor"])
@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 6, 20])
def test_a_single_short_or_empty_sample_still_gives_tables_that_work(group, kind, tokens):
    tables = profile(DeltaConfig(group=group, tables=kind), [sample(tokens)])
    assert_usable(tables, sample(tokens))
    assert_usable(tables, sample(50, seed=9), start=tokens)


def test_without_any_sample_there_are_tables_that_work():
    tables = profile(DeltaConfig(), [])
    assert_usable(tables, sample(50))


@pytest.mark.parametrize("constant", [0.0, 3.25, -1000.0])
def test_a_constant_channel_costs_nothing_and_may_move_later(constant):
    samples = [sample(300, seed) for seed in range(2)]
    for layers in samples:
        layers[1][0][...] = constant
    tables = profile(DeltaConfig(), samples)
    *_, finest = [DeltaCodec(LAYOUT, tables, level) for level in range(4)]
    still = samples[0][1]
    data = finest.encode(1, still, 0)
    out = [torch.empty_like(still[0])]
    finest.decode_into(1, data, out, 0)
    torch.testing.assert_close(out, still, rtol=2.0**-16, atol=1e-3)
    assert len(data) < 4 * 4 * 4 + 600, "sinks, and the fixed cost of two planes"
    moved = sample(60, seed=5)
    moved[1][0] += constant
    assert_usable(tables, moved)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_samples_that_are_not_finite_are_the_callers_mistake(bad):
    layers = sample(10)
    layers[1][0][0, 7, 2] = bad
    profiler = DeltaProfiler(LAYOUT, DeltaConfig())
    profiler.observe_moments(0, layers[0], 0)
    for observe in (profiler.observe_moments, profiler.observe_counts):
        with pytest.raises(ValueError, match="layer 1: the sample's cache holds NaN or infinity"):
            observe(1, layers[1], 0)


def test_sinks_are_not_counted():
    layers, louder = sample(30), sample(30)
    for tensors in louder:
        for tensor in tensors:
            tensor[:, :4] = 1e6
    assert_same(profile(DeltaConfig(), [layers]), profile(DeltaConfig(), [louder]))


def test_the_sample_itself_needs_no_escapes():
    tables = profile(DeltaConfig(), [sample(1000)])
    x = planes(sample(1000))[:, 4:]
    anchors = np.rint((x[:, ::10] - tables.mean[:, None]) / tables.anchor_step[:, None])
    bank = tables.anchors
    assert (anchors >= bank.lo[:, None]).all()
    assert (anchors <= (bank.lo + bank.sizes - 2)[:, None]).all()


def test_kept_tokens_are_counted_without_their_own_rotation():
    layout = KVLayout(
        dtype="float32",
        ropes={"r": RopeSpec(inv_freq=(1.0, 0.1), attention_scaling=1.0, pairing="half")},
        layers=[
            LayerSpec(
                kind="full_attention", tensors=(TensorSpec(name="k", heads=2, dim=4, rope="r"),)
            )
        ]
        * 2,
    )
    kept = torch.arange(0, 120, 3) + torch.arange(4).view(2, 2, 1)
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) + torch.arange(8)
    found = []
    for positions in (kept, None):
        profiler = DeltaProfiler(layout, DeltaConfig(), positions)
        for observe in (profiler.observe_moments, profiler.observe_counts):
            for layer in range(2):
                out = [torch.empty(2, 40, 4)]
                places = kept_positions(layout, [layer], positions, 0, 40)
                store_channels(layout, layout.layers[layer].tensors, x, out, places)
                observe(layer, out, 0)
        found.append(profiler.finish())
    for name in ("mean", "anchor_step", "spread"):
        np.testing.assert_allclose(*(getattr(tables, name) for tables in found), rtol=1e-4)
