"""Whether a cache pays: sizes, times on a link and break-even speeds. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hf_cachegen.cli.output import figure
from hf_cachegen.config import DTYPE_BYTES
from hf_cachegen.layout import DtypeName, KVLayout

TYPICAL_CODECS = ("transform", "delta")

EXPONENT_BITS = {"bfloat16": 8, "float16": 5, "float32": 8}
"""Bits of a number that ``lossless`` entropy-codes; sign and mantissa stay as they are."""


@dataclass(frozen=True)
class Link:
    """What stands between a cache and the model.

    Attributes
    ----------
    gbps
        Gigabits per second, 1e9 bits.
    decode_gb_per_s
        Gigabytes of uncompressed cache that are decoded per second, at the same time as the
        transfer; None does not count decoding.
    """

    gbps: float
    decode_gb_per_s: float | None = None


@dataclass(frozen=True)
class LevelPlan:
    """One level of a planned cache.

    Attributes
    ----------
    load_s
        Seconds until the cache is there: the longer of transfer and decoding, which ``raw`` does
        not need.
    first_load_s
        The same of the first cache of the model, which has to wait for the table.
    break_even_gbps
        Speed of the link from which on loading takes no longer than the prefill; None if that is
        not known, or if decoding alone takes longer.
    helps
        Whether loading is faster than the prefill; None if that is not known.
    """

    codec: str
    level: str
    bits_per_value: float
    size_bytes: int
    load_s: float
    first_load_s: float
    break_even_gbps: float | None
    helps: bool | None


@dataclass(frozen=True)
class Plan:
    """What :func:`plan_transfer` found; levels by codec, from coarse to raw.

    Attributes
    ----------
    table_bytes
        By codec, what has to be fetched of the model's table before its first cache is decoded.
    """

    context_tokens: int
    bytes_per_token: int
    states_bytes: int
    raw_bytes: int
    link: Link
    prefill_s: float | None
    table_bytes: Mapping[str, int]
    levels: tuple[LevelPlan, ...]

    @property
    def verdict(self) -> str:
        """One sentence: whether a cache helps, and why."""
        soonest = min(self.levels, key=lambda level: level.load_s)
        at = f"{figure(self.link.gbps, 6)} Gbit/s"
        arrives = f"level {soonest.level} is there after {figure(soonest.load_s)} s"
        if soonest.first_load_s > soonest.load_s:
            arrives += f" ({figure(soonest.first_load_s)} s with the table, the first time)"
        if self.prefill_s is None:
            return f"At {at} {arrives}; give the prefill time to learn whether that is sooner."
        prefill = f"a prefill of {figure(self.prefill_s)} s"
        if soonest.helps:
            # An artefact has the levels of one lossy codec, by default of the first.
            stored = (self.levels[0].codec, "lossless", "raw")
            finest = [level for level in self.levels if level.helps and level.codec in stored][-1]
            return (
                f"A cache helps at {at}: {arrives}, {self.prefill_s / soonest.load_s:.1f}x as soon "
                f"as {prefill}; the finest level that is still sooner is {finest.level}."
            )
        needed = min(level.break_even_gbps for level in self.levels if level.break_even_gbps)
        return (
            f"A cache does not help at {at}: {arrives} at the soonest, which is no sooner than "
            f"{prefill}; it would take a link of {figure(needed)} Gbit/s."
        )


def typical_levels(codec: str) -> dict[str, float]:
    """Bits per value of a codec's default levels, coarse to fine.

    They are measured figures, every byte of the artefact counted, of the one model that the presets
    of the simulation name. Other models and texts differ by some tenths.
    """
    from hf_cachegen.bench.simulate.presets import LADDERS

    return {level.name: level.bits_per_value for level in LADDERS[codec].levels}


def exact_levels(dtype: DtypeName) -> dict[str, float]:
    """Bits per value of the exact levels."""
    from hf_cachegen.bench.simulate.presets import LOSSLESS_BITS

    coded_exponent = LOSSLESS_BITS - (16 - EXPONENT_BITS["bfloat16"])
    raw = 8 * DTYPE_BYTES[dtype]
    return {"lossless": raw - EXPONENT_BITS[dtype] + coded_exponent, "raw": float(raw)}


def cached_values(layout: KVLayout, context_tokens: int) -> int:
    """Cached numbers of a context. A sliding layer keeps no more than its window."""
    return sum(
        layer.channels * (context_tokens - layer.first_token(context_tokens))
        for layer in layout.layers
    )


def plan_transfer(
    layout: KVLayout,
    context_tokens: int,
    link: Link,
    prefill_s: float | None = None,
    *,
    lossy: Mapping[str, Mapping[str, float]] | None = None,
    states_bytes: int = 0,
    table_bytes: Mapping[str, int] | None = None,
) -> Plan:
    """Sizes and times of a context's cache at every level.

    Parameters
    ----------
    layout
        What the model caches.
    context_tokens
        Length of the context.
    link
        How fast it arrives.
    prefill_s
        Seconds that the model needs to compute the cache instead; None if unknown.
    lossy
        Bits per value by codec and level, coarse to fine, the codec first that artefacts have by
        default; None: typical ones of ``transform`` and ``delta``.
    states_bytes
        Bytes of the states that it keeps of a context, which come with any level as they are.
    table_bytes
        Bytes by codec of a table that is not at hand; None: there is none, or all of it is.

    Raises
    ------
    ValueError
        A number is not finite and above 0.
    """
    _check_positive(
        context_tokens=context_tokens,
        link_gbps=link.gbps,
        decode_gb_per_s=link.decode_gb_per_s,
        prefill_s=prefill_s,
    )
    n_values = cached_values(layout, context_tokens)
    raw_bytes = n_values * DTYPE_BYTES[layout.dtype]
    decode_s = 0.0 if link.decode_gb_per_s is None else raw_bytes / (1e9 * link.decode_gb_per_s)
    if lossy is None:
        lossy = {codec: typical_levels(codec) for codec in TYPICAL_CODECS}
    exact = {name: {name: bits} for name, bits in exact_levels(layout.dtype).items()}
    levels = [
        _plan_level(
            (codec, name),
            bits,
            bits * n_values + 8 * states_bytes,
            link.gbps,
            decode_s,
            prefill_s,
            (table_bytes or {}).get(codec, 0),
        )
        for codec, sizes in {**lossy, **exact}.items()
        for name, bits in sizes.items()
    ]
    return Plan(
        context_tokens=context_tokens,
        bytes_per_token=layout.bytes_per_token,
        states_bytes=states_bytes,
        raw_bytes=raw_bytes + states_bytes,
        link=link,
        prefill_s=prefill_s,
        table_bytes=dict(table_bytes or {}),
        levels=tuple(levels),
    )


def _plan_level(
    level: tuple[str, str],
    bits: float,
    size_bits: float,
    gbps: float,
    decode_s: float,
    prefill_s: float | None,
    table_bytes: int,
) -> LevelPlan:
    codec, name = level
    wait_s = 0.0 if codec == "raw" else decode_s
    load_s = max(size_bits / (1e9 * gbps), wait_s)
    reachable = prefill_s is not None and wait_s < prefill_s
    return LevelPlan(
        codec=codec,
        level=name,
        bits_per_value=bits,
        size_bytes=round(size_bits / 8),
        load_s=load_s,
        first_load_s=load_s + 8 * table_bytes / (1e9 * gbps),
        break_even_gbps=size_bits / (1e9 * prefill_s) if reachable and prefill_s else None,
        helps=None if prefill_s is None else load_s < prefill_s,
    )


def _check_positive(**numbers: float | None) -> None:
    wrong = {
        name: value
        for name, value in numbers.items()
        if value is not None and not 0 < value < math.inf
    }
    if wrong:
        raise ValueError(f"expected finite numbers above 0, got {wrong}")
