"""Which tokens of its context a cache has kept: a bit for each, packed into a file."""

from __future__ import annotations

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from hf_cachegen.errors import FormatError

KEPT_TENSOR = "kept"


def pack_kept(kept: NDArray[np.bool_]) -> bytes:
    """A safetensors file of which tokens are kept, bool ``[L or 1, H or 1, T]``."""
    # safetensors writes memory as it lies.
    bits = np.ascontiguousarray(np.packbits(kept, axis=-1, bitorder="little"))
    data: bytes = safetensors.numpy.save({KEPT_TENSOR: bits})
    return data


def unpack_kept(data: bytes, n_kept: int, n_tokens: int) -> NDArray[np.bool_]:
    """Inverse of :func:`pack_kept`.

    Parameters
    ----------
    data
        The file.
    n_kept, n_tokens
        Tokens that each layer and head keeps, and that there were.

    Raises
    ------
    FormatError
        The file is no such file, or keeps another number of tokens anywhere.
    """
    try:
        tensors = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise FormatError(
            f"kept tokens: not a safetensors file ({error}); fetch it again"
        ) from error
    bits = tensors.get(KEPT_TENSOR)
    n_bytes = -(-n_tokens // 8)
    fits = bits is not None and bits.dtype == np.uint8 and bits.ndim == 3 and bits.size > 0
    if len(tensors) != 1 or bits is None or not fits or bits.shape[-1] != n_bytes:
        found = {name: (str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
        raise FormatError(
            f"kept tokens: expected {KEPT_TENSOR!r} as uint8 [layers, heads, {n_bytes}], found "
            f"{found}; encode the cache again"
        )
    unpacked = np.unpackbits(bits, axis=-1, bitorder="little").astype(bool)
    counts = unpacked[..., :n_tokens].sum(axis=-1)
    if unpacked[..., n_tokens:].any() or (counts != n_kept).any():
        raise FormatError(
            f"kept tokens: expected {n_kept} of {n_tokens} in every layer and head, found "
            f"{counts.min()} to {counts.max()}; encode the cache again"
        )
    return unpacked[..., :n_tokens]
