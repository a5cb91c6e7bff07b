"""Speed of the entropy coder: ``python -m hf_cachegen.bench.entropy [PLANES.npy]``."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_cachegen.codec import bank as plain
from hf_cachegen.codec import entropy
from hf_cachegen.codec.bank import IntegerBank, normalise_counts
from hf_cachegen.config import MAX_ALPHABET


@dataclass(frozen=True)
class EntropySpeed:
    """What one backend does with a plane, on one core unless ``threads`` says otherwise.

    Speeds are medians, in millions of symbols a second. ``*_symbols`` is rANS alone;
    ``*_integers`` is the whole way from integers to bytes and back.
    """

    backend: str
    threads: int
    rows: int
    tokens: int
    bits_per_symbol: float
    table_entropy_bits: float
    encode_symbols: float
    decode_symbols: float
    encode_integers: float
    decode_integers: float
    first_call_s: float


def synthetic_plane(rows: int = 384, tokens: int = 1500, seed: int = 0) -> NDArray[np.int32]:
    """Integers like quantised differences: Laplacian, 3 to 4 bits each, another scale a row."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(1.2, 3.5, (rows, 1))
    return np.rint(rng.laplace(0, scale, (rows, tokens))).astype(np.int32)


def fit_bank(q: NDArray[np.integer[Any]]) -> IntegerBank:
    """A table for each row of a plane [R, T], from the row's own histogram."""
    lo = np.maximum(q.min(axis=1), -(MAX_ALPHABET - 2) // 2).astype(np.int32)
    sizes = np.clip(q.max(axis=1).astype(np.int64) - lo + 2, 1, MAX_ALPHABET)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    escape = starts[1:, None] - 1
    index = starts[:-1, None] + (q.astype(np.int64) - lo[:, None])
    index = np.where((index >= starts[:-1, None]) & (index < escape), index, escape)
    counts = np.bincount(index.ravel(), minlength=starts[-1])
    return IntegerBank(normalise_counts(counts, starts, keep=escape.ravel()), starts, lo)


def run_entropy_bench(
    q: NDArray[np.integer[Any]] | None = None,
    *,
    rows_per_stream: int = 16,
    backends: Sequence[str] = ("numba", "numpy"),
    repeats: int = 9,
    threads: int = 1,
) -> list[EntropySpeed]:
    """Measure each backend on one plane.

    Parameters
    ----------
    q
        Integers [R, T] of int32 or less. None: :func:`synthetic_plane`.
    rows_per_stream
        Rows that share an entropy stream.
    backends
        Names that :func:`hf_cachegen.codec.entropy.available_backends` calls usable.
    repeats
        Runs of which the median counts.
    threads
        Threads that share a plane's streams.

    Raises
    ------
    ValueError
        The integers may not fit an int32.
    RuntimeError
        A plane does not come back as it was.
    """
    plane: NDArray[Any] = synthetic_plane() if q is None else q
    bank = fit_bank(plane)
    return [
        _measure(plane, bank, rows_per_stream, backend, repeats, threads) for backend in backends
    ]


def _measure(
    q: NDArray[Any],
    bank: IntegerBank,
    rows_per_stream: int,
    backend: str,
    repeats: int,
    threads: int,
) -> EntropySpeed:
    ids = np.arange(len(q))
    coding = ids, bank, rows_per_stream, backend, threads
    symbols, _ = plain.to_symbols(q, ids, bank)

    began = time.perf_counter()
    integer_data = entropy.encode_integers(q, *coding)
    decoded = entropy.decode_integers(integer_data, q.shape, *coding)
    first_call_s = time.perf_counter() - began
    symbol_data = entropy.encode_symbols(symbols, *coding)
    decoded_symbols = entropy.decode_symbols(symbol_data, q.shape, *coding)
    if not (np.array_equal(decoded, q) and np.array_equal(decoded_symbols, symbols)):
        raise RuntimeError(f"backend {backend!r} does not give back what it encoded")

    def speed(run: Callable[[], object]) -> float:
        return q.size / _median_s(run, repeats) / 1e6

    counts = np.bincount((bank.starts[:-1, None] + symbols).ravel(), minlength=len(bank.freqs))
    return EntropySpeed(
        backend=backend,
        threads=threads,
        rows=q.shape[0],
        tokens=q.shape[1],
        bits_per_symbol=round(8 * len(integer_data) / q.size, 4),
        table_entropy_bits=round(bank.entropy_bits(counts) / q.size, 4),
        encode_symbols=speed(lambda: entropy.encode_symbols(symbols, *coding)),
        decode_symbols=speed(lambda: entropy.decode_symbols(symbol_data, q.shape, *coding)),
        encode_integers=speed(lambda: entropy.encode_integers(q, *coding)),
        decode_integers=speed(lambda: entropy.decode_integers(integer_data, q.shape, *coding)),
        first_call_s=round(first_call_s, 3),
    )


def _median_s(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return median(times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("planes", nargs="?", help=".npy of integers [R, T] or [..., R, T]")
    parser.add_argument("--rows-per-stream", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    q = None
    if options.planes is not None:
        planes = np.load(options.planes, allow_pickle=False)
        q = planes.reshape(-1, planes.shape[-1])
    speeds = run_entropy_bench(
        q,
        rows_per_stream=options.rows_per_stream,
        repeats=options.repeats,
        threads=options.threads,
    )
    columns = ("encode_symbols", "decode_symbols", "encode_integers", "decode_integers")
    print(f"{'Msymbols/s':10}", *columns, "bits/symbol (tables' entropy)", sep="  ")
    for row in map(asdict, speeds):
        figures = [f"{row[name]:{len(name)}.1f}" for name in columns]
        size = f"{row['bits_per_symbol']:.3f} ({row['table_entropy_bits']:.3f})"
        print(f"{row['backend']:10}", *figures, size, sep="  ")
    result = {"schema": 1, "machine": platform.machine(), "rows": [asdict(s) for s in speeds]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
