"""What decoding on a GPU takes at least: bytes moved, instructions issued and multiplications.

Counted, not measured. docs/kernels.md explains every term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_cachegen.codec.planes import rows_per_stream
from hf_cachegen.config import CHUNK_TOKENS, RANS_LANES

BF16_BYTES = 2
DELTA_GROUP = 10
"""Tokens per anchor of ``delta``."""

TRANSFORM_GROUP = 5
"""Layers per group of ``transform``."""

DECODE_INSTRUCTIONS = {4: 50, 16: 67, 64: 86, 256: 103}
"""Instructions of one step of 32 symbols on sm_90, by largest alphabet (docs/kernels.md)."""

DELTA_INSTRUCTIONS = 516
JOIN_INSTRUCTIONS, JOIN_LEVEL_INSTRUCTIONS = 325, 205
STORE_INSTRUCTIONS = 268
WARP_VALUES = 256
"""Instructions of a warp of each kernel on sm_90, and the values that it handles; each level after
the first is a pass of the join kernel's loop."""

DELTA_ALPHABETS = (256, 64)
"""Largest alphabets of anchors and differences."""

BATCH_TOKENS = 16_384
"""Tokens of one product, as :mod:`~hf_cachegen.codec.transform_triton` has it."""

INTEGERS_ALPHABET, THIRDS_ALPHABET = 64, 4
"""Of nearly all coefficients of ``transform``, and of all thirds."""


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU. ``clock_hz`` is what it holds under load, not its boost.

    ``half_flops_per_s`` is of dense products of 16-bit matrices with float32 sums.
    """

    name: str
    memory_bytes_per_s: float
    link_bytes_per_s: float
    multiprocessors: int
    issues_per_clock: int
    clock_hz: float
    half_flops_per_s: float

    @property
    def instructions_per_s(self) -> float:
        """Warp instructions that all multiprocessors issue."""
        return self.multiprocessors * self.issues_per_clock * self.clock_hz


H200 = Gpu("NVIDIA H200", 4.8e12, 55e9, 132, 4, 1.755e9, 989e12)


@dataclass(frozen=True)
class Shape:
    """What is decoded. By default Llama-3.1-8B and 8 contexts of 8K tokens."""

    layers: int = 32
    heads: int = 8
    dim: int = 128
    contexts: int = 8
    tokens: int = 8192

    @property
    def channels(self) -> int:
        """Of keys and values of one layer."""
        return 2 * self.heads * self.dim

    @property
    def chunks(self) -> list[int]:
        """Tokens of each chunk of a context."""
        starts = range(0, self.tokens, CHUNK_TOKENS)
        return [min(CHUNK_TOKENS, self.tokens - start) for start in starts]

    @property
    def values(self) -> int:
        """Values of all contexts and layers."""
        return self.layers * self.channels * self.contexts * self.tokens

    @property
    def planes(self) -> list[int]:
        """Tokens of each plane of ``delta`` of a layer and context: anchors and differences."""
        return [
            width for n in self.chunks for width in (-(-n // DELTA_GROUP), n - -(-n // DELTA_GROUP))
        ]

    @property
    def groups(self) -> list[int]:
        """Layers of each group of ``transform``."""
        n = -(-self.layers // TRANSFORM_GROUP)
        return [self.layers * (i + 1) // n - self.layers * i // n for i in range(n)]


@dataclass(frozen=True)
class Steps:
    """Tokens that share a step, and the coefficients that are coded of them.

    Attributes
    ----------
    exponent
        log_sqrt2 of their w.
    share
        Of all tokens.
    known
        Coefficients over channels that are known with each level, coarse to fine.
    """

    exponent: int
    share: float
    known: tuple[float, ...]


MEASURED_TOKENS, MEASURED_CHANNELS = 1499, 1920
MEASURED_STEPS = tuple(
    Steps(exponent, tokens / MEASURED_TOKENS, tuple(n / MEASURED_CHANNELS for n in known))
    for exponent, tokens, known in (
        (-1, 1, (479, 825, 1241)),
        (0, 2, (371, 711, 1104)),
        (1, 118, (275, 605, 973)),
        (2, 632, (193, 498, 846)),
        (3, 635, (126, 390, 728)),
        (4, 109, (74, 290, 622)),
        (5, 2, (42, 207, 515)),
    )
)
"""One chunk of English prose in the last group of SmolLM2-135M, with three levels: 0.80 bits a
value."""


@dataclass(frozen=True)
class Term:
    """One term of the bound: ``amount`` of ``unit`` at ``rate`` a second."""

    stage: str
    what: str
    unit: str
    amount: float
    rate: float

    @property
    def seconds(self) -> float:
        """Time that the term alone takes."""
        return self.amount / self.rate


COPY = "copy to the GPU"
"""The stage that runs beside all others."""


def delta_terms(shape: Shape, gpu: Gpu, bits_per_value: float) -> list[Term]:
    """Count what decoding ``delta`` takes, with streams of ``bits_per_value``."""
    values, contexts = shape.values, shape.layers * shape.contexts
    steps = contexts * shape.channels * sum(-(-width // RANS_LANES) for width in shape.planes)
    # Anchors and differences take different depths of the search.
    instructions = (
        contexts
        * shape.channels
        * sum(
            -(-width // RANS_LANES) * DECODE_INSTRUCTIONS[DELTA_ALPHABETS[index % 2]]
            for index, width in enumerate(shape.planes)
        )
    )
    streams = contexts * sum(-(-shape.channels // rows_per_stream(w)) for w in shape.planes)
    coded_bytes = _coded_bytes(values, bits_per_value, streams)
    table_bytes = contexts * len(shape.chunks) * shape.channels * 4 * sum(DELTA_ALPHABETS)
    memory, issue = gpu.memory_bytes_per_s, gpu.instructions_per_s
    return [
        Term(COPY, "streams", "bytes", coded_bytes, gpu.link_bytes_per_s),
        Term("entropy", "streams read", "bytes", coded_bytes, memory),
        Term("entropy", "tables read", "bytes", table_bytes, memory),
        Term("entropy", "integers written", "bytes", 2 * values, memory),
        Term("entropy", f"{steps / 1e6:.1f} M steps", "instructions", instructions, issue),
        Term("delta", "integers read", "bytes", 2 * values, memory),
        Term("delta", "cos and sin read", "bytes", 4 * values / 2, memory),
        Term("delta", "values written", "bytes", BF16_BYTES * values, memory),
        Term("delta", "tiles", "instructions", values / WARP_VALUES * DELTA_INSTRUCTIONS, issue),
    ]


def transform_terms(
    shape: Shape, gpu: Gpu, bits_per_value: float, mix: Sequence[Steps] = MEASURED_STEPS
) -> list[Term]:
    """Count what decoding ``transform`` takes, with streams of ``bits_per_value``.

    Parameters
    ----------
    mix
        The steps of a chunk's tokens; every one of them is a plane.
    """
    integers = thirds = instructions = steps = streams = joined = flops = basis_bytes = 0.0
    n_passes = len(mix[0].known) - 1
    n_batches = -(-shape.contexts * shape.tokens // BATCH_TOKENS)
    for layers in shape.groups:
        channels = layers * shape.channels
        for part in mix:
            rows = [round(known * channels) for known in part.known]
            flops += 2 * rows[-1] * channels * part.share * shape.contexts * shape.tokens
            basis_bytes += n_batches * 2 * rows[-1] * channels
            for chunk in shape.chunks:
                width = max(round(part.share * chunk), 1)
                times = shape.contexts * part.share * chunk / width
                n_thirds = sum(rows[:-1])
                n_steps = times * -(-width // RANS_LANES)
                integers += times * width * rows[-1]
                thirds += times * width * n_thirds
                joined += n_steps * RANS_LANES * rows[-1]
                steps += n_steps * (rows[-1] + n_thirds)
                instructions += n_steps * (
                    rows[-1] * DECODE_INSTRUCTIONS[INTEGERS_ALPHABET]
                    + n_thirds * DECODE_INSTRUCTIONS[THIRDS_ALPHABET]
                )
                fresh = [n - below for n, below in zip(rows, (0, *rows), strict=False)]
                streams += times * sum(
                    -(-n // rows_per_stream(width)) for n in (*fresh, *rows[:-1])
                )
    values, symbols = shape.values, integers + thirds
    coded_bytes = _coded_bytes(values, bits_per_value, streams)
    memory, issue = gpu.memory_bytes_per_s, gpu.instructions_per_s
    warp_join = JOIN_INSTRUCTIONS + n_passes * JOIN_LEVEL_INSTRUCTIONS
    return [
        Term(COPY, "streams", "bytes", coded_bytes, gpu.link_bytes_per_s),
        Term("entropy", "streams read", "bytes", coded_bytes, memory),
        Term("entropy", "integers written", "bytes", 2 * symbols, memory),
        Term("entropy", f"{steps / 1e6:.1f} M steps", "instructions", instructions, issue),
        Term("join", "integers read", "bytes", 2 * symbols, memory),
        Term("join", "coefficients written", "bytes", 2 * integers, memory),
        Term("join", "tiles", "instructions", joined / WARP_VALUES * warp_join, issue),
        Term("product", "coefficients read", "bytes", 2 * integers, memory),
        Term("product", "basis read", "bytes", basis_bytes, memory),
        Term("product", "product written", "bytes", 4 * values, memory),
        Term("product", "multiply-adds", "FLOP", flops, gpu.half_flops_per_s),
        Term("store", "product read", "bytes", 4 * values, memory),
        Term("store", "cos and sin read", "bytes", 4 * values / 2, memory),
        Term("store", "values written", "bytes", BF16_BYTES * values, memory),
        Term("store", "tiles", "instructions", values / WARP_VALUES * STORE_INSTRUCTIONS, issue),
    ]


def bound_s(terms: Sequence[Term]) -> dict[str, float]:
    """Least seconds of each stage: what takes longest of its bytes, instructions and products."""
    stages: dict[str, float] = {}
    for stage in dict.fromkeys(term.stage for term in terms):
        by_unit: dict[str, float] = {}
        for term in terms:
            if term.stage == stage:
                by_unit[term.unit] = by_unit.get(term.unit, 0.0) + term.seconds
        stages[stage] = max(by_unit.values())
    return stages


def _coded_bytes(values: float, bits_per_value: float, streams: float) -> float:
    """Entropy-coded bytes, and the states at the head of each stream."""
    return values * bits_per_value / 8 + streams * RANS_LANES * 4
