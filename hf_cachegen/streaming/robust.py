"""A target met with a bounded probability to miss it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_cachegen.streaming.estimate import RateEstimate
from hf_cachegen.streaming.policy import MISS_BOUND, TEXT, StreamState, TargetPolicy


@dataclass(frozen=True)
class RobustPolicy(TargetPolicy):
    """The least loss with a bounded probability to miss the target.

    Transfer times are a distribution (:class:`~hf_cachegen.streaming.estimate.RateEstimate`). The
    next chunk gets the finest level for which

    - all remaining chunks at that level arrive in time in the median, so that quality is spread
      evenly and slack that earlier chunks left is used; and
    - if the rest then falls back to the smallest level, the target is still met but for a
      probability of ``miss_bound``.

    Of levels that lose as little it gets the one that is there first: ``raw`` instead of
    ``lossless`` where the link is faster than the decoder. If no level is in time, it gets the one
    that is there first of all. But a chunk is recomputed where that loses less and the
    processor has time for it before the deadline, while the link goes on with the next one: both
    work at once. Where the target will be missed in any case, so is a chunk that is recomputed
    before the link has brought the others.

    Attributes
    ----------
    losses
        Loss of quality of each level, coarse to fine; 0 for exact ones.
    first_level
        Level of the first chunk that is fetched, when no throughput is known.
    miss_bound
        Accepted probability to miss the target.
    """

    losses: Sequence[float]
    first_level: int
    miss_bound: float = MISS_BOUND

    def choose(self, state: StreamState) -> int:
        estimate = state.estimate()
        if estimate is None:
            level = self.first_level
        else:
            levels = range(len(self.losses))
            fitting = [level for level in levels if self._fits(state, estimate, level)]
            level = min(
                fitting,
                key=lambda level: (self.losses[level], state.ready_s(estimate, level)),
                default=state.soonest_level(estimate),
            )
        deadline_s = self.deadline_s(state)
        text_is_better = self.losses[level] > 0 and state.text_fits(deadline_s)
        return TEXT if text_is_better or state.text_saves_time(deadline_s) else level

    def _fits(self, state: StreamState, estimate: RateEstimate, level: int) -> bool:
        deadline_s = self.deadline_s(state)
        budget_s = deadline_s - state.elapsed_s
        at_level = state.remaining_bytes(level)
        then_smallest = [at_level[0], *state.smallest_remaining_bytes()[1:]]
        compute_s = state.compute_free_s + state.remaining_decode_s(level)
        return (
            estimate.median_s(sum(at_level)) <= budget_s
            and compute_s <= deadline_s
            and estimate.late_probability(then_smallest, budget_s) <= self.miss_bound
        )
