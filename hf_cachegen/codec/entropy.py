"""Entropy coding as the codecs use it: planes of symbols or integers, to bytes and back.

The implementations give the same bytes: ``numpy`` (the specification), ``numba`` (CPU) and
``triton`` (GPU). These functions take and return arrays of the host, so ``auto`` is the faster of
the first two; a name takes that one or raises.

Integer plane, little-endian: ``u32 n | i32 escape[n] | symbol plane`` (see
:mod:`hf_cachegen.codec.rans`), the escapes in row-major order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_cachegen.codec import rans
from hf_cachegen.codec.bank import PROB_TOTAL, IntegerBank, TableBank, from_symbols, to_symbols
from hf_cachegen.errors import BackendUnavailable, FormatError

AUTO_ORDER = ("numba", "numpy")
"""What ``auto`` tries, in order."""

BACKENDS = (*AUTO_ORDER, "triton")

_COUNT_BYTES = 4


class _Backend(NamedTuple):
    encode_plane: Callable[..., bytes]
    decode_plane: Callable[..., NDArray[np.uint8]]
    to_symbols: Callable[..., tuple[NDArray[np.uint8], NDArray[np.int32]]]
    from_symbols: Callable[..., NDArray[np.int32]]


def available_backends() -> dict[str, str | None]:
    """Every backend's name, with None if it is usable or else the reason why it is not."""
    loaded = {name: _load(name) for name in BACKENDS}
    return {name: item if isinstance(item, str) else None for name, item in loaded.items()}


@cache
def warm_up() -> None:
    """Load what the first plane of a process would wait a third of a second for."""
    bank = IntegerBank(
        np.array([PROB_TOTAL - 1, 1], np.uint16), np.array([0, 2], np.int32), np.zeros(1, np.int32)
    )
    plane = encode_integers(np.zeros((1, 1), np.int32), [0], bank, 1, backend="numpy")
    decode_integers(plane, (1, 1), [0], bank, 1)


def begin_warm_up() -> None:
    """Do :func:`warm_up` in a thread of its own, while something else is waited for."""
    threading.Thread(target=warm_up, name="hf-cachegen-warm-up").start()


def encode_symbols(
    symbols: NDArray[np.uint8],
    table_ids: ArrayLike,
    bank: TableBank,
    rows_per_stream: int,
    backend: str = "auto",
    threads: int = 1,
) -> bytes:
    """Encode a plane of bytes.

    Parameters
    ----------
    symbols
        uint8 [R, T].
    table_ids
        [R]: the table of each row.
    bank
        The tables.
    rows_per_stream
        Rows that share an entropy stream. A decoder needs the same number.
    backend
        ``auto``, or a name from :func:`available_backends`.
    threads
        Threads that share the streams of this plane.

    Raises
    ------
    ValueError
        The arguments do not fit each other, or a symbol has frequency 0.
    BackendUnavailable
        The backend was named and cannot run here.
    """
    plane = _plane(symbols, np.uint8)
    return _choose(backend).encode_plane(plane, table_ids, bank, rows_per_stream, threads)


def decode_symbols(
    data: bytes,
    shape: tuple[int, int],
    table_ids: ArrayLike,
    bank: TableBank,
    rows_per_stream: int,
    backend: str = "auto",
    threads: int = 1,
) -> NDArray[np.uint8]:
    """Decode a plane of bytes: the inverse of :func:`encode_symbols`.

    Parameters
    ----------
    data
        What :func:`encode_symbols` returned.
    shape
        R, T. The caller bounds it: a plane can be much smaller than its symbols.

    Returns
    -------
    uint8 [R, T]

    Raises
    ------
    FormatError
        The bytes are not a plane of this shape and these tables.
    ValueError, BackendUnavailable
        As for :func:`encode_symbols`.
    """
    return _choose(backend).decode_plane(data, shape, table_ids, bank, rows_per_stream, threads)


def encode_integers(
    q: NDArray[Any],
    table_ids: ArrayLike,
    bank: IntegerBank,
    rows_per_stream: int,
    backend: str = "auto",
    threads: int = 1,
) -> bytes:
    """Encode a plane of integers: any int32, or a smaller type, [R, T].

    The other parameters and errors are those of :func:`encode_symbols`.
    """
    coder = _choose(backend)
    symbols, escapes = coder.to_symbols(_plane(q, np.int32), table_ids, bank)
    plane = coder.encode_plane(symbols, table_ids, bank, rows_per_stream, threads)
    return b"".join(
        [np.array(len(escapes), "<u4").tobytes(), escapes.astype("<i4").tobytes(), plane]
    )


def decode_integers(
    data: bytes,
    shape: tuple[int, int],
    table_ids: ArrayLike,
    bank: IntegerBank,
    rows_per_stream: int,
    backend: str = "auto",
    threads: int = 1,
) -> NDArray[np.int32]:
    """Decode a plane of integers: the inverse of :func:`encode_integers`.

    Returns
    -------
    int32 [R, T]

    Raises
    ------
    FormatError
        The bytes are not a plane of this shape and these tables.
    ValueError, BackendUnavailable
        As for :func:`encode_symbols`.
    """
    coder = _choose(backend)
    escapes, plane = split_escapes(data)
    symbols = coder.decode_plane(plane, shape, table_ids, bank, rows_per_stream, threads)
    return coder.from_symbols(symbols, escapes, table_ids, bank)


def split_escapes(data: bytes) -> tuple[NDArray[np.int32], bytes]:
    """The escaped integers and the symbol plane of an integer plane; FormatError if damaged."""
    n_escapes = int.from_bytes(data[:_COUNT_BYTES], "little")
    if len(data) < _COUNT_BYTES * (1 + n_escapes):
        raise FormatError(
            f"expected {n_escapes} escaped integers, found {len(data)} bytes; fetch the data again"
        )
    escapes = np.frombuffer(data, "<i4", n_escapes, offset=_COUNT_BYTES)
    return escapes, data[_COUNT_BYTES + escapes.nbytes :]


def _plane(array: NDArray[Any], dtype: type[np.integer[Any]]) -> NDArray[Any]:
    if array.ndim != 2 or not np.can_cast(array.dtype, dtype):
        raise ValueError(
            f"expected {np.dtype(dtype)} [R, T], got {array.dtype} {list(array.shape)}"
        )
    return array.astype(dtype, copy=False)


def _choose(name: str) -> _Backend:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"expected backend 'auto' or one of {BACKENDS}, got {name!r}")
    reason = ""
    for candidate in AUTO_ORDER if name == "auto" else (name,):
        loaded = _load(candidate)
        if isinstance(loaded, _Backend):
            return loaded
        reason = loaded
    raise BackendUnavailable(f"entropy backend {name!r}: {reason}")


@cache
def _load(name: str) -> _Backend | str:
    """A backend, or the reason why there is none."""
    if name == "numpy":
        return _Backend(rans.encode_plane, rans.decode_plane, to_symbols, from_symbols)
    if name == "triton":
        return _load_triton()
    try:
        from hf_cachegen.codec import rans_numba as fast
    except (ImportError, OSError) as error:
        return f"numba cannot be imported ({error})"
    return _Backend(fast.encode_plane, fast.decode_plane, fast.to_symbols, fast.from_symbols)


def _load_triton() -> _Backend | str:
    import torch

    if not torch.cuda.is_available():
        return "it needs a CUDA device, torch finds none; on the CPU use 'numba' or 'numpy'"
    try:
        from hf_cachegen.codec import rans_triton as gpu
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return _Backend(gpu.encode_plane, gpu.decode_plane, to_symbols, from_symbols)
