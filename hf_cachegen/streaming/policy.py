"""What a streaming policy knows and what it can ask for.

No clock and no link in here: both are injected by whoever measures them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from hf_cachegen.streaming.estimate import RECENT, RateEstimate

TEXT = -1
"""The choice not to fetch a chunk but to recompute it from its token ids, which is lossless."""

MISS_BOUND = 0.02
"""Default of the accepted probability to miss a target."""

HOPELESS = 0.999
"""Probability to miss a target from which on it is given up, and all is done to be late by less.
Simulated, 0.98 misses up to a tenth more targets and 0.9999 saves less time."""


@dataclass(frozen=True)
class StreamState:
    """What is known when the link is free for the next request.

    Several streams that share a link need nothing more: each plans with the throughput that it
    measures, which is its share.

    Attributes
    ----------
    sizes_bytes
        Bytes of every chunk at every level: ``[chunk][level]``, levels coarse to fine.
    chosen
        Level or :data:`TEXT` of each chunk that was chosen already; the next one is
        ``len(chosen)``.
    elapsed_s
        When the link is free for the next request, in seconds since the stream began.
    throughputs_bytes_per_s
        Throughput of each transfer so far, oldest first.
    decode_s
        Seconds to decode every chunk at every level, shaped as ``sizes_bytes``; empty if they
        don't matter.
    recompute_s
        Seconds to recompute every chunk from text, infinite for a chunk that cannot be; empty if
        none can.
    compute_free_s
        When something new could begin to be decoded or recomputed, in seconds since the stream
        began: what is under way has ended then.
    tail_s
        Seconds from the last byte to the first token: decoding of what came last, and the prompt's
        own prefill.
    tail_decode_s
        The part of them that is decoding.
    """

    sizes_bytes: Sequence[Sequence[int]]
    chosen: Sequence[int]
    elapsed_s: float
    throughputs_bytes_per_s: Sequence[float] = ()
    decode_s: Sequence[Sequence[float]] = ()
    recompute_s: Sequence[float] = ()
    compute_free_s: float = 0.0
    tail_s: float = 0.0
    tail_decode_s: float = 0.0

    @property
    def next_chunk(self) -> int:
        """Index of the chunk to choose."""
        return len(self.chosen)

    def remaining_bytes(self, level: int) -> list[int]:
        """Bytes of each chunk that is still to be chosen, at one level."""
        return [sizes[level] for sizes in self.sizes_bytes[self.next_chunk :]]

    def remaining_decode_s(self, level: int, skip: int = 0) -> float:
        """Seconds to decode the chunks still to be chosen, but the first ``skip``."""
        return sum(seconds[level] for seconds in self.decode_s[self.next_chunk + skip :])

    def remaining_recompute_s(self) -> float:
        """Seconds to recompute every chunk still to be chosen from text."""
        return sum(self.recompute_s[self.next_chunk :])

    def smallest_level(self) -> int:
        """The level with the fewest remaining bytes."""
        return min(
            range(len(self.sizes_bytes[0])), key=lambda level: sum(self.remaining_bytes(level))
        )

    def smallest_remaining_bytes(self) -> list[int]:
        """Bytes of each chunk that is still to be chosen, at the smallest level."""
        return self.remaining_bytes(self.smallest_level())

    def ready_s(self, estimate: RateEstimate, level: int) -> float:
        """When all that remains is expected to be decoded, at one level.

        Transfers and decoding overlap, so the slower of the two counts.
        """
        arrived_s = self.elapsed_s + estimate.median_s(sum(self.remaining_bytes(level)))
        return max(arrived_s, self.compute_free_s + self.remaining_decode_s(level))

    def soonest_level(self, estimate: RateEstimate) -> int:
        """The level at which all that remains is expected first: the smallest on a slow link."""
        return min(
            range(len(self.sizes_bytes[0])),
            key=lambda level: (self.ready_s(estimate, level), sum(self.remaining_bytes(level))),
        )

    def estimate(self) -> RateEstimate | None:
        """The rates of transfers to come; None before any was measured."""
        known = self.throughputs_bytes_per_s
        return RateEstimate.from_throughputs(known) if known else None

    def while_arriving(self, left_bytes: Sequence[int], bytes_per_s: float) -> StreamState:
        """The same while the next chunk arrives.

        Parameters
        ----------
        left_bytes
            What would still have to be fetched of it, by level.
        bytes_per_s
            The link's present rate. It is taken to be as variable as it was, but around this.
        """
        sizes = list(self.sizes_bytes)
        sizes[self.next_chunk] = left_bytes
        known = self.throughputs_bytes_per_s[-RECENT:]
        shift = bytes_per_s * RateEstimate.from_throughputs(known).median_s(1) if known else 1.0
        return replace(
            self,
            sizes_bytes=sizes,
            throughputs_bytes_per_s=[*(rate * shift for rate in known), bytes_per_s],
        )

    def text_fits(self, deadline_s: float) -> bool:
        """Whether the next chunk can be recomputed, and the rest decoded at its smallest, by then.

        ``deadline_s`` counts from the start of the stream and is the context's, without the tail.
        """
        if not self.recompute_s:
            return False
        rest_s = self.remaining_decode_s(self.smallest_level(), skip=1)
        work_s = self.recompute_s[self.next_chunk] + rest_s
        return self.compute_free_s + work_s <= deadline_s

    def text_saves_time(self, deadline_s: float) -> bool:
        """Whether a deadline is hopeless, and recomputing the next chunk makes it late by less.

        A deadline that luck may yet meet is not given up for it.
        """
        estimate = self.estimate()
        if estimate is None:
            return False
        level = self.soonest_level(estimate)
        smallest = self.smallest_remaining_bytes()
        late = estimate.late_probability(smallest, deadline_s - self.elapsed_s)
        if self.compute_free_s + self.remaining_decode_s(level) > deadline_s:
            late = 1.0
        return late > HOPELESS and self.text_is_as_soon(estimate, level)

    def level_to_try(self, level: int) -> int | None:
        """``level`` if it may bring the next chunk sooner than its recomputation, else None.

        As long as the processor is busy with others, it may however slow the link was: whether a
        link has become fast is only known by who tries.
        """
        estimate = self.estimate()
        sooner = estimate is not None and not self.text_is_as_soon(estimate, level)
        return level if sooner or self.compute_free_s > self.elapsed_s else None

    def text_is_as_soon(self, estimate: RateEstimate, level: int) -> bool:
        """Whether all that remains is there as soon as at a level if the next chunk is recomputed.

        The link goes on with the chunks after it meanwhile, and has one less to bring.
        """
        if not self.recompute_s:
            return False
        arrived_s = self.elapsed_s + estimate.median_s(sum(self.remaining_bytes(level)[1:]))
        work_s = self.recompute_s[self.next_chunk] + self.remaining_decode_s(level, skip=1)
        ready_s = max(arrived_s, self.compute_free_s + work_s)
        return ready_s <= self.ready_s(estimate, level)


@dataclass(frozen=True)
class Refinement:
    """A finer level of a chunk that is there already.

    Attributes
    ----------
    chunk, level
        What to refine, and the level it then has: not :data:`TEXT`, which whoever waits for the
        context would have to wait for, too.
    size_bytes
        What has to be fetched for it.
    stop_s
        When to give the transfer up, in seconds since the stream began.
    """

    chunk: int
    level: int
    size_bytes: int
    stop_s: float


class Policy(ABC):
    """Chooses what to fetch: each chunk in order, then refinements.

    Attributes
    ----------
    adapts
        Whether choices depend on what anything costs, which then has to be measured.
    """

    adapts: ClassVar[bool] = True

    @abstractmethod
    def choose(self, state: StreamState) -> int:
        """Level of ``state.next_chunk``, or :data:`TEXT`.

        Of a chunk that arrives later than expected it is asked again, see :meth:`reconsider`.
        """

    def reconsider(self, state: StreamState, level: int) -> int | None:
        """What to do instead of fetching the rest of ``state.next_chunk`` at a level; None: go on.

        Text, or a coarser level of which there is less left; of levels of which there is as little
        left, the finest. The chunk's sizes are what would have to be fetched at each level from now
        on.
        """
        choice, left_bytes = self.choose(state), state.sizes_bytes[state.next_chunk]
        if choice == TEXT:
            return TEXT
        if choice >= level or left_bytes[choice] >= left_bytes[level]:
            return None
        return max(coarser for coarser in range(level) if left_bytes[coarser] <= left_bytes[choice])

    def instead_of_text(self, state: StreamState) -> int | None:
        """The level at which to fetch ``state.next_chunk``, which is to be text; None to leave it.

        Asked of the last chunk that waits to be recomputed, whenever the link has nothing else to
        do: text comes from the front while the stream fills from the back. ``state`` has no chunks
        after it. Once the processor waits for it, it is asked again, with what is left as its
        sizes: if the answer is then None, the rest is not fetched.
        """
        return None

    def refines_until_s(self, state: StreamState) -> float:
        """Until when there may be refinements, in seconds since the stream began.

        Before that, a context is not used until :meth:`refine` has come to an end; after that, each
        of its layers is used as soon as it is there. By default that is so from the start.
        """
        return 0.0

    def refine(self, state: StreamState) -> Refinement | None:
        """What to improve once every chunk is chosen; None ends the stream."""
        return None


@dataclass(frozen=True)
class TargetPolicy(Policy):
    """A policy that is to meet a time to first token.

    Attributes
    ----------
    target_s
        It, in seconds from the start of the stream.
    """

    target_s: float

    def deadline_s(self, state: StreamState) -> float:
        """When the context is to have arrived, in seconds since the stream began."""
        return self.target_s - state.tail_s

    def reconsider(self, state: StreamState, level: int) -> int | None:
        """As of any policy, once the target is at stake: as long as it isn't, a chunk goes on."""
        estimate = state.estimate()
        sizes = [state.sizes_bytes[state.next_chunk][level], *state.smallest_remaining_bytes()[1:]]
        left_s = self.deadline_s(state) - state.elapsed_s
        if estimate is not None and estimate.late_probability(sizes, left_s) <= MISS_BOUND:
            return None
        return super().reconsider(state, level)

    def instead_of_text(self, state: StreamState) -> int | None:
        if state.text_fits(self.deadline_s(state)):
            return None  # it is exact, and in time
        level = self.choose(state)
        return state.level_to_try(state.smallest_level() if level == TEXT else level)
