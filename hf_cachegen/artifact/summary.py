"""What an artefact's levels weigh."""

from __future__ import annotations

from dataclasses import dataclass

from hf_cachegen.artifact.manifest import Manifest
from hf_cachegen.config import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class LevelSummary:
    """One level over all chunks, which hold keys and values; states come with any level.

    Attributes
    ----------
    size_bytes
        Bytes that reading it takes, those of the levels it refines included.
    bits_per_value
        Bits for each number that the artefact holds.
    ratio
        Uncompressed bytes over ``size_bytes``.
    """

    name: str
    codec: str
    exact: bool
    size_bytes: int
    bits_per_value: float
    ratio: float


def stored_values(manifest: Manifest) -> int:
    """Numbers in an artefact's chunks. Tokens that a sliding layer skips are not in them."""
    layers = manifest.identity.layout.layers
    return sum(
        layer.channels * (chunk.end - chunk.first_token(index))
        for chunk in manifest.chunks
        for index, layer in enumerate(layers)
    )


def summarise_levels(manifest: Manifest) -> list[LevelSummary]:
    """Every level with its size, coarse to fine."""
    n_values = stored_values(manifest)
    raw_bytes = n_values * DTYPE_BYTES[manifest.identity.layout.dtype]
    by_chunk = [manifest.read_bytes(chunk) for chunk in range(len(manifest.chunks))]
    sizes = [sum(sizes[level] for sizes in by_chunk) for level in range(len(manifest.levels))]
    return [
        LevelSummary(
            name=level.name,
            codec=level.codec,
            exact=level.exact,
            size_bytes=size,
            bits_per_value=8 * size / max(n_values, 1),
            ratio=raw_bytes / max(size, 1),
        )
        for level, size in zip(manifest.levels, sizes, strict=True)
    ]
