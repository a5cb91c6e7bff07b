"""A target met by stopping: the base of everything first, then refinements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_cachegen.streaming.estimate import RateEstimate
from hf_cachegen.streaming.policy import MISS_BOUND, TEXT, Policy, Refinement, StreamState

_INSTANT_S = 1e-9


@dataclass(frozen=True)
class LayeredPolicy(Policy):
    """The base of every chunk first, then refinements by worth until the deadline.

    A deadline is met by stopping and not by guessing. While bases alone are too likely to be late,
    chunks are recomputed from text instead, as far as the processor has time. Afterwards both ends
    are improved at once: the link refines, of equal worth the last chunks first, and time that the
    processor has left goes into recomputing the first ones, whose predecessors are exact.

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
        if estimate is None:
            return base
        deadline_s = self.target_s - state.tail_s
        risk = estimate.late_probability(state.remaining_bytes(base), deadline_s - state.elapsed_s)
        text_helps = risk > self.miss_bound and state.text_fits(deadline_s)
        return TEXT if text_helps or state.text_saves_time(deadline_s) else base

    def refines_until_s(self, state: StreamState) -> float:
        return self.target_s - state.tail_s

    def refine(self, state: StreamState) -> Refinement | None:
        stop_s = self.refines_until_s(state)
        estimate = state.estimate()
        if estimate is None or state.compute_begin_s() >= stop_s:
            return None
        options = self._affordable(state, estimate, stop_s)
        recompute = self._recompute(state, options, stop_s)
        if recompute is not None or not options:
            return recompute
        return max(options, key=_worth).refinement

    def _affordable(
        self, state: StreamState, estimate: RateEstimate, stop_s: float
    ) -> list[_Option]:
        """Each chunk's worthiest refinement that is expected in time, last chunk first."""
        found = []
        for chunk in reversed(range(len(state.chosen))):
            held = state.chosen[chunk]
            if held == TEXT:
                continue
            options = [
                self._option(state, estimate, chunk, level, stop_s)
                for level in range(held + 1, len(self.losses))
            ]
            fitting = [
                option
                for option in options
                if option.worth > 0 and state.elapsed_s + option.transfer_s <= stop_s
            ]
            if fitting:
                found.append(max(fitting, key=_worth))
        return found

    def _option(
        self, state: StreamState, estimate: RateEstimate, chunk: int, level: int, stop_s: float
    ) -> _Option:
        held, sizes = state.chosen[chunk], state.sizes_bytes[chunk]
        size = max(sizes[level] - (sizes[held] if level < self.nested else 0), 0)
        transfer_s = estimate.median_s(size)
        decode_s = state.decode_s[chunk][level] if state.decode_s else 0.0
        # A chunk counts as much as it has tokens, of which its size is a measure.
        gain = sizes[0] * (self.losses[held] - self.losses[level])
        worth = gain / max(transfer_s, decode_s, _INSTANT_S)
        return _Option(worth, transfer_s, decode_s, Refinement(chunk, level, size, stop_s))

    def _recompute(
        self, state: StreamState, options: Sequence[_Option], stop_s: float
    ) -> Refinement | None:
        """The first chunk as text, if the processor has time beside decoding what else arrives."""
        lossy = [
            chunk
            for chunk, held in enumerate(state.chosen)
            if held != TEXT and self.losses[held] > 0
        ]
        if not lossy or not state.recompute_s:
            return None
        decode_s, arrived_s = 0.0, state.elapsed_s
        for option in sorted(options, key=_worth, reverse=True):
            arrived_s += option.transfer_s
            if option.refinement.chunk != lossy[0] and arrived_s <= stop_s:
                decode_s += option.decode_s
        if state.compute_begin_s() + state.recompute_s[lossy[0]] + decode_s > stop_s:
            return None
        return Refinement(lossy[0], TEXT, 0, stop_s)


@dataclass(frozen=True)
class _Option:
    """A refinement and its worth: loss avoided per second of the busier of link and processor."""

    worth: float
    transfer_s: float
    decode_s: float
    refinement: Refinement


def _worth(option: _Option) -> float:
    return option.worth
