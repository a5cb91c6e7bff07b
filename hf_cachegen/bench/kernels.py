"""Speed of the GPU decoders beside their bounds: ``python -m hf_cachegen.bench.kernels``.

The bound is counted (:mod:`hf_cachegen.bench.roofline`): bytes moved over the memory's speed,
instructions over the rate at which a GPU issues them, multiplications over that of its tensor
cores, for each stage the largest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hf_cachegen.bench.roofline import (
    BF16_BYTES,
    COPY,
    H200,
    Shape,
    Term,
    bound_s,
    delta_terms,
    transform_terms,
)

if TYPE_CHECKING:
    from hf_cachegen.codec.rans_triton import DecodeCheck

SCHEMA = 2


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
        By codec, ``terms``, ``bound_s`` by stage and ``bound_bytes_per_s`` of bf16 keys and values;
        and ``measured``: None without a GPU.

    Raises
    ------
    RuntimeError
        The GPU does not give back what was encoded. No time is reported then.
    """
    shape = shape or Shape()
    counted = {"delta": delta_terms, "transform": transform_terms}
    return {
        "schema": SCHEMA,
        "gpu": H200.name,
        "shape": asdict(shape),
        "bits_per_value": bits_per_value,
        "codecs": {
            name: _bound(shape, terms(shape, H200, bits_per_value))
            for name, terms in counted.items()
        },
        "measured": _measure(shape, repeats) if torch.cuda.is_available() else None,
    }


def _bound(shape: Shape, terms: Sequence[Term]) -> dict[str, Any]:
    stages = bound_s(terms)
    on_gpu_s = sum(seconds for stage, seconds in stages.items() if stage != COPY)
    return {
        "terms": [{**asdict(term), "seconds": term.seconds} for term in terms],
        "bound_s": stages,
        "bound_bytes_per_s": BF16_BYTES * shape.values / on_gpu_s,
    }


class Workload(Protocol):
    """Coded segments of some layers, on a device.

    Attributes
    ----------
    n_layers
        How many.
    bits_per_value
        Of what is coded.
    out
        Where they are decoded to.
    """

    n_layers: int
    bits_per_value: float
    out: list[Tensor]

    def decode(self) -> DecodeCheck:
        """The whole way from bytes on the host to keys and values."""
        ...

    def decode_integers(self) -> None:
        """The entropy stage of :meth:`decode` alone."""
        ...

    def check(self) -> None:
        """Raise RuntimeError unless what is decoded is what was coded."""
        ...


def _measure(shape: Shape, repeats: int) -> dict[str, Any]:
    """Time some layers of all contexts, checked; the times are of all layers."""
    from hf_cachegen.bench.workloads import DeltaLayer, TransformLayers

    device = torch.device("cuda")
    codecs = {
        "delta": _time(shape, DeltaLayer(shape, device), repeats),
        "transform": _time(shape, TransformLayers(shape, device), repeats),
    }
    size = (shape.contexts, shape.heads, shape.tokens, shape.dim)
    source, target = (torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "codecs": codecs,
        "device_copy_s": 2 * shape.layers * _event_s(lambda: target.copy_(source), repeats),
        "prefill_s": shape.layers * _event_s(_prefill(shape, device), 3),
    }


def _time(shape: Shape, workload: Workload, repeats: int) -> dict[str, Any]:
    workload.check()
    share = workload.n_layers / shape.layers
    decode_s = _event_s(workload.decode, repeats)
    return {
        "bits_per_value": workload.bits_per_value,
        "seconds": {
            "entropy": _event_s(workload.decode_integers, repeats) / share,
            "decode": decode_s / share,
        },
        "decode_bytes_per_s": sum(tensor.nbytes for tensor in workload.out) / decode_s,
    }


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


def report(result: dict[str, Any]) -> str:
    """The counted terms and what was measured, as a table in text."""
    lines = [f"bound on {result['gpu']}, {result['bits_per_value']} bits/value"]
    for name, bound in result["codecs"].items():
        lines += ["", name]
        for term in bound["terms"]:
            amount = f"{term['amount'] / 1e9:9.2f} G{term['unit']:13}"
            ms = f"{1e3 * term['seconds']:7.2f} ms"
            lines.append(f"{term['stage']:16} {term['what']:20} {amount} {ms}")
        lines += [f"{stage:16} {1e3 * s:57.2f} ms" for stage, s in bound["bound_s"].items()]
        lines.append(f"bf16 produced: at most {bound['bound_bytes_per_s'] / 1e9:.0f} GB/s")
    measured = result["measured"]
    if measured is None:
        return "\n".join([*lines, "", "not measured: no GPU"])
    lines += ["", f"measured on {measured['device']}"]
    for name, speed in measured["codecs"].items():
        lines += [f"{name}, {speed['bits_per_value']:.2f} bits/value"]
        lines += [f"{stage:16} {1e3 * s:57.2f} ms" for stage, s in speed["seconds"].items()]
        lines.append(f"bf16 produced: {speed['decode_bytes_per_s'] / 1e9:.1f} GB/s")
    for name in ("device_copy", "prefill"):
        lines.append(f"{name.replace('_', ' '):16} {1e3 * measured[f'{name}_s']:57.2f} ms")
    return "\n".join(lines)


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
