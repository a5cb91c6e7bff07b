from __future__ import annotations

import json

import pytest
import torch

from hf_cachegen.bench import kernels as bench


def test_the_bound_for_an_h200_is_what_the_design_asks_for():
    if torch.cuda.is_available():
        pytest.skip("it would measure, for minutes")
    result = bench.run_kernel_bench()
    assert result["measured"] is None
    assert "not measured: no GPU" in bench.report(result)
    assert result["bound_bytes_per_s"] > 100e9
    assert json.loads(json.dumps(result)) == result


def test_terms_are_counted_from_the_shape():
    shape = bench.Shape(layers=2, heads=1, dim=16, contexts=3, tokens=1600)
    assert shape.values == 2 * 32 * 3 * 1600
    assert shape.planes == [150, 1350, 10, 90]
    terms = {(t.stage, t.what): t for t in bench.roofline_terms(shape, bench.H200, 4.0)}
    steps = 2 * 3 * 32 * (5 + 43 + 1 + 3)
    assert terms["entropy", "steps"].amount == steps * 116
    assert terms["delta", "values written"].amount == 2 * shape.values
    # A stream a plane: 32,768 symbols are more than 32 rows have, but for the longest.
    streams = 2 * 3 * (1 + 2 + 1 + 1)
    assert terms["entropy", "streams read"].amount == shape.values / 2 + streams * 128


def test_a_stage_takes_its_bytes_or_its_instructions():
    terms = [
        bench.Term("a", "x", "bytes", 10, 10),
        bench.Term("a", "y", "bytes", 20, 10),
        bench.Term("a", "z", "instructions", 20, 10),
        bench.Term("b", "z", "instructions", 5, 10),
    ]
    assert bench.bound_s(terms) == {"a": 3.0, "b": 0.5}


def test_what_is_timed_decodes_to_what_was_encoded(device, monkeypatch):
    monkeypatch.setattr(bench, "CHUNK_TOKENS", 24)
    layer = bench._SyntheticLayer(bench.Shape(1, 1, 4, contexts=2, tokens=40), device)
    layer.check()
    layer.decode_integers()
    layer._integers[0][0, 0] += 100
    with pytest.raises(RuntimeError, match="does not give back"):
        layer.check()
