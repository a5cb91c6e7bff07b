"""Compile every kernel, in every configuration, for GPUs that are not here.

``python -m hf_cachegen.triton_kernels.aot [docs/kernels.md]`` prints what each build takes of a
GPU, or writes it into the file, between the lines that mark the place. Needs no GPU, and must run
without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_cachegen.triton_kernels import delta, pairs, rans, streams, transform

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

TABLE_BEGIN = "<!-- builds: written by hf_cachegen.triton_kernels.aot -->"
TABLE_END = "<!-- end of builds -->"

SM_WARPS, SM_BLOCKS, SM_REGISTERS = 64, 32, 65_536
"""What one multiprocessor of sm_80 and sm_90 holds at once."""
SM_SHARED_BYTES = {"sm_80": 164 << 10, "sm_90": 228 << 10}
BLOCK_SHARED_BYTES = 1 << 10
"""Shared memory that the system takes of each block."""

_REGISTER_UNIT = 8
_TYPES = {
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
}


class Configuration(NamedTuple):
    """One way in which a launcher may call a kernel.

    Attributes
    ----------
    label
        What sets it apart.
    types
        Triton's type of each argument that is none of ``constants``.
    constants
        Arguments known when it is compiled.
    options
        Launch options.
    """

    kernel: Any
    label: str
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's."""
        function: str = self.kernel.fn.__name__
        return function.removesuffix("_kernel")


class Build(NamedTuple):
    """What a compiled kernel takes.

    Attributes
    ----------
    registers
        Of a thread.
    shared_bytes
        Of a block.
    spill_bytes
        Of a thread, in the local memory to which registers spill (the whole stack frame).
    loops
        Instructions of each innermost loop, ascending.
    instructions
        All others; 0 if not counted.
    occupancy
        Share of a multiprocessor's warps that fit at once; None where it was not computed.
    """

    kernel: str
    label: str
    target: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    loops: tuple[int, ...]
    instructions: int
    occupancy: float | None


def configurations() -> list[Configuration]:
    """Everything that the launchers can ask for."""
    return [*_rans_configurations(), *_delta_configurations(), *_transform_configurations()]


def build(configuration: Configuration, target: str) -> Build:
    """Compile for a target, one of :data:`TARGETS`, and look at the result."""
    kernel = configuration.kernel
    signature = {name: configuration.types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name] != "constexpr" and name not in _unspecialised(kernel)
    }
    source = ASTSource(kernel, signature, configuration.constants, attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=configuration.options)
    read = _read_hip if TARGETS[target].backend == "hip" else _read_cuda
    registers, spill_bytes, (loops, instructions) = read(compiled)
    shared, warps = compiled.metadata.shared, configuration.options["num_warps"]
    fit = None
    if target in SM_SHARED_BYTES:
        fit = occupancy(registers, shared, warps, SM_SHARED_BYTES[target])
    return Build(
        configuration.name,
        configuration.label,
        target,
        registers,
        shared,
        spill_bytes,
        loops,
        instructions,
        fit,
    )


def occupancy(registers: int, shared_bytes: int, warps: int, sm_shared_bytes: int) -> float:
    """Share of a multiprocessor's warps that blocks of ``warps`` warps can fill."""
    rounded = -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT
    blocks = min(
        SM_BLOCKS,
        SM_WARPS // warps,
        SM_REGISTERS // (32 * rounded) // warps,
        sm_shared_bytes // (shared_bytes + BLOCK_SHARED_BYTES),
    )
    return blocks * warps / SM_WARPS


def markdown(builds: Sequence[Build]) -> str:
    """A table of builds."""
    lines = [
        "| kernel | configuration | target | registers | shared, bytes | spills, bytes "
        "| loops | instructions | occupancy |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for b in builds:
        fit = "-" if b.occupancy is None else f"{b.occupancy:.0%}"
        loops = ", ".join(map(str, b.loops)) or "-"
        lines.append(
            f"| {b.kernel} | {b.label} | {b.target} | {b.registers} | {b.shared_bytes} "
            f"| {b.spill_bytes} | {loops} | {b.instructions or '-'} | {fit} |"
        )
    return "\n".join(lines)


def _rans_configurations() -> Iterator[Configuration]:
    shared = {"streams": "*i64", "rows": "*i32", "tables": "*i32", "entries": "*i32"}
    for dtype in rans.OUT_DTYPES:
        types = {
            **shared,
            "words": "*u16",
            "out": _pointer(dtype),
            "counts": "*i32",
            "flags": "*i32",
        }
        yield Configuration(rans.rans_decode_kernel, _name(dtype), types, {}, rans.OPTIONS)
    names = {"counts": "*i32", "ends": "*i64", "escapes": "*i32", "n_escapes": "i32"}
    for dtype in streams.INTEGER_DTYPES:
        yield Configuration(
            rans.fill_escapes_kernel,
            _name(dtype),
            {
                "streams": "*i64",
                "rows": "*i32",
                "tables": "*i32",
                **names,
                "out": _pointer(dtype),
            },
            {"BLOCK": rans.ESCAPE_BLOCK},
            rans.OPTIONS,
        )
    outputs = {"states": "*u32", "words": "*u16", "begins": "*i32", "flags": "*i32"}
    yield Configuration(
        rans.rans_encode_kernel, "uint8", {**shared, "symbols": "*u8", **outputs}, {}, rans.OPTIONS
    )


def _delta_configurations() -> Iterator[Configuration]:
    floats = dict.fromkeys(("mean", "anchor_step", "bins"), "*fp32")
    for source, anchors in product(streams.INTEGER_DTYPES, (True, False)):
        given = {"integers": _pointer(source), "segments": "*i64", **floats}
        for pairs_given in _pair_configurations():
            yield _tile_configuration(
                delta.delta_kernel,
                f"{_name(source)}, {'anchors' if anchors else 'no anchors'}",
                given,
                {"HAS_ANCHORS": anchors},
                pairs_given,
            )


def _transform_configurations() -> Iterator[Configuration]:
    options, constants = _split_options(transform.join_options())
    for source in streams.INTEGER_DTYPES:
        types = {
            "integers": _pointer(source),
            "planes": "*i64",
            "places": "*i32",
            "low_bits": "*u8",
            "out": "*fp16",
            "stride": "i32",
            "n_levels": "i32",
        }
        yield Configuration(
            transform.transform_join_kernel, _name(source), types, constants, options
        )
    given = {
        **dict.fromkeys(("values", "scales", "mean", "scale"), "*fp32"),
        "rows": "*i32",
        "segments": "*i64",
    }
    for pairs_given in _pair_configurations():
        yield _tile_configuration(transform.transform_store_kernel, "", given, {}, pairs_given)


class _Pairs(NamedTuple):
    """How pairs of channels may be written."""

    target: torch.dtype
    interleaved: bool
    unit_stride: bool

    @property
    def label(self) -> str:
        pairing = "interleaved" if self.interleaved else "half"
        return f"{pairing}, {'unit' if self.unit_stride else 'any'} stride"


def _pair_configurations() -> Iterator[_Pairs]:
    return itertools.starmap(_Pairs, product(pairs.OUT_DTYPES, (False, True), (True, False)))


def _tile_configuration(
    kernel: Any, label: str, types: dict[str, str], constants: dict[str, Any], written: _Pairs
) -> Configuration:
    """Of a kernel that ends with :func:`~hf_cachegen.triton_kernels.pairs.store_pairs`."""
    options, tile = _split_options(pairs.tile_options(interleaved=written.interleaved))
    constants = {**constants, **tile}
    if written.unit_stride:
        constants["stride_d"] = 1
    types = {**types, "cos": "*fp32", "sin": "*fp32", "out": _pointer(written.target)}
    numbers = {name: "i32" for name in kernel.arg_names if name not in {*types, *constants}}
    parts = (label, f"to {_name(written.target)}", written.label)
    return Configuration(
        kernel, ", ".join(filter(None, parts)), {**types, **numbers}, constants, options
    )


def _split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Launch options, and constants of the kernel."""
    launch = {"num_warps", "enable_fp_fusion"}
    return (
        {key: value for key, value in options.items() if key in launch},
        {key: value for key, value in options.items() if key not in launch},
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _pointer(dtype: Any) -> str:
    return "*" + _TYPES[_name(dtype)]


def _unspecialised(kernel: Any) -> set[str]:
    return {param.name for param in kernel.params if param.do_not_specialize}


_Counts = tuple[tuple[int, ...], int]
"""Instructions of the innermost loops, and of all the rest."""


def _read_cuda(compiled: Any) -> tuple[int, int, _Counts]:
    """Registers, stack bytes and instructions, as :class:`Build` has them."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin))
        sass = _run(knobs.nvidia.cuobjdump.path, "--dump-sass", str(cubin))
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"], _count_instructions(sass)


def _count_instructions(sass: str) -> _Counts:
    addresses = [int(a, 16) for a in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s", sass, re.M)]
    jumps = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s.*\bBRA\S*\s.*?(0x[0-9a-f]+)", sass, re.M)
    jumps = [(int(to, 16), int(at, 16)) for at, to in jumps]
    # What follows the code is a jump to itself.
    code_end = min(to for to, at in jumps if to == at)
    backwards = [(to, at) for to, at in jumps if to < at]
    inner = [
        (begin, end)
        for begin, end in backwards
        if not any((b, e) != (begin, end) and begin <= b and e <= end for b, e in backwards)
    ]
    loops = sorted(sum(begin <= a <= end for a in addresses) for begin, end in inner)
    return tuple(loops), sum(a < code_end for a in addresses) - sum(loops)


def _read_hip(compiled: Any) -> tuple[int, int, _Counts]:
    """Vector registers and bytes of private memory; instructions are not counted."""
    text = compiled.asm["amdgcn"]
    found = {
        key: int(re.search(rf"\.{key}:\s*(\d+)", text)[1])  # type: ignore[index]
        for key in ("vgpr_count", "private_segment_fixed_size")
    }
    return found["vgpr_count"], found["private_segment_fixed_size"], ((), 0)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table into a document, or print it; then the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", nargs="?", type=Path, help="Markdown file with the two markers")
    document = parser.parse_args(arguments).document
    builds = [build(c, target) for c in configurations() for target in TARGETS]
    if document is None:
        print(markdown(builds))
    else:
        write_table(document, markdown(builds))
    print(
        json.dumps(
            {"schema": 1, "triton": triton.__version__, "builds": [b._asdict() for b in builds]}
        )
    )


def write_table(document: Path, table: str) -> None:
    """Put a table between the markers of a document."""
    before, rest = document.read_text(encoding="utf-8").split(TABLE_BEGIN)
    after = rest.split(TABLE_END)[1]
    text = f"{before}{TABLE_BEGIN}\n\n{table}\n\n{TABLE_END}{after}"
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
