"""Many contexts, every policy, the same links: the table of ``hf-cachegen simulate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hf_cachegen.bench.simulate.clock import Costs, Outcome, context_costs, stream
from hf_cachegen.bench.simulate.links import Link, TraceName, make_link
from hf_cachegen.bench.simulate.presets import LADDERS, SETUPS, Ladder, Setup
from hf_cachegen.config import CHUNK_TOKENS
from hf_cachegen.streaming.controller import OF_A_LEVEL, TEXT, Policy, for_each_level, policy_for

SCHEMA = 1
POLICIES = ("text", "fixed", "paper", "robust", "layered")


@dataclass(frozen=True)
class SimulationConfig:
    """What to simulate.

    Attributes
    ----------
    setup, ladders
        See :mod:`~hf_cachegen.bench.simulate.presets`.
    policies
        Names as :func:`~hf_cachegen.streaming.controller.policy_for` takes them, for every ladder;
        ``fixed`` and ``soonest`` stand for each of its levels.
    trace, gbps, low_gbps, high_gbps
        See :func:`~hf_cachegen.bench.simulate.links.make_link`.
    target_s
        Time to first token that is to be met.
    contexts, min_tokens, max_tokens
        How many contexts, of how many tokens: uniform, both ends included.
    prompt_tokens
        Tokens that follow the context.
    concurrency
        Streams that start together and share link and processor evenly.
    seed
        Equal configurations give equal reports.
    """

    setup: Setup = SETUPS["a40-mistral-7b"]
    ladders: tuple[Ladder, ...] = tuple(LADDERS.values())
    policies: tuple[str, ...] = POLICIES
    trace: TraceName = "constant"
    gbps: float = 3.0
    low_gbps: float = 0.1
    high_gbps: float = 10.0
    target_s: float = 1.0
    contexts: int = 1000
    min_tokens: int = 9400
    max_tokens: int = 9400
    chunk_tokens: int = CHUNK_TOKENS
    prompt_tokens: int = 64
    concurrency: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.contexts, self.min_tokens, self.chunk_tokens, self.prompt_tokens)
        if min(*counts, self.concurrency) < 1 or self.target_s <= 0:
            raise ValueError("expected positive numbers of contexts and tokens, and a target")
        if self.max_tokens < self.min_tokens:
            raise ValueError(
                f"expected max_tokens of at least {self.min_tokens}, got {self.max_tokens}"
            )
        if not 0 < self.low_gbps <= self.high_gbps:
            raise ValueError(
                f"expected 0 < low_gbps <= high_gbps, got {self.low_gbps} and {self.high_gbps}"
            )


@dataclass(frozen=True)
class Row:
    """One policy over all contexts.

    Attributes
    ----------
    ttft_mean_s, ttft_p50_s, ttft_p90_s, ttft_p99_s
        Time to first token.
    miss_rate
        Share of contexts whose time exceeded the target.
    loss
        Mean loss of what was delivered, over tokens and then contexts; text and exact levels are 0.
    size_bytes
        Mean bytes that travelled per context.
    shares
        Share of all tokens that ended at each level, or as ``text``.
    """

    ladder: str
    policy: str
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    miss_rate: float
    loss: float
    size_bytes: float
    shares: dict[str, float]


@dataclass(frozen=True)
class Sample:
    """The first context of a row, for the picture."""

    ladder: Ladder
    policy: str
    outcome: Outcome


@dataclass(frozen=True)
class SimulationReport:
    """Rows in the order of ladders and policies, and the first context of each."""

    config: SimulationConfig
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]

    def row(self, policy: str, ladder: str | None = None) -> Row:
        """The row of a policy; ``ladder`` where several have it.

        Raises
        ------
        ValueError
            There is none.
        """
        for row in self.rows:
            if row.policy == policy and ladder in (None, row.ladder):
                return row
        raise ValueError(f"expected a simulated policy, got {policy!r} of {ladder!r}")

    def to_json(self) -> dict[str, Any]:
        """The report's JSON document."""
        return {
            "schema": SCHEMA,
            "config": asdict(self.config),
            "rows": [asdict(row) for row in self.rows],
        }


def run_simulation(config: SimulationConfig) -> SimulationReport:
    """Stream every context by every policy. All of them meet the same links.

    Raises
    ------
    ValueError
        The configuration names an unknown policy or trace.
    """
    rng = np.random.default_rng(config.seed)
    lengths = rng.integers(
        config.min_tokens, config.max_tokens, config.contexts, endpoint=True
    ).tolist()
    links = [_link(config, index) for index in range(config.contexts)]
    rows, samples = [], []
    for ladder in config.ladders:
        costs = {n: _costs(config, ladder, n) for n in sorted(set(lengths))}
        for name, policy in _policies(config, ladder):
            outcomes = [
                stream(costs[n], policy, link) for n, link in zip(lengths, links, strict=True)
            ]
            where = "" if name == "text" else ladder.name
            rows.append(_row(config, ladder, where, name, [costs[n] for n in lengths], outcomes))
            samples.append(Sample(ladder, name, outcomes[0]))
    return SimulationReport(config, tuple(rows), tuple(samples))


def _policies(config: SimulationConfig, ladder: Ladder) -> Iterator[tuple[str, Policy]]:
    for name in config.policies:
        if name == "text" and ladder is not config.ladders[0]:
            continue
        kind, _, level = name.partition(":")
        elsewhere = any(level in other.names for other in config.ladders)
        if kind in OF_A_LEVEL and elsewhere and level not in ladder.names:
            continue  # another ladder has it
        for one in for_each_level(name, ladder.names):
            yield (
                one,
                policy_for(
                    one,
                    levels=ladder.names,
                    losses=ladder.losses,
                    target_s=config.target_s,
                    nested=ladder.nested,
                ),
            )


def _costs(config: SimulationConfig, ladder: Ladder, n_tokens: int) -> Costs:
    return context_costs(
        config.setup,
        ladder,
        n_tokens,
        chunk_tokens=config.chunk_tokens,
        prompt_tokens=config.prompt_tokens,
        sharing=config.concurrency,
    )


def _link(config: SimulationConfig, index: int) -> Link:
    return make_link(
        config.trace,
        (config.seed, index),
        gbps=config.gbps,
        low_gbps=config.low_gbps,
        high_gbps=config.high_gbps,
        sharing=config.concurrency,
    )


def _row(
    config: SimulationConfig,
    ladder: Ladder,
    where: str,
    policy: str,
    costs: Sequence[Costs],
    outcomes: Sequence[Outcome],
) -> Row:
    ttft = np.array([outcome.ttft_s for outcome in outcomes])
    losses = {TEXT: 0.0, **dict(enumerate(ladder.losses))}
    tokens = dict.fromkeys(losses, 0)
    mean_losses = []
    for cost, outcome in zip(costs, outcomes, strict=True):
        lost = 0.0
        for n, level in zip(cost.chunk_tokens, outcome.levels, strict=True):
            tokens[level] += n
            lost += n * losses[level]
        mean_losses.append(lost / sum(cost.chunk_tokens))
    names = {TEXT: "text", **dict(enumerate(ladder.names))}
    p50, p90, p99 = np.percentile(ttft, (50, 90, 99)).tolist()
    return Row(
        ladder=where,
        policy=policy,
        ttft_mean_s=float(ttft.mean()),
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        miss_rate=float((ttft > config.target_s).mean()),
        loss=float(np.mean(mean_losses)),
        size_bytes=float(np.mean([outcome.size_bytes for outcome in outcomes])),
        shares={names[level]: n / sum(tokens.values()) for level, n in tokens.items() if n},
    )
