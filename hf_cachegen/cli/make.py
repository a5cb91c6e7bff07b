"""``encode`` and ``profile``: what is made with a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_cachegen.artifact import Manifest
from hf_cachegen.artifact.files import check_writable
from hf_cachegen.cli import options
from hf_cachegen.cli.inspect import print_levels
from hf_cachegen.cli.output import count, megabytes, report_error
from hf_cachegen.config import CHUNK_TOKENS, GRADIENT_SAMPLES, MIN_SAMPLE_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_cachegen.cli.sharing import Outcome

SOME_FAILED = 1
"""Exit status of a command that has done its work on all documents but some."""


def encode(
    model: options.Model,
    text: Annotated[list[Path], options.text_option("Documents, in UTF-8.", "--text")],
    out: Annotated[
        Path | None,
        options.folder_option("Folder to write the cache of one document to.", "--out", "-o"),
    ] = None,
    into: Annotated[
        Path | None,
        options.folder_option(
            "Folder to write the caches of many documents to: of a.txt to FOLDER/a.", "--into"
        ),
    ] = None,
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
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk.", min=1)] = CHUNK_TOKENS,
    importance: options.ImportanceOption = options.Importance.predicted,
    dtype: options.DtypeOption = options.Dtype.auto,
    model_id: options.ModelId = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a cache of something else.")
    ] = False,
) -> None:
    """Encode the KV cache of a document, or of each of many, into a folder.

    MODEL runs over a document once, and not at all over one whose cache is there. The folder of a
    shorter version of the same document is extended, but not with --tables auto.

    Many documents are shared by the processes that `accelerate launch -m hf_cachegen encode ...`
    starts, on one machine or several, each with the model on a device of its own. A run that was
    interrupted goes on where it was. If a document fails the others are encoded all the same, and
    the exit status is 1.
    """
    targets = _targets(text, out, into)
    # What is wrong with these should not cost the wait for a model.
    if out is not None:
        options.read_text(text[0])
    for folder in filter(None, (out, into)):
        check_writable(folder)
    _check_apart_from(model, filter(None, (*targets, into)))
    from hf_cachegen.cli.models import load_model
    from hf_cachegen.cli.sharing import processes, work_through
    from hf_cachegen.hf.settings import choose

    names = None if levels is None else options.split_names(levels)
    settings = {
        "tables": choose(None if tables == "none" else tables, names).tables,
        "levels": names,
        "chunk_tokens": chunk_tokens,
        "importance": importance.value,
        "model_id": model_id,
    }
    with processes() as state:
        if out is not None and not state.is_main_process:
            return
        device = state.device if state.num_processes > 1 else None
        encoder = _Encoder(*load_model(model, dtype, device), settings, overwrite)
        if out is not None:
            manifest, written = encoder.encode(text[0], out, progress=True)
            verb = "written to" if written else "which were already in"
            tokens = count(manifest.tokens.n, "token")
            print(f"{tokens} in {count(len(manifest.chunks), 'chunk')}, {verb} {out}")
            print_levels(manifest)
            return
        outcome = work_through(targets, lambda *target: encoder.encode(*target)[1], state)
        if state.is_main_process:
            _report(outcome)
    if outcome.failures:
        raise typer.Exit(SOME_FAILED)


@dataclass(frozen=True)
class _Encoder:
    """A model, and how its caches are saved."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    settings: dict[str, Any]
    overwrite: bool

    def encode(self, path: Path, folder: Path, *, progress: bool = False) -> tuple[Manifest, bool]:
        """The artefact of a text file in its folder, and whether it had to be written."""
        from hf_cachegen.hf.saved import find_saved
        from hf_cachegen.hf.saving import context_ids, save_cache

        ids = context_ids(self.tokenizer, options.read_text(path))
        saved = find_saved(folder, self.model, ids, **self.settings)
        if saved is not None:
            return saved, False
        save_options = {**self.settings, "overwrite": self.overwrite, "progress": progress}
        return save_cache(self.model, None, ids, folder, **save_options), True


def _targets(texts: Sequence[Path], out: Path | None, into: Path | None) -> dict[Path, Path]:
    """Text file by the folder that its cache is for."""
    if out is not None and into is None and len(texts) == 1:
        return {out: texts[0]}
    if out is not None or into is None:
        given = " and ".join(
            name for name, folder in (("-o", out), ("--into", into)) if folder is not None
        )
        raise ValueError(
            "expected -o FOLDER for the cache of one document, or --into FOLDER for a folder with "
            f"the cache of each; got {count(len(texts), 'document')} with {given or 'no folder'}"
        )
    targets: dict[Path, Path] = {}
    for path in dict.fromkeys(texts):
        folder = into / path.stem
        if path.stem.startswith("."):
            raise ValueError(f"expected documents whose names begin with no dot, got {path}")
        if folder in targets:
            raise ValueError(
                f"expected documents with different names, got {targets[folder]} and {path}, whose "
                f"caches would both go to {folder}; rename one"
            )
        targets[folder] = path
    return targets


def _check_apart_from(model: str, folders: Iterable[Path]) -> None:
    """Raise ValueError if one of the folders is the model's own, whose files are not ours."""
    for folder in folders:
        if folder.resolve() == Path(model).resolve():
            raise ValueError(
                f"expected a folder other than the model's to write to, got {folder}; choose a "
                "new one"
            )


def _report(outcome: Outcome) -> None:
    """Say on stdout what has been done, and on stderr which documents failed, and why."""
    print(f"{count(len(outcome.written), 'cache')} written, {len(outcome.present)} already there")
    if outcome.taken:
        print(f"{count(len(outcome.taken), 'document')} left to another run that is under way")
    for name, reason in outcome.failures.items():
        report_error(reason if reason.startswith(name) else f"{name}: {reason}")


def profile(
    model: options.Model,
    text: Annotated[
        list[Path], options.text_option("Text files to take the statistics from.", "--text")
    ],
    out: Annotated[Path, options.folder_option("Folder to write the table to.", "--out", "-o")],
    evaluate: Annotated[
        list[Path] | None,
        options.text_option("Other text files to measure rate and quality on.", "--evaluate"),
    ] = None,
    dtype: options.DtypeOption = options.Dtype.auto,
    sample_tokens: Annotated[
        int, typer.Option(help="Tokens per sample.", min=MIN_SAMPLE_TOKENS)
    ] = CHUNK_TOKENS,
    max_samples: Annotated[
        int | None, typer.Option(help="Stop after so many samples.", min=1, show_default=False)
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
    check_writable(out)
    from hf_cachegen.cli.models import load_model
    from hf_cachegen.hf.profiling import profile_model
    from hf_cachegen.hf.table_hub import table_card
    from hf_cachegen.tables.table import check_replaceable

    check_replaceable(out)
    configs = options.codec_configs(codecs, parameters or [])
    loaded, tokenizer = load_model(model, dtype)
    if documents:
        from hf_cachegen.bench import codec as bench

        n_tokens = bench.CONTEXT_TOKENS + bench.CONTINUATION_TOKENS
        bench.cut_documents(tokenizer, documents, n_tokens)
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
        from hf_cachegen.cli.bench import markdown_report, print_rows

        rows = bench.bench_codec(loaded, tokenizer, table, documents)
        table.save(out, table_card(table, markdown_report(rows, list(documents), dtype)))
        print_rows(rows)
    tokens = sum(n_tokens for _, n_tokens in table.record.data)
    print(f"table of {count(tokens, 'token')}, {megabytes(table.size_bytes())}, written to {out}")
