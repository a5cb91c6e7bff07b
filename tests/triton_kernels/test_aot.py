"""Every kernel compiles for GPUs that are not here, in a process that does not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_cachegen.bench import roofline
from hf_cachegen.triton_kernels import aot, streams

TARGETS = set(aot.TARGETS)
DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"


@pytest.fixture(scope="module")
def builds():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "hf_cachegen.triton_kernels.aot"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=840, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])["builds"]
    return [aot.Build(**row) for row in rows]


@pytest.mark.timeout(900)
def test_every_configuration_compiles_for_every_target(builds):
    expected = {(c.name, c.label, target) for c in aot.configurations() for target in aot.TARGETS}
    assert {(b.kernel, b.label, b.target) for b in builds} == expected
    assert len(builds) == len(expected)


@pytest.mark.timeout(900)
def test_no_kernel_spills_registers(builds):
    assert [b for b in builds if b.spill_bytes > 0] == []


@pytest.mark.timeout(900)
def test_half_of_a_multiprocessor_can_be_filled(builds):
    assert min(b.occupancy for b in builds if b.target == "sm_90") >= 0.5


def documented():
    """(kernel, label, target), then instructions of its loops and of the rest, as text."""
    text = DOCUMENT.read_text(encoding="utf-8").split(aot.TABLE_BEGIN)[1].split(aot.TABLE_END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {tuple(row[:3]): (row[6], row[7]) for row in rows if len(row) == 9 and row[2] in TARGETS}


def test_the_document_lists_every_build():
    listed = list(documented())
    expected = [(c.name, c.label, target) for c in aot.configurations() for target in aot.TARGETS]
    assert listed == expected


def test_the_bound_counts_the_documented_instructions():
    counts = {key[:2]: found for key, found in documented().items() if key[2] == "sm_90"}
    loops = ", ".join(map(str, roofline.DECODE_INSTRUCTIONS.values()))
    assert counts["rans_decode", "int16"][0] == loops
    assert list(roofline.DECODE_INSTRUCTIONS) == [1 << depth for depth in streams.DEPTHS]
    label = "int16, anchors, to bfloat16, half, unit stride"
    assert counts["delta", label] == ("-", str(roofline.DELTA_INSTRUCTIONS))
    join = roofline.JOIN_LEVEL_INSTRUCTIONS, roofline.JOIN_INSTRUCTIONS
    assert counts["transform_join", "int16"] == tuple(map(str, join))
    label = "to bfloat16, half, unit stride"
    assert counts["transform_store", label] == ("-", str(roofline.STORE_INSTRUCTIONS))


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "warps", "expected"),
    [
        (32, 0, 1, 0.5),  # 32 blocks at most
        (32, 0, 4, 1.0),
        (64, 0, 8, 0.5),  # 65,536 registers for 64 x 256 a block
        (65, 0, 8, 0.375),
        (32, 113 << 10, 8, 0.25),  # 228 KiB for 114 a block
    ],
)
def test_occupancy(registers, shared_bytes, warps, expected):
    assert aot.occupancy(registers, shared_bytes, warps, 228 << 10) == expected


def test_the_table_replaces_what_stands_between_the_markers(tmp_path):
    document = tmp_path / "kernels.md"
    document.write_text(f"before\n\n{aot.TABLE_BEGIN}\n\nold\n\n{aot.TABLE_END}\n\nafter\n")
    aot.write_table(document, "| new |")
    expected = f"before\n\n{aot.TABLE_BEGIN}\n\n| new |\n\n{aot.TABLE_END}\n\nafter\n"
    assert document.read_text() == expected
