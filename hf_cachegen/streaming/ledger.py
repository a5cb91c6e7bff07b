"""What of a context is in place, what is being written, and who may do what next."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hf_cachegen.errors import FormatError, StoreError
from hf_cachegen.streaming.steps import StreamStep


class Ledger:
    """The state that a stream's threads share. Every method may be called from any thread.

    A chunk is *in place* when each layer that needs it has its values. Chunks are written by
    decoders, and by whoever waits for a layer, who recomputes what was chosen as text: in the order
    of the choices, once everything before the chunk is in place. Refinements write over chunks that
    are in place, and never while a recomputation may read them. They end when the policy has come
    to an end or the time they were given has passed, whichever is first, and then the context is
    ready for use: what is still queued for the decoders is not of use any more.

    Parameters
    ----------
    layers
        Per chunk, the layers that need it.
    room
        Encoded segments in memory at most: for more, the link has to wait.
    may_turn
        Whether a chunk that is on its way may still be given up and recomputed. Then no layer is
        ready for use before every chunk has been handed over: what was used could not be taken
        back, and the recomputation reads all layers of the chunks before.
    """

    def __init__(
        self, layers: Sequence[Sequence[int]], *, room: int, may_turn: bool = False
    ) -> None:
        self._layers = layers
        self._missing = [set(chunk) for chunk in layers]
        self._handed_over = [False] * len(layers)
        self._segments = [0] * len(layers)  # of each chunk, on their way through the decoders
        self._in_memory = 0  # of them, those that have bytes
        self._refining_segments = 0
        self._recomputes: deque[StreamStep] = deque()
        self._recomputing_since: float | None = None
        self._waiting = 0  # for a layer
        self._room = room
        self._may_turn = may_turn
        self._settled = False
        self._stop_at = math.inf
        self._has_base = False
        self._fetching = True
        self._closed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()

    @property
    def ended(self) -> bool:
        """Whether the stream was closed or has failed."""
        return self._closed or self._error is not None

    @property
    def has_room(self) -> bool:
        """Whether another segment may be handed over at once."""
        return self._in_memory < self._room

    def is_wanted(self, step: StreamStep) -> bool:
        """Whether more of what a step brings is of use: to fetch it, or to decode it."""
        return not self.ended and not (step.refinement and not self._may_refine())

    def share_to_decode(self, chunk: int) -> float:
        """Share of a chunk's layers whose segments are to be decoded, whether they are here or not.

        Of a chunk that is refined, those that are here.
        """
        to_decode = len(self._missing[chunk]) or self._segments[chunk]
        return to_decode / max(len(self._layers[chunk]), 1)

    def recompute_backlog_s(self) -> float:
        """Predicted seconds of the recomputations that are queued and not yet done."""
        with self._changed:
            queued_s = sum(step.predicted_recompute_s or 0.0 for step in self._recomputes)
            since = self._recomputing_since
            return max(queued_s - (time.monotonic() - since if since else 0.0), 0.0)

    # What the fetcher calls.

    def admit(self, step: StreamStep, data: bytes) -> bool:
        """Wait for room for a segment and count it; False if it is not wanted any more."""
        with self._changed:
            self._wait(lambda: self.has_room or not self.is_wanted(step))
            if not self.is_wanted(step):
                return False
            self._segments[step.chunk] += 1
            self._in_memory += bool(data)
            self._refining_segments += step.refinement
            return True

    def take_back(self, chunk: int) -> None:
        """Have all layers of a chunk written once more that nobody has read.

        Waits until what was admitted of it is through.
        """
        with self._changed:
            self._wait(lambda: not self._segments[chunk] or self.ended)
            self._missing[chunk].update(self._layers[chunk])

    def handed_over(self, chunk: int) -> None:
        """All segments of a chunk were admitted."""
        with self._changed:
            self._handed_over[chunk] = True
            self._check_whole(chunk)

    def queue_recompute(self, step: StreamStep) -> None:
        """Have a chunk recomputed by whoever waits."""
        with self._changed:
            self._recomputes.append(step)
            self._changed.notify_all()

    def withdraw_recompute(self) -> StreamStep | None:
        """Take back the last recomputation that is queued; None if all are begun."""
        with self._changed:
            n_begun = self._recomputing_since is not None
            return self._recomputes.pop() if len(self._recomputes) > n_begun else None

    def awaits(self, chunk: int) -> bool:
        """Whether nothing keeps whoever waits from recomputing a chunk, if that were queued."""
        with self._changed:
            return self._waiting > 0 and not self._recomputes and not any(self._missing[:chunk])

    def refine_until(self, stop_at: float) -> None:
        """Give refinements up at a time of :func:`time.monotonic`, and do not wait for any then."""
        with self._changed:
            self._stop_at = stop_at
            self._changed.notify_all()

    def end_base(self) -> None:
        """What comes from now on are refinements."""
        with self._changed:
            self._has_base = True
            self._changed.notify_all()

    def await_refinable(self, step: StreamStep) -> bool:
        """Wait until a chunk may be written over; False if that is not wanted any more."""
        with self._changed:
            self._wait(lambda: self._is_still(step.chunk) or not self.is_wanted(step))
            return self.is_wanted(step)

    def end_fetching(self) -> None:
        """Nothing more will be admitted or queued."""
        with self._changed:
            self._fetching = False
            self._changed.notify_all()

    # What decoders call.

    def decoded(self, step: StreamStep, data: bytes, layers: Sequence[int]) -> None:
        """A segment is through: decoded for ``layers``, or dropped, as the stream has ended."""
        with self._changed:
            self._segments[step.chunk] -= 1
            self._in_memory -= bool(data)
            self._refining_segments -= step.refinement
            if not step.refinement:
                self._missing[step.chunk].difference_update(layers)
                self._check_whole(step.chunk)
            self._changed.notify_all()

    def fail_decoding(self, step: StreamStep, error: Exception) -> None:
        """End the stream, as a segment cannot be decoded.

        A refinement may have written over a part of what was in place of its chunk by then.
        """
        with self._changed:
            if step.refinement:
                self._missing[step.chunk].update(self._layers[step.chunk])
            self.fail(error)

    # What the user of the context calls.

    def wait_layer(self, layer: int, recompute: Callable[[StreamStep], bool]) -> None:
        """Return once a layer is ready for use; recompute chunks meanwhile.

        Parameters
        ----------
        layer
            The layer.
        recompute
            Computes a step's chunk; returns whether it came to the end.

        Raises
        ------
        StoreError, FormatError
            What ended the stream before that.
        """
        while (step := self._next_recompute(layer)) is not None:
            done = False
            try:
                done = recompute(step)
            except BaseException as error:
                stop = StoreError("the recomputation of a chunk was interrupted")
                self.fail(error if isinstance(error, Exception) else stop)
                raise
            finally:
                self._end_recompute(done)

    def wait_fetched(self) -> None:
        """Return once nothing more is fetched that is of use, or the stream has ended."""
        with self._changed:
            self._wait(lambda: not self._fetching or (self._has_base and not self._may_refine()))

    # What anyone calls.

    def fail(self, error: Exception) -> None:
        """End the stream; the first reason counts."""
        with self._changed:
            if not self.ended:
                self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """End the stream. What is in place stays usable."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next_recompute(self, layer: int) -> StreamStep | None:
        """Wait for a recomputation to do, or, returning None, until the layer is ready."""
        with self._changed:
            self._waiting += 1
            try:
                self._wait(lambda: self._is_ready(layer) or self.ended or self._can_recompute())
            finally:
                self._waiting -= 1
            if self._is_ready(layer):
                self._settled = True  # whoever reads it must not see it change
                return None
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StoreError("the cache's stream was closed before this layer had arrived")
            self._recomputing_since = time.monotonic()
            return self._recomputes[0]

    def _end_recompute(self, done: bool) -> None:
        with self._changed:
            step = self._recomputes.popleft()
            if done:
                self._missing[step.chunk].clear()
            self._recomputing_since = None
            self._changed.notify_all()

    def _is_ready(self, layer: int) -> bool:
        written = self._refining_segments or self._recomputing_since is not None
        if written or any(layer in missing for missing in self._missing):
            return False
        may_turn = self._may_turn and not self._has_base
        may_change = self._recomputes or (self._fetching and (may_turn or self._may_refine()))
        return self.ended or not may_change

    def _can_recompute(self) -> bool:
        if self._recomputing_since is not None or not self._recomputes:
            return False
        chunk = self._recomputes[0].chunk
        return not any(self._missing[:chunk]) and not any(self._segments[: chunk + 1])

    def _is_still(self, chunk: int) -> bool:
        """Whether a chunk is in place and nobody writes it or may read it."""
        busy = self._missing[chunk] or self._segments[chunk]
        return not busy and all(step.chunk < chunk for step in self._recomputes)

    def _may_refine(self) -> bool:
        return not self._settled and time.monotonic() < self._stop_at

    def _check_whole(self, chunk: int) -> None:
        if self._handed_over[chunk] and not self._segments[chunk] and self._missing[chunk]:
            self.fail(
                FormatError(
                    f"chunk {chunk}: expected segments of all layers, found none that carries "
                    f"layers {sorted(self._missing[chunk])}"
                )
            )

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait for a change that makes something so; that refinements end counts as one."""
        while True:
            left_s = self._stop_at - time.monotonic()  # before asking, so that no end is missed
            if ready():
                return
            self._changed.wait(left_s if 0 < left_s < math.inf else None)
