from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.codec.channels import channels, kept_positions, store_channels
from hf_cachegen.codec.rope import rotate
from hf_cachegen.layout import KVLayout, LayerSpec, RopeSpec, TensorSpec

HALF = RopeSpec(inv_freq=(1.0, 0.1, 0.01), attention_scaling=1.2, pairing="half")
PARTIAL = RopeSpec(inv_freq=(0.5,), attention_scaling=1.0, pairing="interleaved")
SPECS = (
    TensorSpec(name="keys", heads=2, dim=6, rope="half"),
    TensorSpec(name="values", heads=2, dim=5),
    TensorSpec(name="latent", heads=1, dim=7, rope="partial"),
)
N_CHANNELS = 12 + 10 + 7


def layout_of(dtype):
    return KVLayout(
        dtype=dtype,
        ropes={"half": HALF, "partial": PARTIAL},
        layers=(LayerSpec(kind="full_attention", tensors=SPECS),),
    )


def random_tensors(tokens, dtype="float32", specs=SPECS):
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(spec.heads, tokens, spec.dim, generator=generator).to(getattr(torch, dtype))
        for spec in specs
    ]


specs_in_any_order = st.lists(st.sampled_from(SPECS), min_size=1, max_size=4)


@given(specs_in_any_order, st.integers(0, 9), st.sampled_from([0, 4, 1000]))
def test_channels_are_those_before_rope_in_the_order_of_the_tensors(specs, tokens, start):
    layout = layout_of("float32")
    before = random_tensors(tokens, specs=specs)
    rotated = [
        tensor if layout.rope(spec) is None else rotate(tensor, layout.rope(spec), start)
        for spec, tensor in zip(specs, before, strict=True)
    ]
    x = channels(layout, specs, rotated, start)
    assert x.dtype == torch.float32
    assert x.shape == (tokens, sum(spec.channels for spec in specs))
    bounds = np.cumsum([0, *(spec.channels for spec in specs)])
    for spec, tensor, (first, end) in zip(specs, before, pairwise(bounds), strict=True):
        for head in range(spec.heads):
            for d in range(spec.dim):
                found = x[:, first:end][:, head * spec.dim + d]
                torch.testing.assert_close(found, tensor[head, :, d], atol=1e-5, rtol=1e-5)


@given(
    specs_in_any_order,
    st.integers(0, 9),
    st.sampled_from([0, 4, 1000]),
    st.sampled_from(["bfloat16", "float16", "float32"]),
)
def test_channels_go_back_to_the_tensors(specs, tokens, start, dtype):
    layout = layout_of(dtype)
    tensors = random_tensors(tokens, dtype, specs)
    out = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    store_channels(layout, specs, channels(layout, specs, tensors, start), out, start)
    rounding = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-5}[dtype]
    for before, after in zip(tensors, out, strict=True):
        torch.testing.assert_close(after, before, atol=rounding, rtol=rounding)


def test_without_rope_every_bit_goes_through():
    layout = layout_of("bfloat16")
    spec = SPECS[1]
    tensor = random_tensors(20, "bfloat16", [spec])[0]
    x = channels(layout, [spec], [tensor], 3)
    out = torch.empty_like(tensor)
    store_channels(layout, [spec], x, [out], 3)
    assert torch.equal(out, tensor)


def test_views_of_any_strides_are_read_and_written():
    layout = layout_of("float32")
    tensors = random_tensors(8)
    strided = [t.permute(2, 1, 0).contiguous().permute(2, 1, 0) for t in tensors]
    x = channels(layout, SPECS, tensors, 5)
    assert torch.equal(channels(layout, SPECS, strided, 5), x)
    buffers = [torch.zeros(t.shape[0], 12, t.shape[2]) for t in tensors]
    store_channels(layout, SPECS, x, [buffer[:, 3:11] for buffer in buffers], 5)
    for buffer, tensor in zip(buffers, tensors, strict=True):
        torch.testing.assert_close(buffer[:, 3:11], tensor, atol=1e-5, rtol=1e-5)
        assert (buffer[:, :3] == 0).all()
        assert (buffer[:, 11:] == 0).all()


def test_one_tensor_per_spec():
    layout = layout_of("float32")
    tensors = random_tensors(4)
    with pytest.raises(ValueError, match="zip"):
        channels(layout, SPECS, tensors[:-1], 0)
    x = torch.zeros(4, N_CHANNELS)
    with pytest.raises(ValueError, match="zip"):
        store_channels(layout, SPECS, x, tensors[:-1], 0)


@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize("n_heads", [1, 2])
def test_kept_tokens_are_those_of_their_layer_and_head(n_layers, n_heads):
    keys, values = SPECS[:2]
    layout = KVLayout(
        dtype="float32",
        ropes={"half": HALF},
        layers=[LayerSpec(kind="full_attention", tensors=(keys, values))] * 3,
    )
    kept = torch.arange(n_layers * n_heads * 10).view(n_layers, n_heads, 10) * 7
    specs, tensors = [keys, values] * 2, random_tensors(4, specs=[keys, values] * 2)
    places = kept_positions(layout, [1, 2], kept, 3, 4)
    expected = [
        torch.cat(
            [
                channels(
                    layout,
                    [spec.model_copy(update={"heads": 1})],
                    [tensor[head : head + 1, token : token + 1]],
                    int(kept.expand(3, 2, 10)[layer, head, 3 + token]),
                )
                for token in range(4)
            ]
        )
        for layer, spec, tensor in zip([1, 1, 2, 2], specs, tensors, strict=True)
        for head in range(2)
    ]
    x = channels(layout, specs, tensors, places)
    torch.testing.assert_close(x, torch.cat(expected, dim=1), atol=1e-5, rtol=1e-5)
    out = [torch.empty_like(tensor) for tensor in tensors]
    store_channels(layout, specs, x, out, places)
    for before, after in zip(tensors, out, strict=True):
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_tokens_in_a_row_need_no_more_than_the_first():
    assert kept_positions(layout_of("float32"), [0], None, 5, 8) == 5
