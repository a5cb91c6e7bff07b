"""A target met by stopping: the base of everything first, then refinements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_cachegen.streaming.estimate import RateEstimate
from hf_cachegen.streaming.policy import MISS_BOUND, TEXT, Policy, Refinement, StreamState

CAUTION = 1.5
"""By how many standard deviations of a chunk's rate a plan takes the link to be slower than it may
be. A plan that counts on too much refines a few chunks far and never comes to the others."""

_INSTANT_S = 1e-9


@dataclass(frozen=True)
class LayeredPolicy(Policy):
    """The base of every chunk first, then refinements by worth until the deadline.

    A deadline is met by stopping and not by guessing: layers whose refinement is not being decoded
    by then keep what they have. The first chunks are recomputed from text instead where the
    processor has time for it beside decoding all others at any level, or where bases alone are too
    likely to be late. Once the bases are there, both ends are improved at once: the link refines,
    of equal worth the last chunks first, and time that the processor has left goes into recomputing
    the first ones, whose predecessors are exact.

    Attributes
    ----------
    target_s
        Time to first token to meet, in seconds from the start of the stream.
    losses
        Loss of quality of each level, coarse to fine; 0 for exact ones.
    nested
        How many of the coarsest levels nest: refining one to another of them costs the difference
        of their bytes. Any other level replaces the chunk at its full size.
    miss_bound
        Accepted probability that the bases arrive too late.
    """

    target_s: float
    losses: Sequence[float]
    nested: int = 0
    miss_bound: float = MISS_BOUND

    def choose(self, state: StreamState) -> int:
        base = state.smallest_level()
        estimate = state.estimate()
        deadline_s = self.target_s - state.tail_s
        if self._text_is_free(state, deadline_s):
            return TEXT
        if estimate is None:
            return base
        risk = estimate.late_probability(state.remaining_bytes(base), deadline_s - state.elapsed_s)
        text_helps = risk > self.miss_bound and state.text_fits(deadline_s)
        return TEXT if text_helps or state.text_saves_time(deadline_s) else base

    def refines_until_s(self, state: StreamState) -> float:
        return self.target_s - state.tail_s

    def refine(self, state: StreamState) -> Refinement | None:
        stop_s = self.refines_until_s(state)
        estimate = state.estimate()
        if estimate is None:
            return None
        slower = replace(estimate, log_mean=estimate.log_mean - CAUTION * estimate.log_spread)
        # Where nothing is sure to fit, what probably does is worth a try.
        plan = self._plan(state, slower, stop_s) or self._plan(state, estimate, stop_s)
        recompute = self._recompute(state, plan, stop_s)
        if recompute is not None or not plan:
            return recompute
        return max(plan, key=_worth).refinement

    def _text_is_free(self, state: StreamState, deadline_s: float) -> bool:
        """Whether recomputing the next chunk takes nothing from decoding the others.

        Only of the first chunks: what follows a lossy one is no better than that.
        """
        lossy = [level for level, loss in enumerate(self.losses) if loss > 0]
        if not state.recompute_s or not lossy or any(held != TEXT for held in state.chosen):
            return False
        costliest_s = max(state.remaining_decode_s(level, skip=1) for level in lossy)
        if costliest_s == 0 and len(state.sizes_bytes) > state.next_chunk + 1:
            return False  # how long they take is not known yet
        work_s = state.recompute_s[state.next_chunk] + costliest_s
        return state.compute_begin_s() + work_s <= deadline_s

    def _plan(self, state: StreamState, estimate: RateEstimate, stop_s: float) -> list[_Option]:
        """What to refine each chunk to, last chunk first; all of it is expected in time.

        A knapsack filled greedily: what is worth most per second of the busier of link and
        processor comes first. The plan says how far to go with a chunk in one go, since each
        refinement decodes all of it anew.
        """
        options = {
            chunk: [
                self._option(state, estimate, chunk, level, stop_s)
                for level in range(held, len(self.losses))
            ]
            for chunk, held in reversed(list(enumerate(state.chosen)))
            if held != TEXT
        }
        taken = {chunk: chain[0] for chunk, chain in options.items()}
        link_s = stop_s - state.elapsed_s
        compute_s = stop_s + state.tail_decode_s - state.compute_begin_s()
        while True:
            fitting = [
                step
                for chunk, chain in options.items()
                for option in chain
                if (step := option.after(taken[chunk])).gain > 0
                and step.transfer_s <= link_s
                and step.decode_s <= compute_s
            ]
            if not fitting:
                return [option for option in taken.values() if option.gain > 0]
            best = max(fitting, key=_worth)
            link_s, compute_s = link_s - best.transfer_s, compute_s - best.decode_s
            refined = best.refinement
            chain = options[refined.chunk]
            taken[refined.chunk] = chain[refined.level - state.chosen[refined.chunk]]

    def _option(
        self, state: StreamState, estimate: RateEstimate, chunk: int, level: int, stop_s: float
    ) -> _Option:
        held, sizes = state.chosen[chunk], state.sizes_bytes[chunk]
        if level == held:
            return _Option(0.0, 0.0, 0.0, Refinement(chunk, level, 0, stop_s))
        size = max(sizes[level] - (sizes[held] if level < self.nested else 0), 0)
        # A chunk counts as much as it has tokens, of which its size is a measure.
        gain = sizes[0] * (self.losses[held] - self.losses[level])
        decode_s = state.decode_s[chunk][level] if state.decode_s else 0.0
        return _Option(
            gain, estimate.median_s(size), decode_s, Refinement(chunk, level, size, stop_s)
        )

    def _recompute(
        self, state: StreamState, plan: Sequence[_Option], stop_s: float
    ) -> Refinement | None:
        """The first chunk as text, if the processor has time beside decoding what else arrives."""
        lossy = [
            chunk
            for chunk, held in enumerate(state.chosen)
            if held != TEXT and self.losses[held] > 0
        ]
        if not lossy or not state.recompute_s:
            return None
        decode_s = sum(o.decode_s for o in plan if o.refinement.chunk != lossy[0])
        if state.compute_begin_s() + state.recompute_s[lossy[0]] + decode_s > stop_s:
            return None
        return Refinement(lossy[0], TEXT, 0, stop_s)


@dataclass(frozen=True)
class _Option:
    """A refinement: the loss it avoids, and the seconds it takes of the link and the processor."""

    gain: float
    transfer_s: float
    decode_s: float
    refinement: Refinement

    def after(self, other: _Option) -> _Option:
        """What this one adds if it is done instead of another refinement of the same chunk."""
        return _Option(
            self.gain - other.gain,
            self.transfer_s - other.transfer_s,
            self.decode_s - other.decode_s,
            self.refinement,
        )


def _worth(option: _Option) -> float:
    """Loss avoided per second of the busier of link and processor."""
    return option.gain / max(option.transfer_s, option.decode_s, _INSTANT_S)
