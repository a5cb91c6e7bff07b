from __future__ import annotations

import json

import pytest
import torch

from hf_cachegen.bench import kernels as bench
from hf_cachegen.bench import roofline, workloads
from hf_cachegen.codec import transform_tables, transform_triton
from hf_cachegen.codec.scale_classes import n_coded
from hf_cachegen.errors import FormatError


@pytest.mark.parametrize("codec", ["delta", "transform"])
def test_the_bound_for_an_h200_is_what_the_design_asks_for(codec):
    if torch.cuda.is_available():
        pytest.skip("it would measure, for minutes")
    result = bench.run_kernel_bench()
    assert result["measured"] is None
    assert "not measured: no GPU" in bench.report(result)
    assert result["codecs"][codec]["bound_bytes_per_s"] > 100e9
    assert json.loads(json.dumps(result)) == result


def test_terms_of_delta_are_counted_from_the_shape():
    shape = roofline.Shape(layers=2, heads=1, dim=16, contexts=3, tokens=1600)
    assert shape.values == 2 * 32 * 3 * 1600
    assert shape.planes == [150, 1350, 10, 90]
    terms = roofline.delta_terms(shape, roofline.H200, 4.0)
    amounts = {(t.stage, t.what.split()[-1]): t.amount for t in terms}
    assert amounts["entropy", "steps"] == 2 * 3 * 32 * ((5 + 1) * 103 + (43 + 3) * 86)
    assert amounts["delta", "written"] == 2 * shape.values
    # A stream a plane: 32,768 symbols are more than 32 rows have, but for the longest.
    streams = 2 * 3 * (1 + 2 + 1 + 1)
    assert terms[0].amount == shape.values / 2 + streams * 128


def test_terms_of_transform_are_counted_from_the_shape():
    shape = roofline.Shape(layers=2, heads=1, dim=16, contexts=3, tokens=1600)
    assert shape.groups == [2]
    mix = [roofline.Steps(0, 0.5, (0.125, 0.5)), roofline.Steps(1, 0.5, (0.0, 0.25))]
    terms = roofline.transform_terms(shape, roofline.H200, 4.0, mix)
    amounts = {(t.stage, t.what.split(" M ")[-1]): t.amount for t in terms}
    # 64 channels; of 750 and 50 tokens each, 8 + 24 and then 0 + 16 coefficients, 8 thirds.
    integers, thirds = 3 * 800 * (32 + 16), 3 * 800 * 8
    assert amounts["entropy", "integers written"] == 2 * (integers + thirds)
    assert amounts["entropy", "steps"] == 3 * (24 + 2) * ((32 + 16) * 86 + 8 * 50)
    assert amounts["join", "tiles"] == 3 * (24 + 2) * 32 * (32 + 16) / 256 * (325 + 205)
    assert amounts["product", "multiply-adds"] == 2 * integers * 64
    assert amounts["product", "basis read"] == 2 * (32 + 16) * 64
    assert amounts["store", "values written"] == 2 * shape.values
    # 43 rows of 750 tokens fit a stream, and all of 50.
    streams = 3 * 2 * (3 + 1)
    assert terms[0].amount == shape.values / 2 + streams * 128


def test_groups_are_those_of_the_codec():
    shape = roofline.Shape()
    layout = workloads.synthetic_layout(shape, shape.layers)
    groups = transform_tables.layer_groups(layout, roofline.TRANSFORM_GROUP)
    assert shape.groups == [len(group) for group in groups]
    assert roofline.BATCH_TOKENS == transform_triton.BATCH_TOKENS


def test_a_stage_takes_its_bytes_or_its_instructions():
    terms = [
        roofline.Term("a", "x", "bytes", 10, 10),
        roofline.Term("a", "y", "bytes", 20, 10),
        roofline.Term("a", "z", "instructions", 20, 10),
        roofline.Term("b", "z", "instructions", 5, 10),
    ]
    assert roofline.bound_s(terms) == {"a": 3.0, "b": 0.5}


def test_what_is_timed_of_delta_decodes_to_what_was_encoded(device, monkeypatch):
    for module in (roofline, workloads):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 24)
    layer = workloads.DeltaLayer(roofline.Shape(1, 1, 4, contexts=2, tokens=40), device)
    layer.check()
    layer.decode_integers()
    layer._integers[0][0, 0] += 100
    with pytest.raises(RuntimeError, match="does not give back"):
        layer.check()


def test_what_is_timed_of_transform_decodes_to_what_was_encoded(device, monkeypatch):
    for module in (roofline, workloads):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 16)
    layers = workloads.TransformLayers(roofline.Shape(1, 1, 4, contexts=2, tokens=20), device)
    layers.check()
    layers.decode_integers()
    assert layers.bits_per_value > 0
    layers._data[0], layers._data[1] = layers._data[1], layers._data[0]
    with pytest.raises((RuntimeError, FormatError)):
        layers.check()


def test_the_synthetic_spectrum_codes_what_was_measured():
    channels = 1920
    tables = workloads._synthetic_tables(channels, 5, 3)
    for part in roofline.MEASURED_STEPS:
        for level, known in enumerate(part.known):
            found = n_coded(tables.groups[0].sigma, tables.config.scale(level, part.exponent))
            assert abs(found / channels - known) < 0.01
