"""``simulate``: time to first token and quality of every policy, on links made up from a seed."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_cachegen.cli import options
from hf_cachegen.cli.output import print_json, print_table

if TYPE_CHECKING:
    from hf_cachegen.bench.simulate import Row, Setup


class Preset(StrEnum):
    """Models on machines whose constants are known."""

    a40_mistral_7b = "a40-mistral-7b"
    a40_llama_34b = "a40-llama-34b"
    a40_llama_70b = "a40-llama-70b"
    h200_llama_31_8b = "h200-llama-3.1-8b"
    h200_llama_31_70b = "h200-llama-3.1-70b"


class LadderName(StrEnum):
    """Codecs whose levels can be simulated."""

    uniform = "uniform"
    delta = "delta"
    transform = "transform"


class Trace(StrEnum):
    """How a link's rate behaves."""

    constant = "constant"
    iid = "iid"
    markov = "markov"
    step = "step"
    mobile = "mobile"


def simulate(
    preset: Annotated[Preset, typer.Option(help="Model and machine.")] = Preset.a40_mistral_7b,
    trace: Annotated[
        Trace,
        typer.Option(
            help="constant: --gbps; iid: uniform between --low-gbps and --high-gbps, anew for each "
            "request; markov: between both and their mean; step: --gbps falls to a tenth; mobile: "
            "wanders around --gbps, with gaps."
        ),
    ] = Trace.iid,
    target: Annotated[float, options.quantity("Seconds to the first token to meet.")] = 1.0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these: text, fixed or soonest (every level), fixed:<level>, "
            "soonest:<level>, paper, robust, layered.",
            show_default=False,
        ),
    ] = None,
    ladder: Annotated[
        list[LadderName] | None,
        typer.Option(help="Only the levels of these codecs.", show_default=False),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Add the levels lossless and raw to every codec's.")
    ] = False,
    gbps: Annotated[float, options.quantity("Rate in Gbit/s, see --trace.")] = 3.0,
    low_gbps: Annotated[float, options.quantity("Lowest rate, see --trace.")] = 0.1,
    high_gbps: Annotated[float, options.quantity("Highest rate, see --trace.")] = 10.0,
    contexts: Annotated[int, typer.Option(help="Contexts to stream.", min=1)] = 1000,
    min_tokens: Annotated[int, typer.Option(help="Tokens of the shortest.", min=1)] = 9400,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the longest.", min=1)] = 9400,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk.", min=1)] = 1500,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens after the context.", min=1)] = 64,
    concurrency: Annotated[
        int, typer.Option(help="Streams that share link and processor.", min=1)
    ] = 1,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal links.", min=0)] = 0,
    prefill_tokens_per_s: Annotated[
        float | None,
        options.quantity("Measured rate of a short prefill.", show_default=False),
    ] = None,
    decode_gb_per_s: Annotated[
        float | None,
        options.quantity(
            "Measured decoding, GB of uncompressed cache per second.", show_default=False
        ),
    ] = None,
    parameters: Annotated[
        float | None, options.quantity("Parameters of the model.", show_default=False)
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the model.", min=1, show_default=False)
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads of the model.", min=1, show_default=False)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Values per head.", min=1, show_default=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Picture to write of levels against time.", show_default=False),
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare streaming policies on a simulated clock.

    Every policy meets the same links. Nothing is loaded and nothing is measured here: sizes, losses
    and rates are constants, of which the presets' documentation names the sources.
    """
    from hf_cachegen.bench.simulate import (
        LADDERS,
        POLICIES,
        SETUPS,
        SimulationConfig,
        plot_levels,
        run_simulation,
    )

    if plot is not None and not plot.parent.is_dir():
        raise ValueError(f"expected --plot to name a file in an existing folder, got {plot}")
    sizes = {
        "n_parameters": parameters,
        "n_layers": layers,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    ladders = [LADDERS[name] for name in ladder or LADDERS]
    config = SimulationConfig(
        setup=_setup(SETUPS[preset], sizes, prefill_tokens_per_s, decode_gb_per_s),
        ladders=tuple(one.with_exact_levels() if exact else one for one in ladders),
        policies=tuple(policy or POLICIES),
        trace=trace.value,
        gbps=gbps,
        low_gbps=low_gbps,
        high_gbps=high_gbps,
        target_s=target,
        contexts=contexts,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        chunk_tokens=chunk_tokens,
        prompt_tokens=prompt_tokens,
        concurrency=concurrency,
        seed=seed,
    )
    report = run_simulation(config)
    if plot is not None:
        plot_levels(report, plot)
    _print_rows(report.rows, stderr=json)
    if json:
        print_json(report.to_json())


def _setup(
    preset: Setup,
    sizes: dict[str, float | None],
    prefill_tokens_per_s: float | None,
    decode_gb_per_s: float | None,
) -> Setup:
    given = {name: value for name, value in sizes.items() if value is not None}
    model = replace(preset.model, **given)  # type: ignore[arg-type]
    return replace(preset, model=model).with_rates(
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_bytes_per_s=None if decode_gb_per_s is None else 1e9 * decode_gb_per_s,
    )


def _print_rows(rows: tuple[Row, ...], *, stderr: bool) -> None:
    print_table(
        ("policy", "levels", "TTFT mean", "p50", "p90", "p99", "missed", "KL", "MB", "delivered"),
        [
            (
                row.policy,
                row.ladder or "-",
                *(
                    f"{seconds:.3f} s"
                    for seconds in (
                        row.ttft_mean_s,
                        row.ttft_p50_s,
                        row.ttft_p90_s,
                        row.ttft_p99_s,
                    )
                ),
                f"{100 * row.miss_rate:.1f}%",
                f"{row.loss:.2g}",
                f"{row.size_bytes / 1e6:.1f}",
                ", ".join(
                    f"{name} {share:.0%}" for name, share in row.shares.items() if share >= 0.005
                ),
            )
            for row in rows
        ],
        stderr=stderr,
    )
