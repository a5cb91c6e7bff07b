"""Speed of the GPU decoder beside what it cannot exceed: ``python -m hf_cachegen.bench.kernels``.

The bound is counted, not measured: bytes moved over the memory's speed and instructions over the
rate at which a GPU issues them, for each kernel the larger of the two. docs/kernels.md explains
every term.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_cachegen.bench.entropy import fit_bank
from hf_cachegen.codec.entropy import encode_integers
from hf_cachegen.codec.planes import rows_per_stream
from hf_cachegen.codec.rope import rotate
from hf_cachegen.config import CHUNK_TOKENS, RANS_LANES
from hf_cachegen.layout import KVLayout, LayerSpec, RopeSpec, TensorSpec

if TYPE_CHECKING:
    from hf_cachegen.codec.delta_triton import CodedSegment
    from hf_cachegen.codec.rans_triton import DecodeCheck

BF16_BYTES = 2
GROUP = 10

DECODE_INSTRUCTIONS = {16: 76, 32: 86, 64: 96, 256: 116}
"""Instructions of one step of 32 symbols on sm_90, by largest alphabet (docs/kernels.md)."""

DELTA_INSTRUCTIONS = 523
DELTA_VALUES = 8 * 32
"""Instructions of a warp of the delta kernel on sm_90, and the values that it reconstructs."""

ALPHABETS = (256, 64)
"""Largest alphabets of anchors and differences. One launch decodes both, with the deeper search."""


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU. ``clock_hz`` is what it holds under load, not its boost."""

    name: str
    memory_bytes_per_s: float
    link_bytes_per_s: float
    multiprocessors: int
    issues_per_clock: int
    clock_hz: float

    @property
    def instructions_per_s(self) -> float:
        """Warp instructions that all multiprocessors issue."""
        return self.multiprocessors * self.issues_per_clock * self.clock_hz


H200 = Gpu("NVIDIA H200", 4.8e12, 55e9, 132, 4, 1.755e9)


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
        """Tokens of each plane of a layer and context: anchors and differences of each chunk."""
        return [width for n in self.chunks for width in (-(-n // GROUP), n - -(-n // GROUP))]


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


def roofline_terms(shape: Shape, gpu: Gpu, bits_per_value: float) -> list[Term]:
    """Count what decoding takes, with streams of ``bits_per_value``."""
    values, contexts = shape.values, shape.layers * shape.contexts
    steps = contexts * shape.channels * sum(-(-width // RANS_LANES) for width in shape.planes)
    streams = contexts * sum(-(-shape.channels // rows_per_stream(w)) for w in shape.planes)
    coded_bytes = values * bits_per_value / 8 + streams * RANS_LANES * 4
    table_bytes = contexts * len(shape.chunks) * shape.channels * 4 * sum(ALPHABETS)
    memory, issue = gpu.memory_bytes_per_s, gpu.instructions_per_s
    step_instructions = DECODE_INSTRUCTIONS[max(ALPHABETS)]
    return [
        Term("copy to the GPU", "streams", "bytes", coded_bytes, gpu.link_bytes_per_s),
        Term("entropy", "streams read", "bytes", coded_bytes, memory),
        Term("entropy", "tables read", "bytes", table_bytes, memory),
        Term("entropy", "integers written", "bytes", 2 * values, memory),
        Term("entropy", "steps", "instructions", steps * step_instructions, issue),
        Term("delta", "integers read", "bytes", 2 * values, memory),
        Term("delta", "cos and sin read", "bytes", 4 * values / 2, memory),
        Term("delta", "values written", "bytes", BF16_BYTES * values, memory),
        Term("delta", "tiles", "instructions", values / DELTA_VALUES * DELTA_INSTRUCTIONS, issue),
    ]


def bound_s(terms: Sequence[Term]) -> dict[str, float]:
    """Least seconds of each stage: its bytes, or its instructions if they take longer."""
    stages: dict[str, float] = {}
    for stage in dict.fromkeys(term.stage for term in terms):
        by_unit: dict[str, float] = {}
        for term in terms:
            if term.stage == stage:
                by_unit[term.unit] = by_unit.get(term.unit, 0.0) + term.seconds
        stages[stage] = max(by_unit.values())
    return stages


def run_kernel_bench(
    shape: Shape | None = None, *, bits_per_value: float = 0.8, repeats: int = 25
) -> dict[str, Any]:
    """Count the bound on an H200, and measure on the GPU that is here.

    Parameters
    ----------
    shape
        What is decoded.
    bits_per_value
        Of the bound. What is measured is random, with its own rate in the result.
    repeats
        Runs of which the median counts.

    Returns
    -------
    dict
        ``terms``, ``bound_s`` by stage, ``bound_bytes_per_s`` of bf16 keys and values, and
        ``measured``: None without a GPU.

    Raises
    ------
    RuntimeError
        The GPU does not give back what was encoded. No time is reported then.
    """
    shape = shape or Shape()
    terms = roofline_terms(shape, H200, bits_per_value)
    stages = bound_s(terms)
    on_gpu_s = stages["entropy"] + stages["delta"]
    measured = _measure(shape, repeats) if torch.cuda.is_available() else None
    return {
        "schema": 1,
        "gpu": H200.name,
        "shape": asdict(shape),
        "bits_per_value": bits_per_value,
        "terms": [{**asdict(term), "seconds": term.seconds} for term in terms],
        "bound_s": stages,
        "bound_bytes_per_s": BF16_BYTES * shape.values / on_gpu_s,
        "measured": measured,
    }


def _measure(shape: Shape, repeats: int) -> dict[str, Any]:
    """Time one layer of all contexts, checked; the times are of all layers."""
    layer = _SyntheticLayer(shape, torch.device("cuda"))
    layer.check()
    source = torch.empty_like(layer.out[0])
    seconds = {
        "entropy": _event_s(layer.decode_integers, repeats),
        "decode": _event_s(layer.decode, repeats),
        "device copy": _event_s(lambda: [tensor.copy_(source) for tensor in layer.out], repeats),
        "prefill": _event_s(_prefill(shape, layer.device), 3),
    }
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bits_per_value": layer.bits_per_value,
        "seconds": {name: shape.layers * value for name, value in seconds.items()},
        "decode_bytes_per_s": sum(t.nbytes for t in layer.out) / seconds["decode"],
    }


class _SyntheticLayer:
    """Laplacian integers in the shape of one layer of all contexts, encoded, on a device."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        from hf_cachegen.codec import delta_triton

        self.device = device
        rng = np.random.default_rng(0)
        channels, group = shape.channels, GROUP
        specs = tuple(TensorSpec(name=n, heads=shape.heads, dim=shape.dim) for n in "kv")
        rope = RopeSpec(
            inv_freq=tuple(5e5 ** -(np.arange(0, shape.dim, 2) / shape.dim)),
            attention_scaling=1.0,
            pairing="half",
        )
        self.specs = (specs[0].model_copy(update={"rope": "r"}), specs[1])
        layer = LayerSpec(kind="full_attention", tensors=self.specs)
        self.layout = KVLayout(dtype="bfloat16", ropes={"r": rope}, layers=(layer,))
        self._integers = [_laplace(rng, channels, width) for width in shape.planes]
        banks = [fit_bank(q) for q in self._integers[:2]]
        rows = np.arange(channels)
        coded = [
            encode_integers(q, rows, banks[index % 2], rows_per_stream(q.shape[1]))
            for index, q in enumerate(self._integers)
        ]
        values = channels * shape.tokens
        self.bits_per_value = 8 * sum(map(len, coded)) / values
        self.vectors = [torch.rand(channels) + 0.5 for _ in range(3)]
        self.planes = delta_triton.DeltaPlanes.build(banks, rows, self.vectors, group, device)
        self.segments = [
            delta_triton.CodedSegment(coded[2 * k : 2 * k + 2], tokens, batch, k * CHUNK_TOKENS)
            for batch in range(shape.contexts)
            for k, tokens in enumerate(shape.chunks)
        ]
        size = (shape.contexts, shape.heads, shape.tokens, shape.dim)
        self.out = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in specs]
        self._launch = delta_triton.launch_segments

    def decode(self) -> DecodeCheck:
        """The whole way from bytes on the host to keys and values."""
        return self._launch(self.planes, self.layout, self.specs, self.segments, self.out, 0)

    def decode_integers(self) -> None:
        """The entropy stage of :meth:`decode` alone."""
        from hf_cachegen.codec.rans_triton import launch_integers
        from hf_cachegen.triton_kernels.streams import PlaneShape

        coded = [plane for segment in self.segments for plane in segment.planes]
        n_rows = len(self.vectors[0])
        shapes = [
            PlaneShape(n_rows, q.shape[1], rows_per_stream(q.shape[1]), index % 2 * n_rows)
            for index, q in enumerate(self._integers)
        ]
        launch_integers(coded, shapes * (len(coded) // len(shapes)), self.planes.tables)

    def check(self) -> None:
        """Raise RuntimeError unless every chunk decodes to the values that its integers mean."""
        self.decode()()
        for number, segment in enumerate(self.segments):
            index = 2 * number % len(self._integers)
            for tensor, expected in zip(self.out, self._expected(index, segment), strict=True):
                end = segment.first_token + segment.tokens
                found = tensor[segment.batch, :, segment.first_token : end]
                if not torch.allclose(found.float(), expected, rtol=0.01, atol=0.01):
                    raise RuntimeError("the GPU does not give back what was encoded")

    def _expected(self, index: int, segment: CodedSegment) -> list[Tensor]:
        anchors, differences = (
            torch.from_numpy(q).to(self.device) for q in self._integers[index : index + 2]
        )
        mean, step, bins = (vector.to(self.device)[:, None] for vector in self.vectors)
        x = (mean + anchors * step).repeat_interleave(GROUP, dim=1)[:, : segment.tokens]
        coded = torch.arange(segment.tokens, device=self.device) % GROUP != 0
        x[:, coded] += differences * bins
        shape = self.out[0].shape
        values = [part.view(shape[1], shape[3], -1).transpose(1, 2) for part in x.chunk(2)]
        return [rotate(values[0], self.layout.ropes["r"], segment.first_token), values[1]]


def _prefill(shape: Shape, device: torch.device) -> Callable[[], object]:
    """One layer of Llama-3.1-8B, random weights, on the same tokens; one context at a time."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=shape.heads,
        head_dim=shape.dim,
        num_hidden_layers=1,
        vocab_size=1024,
        max_position_embeddings=shape.tokens,
    )
    model = LlamaModel(config).to(device, torch.bfloat16).eval()
    tokens = torch.zeros((1, shape.tokens), dtype=torch.int64, device=device)

    @torch.inference_mode()
    def run() -> None:
        for _ in range(shape.contexts):
            model(tokens)

    return run


def _laplace(rng: np.random.Generator, rows: int, tokens: int) -> NDArray[np.int32]:
    return np.rint(rng.laplace(0, 2, (rows, tokens))).astype(np.int32)


def report(result: dict[str, Any]) -> str:
    """The counted terms and what was measured, as a table in text."""
    lines = [f"bound on {result['gpu']}, {result['bits_per_value']} bits/value"]
    for term in result["terms"]:
        amount, ms = term["amount"] / 1e9, 1e3 * term["seconds"]
        lines.append(
            f"{term['stage']:16} {term['what']:18} {amount:9.2f} G{term['unit']:13} {ms:7.2f} ms"
        )
    lines += [f"{stage:16} {1e3 * s:55.2f} ms" for stage, s in result["bound_s"].items()]
    lines.append(f"bf16 produced: at most {result['bound_bytes_per_s'] / 1e9:.0f} GB/s")
    measured = result["measured"]
    if measured is None:
        return "\n".join([*lines, "not measured: no GPU"])
    lines.append(f"measured on {measured['device']}, {measured['bits_per_value']:.2f} bits/value")
    lines += [f"{name:16} {1e3 * s:55.2f} ms" for name, s in measured["seconds"].items()]
    return "\n".join([*lines, f"decode: {measured['decode_bytes_per_s'] / 1e9:.1f} GB/s of bf16"])


def _event_s(run: Callable[[], object], repeats: int, warmups: int = 5) -> float:
    """Median time of a run on the current stream."""
    times = []
    for index in range(warmups + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        if index >= warmups:
            times.append(begin.elapsed_time(end) / 1000)
    return median(times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report, and the result as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits-per-value", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args(arguments)
    result = run_kernel_bench(bits_per_value=options.bits_per_value, repeats=options.repeats)
    print(report(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
