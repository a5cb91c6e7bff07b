"""A target met by stopping: the base of everything first, then refinements."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hf_cachegen.streaming.estimate import RateEstimate
from hf_cachegen.streaming.policy import (
    MISS_BOUND,
    TEXT,
    Refinement,
    StreamState,
    TargetPolicy,
)

CAUTION = 1.5
"""By how many standard deviations of a chunk's rate a plan takes the link to be slower than it may
be. A plan that counts on too much refines a few chunks far and never comes to the others."""

_INSTANT_S = 1e-9


@dataclass(frozen=True)
class LayeredPolicy(TargetPolicy):
    """The base of every chunk first, then refinements by worth until the deadline.

    The base is the smallest level, unless the processor has no time to decode it and then a finer
    one that is as sure to be in time. A deadline is met by stopping and not by guessing: layers
    whose refinement is not being decoded by then keep what they have. The first chunks are
    recomputed from text instead where the processor has time for it beside decoding all others at
    any level, or where bases alone are too likely to be late. Once the bases are there, all that
    the link and the processor have time for is planned, and brought in rounds as far as the
    processor has time for those, too: what is worth most per second comes first, of equal worth in
    the last chunks, since the first may be text.

    Attributes
    ----------
    losses
        Loss of quality of each level, coarse to fine; 0 for exact ones.
    nested
        How many of the coarsest levels nest: refining one to another of them costs the difference
        of their bytes. Any other level replaces the chunk at its full size.
    miss_bound
        Accepted probability that the bases arrive too late.
    """

    losses: Sequence[float]
    nested: int = 0
    miss_bound: float = MISS_BOUND

    def choose(self, state: StreamState) -> int:
        estimate = state.estimate()
        deadline_s = self.deadline_s(state)
        if self._text_is_free(state, deadline_s):
            return TEXT
        if estimate is None:
            return state.smallest_level()
        base = self._base(state, estimate, deadline_s)
        text_helps = base is None and state.text_fits(deadline_s)
        if text_helps or state.text_saves_time(deadline_s):
            return TEXT
        return state.smallest_level() if base is None else base

    def refines_until_s(self, state: StreamState) -> float:
        return self.deadline_s(state)

    def refine(self, state: StreamState) -> Refinement | None:
        stop_s = self.refines_until_s(state)
        estimate = state.estimate()
        if estimate is None:
            return None
        slower = replace(estimate, log_mean=estimate.log_mean - CAUTION * estimate.log_spread)
        # Where nothing is sure to fit, what probably does is worth a try.
        for rates in (slower, estimate):
            budget = _Budget.until(stop_s, state, rates)
            plan = self._plan(state, budget)
            if plan:
                break
        if not plan:
            return None
        best = max([*plan, *self._stopovers(state, plan, budget)], key=_Option.worth)
        return Refinement(best.chunk, best.level, best.size_bytes, stop_s)

    def _base(self, state: StreamState, estimate: RateEstimate, deadline_s: float) -> int | None:
        """The level to begin with; None if even the smallest is too likely to be late.

        It is the smallest, unless all can be had at a finer one that the processor would have no
        time for beside it.
        """
        smallest = state.smallest_level()
        compute_s = deadline_s - state.compute_free_s
        twice_s = compute_s - state.remaining_decode_s(smallest)

        def is_in_time(level: int) -> bool:
            sizes, budget_s = state.remaining_bytes(level), deadline_s - state.elapsed_s
            return estimate.late_probability(sizes, budget_s) <= self.miss_bound

        finer = [
            level
            for level, loss in enumerate(self.losses)
            if loss < self.losses[smallest]
            and twice_s < state.remaining_decode_s(level) <= compute_s
            and is_in_time(level)
        ]
        if finer:
            return min(
                finer, key=lambda level: (self.losses[level], state.ready_s(estimate, level))
            )
        return smallest if is_in_time(smallest) else None

    def _text_is_free(self, state: StreamState, deadline_s: float) -> bool:
        """Whether recomputing the next chunk takes nothing from decoding the others.

        Only of the first chunks: what follows a lossy one is no better than that.
        """
        lossy = [level for level, loss in enumerate(self.losses) if loss > 0]
        if not state.recompute_s or not lossy or any(held != TEXT for held in state.chosen):
            return False
        others_s = max(state.remaining_decode_s(level, skip=1) for level in lossy)
        if self.nested:  # bases are small, sure to be refined, and then decoded once more
            others_s += state.remaining_decode_s(state.smallest_level(), skip=1)
        if others_s == 0 and len(state.sizes_bytes) > state.next_chunk + 1:
            return False  # how long they take is not known yet
        work_s = state.recompute_s[state.next_chunk] + others_s
        return state.compute_free_s + work_s <= deadline_s

    def _plan(self, state: StreamState, budget: _Budget) -> list[_Option]:
        """What to refine each chunk to, last chunk first; all of it is expected in time.

        A knapsack filled greedily: what is worth most per second of the busier of link and
        processor comes first. The plan says how far to go with a chunk in one go, since each
        refinement decodes all of it anew.

        A heap holds the best step of each chunk. Time only gets less, so that a step that fits when
        it comes to the top is the best of all; one that no longer fits makes way for the chunk's
        next best. (Where a finer level decodes faster, a step gives time back: it is used by the
        chunks that are still in the heap.)
        """
        link_s, compute_s = budget.link_s, budget.compute_s
        firsts = (
            _best_step(
                _Option(chunk, held, 0, 0.0, 0.0, 0.0),
                self._options(state, chunk, budget.per_byte_s),
                link_s,
                compute_s,
            )
            for chunk, held in enumerate(state.chosen)
            if held != TEXT
        )
        heap = [step for step in firsts if step]
        heapq.heapify(heap)
        taken: dict[int, _Option] = {}
        while heap:
            step = heap[0]
            reached = step.before
            if step.transfer_s <= link_s and step.decode_s <= compute_s:
                link_s, compute_s = link_s - step.transfer_s, compute_s - step.decode_s
                reached = taken[step.after.chunk] = step.after
            following = _best_step(reached, step.options, link_s, compute_s)
            if following:
                heapq.heapreplace(heap, following)
            else:
                heapq.heappop(heap)
        return [taken[chunk] for chunk in sorted(taken, reverse=True)]

    def _stopovers(
        self, state: StreamState, plan: Sequence[_Option], budget: _Budget
    ) -> list[_Option]:
        """Coarser levels on the way to those of a plan, as far as there is time for them beside it.

        The processor decodes a chunk once more for it, in a time that has to be known. The link
        carries no more bytes where levels nest, and should it fail, every chunk has something
        instead of some everything.
        """
        link_s = budget.link_s - sum(option.transfer_s for option in plan)
        compute_s = budget.compute_s - sum(option.decode_s for option in plan)
        stopovers = []
        for planned in plan:
            for option in self._options(state, planned.chunk, budget.per_byte_s):
                if option.level < planned.level and 0 < option.decode_s <= compute_s:
                    onwards = self._refining_bytes(
                        state, planned.chunk, option.level, planned.level
                    )
                    more_bytes = option.size_bytes + onwards - planned.size_bytes
                    if not more_bytes or more_bytes * budget.per_byte_s <= link_s:
                        stopovers.append(option)
        return stopovers

    def _options(self, state: StreamState, chunk: int, per_byte_s: float) -> list[_Option]:
        """The finer levels of a chunk that lose less than the one it has."""
        held = state.chosen[chunk]
        options = []
        for level in range(held + 1, len(self.losses)):
            size = self._refining_bytes(state, chunk, held, level)
            # A chunk counts as much as it has tokens, of which its size is a measure.
            gain = state.sizes_bytes[chunk][0] * (self.losses[held] - self.losses[level])
            decode_s = state.decode_s[chunk][level] if state.decode_s else 0.0
            if gain > 0:
                options.append(_Option(chunk, level, size, gain, size * per_byte_s, decode_s))
        return options

    def _refining_bytes(self, state: StreamState, chunk: int, held: int, level: int) -> int:
        """What has to be fetched of a level by who holds another one."""
        sizes = state.sizes_bytes[chunk]
        return max(sizes[level] - (sizes[held] if level < self.nested else 0), 0)


class _Budget(NamedTuple):
    """Seconds that the link and the processor have left, and those that a byte takes."""

    link_s: float
    compute_s: float
    per_byte_s: float

    @classmethod
    def until(cls, stop_s: float, state: StreamState, estimate: RateEstimate) -> _Budget:
        """What is left until the last byte may come, after which it is still decoded."""
        return cls(
            link_s=stop_s - state.elapsed_s,
            compute_s=stop_s + state.tail_decode_s - state.compute_free_s,
            per_byte_s=estimate.median_s(1),
        )


class _Option(NamedTuple):
    """A refinement: the loss it avoids, and the seconds it takes of the link and the processor."""

    chunk: int
    level: int
    size_bytes: int
    gain: float
    transfer_s: float
    decode_s: float

    def worth(self) -> float:
        """Loss avoided per second of the busier of link and processor."""
        return _worth(self.gain, self.transfer_s, self.decode_s)


class _Step(NamedTuple):
    """From one option of a chunk to another; sorts by worth, of equal worth the last chunk first.

    There is one step of a chunk at a time, so that comparing never comes to the other fields.
    """

    minus_worth: float
    minus_chunk: int
    transfer_s: float
    decode_s: float
    before: _Option
    after: _Option
    options: Sequence[_Option]


def _best_step(
    before: _Option, options: Sequence[_Option], link_s: float, compute_s: float
) -> _Step | None:
    """The step worth most of those that gain anything and take no more time than there is."""
    best, best_worth = None, 0.0
    for option in options:
        gain = option.gain - before.gain
        transfer_s = option.transfer_s - before.transfer_s
        decode_s = option.decode_s - before.decode_s
        if gain > 0 and transfer_s <= link_s and decode_s <= compute_s:
            worth = _worth(gain, transfer_s, decode_s)
            if worth > best_worth:
                best, best_worth = (transfer_s, decode_s, option), worth
    if best is None:
        return None
    transfer_s, decode_s, after = best
    return _Step(-best_worth, -after.chunk, transfer_s, decode_s, before, after, options)


def _worth(gain: float, transfer_s: float, decode_s: float) -> float:
    """Loss avoided per second of the busier of link and processor."""
    return gain / max(transfer_s, decode_s, _INSTANT_S)
