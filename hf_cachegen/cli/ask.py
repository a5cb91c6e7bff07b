"""``generate``: a question to a cached context, and how long its first token takes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_cachegen.artifact import Artifact
from hf_cachegen.cli import options
from hf_cachegen.cli.locations import open_location
from hf_cachegen.cli.output import count, megabytes, print_table
from hf_cachegen.config import MANIFEST_NAME
from hf_cachegen.errors import StoreNotFound

if TYPE_CHECKING:
    from hf_cachegen.cli.answering import Answer
    from hf_cachegen.hf.cache import CompressedStreamingCache


def generate(
    model: options.Model,
    location: options.Location,
    question: Annotated[
        str,
        typer.Option(
            help="Text that follows the cached document, as it stands.", show_default=False
        ),
    ],
    level: Annotated[
        str | None,
        typer.Option(
            help="Level to fetch: a name from `info`, coarsest or finest.  "
            "[default: the finest lossy one]",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="What to do about each chunk: paper, robust, layered, text, fixed:LEVEL or "
            "soonest:LEVEL.  "
            "[default with a target: layered, or robust for levels that do not nest]",
            show_default=False,
        ),
    ] = None,
    ttft_target: Annotated[
        float | None,
        options.quantity(
            "Seconds to the first token, which the policy is to meet.", show_default=False
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 128,
    dtype: options.DtypeOption = options.Dtype.auto,
    compare: Annotated[
        bool, typer.Option("--compare", help="Then answer from the text too, without the cache.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Show each chunk's level and size, and its times as expected."
        ),
    ] = False,
    revision: options.Revision = None,
    token: options.Token = None,
    endpoint: options.Endpoint = None,
) -> None:
    """Answer a question about a cached document.

    The cache streams in while the model runs. MODEL must be the very model that encoded it. The
    answer goes to stdout, times to stderr; the time to the first token counts from the request
    for the cache, with the model loaded and, for a target, its speed measured.
    """
    hub_options: dict[str, Any] = {"revision": revision, "token": token, "endpoint": endpoint}
    asked: dict[str, Any] = {"level": level, "policy": policy, "ttft_target_s": ttft_target}
    _check_asked(location, asked, hub_options)
    from hf_cachegen.cli.answering import answer_from_cache, answer_from_text
    from hf_cachegen.cli.models import load_model
    from hf_cachegen.hf.cache import CompressedStreamingCache
    from hf_cachegen.hf.calibration import calibrate

    loaded, tokenizer = load_model(model, dtype)
    if ttft_target is not None or policy is not None:  # which may reckon with the model's speed
        calibrate(loaded)

    def open_cache() -> CompressedStreamingCache:
        return CompressedStreamingCache.from_pretrained(
            location, model=loaded, **asked, **hub_options
        )

    cached, cache = answer_from_cache(loaded, tokenizer, open_cache, question, max_new_tokens)
    _report("from the cache", cached)
    if verbose:
        _print_stream(cache)
    if compare:
        text = answer_from_text(loaded, tokenizer, cached.prompt, max_new_tokens)
        _report("from the text", text)
        ratio = text.first_token_s / cached.first_token_s
        same = "the same" if text.text == cached.text else "another"
        print(f"the cache's first token came {ratio:.1f}x as soon; {same} answer", file=sys.stderr)


def _check_asked(location: str, asked: dict[str, Any], hub_options: dict[str, Any]) -> None:
    """Refuse a location without a cache, or what it cannot do, before the wait for a model."""
    from hf_cachegen.hf.policies import check_request, resolve_policy
    from hf_cachegen.stores import HubStore

    check_request(**asked)
    with open_location(location, **hub_options) as store:
        if not isinstance(store, HubStore):
            resolve_policy(Artifact.open(store).manifest.levels, **asked)
        # What is read of a repository stays on this machine, and the times would be too good.
        elif not store.exists(MANIFEST_NAME):
            raise StoreNotFound(
                f"expected {MANIFEST_NAME} (a cache) in {store.location}, found none"
            )


def _report(source: str, answer: Answer) -> None:
    print(
        f"{source}: first token after {answer.first_token_s:.3f} s, "
        f"{count(answer.n_tokens, 'token')} after {answer.total_s:.3f} s",
        file=sys.stderr,
    )


def _print_stream(cache: CompressedStreamingCache) -> None:
    # TEXT is -1.
    names = ["text", *(level.name for level in cache.artifact.manifest.levels)]
    print_table(
        ("chunk", "level", "size", "at", "transfer", "decode", "recompute", ""),
        [
            (
                str(step.chunk),
                names[step.level + 1],
                megabytes(step.size_bytes) if step.size_bytes else "-",
                f"{step.started_s:.3f} s",
                _seconds(step.transfer_s, step.predicted_transfer_s),
                _seconds(step.decode_s, step.predicted_decode_s),
                _seconds(step.recompute_s, step.predicted_recompute_s),
                "" if step.finished else "given up",
            )
            for step in cache.stream_report()
        ],
        title="seconds as measured (and as predicted); transfers and recomputations go on at once",
        stderr=True,
    )


def _seconds(measured: float | None, predicted: float | None) -> str:
    if measured is None:
        return "-"
    return f"{measured:.3f}" + ("" if predicted is None else f" ({predicted:.3f})")
