"""What a policy may know of a stream, put together from where it is known."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from hf_cachegen.artifact.manifest import Manifest
from hf_cachegen.errors import UnsupportedError
from hf_cachegen.streaming.costs import PASS_MARGIN, StreamCosts
from hf_cachegen.streaming.estimate import RateEstimate
from hf_cachegen.streaming.ledger import Ledger
from hf_cachegen.streaming.policy import TEXT, Policy, StreamState
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
    besides_bytes
        Called with a level: what is to be fetched for it besides, once; None if that is not known.

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
        besides_bytes: Callable[[int], int | None],
    ) -> None:
        self.chosen: list[int] = []
        self.throughputs = costs.link_bytes_per_s()
        self.started_at = started_at
        self._sizes = [manifest.read_bytes(chunk) for chunk in range(len(manifest.chunks))]
        self._costs = costs
        self._ledger = ledger
        self._holds_past = holds_past
        self._besides_bytes = besides_bytes

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
        now_s = self.elapsed_s()
        state = StreamState(
            sizes_bytes=self._sizes_from(len(self.chosen)),
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

    def state_of(
        self, policy: Policy, chunk: int, link_free_in_s: float = 0.0, *, last: bool = False
    ) -> StreamState:
        """What the policy may know for another choice about a chunk; as if it were the last one."""
        state = self.state(policy, link_free_in_s)
        end = chunk + 1 if last else None
        return dataclasses.replace(
            state,
            sizes_bytes=state.sizes_bytes[:end],
            chosen=state.chosen[:chunk],
            decode_s=state.decode_s[:end],
            recompute_s=self._recompute_s(chunk)[:end],
        )

    def begin(
        self, chunk: int, level: int, size_bytes: int = 0, *, refinement: bool = False
    ) -> StreamStep:
        """A step that begins now and fetches so many bytes, with what is expected of it.

        Raises
        ------
        UnsupportedError
            The chunk cannot be recomputed, and is to be.
        """
        step = StreamStep(chunk, level, self.elapsed_s(), refinement=refinement)
        self.chosen[chunk : chunk + 1] = [level]
        if level == TEXT:
            if not self.can_recompute(chunk):
                raise UnsupportedError(
                    f"the policy chose to recompute chunk {chunk}, which this model cannot do from "
                    "what the cache holds of the tokens before it; choose a level"
                )
            known = self._costs.recompute_s()
            step.predicted_recompute_s = known[chunk] if known else None
            return step
        if self.throughputs:
            estimate = RateEstimate.from_throughputs(self.throughputs)
            step.predicted_transfer_s = estimate.median_s(size_bytes)
        step.predicted_decode_s = self._costs.decode_s()[chunk][level] or None
        return step

    def can_recompute(self, chunk: int) -> bool:
        """Whether a chunk can be computed from its token ids, after those that are chosen."""
        if self._holds_past is None:
            return False
        return self._holds_past[chunk] or self.chosen[chunk - 1 : chunk] == [TEXT]

    def read_bytes(self, chunk: int) -> tuple[int, ...]:
        """What is to be fetched for a chunk, by level, if it is the next one."""
        return tuple(
            n_bytes + (self._besides_bytes(level) or 0)
            for level, n_bytes in enumerate(self._sizes[chunk])
        )

    def elapsed_s(self) -> float:
        """Seconds since the stream began."""
        return time.monotonic() - self.started_at

    def _sizes_from(self, next_chunk: int) -> list[Sequence[int]]:
        sizes: list[Sequence[int]] = list(self._sizes)
        if next_chunk < len(sizes):
            sizes[next_chunk] = self.read_bytes(next_chunk)
        return sizes

    def _backlog_s(self) -> float:
        """Seconds of decoding and recomputing that are begun or queued."""
        seconds = self._costs.decode_s()
        decode_s = sum(
            seconds[chunk][level] * self._ledger.share_to_decode(chunk)
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
