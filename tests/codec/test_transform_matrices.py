from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.codec.transform_matrices import (
    Coefficients,
    GroupMatrices,
    analysis_matrix,
    product_dtype,
    scaled_basis,
    synthesise,
    unwhiteners,
)
from hf_cachegen.codec.transform_tables import GroupTables

CPU = torch.device("cpu")
WIDTHS = [80, 48]
N_CHANNELS, N_COEFFICIENTS, N_FINE = sum(WIDTHS), 60, 20


def pack(triangles):
    """Lower triangles [c, c] as they are stored: their values, and the scale of each."""
    scales = np.array([np.abs(triangle).max() for triangle in triangles], np.float32)
    packed = [t[np.tril_indices(len(t))] / s for t, s in zip(triangles, scales, strict=True)]
    return np.concatenate(packed).astype(np.float16), scales


def inverse_factors(widths, seed, magnitude=1.0):
    """The inverse of the Cholesky factor of a positive definite F for each width, float64."""
    rng = np.random.default_rng(seed)
    factors = []
    for width in widths:
        root = rng.normal(size=(width, width)) / width**0.5
        f = magnitude * (root @ root.T + 0.1 * np.eye(width))
        factors.append(np.linalg.inv(np.linalg.cholesky(f)))
    return factors


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    unwhitener, unwhitener_scale = pack(inverse_factors(WIDTHS, seed=1, magnitude=30.0))
    rows = np.linalg.qr(rng.normal(size=(N_CHANNELS, N_COEFFICIENTS)))[0].T
    coefficient_scale = np.abs(rows).max(1) / 127
    exact = rows / coefficient_scale[:, None]
    low = (exact - exact.round())[:N_FINE] * 256
    return GroupTables(
        mean=rng.normal(size=N_CHANNELS).astype(np.float32),
        unwhitener=unwhitener,
        unwhitener_scale=unwhitener_scale,
        basis=exact.round().astype(np.int8),
        basis_low=low.round().clip(-128, 127).astype(np.int8),
        coefficient_scale=coefficient_scale.astype(np.float32),
        sigma=np.linspace(2, 0.1, N_COEFFICIENTS, dtype=np.float32),
        importance=np.zeros(3, np.float32),
        recency=np.zeros(4, np.float32),
    )


def planes(*shapes):
    """Coefficients [K', T'] of tokens in turns."""
    rng = np.random.default_rng(2)
    order, found = rng.permutation(sum(tokens for _, tokens in shapes)), []
    for number, (kept, tokens) in enumerate(shapes):
        columns, order = np.sort(order[:tokens]), order[tokens:]
        q = rng.integers(-4, 5, (kept, tokens), np.int32)
        found.append(Coefficients(0.1 * 2.0**number, columns, q))
    return found


def dense(table, widths=WIDTHS):
    """S = U V' by its definition, float64 [C, K]."""
    basis = table.basis.astype(np.float64)
    basis[: len(table.basis_low)] += table.basis_low / 256
    basis *= table.coefficient_scale[:, None]
    blocks, first, channel = [], 0, 0
    for width, scale in zip(widths, table.unwhitener_scale, strict=True):
        triangle = np.zeros((width, width))
        for row in range(width):
            triangle[row, : row + 1] = table.unwhitener[first : first + row + 1]
            first += row + 1
        blocks.append(scale * triangle.T @ basis[:, channel : channel + width].T)
        channel += width
    assert first == len(table.unwhitener)
    return np.concatenate(blocks)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(0, 9),
    st.sampled_from([1e-12, 1.0, 1e12]),
)
def test_packed_triangles_come_back(widths, seed, magnitude):
    """Each in its layer's place, whatever its magnitude, to the rounding of float16."""
    factors = inverse_factors(widths, seed, magnitude)
    unwhitener, unwhitener_scale = pack(factors)
    table = GroupTables(
        **dict.fromkeys(GroupTables.__dataclass_fields__)
        | {"unwhitener": unwhitener, "unwhitener_scale": unwhitener_scale}
    )
    found = unwhiteners(table, widths, CPU)
    assert [tuple(triangle.shape) for triangle in found] == [(width, width) for width in widths]
    for triangle, factor in zip(found, factors, strict=True):
        assert triangle.dtype == torch.float32
        assert torch.equal(triangle, triangle.tril())
        rounding = 2.0**-11 * np.abs(factor) + 2.0**-24 * np.abs(factor).max()
        assert (np.abs(triangle.numpy() - factor) <= 1.001 * rounding).all()
    again, scales = pack([triangle.double().numpy() for triangle in found])
    assert np.array_equal(again, unwhitener)
    np.testing.assert_allclose(scales, unwhitener_scale, rtol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, N_FINE - 1, N_FINE, N_FINE + 1, N_COEFFICIENTS])
def test_the_first_rows_of_the_basis_are_finer(table, rows):
    basis = scaled_basis(table, CPU, rows)
    assert basis.dtype == torch.float32
    assert basis.shape == (rows, N_CHANNELS)
    fine = min(rows, N_FINE)
    assert np.array_equal(basis[fine:].numpy(), table.basis[fine:rows])
    exact = table.basis[:fine] + table.basis_low[:fine] / 256
    assert np.array_equal(basis[:fine].numpy(), exact)


@pytest.mark.parametrize("shapes", [[(60, 9)], [(40, 5), (60, 3), (0, 4), (1, 1)], [(0, 1)]])
def test_synthesis_is_the_mean_and_the_product(table, shapes):
    coefficients, s = planes(*shapes), dense(table)
    tokens = sum(tokens for _, tokens in shapes)
    x = synthesise(table, WIDTHS, coefficients, tokens, CPU)
    assert x.dtype == torch.float32
    for scale, columns, q in coefficients:
        expected = table.mean + (s[:, : len(q)] @ (scale * q)).T
        np.testing.assert_allclose(x[columns].numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shapes", [[(60, 9)], [(40, 50), (60, 30)]])
def test_products_of_16_bits_are_near(table, shapes):
    """As near as bfloat16 gets; large coefficients are not in them."""
    coefficients, tokens = planes(*shapes), sum(tokens for _, tokens in shapes)
    exact = synthesise(table, WIDTHS, coefficients, tokens, CPU)
    fast = synthesise(table, WIDTHS, coefficients, tokens, CPU, torch.bfloat16)
    spread = (exact - torch.from_numpy(table.mean)).abs().max()
    assert 0 < (fast - exact).abs().max() < 2.0**-6 * spread
    tiny = [part._replace(scale=part.scale * 1e-4) for part in coefficients]
    large = replace(table, sigma=np.ones_like(table.sigma))
    exact = synthesise(large, WIDTHS, tiny, tokens, CPU)
    assert torch.equal(exact, synthesise(large, WIDTHS, tiny, tokens, CPU, torch.bfloat16))


def test_only_caches_of_16_bits_have_such_products():
    assert product_dtype(torch.float32) == product_dtype(torch.float16) == torch.float32
    assert product_dtype(torch.bfloat16) in (torch.bfloat16, torch.float32)


def test_of_a_basis_without_fine_rows(table):
    coarse = replace(table, basis_low=table.basis_low[:0])
    ones = Coefficients(0.5, np.arange(2), np.ones((60, 2), np.int32))
    x = synthesise(coarse, WIDTHS, [ones], 2, CPU)
    expected = table.mean + 0.5 * dense(coarse).sum(1)
    np.testing.assert_allclose(x.numpy(), [expected, expected], rtol=1e-5, atol=1e-5)
    a = analysis_matrix(coarse, WIDTHS, CPU).double().numpy()
    np.testing.assert_allclose(a.T @ dense(coarse), np.eye(N_COEFFICIENTS), atol=1e-4)


def test_analysis_is_the_best_fit_in_the_metric_of_the_sensitivities(table):
    """Of what is stored, roundings included: F is what the stored triangles whiten."""
    a = analysis_matrix(table, WIDTHS, CPU)
    assert a.dtype == torch.float32
    assert a.shape == (N_CHANNELS, N_COEFFICIENTS)
    a, s = a.double().numpy(), dense(table)
    np.testing.assert_allclose(a.T @ s, np.eye(N_COEFFICIENTS), atol=1e-5)
    blocks = [u.double() for u in unwhiteners(table, WIDTHS, CPU)]
    u = torch.block_diag(*blocks).T.numpy()
    f = np.linalg.inv(u @ u.T)
    x = np.random.default_rng(3).normal(size=N_CHANNELS)
    rest = x - s @ (x @ a)
    assert np.abs(rest).max() > 0.1, "fewer coefficients than channels"
    np.testing.assert_allclose(s.T @ f @ rest, 0, atol=1e-3)


def test_analysis_is_built_once_for_all_threads(table):
    other = replace(table, basis=table.basis[::-1].copy())
    matrices = GroupMatrices([table, other], analysis_matrix)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda group: matrices.get(group, WIDTHS, CPU), [0, 1] * 8))
    assert {id(matrix) for matrix in found[::2]} == {id(found[0])}
    assert {id(matrix) for matrix in found[1::2]} == {id(found[1])}
    assert torch.equal(found[0], analysis_matrix(table, WIDTHS, CPU))
    assert torch.equal(found[1], analysis_matrix(other, WIDTHS, CPU))


def test_new_threads_decode_to_the_same_bits(table):
    """Each begins with another number of threads than torch was set to."""
    coefficients = planes((60, 5))
    expected = synthesise(table, WIDTHS, coefficients, 5, CPU)
    for _ in range(20):
        with ThreadPoolExecutor(2) as pool:
            for x in pool.map(lambda _: synthesise(table, WIDTHS, coefficients, 5, CPU), range(4)):
                assert torch.equal(x, expected)
