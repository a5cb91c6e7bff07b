"""One context streamed on a simulated clock, by the policies that stream real ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_cachegen.bench.simulate.links import Link
from hf_cachegen.bench.simulate.presets import Ladder, Setup
from hf_cachegen.streaming.controller import TEXT, Policy, Refinement, StreamState


@dataclass(frozen=True)
class Costs:
    """What one context costs, by chunk and level; see :class:`StreamState`.

    Attributes
    ----------
    chunk_tokens
        Tokens of each chunk.
    prompt_s
        Seconds of the prompt's own prefill, after the context is in place.
    """

    chunk_tokens: tuple[int, ...]
    sizes_bytes: tuple[tuple[int, ...], ...]
    decode_s: tuple[tuple[float, ...], ...]
    recompute_s: tuple[float, ...]
    prompt_s: float

    @property
    def tail_decode_s(self) -> float:
        """Most seconds from the last byte until it is decoded, if decoding keeps up."""
        return max(map(max, self.decode_s))

    @property
    def tail_s(self) -> float:
        """Most seconds from the last byte to the first token, if decoding keeps up."""
        return self.tail_decode_s + self.prompt_s


def context_costs(
    setup: Setup,
    ladder: Ladder,
    n_tokens: int,
    *,
    chunk_tokens: int,
    prompt_tokens: int,
    sharing: int = 1,
) -> Costs:
    """Costs of a context of ``n_tokens``; ``sharing`` streams also share the processor."""
    starts = range(0, n_tokens, chunk_tokens)
    tokens = tuple(min(chunk_tokens, n_tokens - start) for start in starts)
    values = setup.model.values_per_token
    return Costs(
        chunk_tokens=tokens,
        sizes_bytes=tuple(
            tuple(round(n * values * level.bits_per_value / 8) for level in ladder.levels)
            for n in tokens
        ),
        decode_s=tuple(
            tuple(sharing * setup.decode_s(n, level) for level in ladder.levels) for n in tokens
        ),
        recompute_s=tuple(
            sharing * setup.prefill_s(start, n) for start, n in zip(starts, tokens, strict=True)
        ),
        prompt_s=sharing * setup.prefill_s(n_tokens, prompt_tokens),
    )


@dataclass(frozen=True)
class Step:
    """Something that was done to a chunk: a transfer, or a recomputation (:data:`TEXT`).

    Attributes
    ----------
    size_bytes
        Bytes that travelled.
    finished
        False for a refinement that was given up.
    """

    chunk: int
    level: int
    start_s: float
    end_s: float
    size_bytes: float
    finished: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a stream went: the level that each chunk ended with, and everything done for it."""

    ttft_s: float
    levels: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def size_bytes(self) -> float:
        """Bytes that travelled."""
        return sum(step.size_bytes for step in self.steps)


def stream(costs: Costs, policy: Policy, link: Link) -> Outcome:
    """Stream a context.

    The link carries one transfer at a time and the processor does one thing at a time, in the order
    in which they came up: a chunk is decoded, whole, once it has arrived, while the next travels; a
    recomputation starts when every earlier chunk is in place, and the link goes on meanwhile.
    """
    run = _Run(costs, link)
    for chunk in range(len(costs.chunk_tokens)):
        run.take(chunk, policy.choose(run.state()))
    while refinement := policy.refine(run.state()):
        run.refine(refinement)
    return run.outcome()


class _Run:
    def __init__(self, costs: Costs, link: Link) -> None:
        self._costs = costs
        self._link = link
        self._now_s = 0.0  # when the link is free
        self._compute_free_s = 0.0
        self._requests = 0
        self._levels: list[int] = []
        self._throughputs: list[float] = []
        self._steps: list[Step] = []

    def state(self) -> StreamState:
        return StreamState(
            sizes_bytes=self._costs.sizes_bytes,
            chosen=self._levels,
            elapsed_s=self._now_s,
            throughputs_bytes_per_s=self._throughputs,
            decode_s=self._costs.decode_s,
            recompute_s=self._costs.recompute_s,
            compute_free_s=self._compute_free_s,
            tail_s=self._costs.tail_s,
            tail_decode_s=self._costs.tail_decode_s,
        )

    def take(self, chunk: int, level: int) -> None:
        self._levels.append(level)
        if level == TEXT:
            self._recompute(chunk)
        else:
            self._fetch(chunk, level, self._costs.sizes_bytes[chunk][level])

    def refine(self, wanted: Refinement) -> None:
        if self._fetch(wanted.chunk, wanted.level, wanted.size_bytes, wanted.stop_s):
            self._levels[wanted.chunk] = wanted.level

    def outcome(self) -> Outcome:
        ready_s = max(self._now_s, self._compute_free_s)
        return Outcome(ready_s + self._costs.prompt_s, tuple(self._levels), tuple(self._steps))

    def _recompute(self, chunk: int) -> None:
        start_s = max(self._now_s, self._compute_free_s)
        self._compute_free_s = start_s + self._costs.recompute_s[chunk]
        self._steps.append(Step(chunk, TEXT, start_s, self._compute_free_s, 0))

    def _fetch(self, chunk: int, level: int, size_bytes: int, stop_s: float = math.inf) -> bool:
        """Transfer and, if it finished, decode."""
        start_s = self._now_s
        self._now_s, sent = self._link.send(self._requests, start_s, size_bytes, stop_s)
        self._requests += 1
        finished = sent == size_bytes
        self._steps.append(Step(chunk, level, start_s, self._now_s, sent, finished))
        if sent:
            self._throughputs.append(sent / (self._now_s - start_s))
        if finished:
            begin_s = max(self._now_s, self._compute_free_s)
            self._compute_free_s = begin_s + self._costs.decode_s[chunk][level]
        return finished
