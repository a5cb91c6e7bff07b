from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.codec.rope import rotate, unrotate
from hf_cachegen.layout import RopeSpec


@st.composite
def rotations(draw):
    """A rope, and values with at least as many channels as it rotates."""
    pairs = draw(st.integers(1, 6))
    spec = RopeSpec(
        inv_freq=tuple(10000.0 ** (-i / pairs) for i in range(pairs)),
        attention_scaling=draw(st.sampled_from([0.7, 1.0, 1.3])),
        pairing=draw(st.sampled_from(["half", "interleaved"])),
    )
    shape = draw(st.tuples(st.integers(1, 3), st.integers(0, 9)))
    dim = 2 * pairs + draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(*shape, dim, generator=generator)
    return spec, x, draw(st.sampled_from([0, 1, 1500, 100_000]))


def channels_of_pair(spec, pair):
    n = len(spec.inv_freq)
    return (pair, pair + n) if spec.pairing == "half" else (2 * pair, 2 * pair + 1)


@given(rotations())
def test_each_pair_turns_by_its_angle_as_a_complex_number(rotation):
    spec, x, start = rotation
    expected = x.double().numpy().copy()
    positions = np.arange(start, start + x.shape[1], dtype=np.float32)
    for pair, inv_freq in enumerate(spec.inv_freq):
        a, b = channels_of_pair(spec, pair)
        # The angle is a product of float32, as models take it.
        turn = np.exp(1j * (positions * np.float32(inv_freq)).astype(np.float64))
        turned = (expected[..., a] + 1j * expected[..., b]) * turn * spec.attention_scaling
        expected[..., a], expected[..., b] = turned.real, turned.imag
    torch.testing.assert_close(
        rotate(x, spec, start).double(), torch.from_numpy(expected), atol=3e-6, rtol=0
    )


@given(rotations())
def test_undoing_the_rotation_gives_the_values_back(rotation):
    spec, x, start = rotation
    torch.testing.assert_close(
        unrotate(rotate(x, spec, start), spec, start), x, atol=3e-6, rtol=3e-6
    )


@given(rotations(), st.integers(0, 9))
def test_a_piece_turns_as_it_does_in_the_whole(rotation, cut):
    spec, x, start = rotation
    cut = min(cut, x.shape[1])
    parts = rotate(x[:, :cut], spec, start), rotate(x[:, cut:], spec, start + cut)
    torch.testing.assert_close(torch.cat(parts, dim=1), rotate(x, spec, start), atol=1e-6, rtol=0)


@given(rotations())
def test_channels_past_the_rotated_ones_pass_through(rotation):
    spec, x, start = rotation
    rest = 2 * len(spec.inv_freq)
    assert torch.equal(rotate(x, spec, start)[..., rest:], x[..., rest:])
    assert torch.equal(unrotate(x, spec, start)[..., rest:], x[..., rest:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_float_comes_in_and_float32_comes_out(dtype):
    spec = RopeSpec(inv_freq=(1.0,), attention_scaling=1.0, pairing="half")
    x = torch.tensor([[[1.0, -2.0, 3.0]]], dtype=dtype)
    for turn in (rotate, unrotate):
        assert turn(x, spec, 0).dtype == torch.float32
        assert turn(x, spec, 0).tolist() == x.tolist(), "token 0 does not turn"


@given(rotations(), st.data())
def test_tokens_anywhere_turn_as_they_would_alone(rotation, data):
    spec, x, start = rotation
    heads, tokens = x.shape[:2]
    rows = data.draw(st.sampled_from(sorted({1, heads})))
    places = st.lists(st.integers(start, start + 50), min_size=tokens, max_size=tokens)
    at = torch.tensor([data.draw(places) for _ in range(rows)], dtype=torch.int64)
    at = at.view(rows, tokens)
    if rows == 1 and data.draw(st.booleans()):
        at = at[0]
    for turn in (rotate, unrotate):
        found = turn(x, spec, at)
        for head, token in np.ndindex(heads, tokens):
            place = int(at.expand(heads, tokens)[head, token])
            alone = turn(x[head : head + 1, token : token + 1], spec, place)
            torch.testing.assert_close(
                found[head : head + 1, token : token + 1], alone, atol=1e-6, rtol=0
            )


@given(rotations())
def test_tokens_in_a_row_turn_the_same_to_the_bit_however_they_are_given(rotation):
    spec, x, start = rotation
    at = torch.arange(start, start + x.shape[1])
    for turn in (rotate, unrotate):
        assert torch.equal(turn(x, spec, at), turn(x, spec, start))
