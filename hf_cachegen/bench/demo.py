"""The main job on real input: one question about a long document, from text and from caches.

``python -m hf_cachegen.bench.demo`` lets a real model answer once from the document's text and once
from each level of its encoded cache, which comes over an HTTP link of known speed, and prints
sizes, seconds and quality.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cachegen.bench.corpus import documents
from hf_cachegen.bench.embedded import prepare_embedded_model
from hf_cachegen.bench.ttft import AHEAD_TOKENS, TtftResult, build_prompt, measure_ttft
from hf_cachegen.hf.codecs import load_table
from hf_cachegen.levels import RAW

MODEL = ".cache/models/SmolLM2-135M"
TABLE = "model_tables/HuggingFaceTB--SmolLM2-135M-Instruct"
DOCUMENT = "prose-05"
QUESTION = "What does the return statement do?"

SCHEMA = 1
NOTHING = "-"


def show(result: TtftResult, console: Console) -> None:
    """Print what was measured for people."""
    console.print(
        f"\n[bold]{result.context_tokens:,} tokens, {result.dtype}, {result.model}[/bold]\n"
        f"{result.threads} threads ({result.cpu_capability}), load {result.load:.1f} before; "
        f"caches over HTTP at {result.link_mbps:g} Mbit/s; "
        f"the model's table ({result.table_bytes / 1e6:.1f} MB) is at hand"
    )
    console.print(level_table(result))
    console.print(
        "ratio: bf16 bytes of the cache over those sent. TTFT: time to the first token; vs text, "
        "vs raw: how many times sooner. KL: from the exact cache's predictions, nats per token "
        f"over the next {AHEAD_TOKENS}. same: the answer is that from text.\n",
        highlight=False,
    )
    sources = {result.text.text: ["text"]}
    for row in result.levels:
        sources.setdefault(row.answer.text, []).append(row.level)
    for answer, names in sources.items():
        console.print(f"[bold]Answer from {', '.join(names)}[/bold]")
        console.print(answer, markup=False, highlight=False)


def level_table(result: TtftResult) -> Table:
    """A row for the text and for each level, for people."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("from", no_wrap=True)
    for name in ("MB", "bits/value", "ratio", "TTFT s", "vs text", "vs raw", "KL", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    text_s = result.text.ttft_s
    raw_s = next(row.answer.ttft_s for row in result.levels if row.level == RAW.name)
    table.add_row(
        "text", *3 * [NOTHING], f"{text_s:.2f}", "1.0x", f"{raw_s / text_s:.1f}x", NOTHING, NOTHING
    )
    for row in result.levels:
        ttft_s = row.answer.ttft_s
        table.add_row(
            row.level,
            f"{row.size_bytes / 1e6:.1f}",
            f"{row.bits_per_value:.2f}",
            f"{row.ratio_bf16:.1f}x",
            f"{ttft_s:.2f}",
            f"{text_s / ttft_s:.1f}x",
            f"{raw_s / ttft_s:.1f}x",
            f"{row.kl_mean:.4f}",
            "yes" if row.answer.text == result.text.text else "no",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="folder or Hub repository")
    parser.add_argument("--table", default=TABLE, help="folder or Hub repository of its table")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tokens", type=int, default=3000, help="tokens of the document")
    parser.add_argument("--link-mbps", type=float, default=100.0, help="Mbit/s of the HTTP link")
    parser.add_argument("--runs", type=int, default=1, help="median over so many runs")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    if options.model == MODEL:
        prepare_embedded_model(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).eval()
    console = Console()
    console.print(
        f"[bold]Question[/bold] about {options.tokens:,} tokens of text: {QUESTION}\n"
        "It is asked from text first, which takes a prefill, and then from caches."
    )
    result = measure_ttft(
        model,
        tokenizer,
        load_table(options.table)[0],
        build_prompt(tokenizer, documents("evaluation")[DOCUMENT], QUESTION, options.tokens),
        link_mbps=options.link_mbps,
        runs=options.runs,
    )
    show(result, console)
    if options.json:
        print(json.dumps({"schema": SCHEMA, **asdict(result)}))


if __name__ == "__main__":
    main()
