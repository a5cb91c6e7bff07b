"""One context streamed on a simulated clock, by the policies that stream real ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from hf_cachegen.bench.simulate.links import Link
from hf_cachegen.bench.simulate.presets import Ladder, Setup
from hf_cachegen.streaming.controller import TEXT, Policy, Refinement, StreamState
from hf_cachegen.streaming.meter import RECENT_S, comes_late


@dataclass(frozen=True)
class Costs:
    """What one context costs, by chunk and level; see :class:`StreamState`.

    Attributes
    ----------
    chunk_tokens
        Tokens of each chunk.
    prompt_s
        Seconds of the prompt's own prefill, after the context is in place.
    nested
        How many of the coarsest levels nest: each begins with the bytes of the one before.
    """

    chunk_tokens: tuple[int, ...]
    sizes_bytes: tuple[tuple[int, ...], ...]
    decode_s: tuple[tuple[float, ...], ...]
    recompute_s: tuple[float, ...]
    prompt_s: float
    nested: int = 0

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
        nested=ladder.nested,
    )


@dataclass(frozen=True)
class Step:
    """Something that was done to a chunk: a transfer, or a recomputation (:data:`TEXT`).

    Attributes
    ----------
    size_bytes
        Bytes that travelled.
    finished
        False for a transfer that was given up.
    """

    chunk: int
    level: int
    start_s: float
    end_s: float
    size_bytes: float
    finished: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a stream went: the level that each chunk ended with, and all steps as they began."""

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

    What comes too slowly is given up, and what waits to be recomputed is fetched from the back, as
    by :class:`~hf_cachegen.streaming.pipeline.ChunkStream`. All requests for one chunk in a row
    count as one for the link.
    """
    run = _Run(costs, policy, link)
    for chunk in range(len(costs.chunk_tokens)):
        run.take(chunk)
    if policy.adapts:
        run.fill_from_the_back()
    while refinement := policy.refine(run.state()):
        run.refine(refinement)
    return run.outcome()


ASK_S = 0.1
"""How often it is looked whether a chunk comes too slowly; after a while less and less often."""

Prefers = Callable[[float, float, Callable[[], StreamState]], int | None]
"""Called with the seconds that a transfer has taken and those that it will yet take at the present
rate, and what gives the state then; returns what to do instead of the rest of it, or None."""


@dataclass
class _Work:
    """Something that the processor is to do about a chunk: decode a level, or recompute."""

    chunk: int
    level: int
    ready_s: float
    seconds: float


class _Run:
    def __init__(self, costs: Costs, policy: Policy, link: Link) -> None:
        self._costs = costs
        self._policy = policy
        self._link = link
        self._now_s = 0.0  # when the link is free
        self._requests = 0
        self._levels: list[int] = []
        self._throughputs: list[float] = []
        self._transfers: list[Step] = []
        self._work: list[_Work] = []  # in the order in which it is done

    def state(self) -> StreamState:
        return StreamState(
            sizes_bytes=self._costs.sizes_bytes,
            chosen=self._levels,
            elapsed_s=self._now_s,
            throughputs_bytes_per_s=self._throughputs,
            decode_s=self._costs.decode_s,
            recompute_s=self._costs.recompute_s,
            compute_free_s=max(self._compute_free_s(), self._now_s),
            tail_s=self._costs.tail_s,
            tail_decode_s=self._costs.tail_decode_s,
        )

    def take(self, chunk: int) -> None:
        """Have a chunk brought, or else recomputed."""
        choice = self._policy.choose(self.state())
        level: int | None = choice
        held_bytes = 0.0
        while level is not None and level != TEXT:
            self._levels[chunk:] = [level]
            level, held_bytes = self._bring(chunk, level, held_bytes)
        self._requests += choice != TEXT
        if level == TEXT:
            self._levels[chunk:] = [TEXT]
            self._recompute(chunk)

    def fill_from_the_back(self) -> None:
        """Fetch what waits to be recomputed, last chunk first, while the processor is busy."""
        while (index := self._last_text()) is not None:
            text = self._work.pop(index)
            level = self._policy.instead_of_text(self._state_of(text.chunk, last=True))
            if level is None or not self._fill(text.chunk, level):
                text.ready_s = self._now_s
                self._work.insert(index, text)
                return

    def refine(self, wanted: Refinement) -> None:
        start_s = self._now_s
        end_s, sent = self._send(start_s, wanted.size_bytes, wanted.stop_s)
        finished = sent == wanted.size_bytes
        self._note_transfer(wanted.chunk, wanted.level, end_s, sent, finished)
        self._requests += 1
        if finished:
            self._levels[wanted.chunk] = wanted.level
            self._decode(wanted.chunk, wanted.level)

    def outcome(self) -> Outcome:
        ready_s = max(self._now_s, self._compute_free_s())
        recomputed = [
            Step(work.chunk, TEXT, start_s, end_s, 0)
            for work, start_s, end_s in self._schedule()
            if work.level == TEXT
        ]
        steps = sorted([*self._transfers, *recomputed], key=lambda step: step.start_s)
        return Outcome(ready_s + self._costs.prompt_s, tuple(self._levels), tuple(steps))

    def _bring(self, chunk: int, level: int, held_bytes: float) -> tuple[int | None, float]:
        """Transfer a chunk of which some bytes are there already, and have it decoded.

        Returns what is preferred to the rest of it, None if all has come, and the bytes that are
        there for another of the levels that nest.
        """
        size_bytes = self._left_bytes(chunk, held_bytes)[level]
        estimate = self.state().estimate()
        expected_s = estimate.median_s(size_bytes) if estimate else 0.0

        def prefers(taken_s: float, left_s: float, state: Callable[[], StreamState]) -> int | None:
            if not comes_late(taken_s, left_s, expected_s):
                return None
            return self._policy.reconsider(state(), level)

        first_s = RECENT_S if self._policy.adapts else math.inf
        instead, sent = self._transfer(chunk, level, held_bytes, first_s, prefers)
        return instead, held_bytes + (sent if level < self._costs.nested else 0.0)

    def _fill(self, chunk: int, level: int) -> bool:
        """Transfer a chunk that would else be recomputed; False if it is given up."""

        def prefers(taken_s: float, left_s: float, state: Callable[[], StreamState]) -> int | None:
            return TEXT if self._policy.instead_of_text(state()) is None else None

        busy_s = max(self._compute_free_s() - self._now_s, ASK_S)
        instead, _ = self._transfer(chunk, level, 0.0, busy_s, prefers, last=True)
        self._requests += 1
        if instead is None:
            self._levels[chunk] = level
        return instead is None

    def _transfer(
        self,
        chunk: int,
        level: int,
        held_bytes: float,
        first_s: float,
        prefers: Prefers,
        *,
        last: bool = False,
    ) -> tuple[int | None, float]:
        """What is preferred to the rest of a transfer, asked for after ``first_s``; bytes sent."""
        start_s, ask_s = self._now_s, first_s
        size_bytes = self._left_bytes(chunk, held_bytes)[level]
        rate, instead = 0.0, None
        end_s, sent = self._send(start_s, size_bytes, start_s + ask_s)
        while sent < size_bytes and instead is None:
            window_s = min(max(RECENT_S, ask_s / 2), ask_s)
            before = self._send(start_s, size_bytes, start_s + ask_s - window_s)[1]
            rate = (sent - before) / window_s
            state = partial(
                self._state_during, chunk, level, held_bytes, sent, ask_s, rate, last=last
            )
            instead = prefers(ask_s, (size_bytes - sent) / rate, state)
            if instead is None:
                ask_s += max(ASK_S, ask_s / 4)
                end_s, sent = self._send(start_s, size_bytes, start_s + ask_s)
        finished = instead is None
        # Of a chunk that is given up, the first part may have come over a better link.
        self._note_transfer(chunk, level, end_s, sent, finished, None if finished else rate)
        if finished:
            self._decode(chunk, level)
        return instead, sent

    def _send(self, start_s: float, size_bytes: float, stop_s: float) -> tuple[float, float]:
        return self._link.send(self._requests, start_s, size_bytes, stop_s)

    def _left_bytes(self, chunk: int, held_bytes: float) -> list[int]:
        """Bytes to fetch of a chunk by level, if so many are there for those that nest."""
        return [
            max(size - round(held_bytes), 0) if level < self._costs.nested else size
            for level, size in enumerate(self._costs.sizes_bytes[chunk])
        ]

    def _state_of(self, chunk: int, later_s: float = 0.0, *, last: bool = False) -> StreamState:
        """The state for another choice about a chunk; as if it were the last one."""
        state, end = self.state(), chunk + 1 if last else None
        return replace(
            state,
            sizes_bytes=state.sizes_bytes[:end],
            chosen=state.chosen[:chunk],
            decode_s=state.decode_s[:end],
            recompute_s=state.recompute_s[:end],
            elapsed_s=state.elapsed_s + later_s,
            compute_free_s=max(state.compute_free_s, state.elapsed_s + later_s),
        )

    def _state_during(
        self,
        chunk: int,
        level: int,
        held_bytes: float,
        sent: float,
        taken_s: float,
        rate: float,
        *,
        last: bool,
    ) -> StreamState:
        """The state when some of a chunk has been sent, beside what was there before."""
        left = self._left_bytes(chunk, held_bytes + (sent if level < self._costs.nested else 0.0))
        left[level] = self._left_bytes(chunk, held_bytes)[level] - round(sent)
        return self._state_of(chunk, taken_s, last=last).while_arriving(left, rate)

    def _note_transfer(
        self,
        chunk: int,
        level: int,
        end_s: float,
        sent: float,
        finished: bool,
        rate: float | None = None,
    ) -> None:
        """Record a transfer, and the link's rate: by default its mean."""
        self._transfers.append(Step(chunk, level, self._now_s, end_s, sent, finished))
        if sent:
            self._throughputs.append(rate or sent / (end_s - self._now_s))
        self._now_s = end_s

    def _decode(self, chunk: int, level: int) -> None:
        seconds = self._costs.decode_s[chunk][level]
        self._work.append(_Work(chunk, level, self._now_s, seconds))

    def _recompute(self, chunk: int) -> None:
        self._work.append(_Work(chunk, TEXT, self._now_s, self._costs.recompute_s[chunk]))

    def _last_text(self) -> int | None:
        """Where in the schedule the last recomputation is, if it has not begun."""
        texts = [
            index
            for index, (work, start_s, _) in enumerate(self._schedule())
            if work.level == TEXT and start_s > self._now_s
        ]
        for work in self._work[texts[-1] :] if texts else ():
            work.ready_s = max(work.ready_s, self._now_s)  # nothing from there on has begun
        return texts[-1] if texts else None

    def _schedule(self) -> list[tuple[_Work, float, float]]:
        """What the processor does, and when it begins and ends."""
        schedule, free_s = [], 0.0
        for work in self._work:
            start_s = max(free_s, work.ready_s)
            free_s = start_s + work.seconds
            schedule.append((work, start_s, free_s))
        return schedule

    def _compute_free_s(self) -> float:
        return self._schedule()[-1][2] if self._work else 0.0
