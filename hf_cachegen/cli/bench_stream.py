"""``bench stream``: time to first token over real links."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_cachegen.bench.loopback import Shaper
from hf_cachegen.cli import options
from hf_cachegen.cli.output import count, figure, print_json, print_table
from hf_cachegen.config import CHUNK_TOKENS


def stream(
    model: options.Model,
    text: Annotated[
        Path,
        options.text_option(
            "Text file: its beginning is cached, then it goes on.", "--text", "FILE"
        ),
    ],
    table: Annotated[
        str, typer.Option(help="Folder or Hub repository of the model's table.", show_default=False)
    ],
    context: Annotated[int, typer.Option(help="Tokens to cache.", min=1)] = 6000,
    ahead: Annotated[
        int,
        typer.Option(help="Next tokens: what is asked, and what quality is measured on.", min=2),
    ] = 64,
    link_mbps: Annotated[
        list[float] | None,
        options.quantity("Rates of links in Mbit/s.  [default: 10 50 200]", show_default=False),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        options.text_option(
            "Files with the rate of a link over time: lines of '<seconds> <Mbit/s>'.", "--trace"
        ),
    ] = None,
    latency_ms: Annotated[float, options.quantity("Round trip of the links.", zero=True)] = 0.0,
    shaper: Annotated[
        Shaper,
        typer.Option(
            help="Who keeps the rate: the server (bucket), or the kernel with real TCP between "
            "network namespaces (tc; on Linux, as root).",
        ),
    ] = Shaper.bucket,
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these: text, bf16 and uniform-8 (files without a codec), fixed (every "
            "level), soonest (the same), fixed:LEVEL, soonest:LEVEL, paper, robust, layered.",
            show_default=False,
        ),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(help="Levels to encode, comma-separated.", show_default=False),
    ] = None,
    target: Annotated[float, options.quantity("Seconds to the first token to meet.")] = 2.0,
    runs: Annotated[int, typer.Option(help="Runs of each source.", min=1)] = 5,
    clients: Annotated[
        int, typer.Option(help="Clients that ask at once and share the link and the CPU.", min=1)
    ] = 1,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap", help="Also measure transfer and decoding of each level by themselves."
        ),
    ] = False,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk.", min=1)] = CHUNK_TOKENS,
    dtype: options.DtypeOption = options.Dtype.auto,
    json: options.Json = False,
) -> None:
    """Measure time to first token over real links: from text, from files, levels and policies.

    The document is encoded once and served on this machine behind each link in turn. Every time
    counts from the request for the cache, with the model loaded and its speed measured.
    """
    from hf_cachegen.bench.link import read_trace
    from hf_cachegen.bench.stream import SOURCES, BenchLink, bench_stream, expand_sources
    from hf_cachegen.cli.models import load_model
    from hf_cachegen.hf.codecs import load_table

    document = options.read_text(text)
    rates = link_mbps or ([] if trace else [10.0, 50.0, 200.0])
    latency_s = latency_ms / 1e3
    links = [BenchLink.constant(rate, latency_s) for rate in rates]
    links += [BenchLink(path.stem, read_trace(path), latency_s) for path in trace or []]
    known, _ = load_table(table)
    settings: dict[str, Any] = {
        "sources": source or SOURCES,
        "levels": None if levels is None else options.split_names(levels),
        "target_s": target,
        "chunk_tokens": chunk_tokens,
        "shaper": shaper,
    }
    expand_sources(known, links, **settings)  # what is wrong should not cost the wait for a model
    loaded, tokenizer = load_model(model, dtype)
    ids = tokenizer(document, return_tensors="pt")["input_ids"][0]
    if len(ids) < context + ahead:
        raise ValueError(f"{text}: expected at least {context + ahead} tokens, found {len(ids)}")
    result = bench_stream(
        loaded,
        known,
        ids[:context],
        ids[context : context + ahead],
        links,
        runs=runs,
        clients=clients,
        overlap=overlap,
        **settings,
    )
    print_table(
        ("link", "source", "TTFT p50", "p90", "missed", "MB", "KL", "chunks"),
        [
            (
                row.link,
                row.source,
                f"{row.ttft_p50_s:.2f} s",
                f"{row.ttft_p90_s:.2f} s",
                f"{100 * row.missed:.0f}%",
                f"{row.size_bytes / 1e6:.1f}",
                f"{row.kl_mean:.2g}",
                ", ".join(f"{100 * share:.0f}% {name}" for name, share in row.shares.items()),
            )
            for row in result.rows
        ],
        title=f"{count(context, 'token')}, target {figure(target, 6)} s, {count(runs, 'run')}, "
        f"links by {shaper}" + (f", {clients} clients at once" if clients > 1 else ""),
        stderr=json,
    )
    if overlap:
        print_table(
            ("link", "level", "transfer alone", "decoding alone", "both", "of the longer"),
            [
                (
                    found.link,
                    found.level,
                    f"{found.transfer_s:.2f} s",
                    f"{found.decode_s:.2f} s",
                    f"{found.stream_s:.2f} s",
                    f"{found.ratio:.2f}x",
                )
                for found in result.overlap
            ],
            title="until the whole context is in place",
            stderr=json,
        )
    if json:
        print_json(result.to_json())
