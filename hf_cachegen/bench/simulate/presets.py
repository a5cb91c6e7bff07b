"""Constants of the simulation: models, machines and ladders of levels, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, replace

EFFICIENCY = 0.5
"""Share of the peak that a long prefill reaches. An assumption, the middle of the 40-60% usual for
16-bit dense models; :meth:`Setup.with_rates` replaces it by a measured rate."""

TENSOR_PARALLEL_EFFICIENCY = 0.8
"""What is left of each GPU's speed once several share a model. An assumption as well."""


@dataclass(frozen=True)
class ModelSize:
    """What a model's arithmetic costs and how much it caches, in 16 bits.

    Attributes
    ----------
    n_parameters, n_layers, n_heads, n_kv_heads, head_dim
        From the model's ``config.json`` and card; ``n_heads`` are those of the queries.
    """

    name: str
    n_parameters: float
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def values_per_token(self) -> int:
        """Cached numbers per token: keys and values of every layer."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim

    def prefill_flops(self, start: int, n_tokens: int) -> float:
        """Floating-point operations to compute tokens that follow ``start`` others.

        Two per parameter and token; four per head channel, layer and pair of tokens that attend to
        each other (scores, and the weighted sum of values).
        """
        pairs = n_tokens * start + n_tokens * (n_tokens + 1) / 2
        attention = 4 * self.n_layers * self.n_heads * self.head_dim * pairs
        return 2 * self.n_parameters * n_tokens + attention


@dataclass(frozen=True)
class Machine:
    """How fast a machine computes.

    Attributes
    ----------
    flops_per_s
        Operations per second that a long prefill reaches.
    memory_bytes_per_s
        Memory bandwidth: a short prefill takes at least one reading of all weights.
    decode_bytes_per_s
        Uncompressed (16-bit) cache bytes that entropy decoding yields per second.
    unpack_bytes_per_s
        The same for levels without an entropy coder, which are only scaled or copied.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    decode_bytes_per_s: float
    unpack_bytes_per_s: float


def _machine(
    name: str, gpus: int, peak_flops_per_s: float, memory_bytes_per_s: float, decode: float
) -> Machine:
    """Unpacking is bound by memory: as many bytes are read and written as come out, at most."""
    share = gpus * (TENSOR_PARALLEL_EFFICIENCY if gpus > 1 else 1.0)
    return Machine(
        name=name,
        flops_per_s=share * EFFICIENCY * peak_flops_per_s,
        memory_bytes_per_s=share * memory_bytes_per_s,
        decode_bytes_per_s=share * decode,
        unpack_bytes_per_s=share * memory_bytes_per_s / 2,
    )


def a40(gpus: int) -> Machine:
    """NVIDIA A40: 149.7 TFLOPS dense in 16 bits and 696 GB/s (data sheet).

    The paper gives no decoding rate. 7 GB/s is what the released coder's algorithm reaches on an
    M1 Ultra (Mesh-LLM, 312 ms for 19,000 tokens of Qwen3-0.6B), whose memory is about as fast.
    """
    return _machine(f"{gpus} x A40", gpus, 149.7e12, 696e9, 7e9)


def h200(gpus: int) -> Machine:
    """NVIDIA H200: 989 TFLOPS dense in 16 bits and 4.8 TB/s (data sheet).

    40 GB/s of decoding is the rate published for KVTC on an H100 (arXiv 2511.01815, 267 ms for a
    batch of 8 x 8,000 tokens), reconstruction included.
    """
    return _machine(f"{gpus} x H200", gpus, 989e12, 4.8e12, 40e9)


@dataclass(frozen=True)
class Setup:
    """A model on a machine."""

    model: ModelSize
    machine: Machine

    def prefill_s(self, start: int, n_tokens: int) -> float:
        """Seconds to compute tokens that follow ``start`` others."""
        weights_bytes = 2 * self.model.n_parameters
        return max(
            self.model.prefill_flops(start, n_tokens) / self.machine.flops_per_s,
            weights_bytes / self.machine.memory_bytes_per_s,
        )

    def decode_s(self, n_tokens: int, level: Level) -> float:
        """Seconds to decode tokens that were encoded at a level."""
        machine = self.machine
        rate = machine.decode_bytes_per_s if level.entropy_coded else machine.unpack_bytes_per_s
        return 2 * n_tokens * self.model.values_per_token / rate

    def with_rates(
        self, *, prefill_tokens_per_s: float | None = None, decode_bytes_per_s: float | None = None
    ) -> Setup:
        """The same with measured rates: of a short prefill, and of entropy decoding.

        Raises
        ------
        ValueError
            A rate is not positive.
        """
        if min(prefill_tokens_per_s or 1, decode_bytes_per_s or 1) <= 0:
            raise ValueError("expected positive rates of prefill and decoding")
        machine = self.machine
        if prefill_tokens_per_s is not None:
            flops = 2 * self.model.n_parameters * prefill_tokens_per_s
            machine = replace(machine, flops_per_s=flops)
        if decode_bytes_per_s is not None:
            machine = replace(machine, decode_bytes_per_s=decode_bytes_per_s)
        return replace(self, machine=machine)


MISTRAL_7B = ModelSize("Mistral-7B", 7.24e9, 32, 32, 8, 128)
LLAMA_34B = ModelSize("Llama-34B", 33.7e9, 48, 64, 8, 128)
"""CodeLlama-34B, the published Llama of that size."""
LLAMA_70B = ModelSize("Llama-70B", 69.0e9, 80, 64, 8, 128)
LLAMA_31_8B = ModelSize("Llama-3.1-8B", 8.03e9, 32, 32, 8, 128)
LLAMA_31_70B = ModelSize("Llama-3.1-70B", 70.6e9, 80, 64, 8, 128)

SETUPS = {
    "a40-mistral-7b": Setup(MISTRAL_7B, a40(1)),
    "a40-llama-34b": Setup(LLAMA_34B, a40(2)),
    "a40-llama-70b": Setup(LLAMA_70B, a40(4)),
    "h200-llama-3.1-8b": Setup(LLAMA_31_8B, h200(1)),
    "h200-llama-3.1-70b": Setup(LLAMA_31_70B, h200(2)),
}
"""Models on as many GPUs as hold their 16-bit weights and a cache. The paper's server has four
A40; which model ran on how many of them is not known to us."""


LOSSLESS_BITS = 10.6
"""Of a bfloat16 value at the level ``lossless``, measured as :data:`LADDERS` are."""


@dataclass(frozen=True)
class Level:
    """A quality of an encoded cache.

    Attributes
    ----------
    bits_per_value
        Size, every byte counted.
    loss
        KL divergence (nats per token) of next-token predictions from those of the exact cache.
    entropy_coded
        Whether it has to be decoded, or only scaled or copied.
    """

    name: str
    bits_per_value: float
    loss: float
    entropy_coded: bool = True


@dataclass(frozen=True)
class Ladder:
    """The levels of a codec, coarse to fine; the first ``nested`` refine each other."""

    name: str
    levels: tuple[Level, ...]
    nested: int = 0

    @property
    def names(self) -> list[str]:
        """Names of the levels."""
        return [level.name for level in self.levels]

    @property
    def losses(self) -> list[float]:
        """Losses of the levels."""
        return [level.loss for level in self.levels]

    def with_exact_levels(self) -> Ladder:
        """The same with this library's two exact levels on top, which nest with nothing."""
        lossless = Level("lossless", LOSSLESS_BITS, 0.0)
        exact = (lossless, Level("raw", 16.0, 0.0, entropy_coded=False))
        return replace(self, levels=self.levels + exact)


LADDERS = {
    "uniform": Ladder(
        "uniform",
        (
            Level("uniform-4", 4.25, 0.0256, entropy_coded=False),
            Level("uniform-8", 8.25, 0.0001, entropy_coded=False),
        ),
    ),
    "delta": Ladder(
        "delta",
        (
            Level("delta-0", 2.82, 0.2),
            Level("delta-1", 3.67, 0.028),
            Level("delta-2", 4.12, 0.014),
            Level("delta-3", 4.84, 0.0038),
        ),
    ),
    "transform": Ladder(
        "transform",
        (
            Level("transform-0", 0.13, 0.0857),
            Level("transform-1", 0.34, 0.0144),
            Level("transform-2", 0.78, 0.0028),
            Level("transform-3", 1.57, 0.00045),
            Level("transform-4", 2.72, 0.00007),
        ),
        nested=5,
    ),
}
"""As this library measures them on SmolLM2-135M with contexts of 1,500 tokens (``bench codec``).
Losses of other models differ."""
