"""``plan``: does a cache pay for this model, this context and this link?"""

from __future__ import annotations

import functools
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hf_cachegen.artifact.manifest import MAX_TOKENS
from hf_cachegen.cli import options
from hf_cachegen.cli.arithmetic import Link, Plan, plan_transfer, typical_levels
from hf_cachegen.cli.output import count, figure, megabytes, print_facts, print_json, print_table
from hf_cachegen.errors import TableMismatch

if TYPE_CHECKING:
    from hf_cachegen.layout import DtypeName, KVLayout
    from hf_cachegen.tables import ModelTable

WARM_UP_TOKENS = 64


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Model folder, config.json, or id on the Hub.",
            metavar="MODEL",
            show_default=False,
        ),
    ],
    context: Annotated[
        int, typer.Option(help="Tokens of the context.", min=1, max=MAX_TOKENS, show_default=False)
    ],
    link_gbps: Annotated[
        float, options.quantity("Speed of the link in Gbit/s.", show_default=False)
    ],
    prefill_s: Annotated[
        float | None,
        options.quantity("Seconds that the model takes for the context.", show_default=False),
    ] = None,
    prefill_tokens_per_s: Annotated[
        float | None,
        options.quantity("The same, as tokens per second.", show_default=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the prefill with the model, here and now.")
    ] = False,
    decode_gb_per_s: Annotated[
        float | None,
        options.quantity(
            "Decoding speed, GB of uncompressed cache per second (`bench codec` measures it); "
            "without it decoding is not counted.",
            show_default=False,
        ),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            help="The model's table, a folder or Hub repository: its levels, with the sizes that "
            "its own samples had. What of it is not on this machine yet is counted, and fetched.",
            show_default=False,
        ),
    ] = None,
    dtype: options.DtypeOption = options.Dtype.auto,
    json: options.Json = False,
) -> None:
    """Work out whether a cache pays on a given link.

    It does if it arrives sooner than the model can compute the context again.

    Sizes come from the model's config and from bits per value that are typical, or noted in the
    model's table; no weights are needed.
    """
    given = [prefill_s is not None, prefill_tokens_per_s is not None, measure]
    if sum(given) > 1:
        raise ValueError("expected one of --prefill-s, --prefill-tokens-per-s and --measure")
    if measure and Path(model).is_file():
        raise ValueError(
            f"expected a model's folder or Hub id with --measure, got the file {model}"
        )
    if prefill_tokens_per_s is not None:
        prefill_s = context / prefill_tokens_per_s
    from hf_cachegen.hf.codecs import load_counted_table
    from hf_cachegen.hf.estimate import estimate_layout, estimate_states_bytes, load_config

    named = None if dtype is options.Dtype.auto else cast("DtypeName", dtype.value)
    config = load_config(model)
    layout, states_bytes = estimate_layout(config, named), estimate_states_bytes(config, named)
    lossy = table_bytes = None
    if table is not None:
        loaded, table_bytes = load_counted_table(table)
        lossy = _noted_levels(loaded, table, layout)
    plan_for = functools.partial(
        plan_transfer,
        layout,
        context,
        Link(link_gbps, decode_gb_per_s),
        lossy=lossy,
        states_bytes=states_bytes,
        table_bytes=table_bytes,
    )
    found = plan_for(prefill_s)
    if measure:
        found = plan_for(_measure_prefill(model, dtype, context))
    if json:
        print_json(
            {
                "model": model,
                "table": table,
                "dtype": layout.dtype,
                **asdict(found),
                "verdict": found.verdict,
            }
        )
    else:
        _print_plan(model, table, layout.dtype, found)


def _noted_levels(
    table: ModelTable, location: str, layout: KVLayout
) -> dict[str, dict[str, float]]:
    """Bits per value of a table's levels by codec and name.

    A table notes what its samples took at the levels of ``transform``. Of ``delta`` it notes
    nothing: its levels are listed if they are the default ones, with the typical sizes of those.

    Raises
    ------
    TableMismatch
        The table is of a model that caches something else.
    """
    from hf_cachegen.codec.delta import DeltaConfig
    from hf_cachegen.codec.transform_tables import TransformTables
    from hf_cachegen.levels import lossy_levels

    if _sizes(table.record.layout) != _sizes(layout):
        raise TableMismatch(
            f"{location} is the table of {table.record.model_id}, which caches "
            f"{table.record.layout.values_per_token} values a token in another layout than this "
            f"model with {layout.values_per_token}; pass this model's table"
        )
    noted: dict[str, dict[str, float]] = {}
    transform, delta = (table.tables.get(codec) for codec in ("transform", "delta"))
    if isinstance(transform, TransformTables):
        names = [level.name for level in lossy_levels(table, "transform")]
        noted["transform"] = dict(zip(names, map(float, transform.rates), strict=True))
    if delta is not None and delta.config == DeltaConfig():
        noted["delta"] = typical_levels("delta")
    return noted


def _sizes(layout: KVLayout) -> list[object]:
    """What a layout says of sizes, without the rotations, which a config alone does not tell."""
    return [
        (layer.window, [(tensor.heads, tensor.dim) for tensor in layer.tensors])
        for layer in layout.layers
    ]


def _measure_prefill(model: str, dtype: str, context: int) -> float:
    """Seconds of a prefill with made-up tokens: the work does not depend on what they say."""
    import torch

    from hf_cachegen.cli.models import load_model
    from hf_cachegen.hf.prefill import prefill

    loaded, tokenizer = load_model(model, dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(tokenizer), (context,), generator=generator)
    prefill(loaded, ids[:WARM_UP_TOKENS], progress=False)
    started = time.perf_counter()
    prefill(loaded, ids)
    if loaded.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _print_plan(model: str, table: str | None, dtype: str, found: Plan) -> None:
    facts: dict[str, object] = {
        "model": f"{model} ({dtype})",
        "cache": f"{found.bytes_per_token} bytes a token; {megabytes(found.raw_bytes)} for "
        f"{count(found.context_tokens, 'token')}",
        "link": f"{figure(found.link.gbps, 6)} Gbit/s",
        "bits": "typical, as measured on SmolLM2-135M"
        if table is None
        else f"of transform as on the samples of {table}, others typical",
    }
    if found.states_bytes:
        facts["states"] = f"{megabytes(found.states_bytes)} of them, however long the context"
    if table is None:
        facts["table"] = "not counted; name it with --table"
    for codec, size_bytes in found.table_bytes.items():
        facts[f"table of {codec}"] = (
            f"{megabytes(size_bytes)} to fetch, once for all caches of the model: "
            f"{figure(8 * size_bytes / (1e9 * found.link.gbps))} s"
        )
    if found.prefill_s is not None:
        facts["prefill"] = f"{figure(found.prefill_s)} s"
    print_facts(facts)
    first = ("first load",) if found.table_bytes else ()
    print_table(
        ("level", "bits/value", "size", "load", *first, "break-even link", "sooner than prefill"),
        [
            (
                level.level,
                f"{level.bits_per_value:.2f}",
                megabytes(level.size_bytes),
                f"{figure(level.load_s)} s",
                *(f"{figure(level.first_load_s)} s" for _ in first),
                "-" if level.break_even_gbps is None else f"{figure(level.break_even_gbps)} Gbit/s",
                {True: "yes", False: "no", None: "-"}[level.helps],
            )
            for level in found.levels
        ],
    )
    print(found.verdict)
