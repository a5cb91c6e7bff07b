from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cachegen.codec.bank import ESCAPE_BITS, PROB_BITS, to_symbols
from hf_cachegen.codec.channels import channels
from hf_cachegen.codec.importance import Importance
from hf_cachegen.codec.rope import rotate
from hf_cachegen.codec.scale_classes import CLASS_RATIOS, LOWEST_RATIO
from hf_cachegen.codec.transform import TransformCodec
from hf_cachegen.codec.transform_matrices import (
    LARGE_STEPS,
    Coefficients,
    analysis_matrix,
    scaled_basis,
    synthesise,
    unwhiteners,
)
from hf_cachegen.codec.transform_profile import (
    FINEST_EXPONENT,
    LIMIT,
    TransformProfiler,
)
from hf_cachegen.codec.transform_tables import (
    TransformConfig,
    TransformTables,
    group_specs,
    layer_groups,
)
from hf_cachegen.layout import KVLayout, LayerSpec, RopeSpec, TensorSpec

CPU = torch.device("cpu")
CONFIG = TransformConfig(group=2, step=0.1, sinks=4, levels=3)
K = TensorSpec(name="k", heads=2, dim=3)
V = TensorSpec(name="v", heads=1, dim=5)
LATENT = TensorSpec(name="latent", heads=1, dim=4)
# Nothing is rotated, so that a channel's statistics are those of the numbers given.
LAYOUT = KVLayout(
    dtype="float32",
    ropes={},
    layers=tuple(
        LayerSpec(kind="full_attention", tensors=tensors)
        for tensors in ((K, V), (LATENT,), (LATENT, V))
    ),
)
GROUPS = layer_groups(LAYOUT, 2)
WIDTHS = [[11], [4, 9]]


def to_tensors(group, x):
    """Channels [T, C] of a group as its tensors [H, T, D]."""
    specs = group_specs(LAYOUT, GROUPS[group])
    parts = x.split([spec.channels for spec in specs], dim=1)
    return [
        part.reshape(-1, spec.heads, spec.dim).transpose(0, 1)
        for spec, part in zip(specs, parts, strict=True)
    ]


def noise(tokens, width, seed):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def mixed(group, tokens, seed, kind=0):
    """Correlated channels, some a thousand times smaller than others."""
    width = sum(WIDTHS[group])
    mix = torch.randn(width, width, generator=torch.Generator().manual_seed(50 + 2 * group + kind))
    return noise(tokens, width, seed) @ mix * torch.logspace(0, -3, width)


def sample(tokens, seed=0):
    """Per group: channels and gradients [T, C]."""
    return [
        (mixed(g, tokens, seed) + torch.arange(sum(WIDTHS[g])) % 5 - 2, mixed(g, tokens, seed, 1))
        for g in range(2)
    ]


def calls(samples, start=0):
    """Of a profiler's methods, in order: a name and arguments."""
    groups_of = [
        [[to_tensors(group, part) for part in parts] for group, parts in enumerate(groups)]
        for groups in samples
    ]
    for groups in groups_of:
        for group, (x, g) in enumerate(groups):
            yield "observe", (group, x, start)
            yield "observe_gradients", (group, g, start)
    for groups in groups_of:
        for group, (x, g) in enumerate(groups):
            yield "observe_importance", (group, x, g, start)
    for groups in groups_of:
        for group, (x, _) in enumerate(groups):
            yield "observe_counts", (group, x, start)


def observed(samples, config=CONFIG, start=0):
    profiler = TransformProfiler(LAYOUT, config)
    for name, arguments in calls(samples, start):
        getattr(profiler, name)(*arguments)
    return profiler


def profile(samples, config=CONFIG, start=0):
    return observed(samples, config, start).finish()


def sensitivities(group, gradients):
    """F of a group, block-diagonal, float64, by its definition."""
    f = np.zeros((sum(WIDTHS[group]), sum(WIDTHS[group])))
    first = 0
    for width in WIDTHS[group]:
        block = slice(first, first + width)
        g = gradients[:, block].double().numpy()
        f[block, block] = g.T @ g / len(g)
        f[block, block] += CONFIG.ridge * np.trace(f[block, block]) / width * np.eye(width)
        first += width
    return f


def with_moment(moment, tokens, seed):
    """Samples [T, C], float64, of zero mean whose mean outer product is just this."""
    x = noise(tokens, len(moment), seed).double()
    x -= x.mean(0)
    own, wanted = (torch.linalg.cholesky(m) for m in (x.T @ x / tokens, moment))
    return torch.linalg.solve_triangular(own, x.T, upper=False).T @ wanted.T


def profile_of_known(spreads, config, tokens=4000):
    """A profile of values with these standard deviations [C] once whitened, of the second group.

    Returns the tables, L float64 [C, C] of F = L L', and the principal axes [C, C] as columns.
    """
    gradients, factors = [], []
    for seed, width in enumerate(WIDTHS[1]):
        axes = torch.linalg.qr(noise(width, width, seed).double())[0]
        moment = axes * torch.logspace(2, -1, width, dtype=torch.float64) @ axes.T
        gradients.append(with_moment(moment, tokens, 10 + seed))
        ridge = config.ridge * moment.diagonal().mean() * torch.eye(width, dtype=torch.float64)
        factors.append(torch.linalg.cholesky(moment + ridge))
    factor = torch.block_diag(*factors)
    axes = torch.linalg.qr(noise(len(factor), len(factor), 20).double())[0]
    whitened = axes * torch.tensor(spreads, dtype=torch.float64) ** 2 @ axes.T
    inverse = torch.linalg.inv(factor)
    x = 3 + with_moment(inverse.T @ whitened @ inverse, tokens, 30)
    profiler = TransformProfiler(LAYOUT, config)
    others = [part[: config.sinks + 40] for part in sample(100)[0]]
    for group, (values, slopes) in enumerate([others, (x, torch.cat(gradients, dim=1))]):
        values, slopes = (to_tensors(group, part.float()) for part in (values, slopes))
        profiler.observe(group, values, 0)
        profiler.observe_gradients(group, slopes, 0)
    return profiler.finish(), factor, axes


def round_trip_errors(tables, x):
    """Decoded less original channels [T, C] of the second group at level 0, all tokens alike."""
    codec, start = TransformCodec(LAYOUT, tables, 0, Importance("flat")), CONFIG.sinks
    tensors = to_tensors(1, x.float())
    out = [torch.empty_like(tensor) for tensor in tensors]
    codec.decode_into(1, codec.encode(1, tensors, start), out, start)
    specs = codec.specs(1)
    after, before = (channels(LAYOUT, specs, side, start).double() for side in (out, tensors))
    return after - before


def assert_same(a, b):
    found, expected = a.to_arrays(), b.to_arrays()
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].dtype == expected[name].dtype
        assert np.array_equal(found[name], expected[name])


def dense(tables, group):
    """What a unit of each coefficient adds to the channels, float64 [C, K]."""
    table = tables.groups[group]
    kept = len(table.sigma)
    unit = Coefficients(1.0, np.arange(kept), np.eye(kept, dtype=np.int32))
    x = synthesise(table, WIDTHS[group], [unit], kept, CPU) - torch.from_numpy(table.mean)
    return x.T.double().numpy()


def test_sigma_is_the_spread_along_the_principal_axes_of_the_whitened_values():
    whole = sample(2000)
    tables = profile([whole])
    for group, (x, g) in enumerate(whole):
        x, g = x[4:], g[4:]
        np.testing.assert_allclose(tables.groups[group].mean, x.mean(0), rtol=1e-4, atol=1e-5)
        f, covariance = sensitivities(group, g), np.cov(x.double().numpy().T, bias=True)
        expected = np.sqrt(np.sort(np.linalg.eigvals(f @ covariance).real)[::-1])
        sigma = tables.groups[group].sigma
        np.testing.assert_allclose(sigma, expected[: len(sigma)], rtol=2e-3)
        least = LOWEST_RATIO * CONFIG.scale(CONFIG.levels - 1, FINEST_EXPONENT)
        assert (expected[len(sigma) :] < least).all()
        assert (expected[: len(sigma)] > 0.99 * least).all()


ONE_LEVEL = TransformConfig(group=2, step=0.1, levels=1, sinks=0)
SPREADS = ONE_LEVEL.step * np.array([40, 30, 22, 16, 12, 9, 7, 5, 4, *[0.1] * 4])


def test_spreads_and_axes_are_those_that_theory_gives():
    tables, _, axes = profile_of_known(SPREADS, ONE_LEVEL)
    table = tables.groups[1]
    np.testing.assert_allclose(table.sigma, SPREADS[:9], rtol=1e-3)
    np.testing.assert_allclose(table.mean, 3, rtol=1e-5)
    basis = scaled_basis(table, CPU, 9).double().numpy() * table.coefficient_scale[:, None]
    np.testing.assert_allclose(np.abs(basis @ axes[:, :9].numpy()), np.eye(9), atol=5e-3)


def test_errors_are_white_where_coded_and_what_was_left_out_elsewhere():
    """Reverse water-filling: once whitened, step^2 / 12 along every axis with more than that."""
    tables, factor, axes = profile_of_known(SPREADS, ONE_LEVEL)
    whitened = noise(20_000, 13, seed=7).double() * torch.from_numpy(SPREADS)
    x = 3 + whitened @ axes.T @ torch.linalg.inv(factor)
    errors = (round_trip_errors(tables, x) @ factor @ axes).numpy()
    uniform = ONE_LEVEL.step**2 / 12
    expected = np.diag([uniform] * 9 + [float(SPREADS[-1]) ** 2] * 4)
    np.testing.assert_allclose(errors.T @ errors / len(errors), expected, atol=0.06 * uniform)


def test_the_rounding_of_the_basis_moves_no_token_by_a_share_of_its_large_coefficients():
    """The same in all tokens, it would cost far more than noise of its size."""
    step = ONE_LEVEL.step
    tables, factor, axes = profile_of_known(SPREADS, ONE_LEVEL)
    whitened = noise(4000, 13, seed=7).double() * torch.from_numpy(SPREADS)
    whitened[:, 0] = 2000 * step + step * torch.linspace(-0.5, 0.5, 4000)
    x = 3 + whitened @ axes.T @ torch.linalg.inv(factor)
    coarse = replace(tables.groups[1], basis_low=tables.groups[1].basis_low[:0])
    without_low = replace(tables, groups=(tables.groups[0], coarse))
    bias, bias_without = (
        float((round_trip_errors(t, x) @ factor).mean(0).abs().max()) for t in (tables, without_low)
    )
    assert bias < 0.05 * step
    assert bias_without > step


def test_synthesis_is_orthonormal_in_the_metric_of_the_sensitivities():
    """So that an error of a coefficient costs its square; int8 moves it by a percent or two."""
    whole = sample(2000)
    tables = profile([whole])
    for group, (x, g) in enumerate(whole):
        table, f, s = tables.groups[group], sensitivities(group, g[4:]), dense(tables, group)
        product = s.T @ f @ s
        np.testing.assert_allclose(product, np.eye(s.shape[1]), atol=0.03)
        fine = len(table.basis_low)
        assert fine == (table.sigma >= LARGE_STEPS * CONFIG.steps[-1]).sum() > 1
        np.testing.assert_allclose(product[:fine, :fine], np.eye(fine), atol=3e-3)
        a = analysis_matrix(table, WIDTHS[group], CPU).double().numpy()
        np.testing.assert_allclose(a.T @ s, np.eye(s.shape[1]), atol=1e-4)
        y = (x[4:].double().numpy() - table.mean) @ a
        np.testing.assert_allclose(y.std(0), table.sigma, rtol=0.2)
        np.testing.assert_allclose(y.std(0)[:fine], table.sigma[:fine], rtol=0.01)


def test_the_stored_triangles_whiten_by_f():
    """Each is the inverse of the Cholesky factor of its layer's F, to the rounding of float16."""
    whole = sample(500)
    tables = profile([whole])
    for group, (_, g) in enumerate(whole):
        f, table, first = sensitivities(group, g[4:]), tables.groups[group], 0
        found = unwhiteners(table, WIDTHS[group], CPU)
        for width, triangle, scale in zip(
            WIDTHS[group], found, table.unwhitener_scale, strict=True
        ):
            block = slice(first, first + width)
            expected = np.linalg.inv(np.linalg.cholesky(f[block, block]))
            assert scale == pytest.approx(np.abs(expected).max(), rel=1e-3)
            np.testing.assert_allclose(triangle.numpy(), expected, rtol=2e-3, atol=1e-3 * scale)
            first += width


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 80),
    st.sampled_from([4, 1000]),
)
def test_statistics_of_pieces_are_those_of_the_whole(sizes, start):
    """The counts too; the importance's recency is that of each piece."""
    pieces = [sample(tokens, seed) for seed, tokens in enumerate(sizes)]
    whole = [
        tuple(torch.cat([piece[group][part] for piece in pieces]) for part in range(2))
        for group in range(2)
    ]
    one, many = profile([whole], start=start), profile(pieces, start=start)
    for a, b in zip(one.groups, many.groups, strict=True):
        np.testing.assert_allclose(a.mean, b.mean, rtol=1e-3, atol=1e-4)
        assert abs(len(a.sigma) - len(b.sigma)) <= 1
        n = min(len(a.sigma), len(b.sigma))
        np.testing.assert_allclose(a.sigma[:n], b.sigma[:n], rtol=1e-2)
        np.testing.assert_allclose(a.unwhitener, b.unwhitener, atol=2e-3)
        np.testing.assert_allclose(a.unwhitener_scale, b.unwhitener_scale, rtol=1e-3)
        np.testing.assert_allclose(a.importance, b.importance, rtol=1e-2, atol=1e-2)


def test_tables_are_valid_and_the_same_every_time():
    samples = [sample(40), sample(30, seed=1)]
    tables = profile(samples)
    assert_same(tables, profile(samples))
    assert_same(tables, TransformTables.from_arrays(CONFIG, tables.to_arrays(), LAYOUT))


def test_accumulators_are_all_that_a_checkpoint_needs():
    """A profiler that takes over another's arrays between any two calls ends with its tables."""
    samples = [sample(40), sample(30, seed=1)]
    expected = profile(samples)
    profiler = TransformProfiler(LAYOUT, CONFIG)
    for name, arguments in calls(samples):
        getattr(profiler, name)(*arguments)
        kept = {name: array.copy() for name, array in profiler.accumulators().items()}
        profiler = TransformProfiler(LAYOUT, CONFIG)
        for name, array in profiler.accumulators().items():
            array[...] = kept.pop(name)
        assert not kept
    assert_same(profiler.finish(), expected)


def test_sinks_are_not_counted():
    quiet, loud = sample(60), sample(60)
    for x, g in loud:
        x[:4] = 1e6
        g[:4] = 1e6
    assert_same(profile([quiet]), profile([loud]))


@pytest.mark.parametrize("rotated", [2, 4])
def test_gradients_are_those_of_the_keys_before_their_rotation(rotated):
    """Of partial rope, too, which scales only the channels that it rotates."""
    rope = RopeSpec(inv_freq=(1.0, 0.2)[: rotated // 2], attention_scaling=1.3, pairing="half")
    spec = TensorSpec(name="keys", heads=1, dim=5, rope="r")
    layout = KVLayout(
        dtype="float32",
        ropes={"r": rope},
        layers=(LayerSpec(kind="full_attention", tensors=(spec,)),),
    )
    keys = noise(40, 5, 0)[None].requires_grad_()
    before = channels(layout, [spec], [keys.detach()], 7).requires_grad_()
    after = rotate(before[None], rope, 7)
    torch.testing.assert_close(after, keys)
    weights = noise(40, 5, 1)
    (at_keys,), (expected,) = (
        torch.autograd.grad((weights * cached[0]).square().sum(), inputs)
        for cached, inputs in ((keys, keys), (after, before))
    )
    profiler = TransformProfiler(layout, CONFIG)
    found = profiler._gradient_channels(0, [at_keys], 7)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def planted(exponent, recency=0.0, tokens=1500, seed=0):
    """A sample whose sensitivity is the first head's norm^exponent * distance^recency."""
    groups = []
    for x, g in sample(tokens, seed):
        loudness = torch.exp(torch.randn(tokens, generator=torch.Generator().manual_seed(seed)))
        x = x - x.mean(0)
        x[:, :3] = torch.nn.functional.normalize(x[:, :3], dim=1) * loudness[:, None]
        distance = torch.arange(tokens, 0, -1.0)
        groups.append((x, g * (loudness**exponent * distance**recency)[:, None]))
    return groups


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize("recency", [-0.7, 0.0])
def test_the_regression_finds_what_sensitivity_depends_on(exponent, recency):
    tables = profile([planted(exponent, recency, seed=seed) for seed in range(2)])
    table = tables.groups[0]
    assert table.importance.shape == (3 + 1,)
    assert table.recency.shape == (4 + 1,)
    # Log of a sum of squares: of the norm, half the power; of gradients, twice.
    assert table.importance[0] == pytest.approx(exponent, abs=0.15)
    assert table.recency[0] == pytest.approx(exponent, abs=0.15)
    assert table.recency[-2] == pytest.approx(2 * recency, abs=0.15)


def test_sensitivity_is_one_on_average():
    """So that the step is spent on the average token, whatever the scale of the loss."""
    whole = sample(2000)
    for scale in (1e-4, 1.0, 1e4):
        scaled = [(x, scale * g) for x, g in whole]
        weights = profile([scaled]).groups[0].importance
        features = to_tensors(0, whole[0][0][4:])
        norms = torch.cat([t.square().sum(-1) for t in features]).log().T.numpy()
        logs = norms @ weights[:-1] + weights[-1]
        assert -1.5 < logs.mean() < 0.2, "the mean of a log lies below the log of the mean"


def coded_sizes(tables, groups, start=0):
    sizes = []
    for group, (x, _) in enumerate(groups):
        layer, tensors = GROUPS[group].start, to_tensors(group, x)
        data, out = b"", [torch.empty_like(t) for t in tensors]
        for level in range(CONFIG.levels):
            codec = TransformCodec(LAYOUT, tables, level)
            data += codec.encode(layer, tensors, start)
            codec.decode_into(layer, data, out, start)
            assert all(torch.isfinite(t).all() for t in out)
        sizes.append(len(data))
    return sizes


@pytest.mark.parametrize("tokens", [5, 6, 20])
def test_a_single_short_sample_still_gives_tables_that_work(tokens):
    tables = profile([sample(tokens)])
    tables = TransformTables.from_arrays(CONFIG, tables.to_arrays(), LAYOUT)
    coded_sizes(tables, sample(tokens))
    coded_sizes(tables, sample(50, seed=9), start=tokens)


def test_the_sample_itself_needs_no_escapes():
    whole = sample(1000)
    tables = profile([whole])
    for group, (x, _) in enumerate(whole):
        for level in range(CONFIG.levels):
            codec = TransformCodec(LAYOUT, tables, level)
            for plane in codec.coded_planes(GROUPS[group].start, to_tensors(group, x), 0):
                ids, bank = plane.classes[len(plane.thirds) :], tables.classes
                assert (np.abs(plane.integers) <= LIMIT).all()
                assert (plane.integers >= bank.lo[ids, None]).all()
                assert (plane.integers <= (bank.lo + bank.sizes - 2)[ids, None]).all()


def coded_bits(codec, tables, groups):
    """Ideal bits of the integers: with the tables, and with a histogram of each row's own."""
    shared = own = 0.0
    for group, (x, _) in enumerate(groups):
        for plane in codec.coded_planes(GROUPS[group].start, to_tensors(group, x), 0):
            ids = plane.classes[len(plane.thirds) :]
            shared += table_bits(tables.classes, ids, plane.integers)
            for row in plane.integers:
                counts = np.unique(row, return_counts=True)[1]
                own -= counts @ np.log2(counts / len(row))
    return shared, own


def table_bits(bank, ids, integers):
    symbols, escapes = to_symbols(integers, ids, bank)
    freqs = bank.freqs[bank.starts[ids][:, None] + symbols]
    return (PROB_BITS - np.log2(freqs)).sum() + ESCAPE_BITS * len(escapes)


def test_the_tables_cost_no_more_than_those_of_the_sample_itself():
    """Classes shared by coefficients of about one spread, against a histogram for each."""
    whole, other = sample(4000), sample(4000, seed=1)
    tables = profile([whole])
    shared, own = coded_bits(TransformCodec(LAYOUT, tables, 0), tables, other)
    assert shared < 1.03 * own


def test_a_table_serves_steps_that_no_sample_had():
    """Flat weights after predicted ones shift coefficients to classes that were not profiled."""
    rare = torch.where(torch.arange(3000) % 50 == 20, 100.0, 1.0)[:, None]
    whole = [(x, g * rare) for x, g in sample(3000)]  # most tokens: far below the average
    profiler = observed([whole], CONFIG.model_copy(update={"levels": 1}))
    seen = profiler.accumulators()["counts"].any((0, 2))
    tables = profiler.finish()
    flat = TransformCodec(LAYOUT, tables, 0, Importance("flat"))
    used = [
        plane.classes
        for group, (x, _) in enumerate(whole)
        for plane in flat.coded_planes(GROUPS[group].start, to_tensors(group, x), 0)
    ]
    assert not seen[np.concatenate(used)].all()
    shared, own = coded_bits(flat, tables, whole)
    assert shared < 1.05 * own


def test_no_class_escapes_what_its_spread_makes_likely():
    """Laplacian integers of every class, most of which no sample had, cost about their entropy."""
    profiler = observed([sample(30)], CONFIG.model_copy(update={"levels": 1, "max_exponent": 0}))
    assert not profiler.accumulators()["counts"].any((0, 2))[-1]
    bank = profiler.finish().classes
    rng = np.random.default_rng(0)
    for number, ratio in enumerate(CLASS_RATIOS):
        spread = ratio * rng.uniform(1, 2**0.25, 20_000)
        integers = np.round(rng.laplace(scale=spread / 2**0.5)).astype(np.int32)[None]
        counts = np.unique(integers, return_counts=True)[1]
        own = -counts @ np.log2(counts / counts.sum())
        cost = table_bits(bank, np.array([number]), integers)
        assert cost < 1.08 * own + 0.03 * integers.size


@pytest.mark.parametrize("constant", [0.0, 3.25, -1000.0])
def test_a_constant_channel_comes_back(constant):
    whole = sample(500)
    whole[1][0][:, 2] = constant
    tables = profile([whole])
    tensors = to_tensors(1, whole[1][0])
    out = [torch.empty_like(t) for t in tensors]
    data = b""
    for level in range(CONFIG.levels):
        codec = TransformCodec(LAYOUT, tables, level)
        data += codec.encode(1, tensors, 0)
    codec.decode_into(1, data, out, 0)
    torch.testing.assert_close(out[0][0, :, 2], tensors[0][0, :, 2], rtol=1e-3, atol=0.02)


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_a_large_mean_does_not_drown_the_spread(offset):
    """Keys of models with biases lie hundreds of their spreads away from zero."""
    near, far = sample(1000), sample(1000)
    far = [(x + offset, g) for x, g in far]
    for a, b in zip(profile([near]).groups, profile([far]).groups, strict=True):
        np.testing.assert_allclose(b.mean - a.mean, offset, rtol=1e-4)
        n = min(len(a.sigma), len(b.sigma))
        np.testing.assert_allclose(a.sigma[:n], b.sigma[:n], rtol=0.02)


def test_a_layer_that_nothing_attends_to_costs_nothing():
    whole = sample(500)
    whole[1][1][:, :4] = 0  # the latent of layer 1 has no gradient
    tables = profile([whole])
    assert all(np.isfinite(array).all() for array in tables.to_arrays().values())
    coded_sizes(tables, sample(50, seed=3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_samples_that_are_not_finite_are_the_callers_mistake(bad):
    tensors = to_tensors(1, sample(10)[1][0])
    broken = to_tensors(1, sample(10)[1][0].clone())
    broken[0][0, 7, 2] = bad
    profiler = TransformProfiler(LAYOUT, CONFIG)
    for call in (
        lambda: profiler.observe(1, broken, 0),
        lambda: profiler.observe_gradients(1, broken, 0),
        lambda: profiler.observe_importance(1, tensors, broken, 0),
    ):
        with pytest.raises(ValueError, match=r"layers range\(1, 3\): .*NaN or infinity"):
            call()


def test_without_gradients_there_are_no_tables():
    profiler = TransformProfiler(LAYOUT, CONFIG)
    profiler.observe(0, to_tensors(0, sample(20)[0][0]), 0)
    with pytest.raises(ValueError, match="at least one sample with gradients"):
        profiler.finish()
