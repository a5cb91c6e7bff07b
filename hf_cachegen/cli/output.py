"""What commands print: tables for people, JSON for programs, bars for those who wait."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

PIPED_WIDTH = 120
"""Columns of a table that goes to a file or a program, which has no width of its own."""

_SPELLINGS = {
    "expected level, or policy": "expected --level, or --policy",
    "ttft_target_s": "--ttft-target",
    "overwrite=True": "--overwrite",
    "tables='auto'": "--tables auto",
    "token=...": "--token ...",
    "endpoint=...": "--endpoint",
    "cache_dir=..., ": "",
}
"""Advice in the library's messages is for Python; here it is for the shell."""


def report_error(message: str) -> None:
    """Say what went wrong in one line on stderr."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    joined = "".join(f"{line} " if line[-1] in ":;,." else f"{line}; " for line in lines)
    for python, shell in _SPELLINGS.items():
        joined = joined.replace(python, shell)
    print(f"hf-cachegen: error: {joined.rstrip(' ;')}", file=sys.stderr)


def report_interrupt() -> None:
    """Say on stderr that the user has ended the command."""
    after_echo = "\n" if sys.stderr.isatty() else ""  # the terminal has just shown a ^C
    print(f"{after_echo}hf-cachegen: interrupted", file=sys.stderr)


def print_json(value: dict[str, Any]) -> None:
    """One line, so that a program finds it as the last one of stdout."""
    print(json.dumps(value))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    stderr: bool = False,
) -> None:
    """A table whose first column is left-aligned and whose others are figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    console = Console(stderr=stderr, width=None if terminal else PIPED_WIDTH, markup=False)
    console.print(table)


def print_facts(facts: dict[str, object]) -> None:
    """Lines of ``name  value``, aligned."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")


def bytes_bar(description: str, total: int) -> Any:
    """A progress bar that counts bytes."""
    return tqdm(total=total, desc=description, unit="B", unit_scale=True)


def count(number: int, noun: str) -> str:
    """How many there are: ``1 chunk``, ``2 chunks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def figure(value: float, digits: int = 3) -> str:
    """A number of so many significant digits, written out: ``12300``, ``0.000123``."""
    return np.format_float_positional(
        value, precision=digits, unique=False, fractional=False, trim="-"
    )


def megabytes(size_bytes: float) -> str:
    """A size for people: ``12.34 MB``."""
    return f"{size_bytes / 1e6:.2f} MB"
