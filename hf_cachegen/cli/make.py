"""``encode`` and ``profile``: what is made with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_cachegen.cli import options
from hf_cachegen.cli.inspect import print_levels
from hf_cachegen.config import CHUNK_TOKENS, GRADIENT_SAMPLES


def encode(
    model: options.Model,
    text: Annotated[Path, options.text_option("The document, in UTF-8.", "--text", "FILE")],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            show_default=False,
            help="Folder to write the cache to.",
        ),
    ],
    tables: Annotated[
        str,
        typer.Option(
            help="Model table: a folder or Hub repository; auto: make a small one from this "
            "document; none: exact levels only."
        ),
    ] = "auto",
    levels: Annotated[
        str | None,
        typer.Option(
            help="Levels to store, comma-separated, such as delta-1,lossless.  "
            "[default: those of the table's best codec, and lossless]",
            show_default=False,
        ),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk.")] = CHUNK_TOKENS,
    importance: options.ImportanceOption = options.Importance.predicted,
    dtype: options.DtypeOption = options.Dtype.auto,
    model_id: options.ModelId = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a cache of something else.")
    ] = False,
) -> None:
    """Encode a document's KV cache into a folder.

    MODEL runs over the document once. The folder of a shorter version of the same document is
    extended.
    """
    document = options.read_text(text)
    names = None if levels is None else [name.strip() for name in levels.split(",")]
    from hf_cachegen.cli.models import load_model
    from hf_cachegen.hf.codecs import load_table
    from hf_cachegen.hf.saving import save_cache

    # A wrong table should not cost the wait for the model, so it is looked up before.
    automatic = tables in ("auto", "none")
    if not automatic:
        load_table(tables)
    loaded, tokenizer = load_model(model, dtype)
    manifest = save_cache(
        loaded,
        tokenizer,
        document,
        out,
        tables={"auto": "auto", "none": None}[tables] if automatic else tables,
        levels=names,
        chunk_tokens=chunk_tokens,
        importance=importance.value,
        model_id=model_id,
        overwrite=overwrite,
    )
    print(f"{manifest.tokens.n} tokens in {len(manifest.chunks)} chunks, written to {out}")
    print_levels(manifest)


def profile(
    model: options.Model,
    text: Annotated[
        list[Path], options.text_option("Text files to take the statistics from.", "--text")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            show_default=False,
            help="Folder to write the table to.",
        ),
    ],
    evaluate: Annotated[
        list[Path] | None,
        options.text_option("Other text files to measure rate and quality on.", "--evaluate"),
    ] = None,
    dtype: options.DtypeOption = options.Dtype.auto,
    sample_tokens: Annotated[int, typer.Option(help="Tokens per sample.")] = CHUNK_TOKENS,
    max_samples: Annotated[
        int | None, typer.Option(help="Stop after so many samples.", show_default=False)
    ] = None,
    model_id: options.ModelId = None,
    gradient_samples: Annotated[
        int, typer.Option(help="Samples that transform also takes gradients on.", min=1)
    ] = GRADIENT_SAMPLES,
    codecs: options.Codecs = None,
    parameters: options.CodecParameters = None,
) -> None:
    """Make a model's table, which makes its caches small.

    The table holds statistics of MODEL's caches; it is made once and serves every document.

    Some ten files of several thousand words, like the documents to be encoded, are enough. An
    interrupted call goes on where it was. With --evaluate the table's card also tells what its
    levels cost and what they change.
    """
    samples, documents = options.read_texts(text), options.read_texts(evaluate or [])
    options.check_apart(samples, documents)
    from hf_cachegen.cli.models import load_model
    from hf_cachegen.hf.profiling import profile_model
    from hf_cachegen.hf.table_hub import table_card

    configs = options.codec_configs(codecs, parameters or [])
    loaded, tokenizer = load_model(model, dtype)
    table = profile_model(
        loaded,
        tokenizer,
        samples,
        configs=configs,
        sample_tokens=sample_tokens,
        max_samples=max_samples,
        gradient_samples=gradient_samples,
        checkpoint=out.with_name(f"{out.name}.partial.safetensors"),
        model_id=model_id,
    )
    table.save(out, table_card(table))
    if documents:
        from hf_cachegen.bench.codec import bench_codec
        from hf_cachegen.cli.bench import markdown_report, print_rows

        rows = bench_codec(loaded, tokenizer, table, documents)
        table.save(out, table_card(table, markdown_report(rows, list(documents), dtype)))
        print_rows(rows)
    tokens = sum(count for _, count in table.record.data)
    print(f"table of {tokens} tokens, {table.size_bytes() / 1e6:.2f} MB, written to {out}")
