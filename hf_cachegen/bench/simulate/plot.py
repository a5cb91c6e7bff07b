"""The picture of a simulation: what each policy fetched for one context, over time."""

from __future__ import annotations

import os
from typing import Any

from hf_cachegen.bench.simulate.report import Sample, SimulationReport
from hf_cachegen.streaming.controller import TEXT


def plot_levels(report: SimulationReport, path: str | os.PathLike[str]) -> None:
    """Draw the first context of every adaptive policy: a bar per transfer or recomputation.

    Parameters
    ----------
    report
        With at least one policy that is not ``fixed``.
    path
        Of the picture; its ending says the format.

    Raises
    ------
    ValueError
        The report has no such policy.
    """
    from matplotlib.figure import Figure

    samples = [s for s in report.samples if not s.policy.startswith("fixed:")]
    if not samples:
        raise ValueError("expected a policy that adapts; every one in this report is fixed")
    figure = Figure(figsize=(9, 1.8 * len(samples)), layout="constrained")
    panels = figure.subplots(len(samples), 1, sharex=True, squeeze=False)[:, 0]
    for panel, sample in zip(panels, samples, strict=True):
        _draw(panel, sample, report.config.target_s)
    panels[-1].set_xlabel("seconds (dashed: target, dotted: first token)")
    figure.savefig(path)


def _draw(panel: Any, sample: Sample, target_s: float) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    names, outcome = sample.ladder.names, sample.outcome
    shades = [colormaps["viridis"](level / max(len(names) - 1, 1)) for level in range(len(names))]
    colours: dict[int, Any] = {TEXT: "tab:orange", **dict(enumerate(shades))}
    for step in outcome.steps:
        panel.barh(
            step.chunk,
            step.end_s - step.start_s,
            left=step.start_s,
            color=colours[step.level],
            alpha=1.0 if step.finished else 0.4,
        )
    panel.axvline(target_s, color="tab:red", linestyle="--")
    panel.axvline(outcome.ttft_s, color="black", linestyle=":")
    panel.invert_yaxis()
    panel.set_ylabel("chunk")
    title = sample.policy if sample.policy == "text" else f"{sample.policy}, {sample.ladder.name}"
    panel.set_title(title, loc="left", fontsize="small")
    labels = {TEXT: "text", **dict(enumerate(names))}
    panel.legend(
        handles=[
            Patch(color=colours[level], label=labels[level])
            for level in sorted({step.level for step in outcome.steps})
        ],
        fontsize="x-small",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
