from __future__ import annotations

import json

import numpy as np
import pytest

from hf_cachegen.bench.entropy import fit_bank, main, run_entropy_bench
from hf_cachegen.codec.entropy import decode_integers, encode_integers


def test_bench_measures_planes_from_a_file(tmp_path, capsys):
    rng = np.random.default_rng(0)
    planes = np.rint(rng.laplace(0, 2, (2, 3, 200))).astype(np.int16)
    np.save(tmp_path / "planes.npy", planes)
    main([str(tmp_path / "planes.npy"), "--repeats", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["backend"] for row in result["rows"]] == ["numba", "numpy"]
    for row in result["rows"]:
        assert (row["rows"], row["tokens"]) == (6, 200)
        assert row["bits_per_symbol"] > row["table_entropy_bits"] > 2
        assert row["encode_integers"] > 0
        assert row["decode_integers"] > 0


@pytest.mark.parametrize(("low", "high"), [(-3, 3), (-5000, 5000), (900, 1000), (-(2**31), -900)])
def test_banks_are_fitted_to_any_range(low, high):
    q = np.random.default_rng(0).integers(low, high, (3, 50)).astype(np.int32)
    bank = fit_bank(q)
    bank.validate()
    data = encode_integers(q, np.arange(3), bank, 2)
    assert np.array_equal(decode_integers(data, q.shape, np.arange(3), bank, 2), q)


def test_planes_that_do_not_fit_an_int32_are_refused():
    with pytest.raises(ValueError, match="expected int32"):
        run_entropy_bench(np.zeros((2, 3), np.int64))
