from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs

from hf_cachegen.codec import entropy, rans_triton
from hf_cachegen.codec import rans as spec
from hf_cachegen.codec.bank import IntegerBank, TableBank, normalise_counts
from hf_cachegen.config import RANS_LANES, RANS_STATE_WORDS
from hf_cachegen.errors import BackendUnavailable, FormatError
from hf_cachegen.triton_kernels import rans
from hf_cachegen.triton_kernels.streams import EntryTables, PlaneShape, PlaneShapes

GOLDEN = Path(__file__).parents[1] / "golden" / "rans_v1"
TOKENS = [1, 31, 32, 33, 63, 150]
TABLES = {
    "certain": [4096],
    "certain of many": [0, 0, 4096, 0],
    "frequency 1": [1, 4094, 1],
    "16 symbols": [256] * 16,
    "17 symbols": [*[240] * 16, 256],
    "64 symbols": [64] * 64,
    "255 of frequency 1": [*[1] * 255, 4096 - 255],
}


def bank_of(*tables):
    starts = np.cumsum([0, *map(len, tables)]).astype(np.int32)
    return TableBank(np.concatenate(tables).astype(np.uint16), starts)


def draw_symbols(rng, bank, ids, tokens, *, extreme=False):
    """Symbols as likely as their table says, or any that can be coded."""
    rows = []
    for k in ids:
        f = bank.freqs[bank.starts[k] : bank.starts[k + 1]]
        codable = np.flatnonzero(f)
        p = None if extreme else f[codable] / 4096
        rows.append(rng.choice(codable, tokens, p=p))
    return np.array(rows, np.uint8).reshape(len(ids), tokens)


def laplace_bank(n_tables=3, size=24):
    scale = np.arange(1, n_tables + 1)[:, None]
    counts = np.exp(-np.abs(np.arange(size) - size // 2) / scale)
    starts = np.arange(n_tables + 1, dtype=np.int32) * size
    freqs = normalise_counts(counts.ravel(), starts, keep=starts[1:] - 1)
    return IntegerBank(freqs, starts, np.full(n_tables, -(size // 2), np.int32))


def decode(data, shape, ids, bank, rows_per_stream, device):
    return rans_triton.decode_plane(data, shape, ids, bank, rows_per_stream, device=str(device))


def encode(symbols, ids, bank, rows_per_stream, device):
    return rans_triton.encode_plane(symbols, ids, bank, rows_per_stream, device=str(device))


def test_kernels_are_interpreted_only_without_a_gpu(guards):
    names = {type(proxy.kernel).__name__ for proxy in guards.values()}
    assert names == {"JITFunction" if torch.cuda.is_available() else "InterpretedFunction"}


@pytest.mark.parametrize("extreme", [False, True], ids=["likely", "extreme"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_row_round_trips_with_the_bytes_of_the_specification(table, tokens, extreme, device):
    bank = bank_of(TABLES[table])
    symbols = draw_symbols(np.random.default_rng(tokens), bank, [0], tokens, extreme=extreme)
    data = spec.encode_plane(symbols, [0], bank, 1)
    assert encode(symbols, [0], bank, 1, device) == data
    assert np.array_equal(decode(data, symbols.shape, [0], bank, 1, device), symbols)


@given(st.data())
def test_planes_round_trip_with_the_bytes_of_the_specification(data):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    names = data.draw(st.lists(st.sampled_from(sorted(TABLES)), min_size=1, max_size=4))
    bank = bank_of(*[TABLES[name] for name in names])
    n_rows, tokens = data.draw(st.tuples(st.integers(0, 6), st.integers(0, 100)))
    rows_per_stream = data.draw(st.integers(1, 8))
    ids = rng.integers(0, len(bank), n_rows)
    symbols = draw_symbols(rng, bank, ids, tokens, extreme=data.draw(st.booleans()))
    coded = spec.encode_plane(symbols, ids, bank, rows_per_stream)
    assert encode(symbols, ids, bank, rows_per_stream, device) == coded
    decoded = decode(coded, symbols.shape, ids, bank, rows_per_stream, device)
    assert np.array_equal(decoded, symbols)


@pytest.mark.parametrize(
    "case", json.loads((GOLDEN / "cases.json").read_text()), ids=lambda c: c["name"]
)
def test_golden_planes_decode(case, device):
    data = (GOLDEN / f"{case['name']}.bin").read_bytes()
    shape, ids = tuple(case["shape"]), np.array(case["table_ids"], int)
    freqs, starts = np.array(case["freqs"], np.uint16), np.array(case["starts"], np.int32)
    values = np.array(case["values"]).reshape(shape)
    if "lo" not in case or case["lo"] is None:
        bank = TableBank(freqs, starts)
        decoded = decode(data, shape, ids, bank, case["rows_per_stream"], device)
        assert np.array_equal(decoded, values)
        return
    bank = IntegerBank(freqs, starts, np.array(case["lo"], np.int32))
    tables = rans_triton.entry_tables([(bank, ids, shape[0])]).to(device)
    plane = rans_triton.PlaneBytes(data, PlaneShape(*shape, case["rows_per_stream"]), True)
    integers, check = launch([plane], tables)
    check()
    assert np.array_equal(integers.cpu().numpy().reshape(shape), values)


@pytest.mark.parametrize("largest", [0, 1000, 2**31 - 1], ids=["none", "int16", "int32"])
def test_integers_of_several_planes_and_banks_decode_in_one_launch(largest, device, guards):
    rng = np.random.default_rng(3)
    banks = [laplace_bank(3, 24), laplace_bank(2, 70)]
    shapes, ids = [(5, 4), (7, 150)], [rng.integers(0, 3, 5), rng.integers(0, 2, 7)]
    planes = [np.rint(rng.laplace(0, 2, shape)).clip(-10, 10).astype(np.int32) for shape in shapes]
    for q in planes:
        q[rng.random(q.shape) < 0.1] = largest
        q[rng.random(q.shape) < 0.1] = -largest
    coded = [
        entropy.encode_integers(q, k, bank, 2)
        for q, k, bank in zip(planes, ids, banks, strict=True)
    ]
    parts = [(bank, k, len(k)) for bank, k in zip(banks, ids, strict=True)]
    tables = rans_triton.entry_tables(parts).to(device)
    shapes = [PlaneShape(5, 4, 2), PlaneShape(7, 150, 2, first_row=5)]
    parts = [rans_triton.PlaneBytes(d, s, True) for d, s in zip(coded, shapes, strict=True)]
    integers, check = launch(parts, tables)
    check()
    assert integers.dtype == (torch.int16 if largest < 2**15 else torch.int32)
    assert np.array_equal(integers.cpu().numpy(), np.concatenate([q.ravel() for q in planes]))
    assert guards["rans_decode_kernel"].launches == 1
    assert guards["fill_escapes_kernel"].launches == (largest > 0)


def test_nothing_beside_the_planes_is_written(device, poisoned):
    bank, tokens = bank_of([2048, 2048]), 33
    symbols = draw_symbols(np.random.default_rng(0), bank, [0] * 3, tokens)
    plane = coded_plane(spec.encode_plane(symbols, [0] * 3, bank, 2), PlaneShape(3, tokens, 2))
    whole = poisoned((7 + 3 * tokens + 5,), torch.uint8)
    tables = rans_triton.entry_tables([(bank, [0] * 3, 3)]).to(device)
    flags = rans.decode_planes(plane, tables, whole[7 : 7 + 3 * tokens])
    assert not flags.streams.any()
    expected = np.concatenate([[0xA5] * 7, symbols.ravel(), [0xA5] * 5])
    assert np.array_equal(whole.cpu().numpy(), expected)


def coded_plane(data, shape):
    return rans_triton.coded_planes([rans_triton.PlaneBytes(data, shape, False)])


def launch(parts, tables):
    return rans_triton.launch_planes(rans_triton.coded_planes(parts), tables)


def sample_plane():
    rng = np.random.default_rng(5)
    bank = bank_of(normalise_counts(rng.gamma(0.5, size=40)), [4096], [4095, 1])
    ids = np.array([0, 1, 2])
    symbols = draw_symbols(rng, bank, ids, 33)
    return symbols, ids, bank, spec.encode_plane(symbols, ids, bank, 1)


def decode_or_none(coder, data, *arguments):
    try:
        return coder(data, *arguments)
    except FormatError:
        return None


def test_damage_is_refused_exactly_where_the_specification_refuses_it(device):
    symbols, ids, bank, data = sample_plane()
    rng = np.random.default_rng(2)
    refused = 0
    for bit in rng.choice(8 * len(data), 20, replace=False):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        arguments = (bytes(damaged), symbols.shape, ids, bank, 1)
        plain = decode_or_none(spec.decode_plane, *arguments)
        kernel = decode_or_none(decode, *arguments, device)
        assert (plain is None) == (kernel is None)
        assert plain is None or np.array_equal(plain, kernel)
        refused += plain is None
    assert refused > 15


def test_random_words_stay_inside_every_buffer(device):
    symbols, ids, bank, _ = sample_plane()
    rng = np.random.default_rng(4)
    for _ in range(4):
        words = rng.integers(0, 20, 3)
        body = rng.bytes(3 * 2 * RANS_STATE_WORDS + 2 * int(words.sum()))
        data = words.astype("<u4").tobytes() + body
        plain = decode_or_none(spec.decode_plane, data, symbols.shape, ids, bank, 1)
        kernel = decode_or_none(decode, data, symbols.shape, ids, bank, 1, device)
        assert (plain is None) == (kernel is None)


def test_the_damaged_stream_is_named(device):
    symbols, ids, bank, data = sample_plane()
    damaged = data[:-2] + bytes(255 - byte for byte in data[-2:])
    with pytest.raises(FormatError, match="stream 2"):
        decode(damaged, symbols.shape, ids, bank, 1, device)


@pytest.mark.parametrize("escapes", [[], [7], [7, 8, 9]], ids=["fewer", "one less", "more"])
def test_a_wrong_number_of_escapes_is_refused(escapes, device):
    bank = laplace_bank()
    q = np.zeros((1, 40), np.int32)
    q[0, [3, 30]] = 1000
    coded = entropy.encode_integers(q, [0], bank, 1)
    plane = coded[4 + 2 * 4 :]
    hostile = np.array([len(escapes), *escapes], "<i4").tobytes() + plane
    tables = rans_triton.entry_tables([(bank, [0], 1)]).to(device)
    _, check = launch([rans_triton.PlaneBytes(hostile, PlaneShape(1, 40, 1), True)], tables)
    with pytest.raises(FormatError, match="expected 2 escaped integers"):
        check()


def good_plane():
    bank = bank_of([2048, 2048])
    symbols = np.zeros((4, 10), np.uint8)
    shape = PlaneShape(4, 10, 2)
    return coded_plane(spec.encode_plane(symbols, [0] * 4, bank, 2), shape), bank


SHAPES = [PlaneShape(5, 33, 2), PlaneShape(0, 33, 2), PlaneShape(5, 0, 2), PlaneShape(3, 40, 5)]


def several_planes():
    """Planes of both kinds, some of them empty, some with escapes: what is coded, and how."""
    rng, bank = np.random.default_rng(8), laplace_bank()
    parts = []
    for index, shape in enumerate(SHAPES):
        ids = rng.integers(0, 3, shape.n_rows)
        q = np.rint(rng.laplace(0, 4, shape[:2])).clip(-12, 100).astype(np.int32)
        parts.append(entropy.encode_integers(q, ids, bank, shape.rows_per_stream))
        symbols = draw_symbols(rng, bank, ids, shape.tokens)
        if index % 2:
            parts[-1] = spec.encode_plane(symbols, ids, bank, shape.rows_per_stream)
    kinds = [not index % 2 for index in range(len(SHAPES))]
    return [rans_triton.PlaneBytes(*part) for part in zip(parts, SHAPES, kinds, strict=True)]


def test_planes_are_read_together_as_they_are_one_by_one():
    parts = several_planes()
    planes = rans_triton.coded_planes(parts)
    planes.check()
    streams, escapes = [], []
    for data, shape, holds_integers in parts:
        given, words, bounds = read_plane(data, shape, holds_integers)
        streams += [words[a:b] for a, b in pairwise(bounds)]
        escapes += list(given)
    found = [planes.words.numpy()[begin:end] for begin, end in planes.bounds.tolist()]
    assert len(found) == len(streams) == 4
    assert all(np.array_equal(a, b) for a, b in zip(found, streams, strict=True))
    assert planes.escapes.tolist() == escapes
    assert len(escapes) > 0
    assert int(planes.n_escapes.sum()) == len(escapes)


@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_a_plane_of_another_length_is_refused_as_it_is_alone(which):
    parts = several_planes()
    data, shape, holds_integers = parts[which]
    hostile = [data[:n] for n in range(0, len(data), 3)] + [data + b"\0", data + bytes(2)]
    hostile.append(b"\xff" * max(len(data), 4))
    for other in hostile:
        changed = [*parts[:which], parts[which]._replace(data=other), *parts[which + 1 :]]
        with pytest.raises(FormatError) as together:
            rans_triton.coded_planes(changed)
        with pytest.raises(FormatError) as alone:
            read_plane(other, shape, holds_integers)
        assert str(together.value) == str(alone.value)


def read_plane(data, shape, holds_integers):
    """Escapes, words and their bounds, as the specification reads them."""
    escapes, plane = entropy.split_escapes(data) if holds_integers else ([], data)
    bounds = spec.stream_bounds(plane, shape[:2], shape.rows_per_stream)
    return escapes, np.frombuffer(plane, "<u2"), bounds


@pytest.mark.parametrize(
    "bounds",
    [[-1, 70, 140], [4, 4, 200], [200, 100, 4], [4, 72, 10**6], [4, 72], [4, 72, 2**40]],
    ids=["before", "no states", "backwards", "behind", "too few", "huge"],
)
def test_streams_outside_their_plane_are_refused_before_the_launch(bounds, device, guards):
    plane, bank = good_plane()
    between = torch.tensor([*pairwise(bounds)])
    refuse(replace(plane, bounds=between), bank, device, guards, FormatError, "inside")


def test_states_below_the_bound_are_refused_before_the_launch(device, guards):
    plane, bank = good_plane()
    words = plane.words.clone()
    words.view(torch.int16)[int(plane.bounds[1, 0]) + 63] = 0
    refuse(
        replace(plane, words=words),
        bank,
        device,
        guards,
        FormatError,
        "stream 1 begins with a state",
    )


def test_rows_without_a_table_are_refused_before_the_launch(device, guards):
    plane, bank = good_plane()
    shapes = PlaneShapes.of([PlaneShape(4, 10, 2, first_row=1)])
    refuse(replace(plane, shapes=shapes), bank, device, guards, ValueError, "planes of 4 rows")


def test_tensors_on_the_cpu_are_refused_unless_interpreted(monkeypatch):
    plane, bank = good_plane()
    tables = rans_triton.entry_tables([(bank, [0] * 4, 4)])
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(BackendUnavailable, match=r"tensors on a GPU, got one on cpu.*'numba'"):
        rans.decode_planes(plane, tables, torch.zeros(40, dtype=torch.uint8))


def refuse(plane, bank, device, guards, error, match):
    tables = rans_triton.entry_tables([(bank, [0] * 4, 4)]).to(device)
    out = torch.zeros(40, dtype=torch.uint8, device=device)
    with pytest.raises(error, match=match):
        rans.decode_planes(plane, tables, out)
    assert guards["rans_decode_kernel"].launches == 0


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(39, dtype=torch.uint8),
        torch.zeros(40, dtype=torch.float32),
        torch.zeros(80, dtype=torch.uint8)[::2],
        torch.zeros((4, 10), dtype=torch.uint8),
    ],
    ids=["short", "dtype", "strided", "shape"],
)
def test_outputs_that_do_not_fit_are_refused(out, device, guards):
    plane, bank = good_plane()
    tables = rans_triton.entry_tables([(bank, [0] * 4, 4)]).to(device)
    with pytest.raises(ValueError, match="contiguous tensor"):
        rans.decode_planes(plane, tables, out.to(device))
    assert guards["rans_decode_kernel"].launches == 0


@pytest.mark.parametrize("table", [[4095], [4097], [65535, 65535], [4096, 1], [0]])
def test_tables_that_do_not_sum_to_one_are_refused(table):
    with pytest.raises(FormatError, match="sum to 4096"):
        rans_triton.entry_tables([(bank_of(table), [0], 1)])


def test_tables_outside_the_bank_are_refused():
    for first, size in ((-1, 1), (0, 2), (0, 0), (0, 257), (2**40, 1)):
        with pytest.raises(FormatError, match="inside the bank"):
            build_tables(first, size, [0])


@pytest.mark.parametrize("row", [-1, 1])
def test_rows_of_no_table_are_refused(row):
    with pytest.raises(ValueError, match="rows of 1 tables"):
        build_tables(0, 1, [0, row])


def build_tables(first, size, rows):
    columns = [torch.tensor([number]) for number in (first, size, 0)]
    rows = torch.tensor(rows)
    return EntryTables.build(torch.tensor([4096]), *columns, torch.tensor([False]), rows)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 16, 17, 64, 65, 256])
def test_tables_are_filled_up_to_a_depth_of_the_search(size, device):
    """The last symbol, behind which the filling begins, is found and coded like any other."""
    bank = bank_of([*[1] * (size - 1), 4097 - size])
    tables = rans_triton.entry_tables([(bank, [0], 1)])
    depth = int(tables.tables[0, 1])
    assert len(tables.entries) == 2**depth >= size > 2 ** (depth - 2) * (depth > 2)
    symbols = np.full((1, 40), size - 1, np.uint8)
    data = spec.encode_plane(symbols, [0], bank, 1)
    assert encode(symbols, [0], bank, 1, device) == data
    assert np.array_equal(decode(data, symbols.shape, [0], bank, 1, device), symbols)


def test_symbols_of_integers_decode_as_symbols(device):
    """As the entropy coder's `triton` backend asks for them, before it puts in escapes."""
    rng, bank = np.random.default_rng(6), laplace_bank()
    ids = rng.integers(0, 3, 5)
    symbols = draw_symbols(rng, bank, ids, 50)
    data = spec.encode_plane(symbols, ids, bank, 2)
    assert encode(symbols, ids, bank, 2, device) == data
    assert np.array_equal(decode(data, symbols.shape, ids, bank, 2, device), symbols)


def test_symbols_and_integers_decode_in_one_launch(device, guards):
    """The last symbol of a table of symbols is no escape."""
    rng = np.random.default_rng(7)
    integers, symbols = laplace_bank(), bank_of([1024, 1024, 2048])
    q = np.rint(rng.laplace(0, 2, (6, 40))).astype(np.int32)
    q[2, 5:9] = 1000
    plane = draw_symbols(rng, symbols, [0] * 4, 40)
    ids = rng.integers(0, 3, 6)
    coded = [
        rans_triton.PlaneBytes(
            entropy.encode_integers(q, ids, integers, 2), PlaneShape(6, 40, 2), True
        ),
        rans_triton.PlaneBytes(
            spec.encode_plane(plane, [0] * 4, symbols, 3), PlaneShape(4, 40, 3, first_row=6), False
        ),
    ]
    tables = rans_triton.entry_tables([(integers, ids, 6), (symbols, [0] * 4, 4)]).to(device)
    found, check = launch(coded, tables)
    check()
    assert np.array_equal(found.cpu().numpy(), np.concatenate([q.ravel(), plane.ravel()]))
    assert guards["rans_decode_kernel"].launches == guards["fill_escapes_kernel"].launches == 1


@pytest.mark.parametrize("symbol", [1, 3, 255])
def test_symbols_that_cannot_be_coded_are_refused(symbol, device):
    bank = bank_of([4095, 0, 1])
    symbols = np.zeros((2, RANS_LANES + 1), np.uint8)
    symbols[1, -1] = symbol
    with pytest.raises(ValueError, match="frequency 1 or more"):
        encode(symbols, [0, 0], bank, 2, device)
