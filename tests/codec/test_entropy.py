from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.codec import entropy
from hf_cachegen.codec.bank import IntegerBank, TableBank, normalise_counts
from hf_cachegen.errors import BackendUnavailable, FormatError

GOLDEN = Path(__file__).parents[1] / "golden" / "rans_v1"
CASES = json.loads((GOLDEN / "cases.json").read_text())
BACKENDS = pytest.mark.parametrize("backend", ["numpy", "numba"])


def laplace_bank(n_tables=3, size=24):
    scale = np.arange(1, n_tables + 1)[:, None]
    counts = np.exp(-np.abs(np.arange(size) - size // 2) / scale)
    starts = np.arange(n_tables + 1, dtype=np.int32) * size
    freqs = normalise_counts(counts.ravel(), starts, keep=starts[1:] - 1)
    return IntegerBank(freqs, starts, np.full(n_tables, -(size // 2), np.int32))


@given(st.data())
def test_integers_round_trip(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shape = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 70)))
    dtype = data.draw(st.sampled_from([np.int8, np.uint8, np.int16, np.int32]))
    limits = np.iinfo(dtype)
    q = np.rint(rng.laplace(0, 2, shape)).clip(limits.min, limits.max).astype(dtype)
    extreme = rng.random(shape) < data.draw(st.sampled_from([0.0, 0.05, 1.0]))
    q[extreme] = rng.choice([limits.min, limits.max], shape)[extreme]
    bank, ids = laplace_bank(), rng.integers(0, 3, shape[0])
    rows_per_stream = data.draw(st.integers(1, 6))
    coded = {
        backend: entropy.encode_integers(q, ids, bank, rows_per_stream, backend)
        for backend in ("auto", "numpy", "numba")
    }
    assert len(set(coded.values())) == 1
    for backend, payload in coded.items():
        back = entropy.decode_integers(payload, shape, ids, bank, rows_per_stream, backend)
        assert back.dtype == np.int32
        assert np.array_equal(back, q)


@BACKENDS
def test_planes_need_not_be_contiguous(backend):
    q = np.arange(-30, 30, dtype=np.int32).reshape(10, 6).T
    data = entropy.encode_integers(q, np.zeros(6, int), laplace_bank(), 2, backend)
    back = entropy.decode_integers(data, (6, 10), np.zeros(6, int), laplace_bank(), 2, backend)
    assert np.array_equal(back, q)


@BACKENDS
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_files(case, backend):
    """These bytes are version 1 of the format: they decode for ever, and encode the same."""
    values = np.array(case["values"], np.int64).reshape(case["shape"])
    freqs, starts = np.array(case["freqs"], np.uint16), np.array(case["starts"], np.int32)
    ids, rows_per_stream = case["table_ids"], case["rows_per_stream"]
    data = (GOLDEN / f"{case['name']}.bin").read_bytes()
    bank: TableBank
    if "lo" in case:
        bank = IntegerBank(freqs, starts, np.array(case["lo"], np.int32))
        encode, decode, dtype = entropy.encode_integers, entropy.decode_integers, np.int32
    else:
        bank = TableBank(freqs, starts)
        encode, decode, dtype = entropy.encode_symbols, entropy.decode_symbols, np.uint8
    bank.validate()
    decoded = decode(data, values.shape, ids, bank, rows_per_stream, backend)
    assert np.array_equal(decoded, values)
    assert encode(values.astype(dtype), ids, bank, rows_per_stream, backend) == data


def hostile_decode(data, shape, ids, bank, backend):
    try:
        q = entropy.decode_integers(data, shape, ids, bank, 2, backend)
    except FormatError:
        return None
    assert q.shape == shape
    return q.tolist()


def test_truncated_and_flipped_integer_planes_are_refused_or_give_a_plane():
    rng = np.random.default_rng(3)
    q = np.rint(rng.laplace(0, 4, (4, 40))).astype(np.int32)
    bank, ids = laplace_bank(), np.array([0, 1, 2, 2])
    data = entropy.encode_integers(q, ids, bank, 2)
    assert int.from_bytes(data[:4], "little") > 0, "the sample should have escapes"
    for size in range(len(data)):
        assert hostile_decode(data[:size], q.shape, ids, bank, "numba") is None
        assert hostile_decode(data[:size], q.shape, ids, bank, "numpy") is None
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert hostile_decode(bytes(damaged), q.shape, ids, bank, "numba") == hostile_decode(
            bytes(damaged), q.shape, ids, bank, "numpy"
        )


@BACKENDS
@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused_or_give_a_plane(backend, data):
    hostile_decode(data, (2, 5), np.array([0, 1]), laplace_bank(), backend)


@pytest.mark.parametrize(
    "q",
    [np.zeros((2, 3), np.int64), np.zeros((2, 3), np.float32), np.zeros((1, 2, 3), np.int32)],
    ids=["int64", "float32", "3 axes"],
)
def test_planes_of_another_type_are_the_callers_mistake(q):
    with pytest.raises(ValueError, match=r"expected int32 \[R, T\]"):
        entropy.encode_integers(q, [0, 0], laplace_bank(), 1)


def test_backends_are_listed_with_reasons():
    backends = entropy.available_backends()
    assert backends["numpy"] is backends["numba"] is None
    assert "CUDA" in str(backends["triton"])


def test_an_unusable_backend_says_why_and_an_unknown_one_what_there_is():
    q = np.zeros((1, 3), np.int32)
    with pytest.raises(BackendUnavailable, match="CUDA"):
        entropy.encode_integers(q, [0], laplace_bank(), 1, "triton")
    with pytest.raises(ValueError, match="'numba', 'numpy'"):
        entropy.encode_integers(q, [0], laplace_bank(), 1, "cuda")


def test_without_numba_auto_falls_back_and_the_name_raises():
    script = """
import sys
sys.modules["numba"] = None  # what a missing package looks like to `import`
import numpy as np
from hf_cachegen.codec import entropy
from hf_cachegen.codec.bank import TableBank
from hf_cachegen.errors import BackendUnavailable
bank = TableBank(np.array([4000, 96], np.uint16), np.array([0, 2], np.int32))
symbols = np.zeros((1, 9), np.uint8)
data = entropy.encode_symbols(symbols, [0], bank, 1)
assert (entropy.decode_symbols(data, (1, 9), [0], bank, 1) == symbols).all()
assert "numba" in entropy.available_backends()["numba"]
try:
    entropy.encode_symbols(symbols, [0], bank, 1, "numba")
except BackendUnavailable as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "entropy backend 'numba': numba cannot be imported" in result.stdout


def test_nothing_is_left_to_load_after_the_warm_up():
    """Kernels are loaded for the types of the arrays that codecs pass, and not for others."""
    script = """
import numpy as np
from hf_cachegen.codec import entropy, rans_numba
from hf_cachegen.codec.bank import IntegerBank

KERNELS = (rans_numba._decode_streams, rans_numba._fill_integers)
def loaded():
    return [kernel.signatures for kernel in KERNELS]

assert not any(loaded())
entropy.warm_up()
before = loaded()
assert all(before)
starts = np.array([0, 3], np.int32)
bank = IntegerBank(np.array([1000, 2000, 1096], np.uint16), starts, np.array([-1], np.int32))
q = np.arange(-2, 4, dtype=np.int32).reshape(2, 3)
data = entropy.encode_integers(q, np.zeros(2, int), bank, 1)
assert (entropy.decode_integers(data, q.shape, np.zeros(2, int), bank, 1) == q).all()
assert loaded() == before, loaded()
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
