"""``bench``: size, quality and speed on this machine."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_cachegen.cli import options
from hf_cachegen.cli.bench_stream import stream
from hf_cachegen.cli.output import print_json, print_table

if TYPE_CHECKING:
    from hf_cachegen.bench.codec import Row

ROUND_TRIP_FAILED = 1

COLUMNS = (
    "codec",
    "level",
    "bits/value",
    "vs bf16",
    "KL mean",
    "KL p99",
    "top-1",
    "perplexity",
    "encode",
    "decode",
    "GB/s",
)

app = typer.Typer(help="Measure size, quality and speed on this machine.", rich_markup_mode=None)


def codec(
    model: options.Model,
    text: Annotated[
        list[Path], options.text_option("Text files, one document each, to measure on.", "--text")
    ],
    calibration: Annotated[
        list[Path] | None,
        options.text_option("Other text files, to make the model's table from.", "--calibration"),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(help="Folder or Hub repository of a model table.", show_default=False),
    ] = None,
    codec: Annotated[
        str | None, typer.Option(help="Measure only this codec's levels.", show_default=False)
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each document to cache.", min=1)] = 1500,
    continuation: Annotated[
        int, typer.Option(help="Next tokens to predict from the cache.", min=2)
    ] = 256,
    dtype: options.DtypeOption = options.Dtype.auto,
    max_samples: Annotated[
        int | None,
        typer.Option(help="Samples of calibration text to use at most.", min=1, show_default=False),
    ] = None,
    importance: options.ImportanceOption = options.Importance.predicted,
    codecs: options.Codecs = None,
    parameters: options.CodecParameters = None,
    json: options.Json = False,
) -> None:
    """Measure every level, and what people do without a codec, on real documents.

    Bits per value count every byte but the model table. Quality compares next-token predictions
    with those of the exact cache. The exit code is 1 if a level does not give back what it must.
    """
    if (calibration is None) == (table is None):
        raise ValueError("expected either --calibration FILE... or --table FOLDER")
    if table is not None and (codecs or parameters or max_samples is not None):
        raise ValueError("expected no codec parameters with --table: the table has its own")
    documents, samples = options.read_texts(text), options.read_texts(calibration or [])
    options.check_apart(samples, documents)
    from hf_cachegen.bench.codec import (
        RoundTripError,
        bench_codec,
        cut_documents,
        levels_of,
        report,
    )
    from hf_cachegen.cli.models import load_model
    from hf_cachegen.hf.codecs import load_table
    from hf_cachegen.hf.profiling import profile_model
    from hf_cachegen.levels import TABLE_CODECS, available_levels, ladder

    if codecs is None and codec in TABLE_CODECS:
        codecs = codec  # a table for what is not measured would be for nothing
    configs = options.codec_configs(codecs, parameters or [])
    known = None if table is None else load_table(table)[0]
    # What is wrong with these should not cost a profile.
    levels_of(codec, available_levels(known) if known else ladder(configs))
    loaded, tokenizer = load_model(model, dtype)
    cut_documents(tokenizer, documents, context + continuation)
    used = known or profile_model(
        loaded, tokenizer, samples, configs=configs, max_samples=max_samples
    )
    try:
        rows = bench_codec(
            loaded,
            tokenizer,
            used,
            documents,
            context=context,
            continuation=continuation,
            codec=codec,
            importance=importance.value,
        )
    except RoundTripError as error:
        print(f"hf-cachegen: round trip failed: {error}", file=sys.stderr)
        raise typer.Exit(ROUND_TRIP_FAILED) from error
    print_rows(rows, stderr=json)
    if json:
        print_json(report(rows, used, used.record.model_id))


def entropy(
    threads: Annotated[int, typer.Option(help="Threads that share the work.", min=1)] = 1,
    repeats: Annotated[int, typer.Option(help="Runs of which the median counts.", min=1)] = 9,
    json: options.Json = False,
) -> None:
    """Measure the entropy coder's speed, in millions of symbols a second."""
    from hf_cachegen.bench.entropy import run_entropy_bench

    speeds = run_entropy_bench(threads=threads, repeats=repeats)
    print_table(
        ("backend", "encode", "decode", "encode integers", "decode integers", "bits/symbol"),
        [
            (
                speed.backend,
                f"{speed.encode_symbols:.1f}",
                f"{speed.decode_symbols:.1f}",
                f"{speed.encode_integers:.1f}",
                f"{speed.decode_integers:.1f}",
                f"{speed.bits_per_symbol:.3f}",
            )
            for speed in speeds
        ],
        title="millions of symbols a second",
        stderr=json,
    )
    if json:
        rows = [asdict(speed) for speed in speeds]
        print_json({"schema": 1, "machine": platform.machine(), "rows": rows})


def kernels(json: options.Json = False) -> None:
    """Time the GPU kernels beside what bytes and operations allow; without a GPU, only count."""
    from hf_cachegen.bench.kernels import report as kernel_report
    from hf_cachegen.bench.kernels import run_kernel_bench

    result = run_kernel_bench()
    print(kernel_report(result), file=sys.stderr if json else sys.stdout)
    if json:
        print_json(result)


def answers(
    model: options.Model,
    text: Annotated[Path, options.text_option("The document.", "--text", "FILE")],
    questions: Annotated[
        Path, options.text_option("Lines of 'part: question'.", "--questions", "FILE")
    ],
    table: Annotated[
        str, typer.Option(help="Folder or Hub repository of the model's table.", show_default=False)
    ],
    context: Annotated[int, typer.Option(help="Tokens of the document to cache.", min=1)] = 3000,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 24,
    dtype: options.DtypeOption = options.Dtype.auto,
    json: options.Json = False,
) -> None:
    """Count the answers that stay the same, word for word, at every level.

    Questions are grouped by the part of the document that they are about, so that a level which
    serves one part at the cost of another shows.
    """
    from dataclasses import asdict

    from hf_cachegen.bench.answers import SCHEMA, bench_answers, read_questions
    from hf_cachegen.cli.models import load_model
    from hf_cachegen.hf.codecs import load_table

    asked, document = read_questions(options.read_text(questions)), options.read_text(text)
    known, _ = load_table(table)
    loaded, tokenizer = load_model(model, dtype)
    rows = bench_answers(
        loaded,
        tokenizer,
        known,
        document,
        asked,
        context=context,
        answer_tokens=answer_tokens,
    )
    print_table(
        ("level", "importance", *asked, "all"),
        [
            (
                row.level if row.codec in row.level else f"{row.codec} {row.level}",
                row.importance,
                *(f"{row.same[part]}/{row.asked[part]}" for part in asked),
                f"{sum(row.same.values())}/{sum(row.asked.values())}",
            )
            for row in rows
        ],
        title=f"{context} tokens, answers of {answer_tokens}: the same as from the exact cache",
        stderr=json,
    )
    if json:
        print_json({"schema": SCHEMA, "rows": [asdict(row) for row in rows]})


for _command in (codec, answers, stream, entropy, kernels):
    app.command(cls=options.ManyValuesCommand)(_command)


def print_rows(rows: Sequence[Row], *, stderr: bool = False) -> None:
    """The rows of a codec benchmark as a table."""
    print_table(COLUMNS, map(_cells, rows), stderr=stderr)


def markdown_report(rows: Sequence[Row], documents: Sequence[str], dtype: str) -> str:
    """The rows of a codec benchmark for a model card."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(
        [
            f"On {', '.join(documents)} (not part of the data above; dtype: {dtype}). Bits per "
            "value count every byte of an artefact that a reader fetches, but this table. KL is "
            "in nats per token, against the exact cache; perplexity is relative to it. Times are "
            "per document.",
            "",
            *lines,
        ]
    )


def _cells(row: Row) -> list[str]:
    return [
        row.codec,
        row.level,
        f"{row.bits_per_value:.2f}",
        f"{row.ratio_bf16:.2f}x",
        f"{row.kl_mean:.2g}",
        f"{row.kl_p99:.2g}",
        f"{100 * row.top1:.1f}%",
        f"{row.perplexity_ratio:.4f}",
        "-" if row.encode_s is None else f"{row.encode_s:.2f} s",
        "-" if row.decode_s is None else f"{row.decode_s:.2f} s",
        "-" if row.decode_gb_per_s is None else f"{row.decode_gb_per_s:.2f}",
    ]
