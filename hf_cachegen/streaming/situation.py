"""What a policy may know of a stream, put together from where it is known."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from hf_cachegen.artifact.manifest import Manifest
from hf_cachegen.errors import UnsupportedError
from hf_cachegen.streaming.costs import PASS_MARGIN, StreamCosts
from hf_cachegen.streaming.estimate import RECENT, RateEstimate
from hf_cachegen.streaming.ledger import Ledger
from hf_cachegen.streaming.policy import TEXT, Policy, Refinement, StreamState
from hf_cachegen.streaming.steps import StreamStep


class Situation:
    """The choices and measurements of one stream so far. Belongs to the thread that decides.

    Parameters
    ----------
    manifest
        The artefact.
    costs
        What things cost.
    ledger
        What is under way.
    holds_past
        Per chunk, whether it can be recomputed whatever was done about the one before; None if no
        chunk can be recomputed.
    started_at
        When the stream began, as :func:`time.monotonic` counts.

    Attributes
    ----------
    chosen
        Level or :data:`TEXT` of each chunk so far, refinements included.
    throughputs
        Of transfers in bytes per second, those of earlier streams first.
    """

    def __init__(
        self,
        manifest: Manifest,
        costs: StreamCosts,
        ledger: Ledger,
        holds_past: Sequence[bool] | None,
        started_at: float,
    ) -> None:
        self.chosen: list[int] = []
        self.throughputs = costs.link_bytes_per_s()
        self.started_at = started_at
        self._sizes = [manifest.read_bytes(chunk) for chunk in range(len(manifest.chunks))]
        self._costs = costs
        self._ledger = ledger
        self._holds_past = holds_past
        self._last_text: int | None = None

    def state(
        self, policy: Policy, link_free_in_s: float = 0.0, seen: Sequence[float] = ()
    ) -> StreamState:
        """What the policy may know for its next choice.

        Also tells who waits how long refinements may take.

        Parameters
        ----------
        policy
            It.
        link_free_in_s
            Seconds for which the link is still busy with the chunk before.
        seen
            Throughputs of transfers that have not ended yet.
        """
        now_s = self._elapsed_s()
        state = StreamState(
            sizes_bytes=self._sizes,
            chosen=list(self.chosen),
            elapsed_s=now_s + link_free_in_s,
            throughputs_bytes_per_s=[*self.throughputs, *seen],
            decode_s=self._costs.decode_s(),
            recompute_s=self._recompute_s(len(self.chosen)),
            compute_free_s=now_s + self._backlog_s(),
            tail_s=self._costs.tail_s(overlap_s=0.0),
            tail_decode_s=self._costs.segment_s(),
        )
        refines_until_s = policy.refines_until_s(state)
        self._ledger.refine_until(self.started_at + refines_until_s)
        estimate = state.estimate()
        may_turn = policy.adapts and self._holds_past is not None
        if now_s < refines_until_s or may_turn or estimate is None:
            return state
        # Nothing will change any more: the prompt's pass follows the last chunk's layers.
        overlap_s = estimate.median_s(min(self._sizes[-1]))
        return dataclasses.replace(state, tail_s=self._costs.tail_s(overlap_s))

    def state_during(
        self, policy: Policy, chunk: int, left_bytes: int, bytes_per_s: float
    ) -> StreamState:
        """What the policy may know for the same choice once more, while the chunk arrives.

        The chunk's sizes are what is left of it, and the link is as variable as it was, but around
        its present rate.
        """
        state = self.state(policy)
        sizes = list(state.sizes_bytes)
        sizes[chunk] = [left_bytes] * len(sizes[chunk])
        known = self.throughputs[-RECENT:]
        shift = bytes_per_s * RateEstimate.from_throughputs(known).median_s(1) if known else 1.0
        return dataclasses.replace(
            state,
            sizes_bytes=sizes,
            chosen=state.chosen[:chunk],
            recompute_s=self._recompute_s(chunk),
            throughputs_bytes_per_s=[*(rate * shift for rate in known), bytes_per_s],
        )

    def begin(self, chunk: int, level: int, wanted: Refinement | None) -> StreamStep:
        """A step that begins now, a refinement or not, with what is expected of it.

        Raises
        ------
        UnsupportedError
            The chunk cannot be recomputed, and is to be.
        """
        step = StreamStep(chunk, level, self._elapsed_s(), refinement=wanted is not None)
        self.chosen[chunk : chunk + 1] = [level]
        if level == TEXT:
            if not self.can_recompute(chunk):
                raise UnsupportedError(
                    f"the policy chose to recompute chunk {chunk}, which this model cannot do from "
                    "what the cache holds of the tokens before it; choose a level"
                )
            known = self._costs.recompute_s()
            step.predicted_recompute_s = known[chunk] if known else None
            self._last_text = chunk
            return step
        if self.throughputs:
            estimate = RateEstimate.from_throughputs(self.throughputs)
            size = self._sizes[chunk][level] if wanted is None else wanted.size_bytes
            step.predicted_transfer_s = estimate.median_s(size)
        step.predicted_decode_s = self._costs.decode_s()[chunk][level] or None
        return step

    def can_recompute(self, chunk: int) -> bool:
        """Whether the next chunk can be computed from its token ids."""
        if self._holds_past is None:
            return False
        return self._holds_past[chunk] or self._last_text == chunk - 1

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    def _backlog_s(self) -> float:
        """Seconds of decoding and recomputing that are begun or queued."""
        seconds = self._costs.decode_s()
        decode_s = sum(
            seconds[chunk][level] * self._ledger.share_in_flight(chunk)
            for chunk, level in enumerate(self.chosen)
            if level != TEXT
        )
        return decode_s + PASS_MARGIN * self._ledger.recompute_backlog_s()

    def _recompute_s(self, next_chunk: int) -> list[float]:
        """Seconds to recompute each chunk, infinite where it cannot be; empty if none can."""
        seconds = self._costs.recompute_s()
        if seconds is None or self._holds_past is None:
            return []
        possible = False
        for chunk in range(len(seconds)):
            # A chunk that is still to be chosen may follow another such chunk.
            follows = possible and chunk > next_chunk
            possible = self.can_recompute(chunk) or follows
            seconds[chunk] = PASS_MARGIN * seconds[chunk] if possible else math.inf
        return seconds
