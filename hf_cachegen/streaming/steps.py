"""What a stream did, step by step, beside what it expected of each."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from hf_cachegen.artifact.manifest import EXACT, LevelRecord
from hf_cachegen.streaming.policy import TEXT


@dataclass
class StreamStep:
    """One decision of a policy and what came of it.

    Seconds are None where a step has no such part, predictions also where nothing was known yet.

    Attributes
    ----------
    chunk, level
        What was chosen: the index of a level, or :data:`~hf_cachegen.streaming.policy.TEXT`.
    started_s
        When the transfer's turn came or the recomputation began, in seconds since the stream did.
        A transfer may have been asked for before that, and some of it be here.
    refinement
        Whether the chunk was there already, at a coarser level.
    finished
        Whether the chunk has this level now. A transfer may have been given up in between, and
        then some layers may have it.
    dropped_segments
        Segments that had arrived and were not decoded, since it was too late for them.
    size_bytes
        What travelled for it, the chunk's index not counted.
    transfer_s
        From then to the last byte, waits for a slow decoder included.
    decode_s
        Time of the decoding threads, over their number: what the chunk adds to a busy machine.
    recompute_s
        Time that the model ran.
    """

    chunk: int
    level: int
    started_s: float
    refinement: bool = False
    finished: bool = False
    dropped_segments: int = 0
    size_bytes: int = 0
    transfer_s: float | None = None
    decode_s: float | None = None
    recompute_s: float | None = None
    predicted_transfer_s: float | None = None
    predicted_decode_s: float | None = None
    predicted_recompute_s: float | None = None


class StepLog:
    """The steps of a stream, in the order of their choices. Any thread may call any method."""

    def __init__(self) -> None:
        self._steps: list[StreamStep] = []
        self._lock = threading.Lock()

    def add(self, step: StreamStep) -> StreamStep:
        """Record a step that begins now."""
        with self._lock:
            self._steps.append(step)
        return step

    def remove(self, step: StreamStep) -> None:
        """Forget a step that has not begun and will not."""
        with self._lock:
            self._steps = [other for other in self._steps if other is not step]

    def note_transfer(self, step: StreamStep, size_bytes: int, seconds: float) -> None:
        """Record what has travelled so far."""
        with self._lock:
            step.size_bytes, step.transfer_s = size_bytes, seconds

    def note_decoded(self, step: StreamStep, seconds: float) -> None:
        """Record a part of the time that decoding took."""
        with self._lock:
            step.decode_s = (step.decode_s or 0.0) + seconds

    def note_dropped(self, step: StreamStep) -> None:
        """Record that a segment had come too late to be decoded."""
        with self._lock:
            step.dropped_segments += 1
            step.finished = False

    def finish(self, step: StreamStep) -> None:
        """Record that the chunk has the step's level, unless a segment was dropped."""
        with self._lock:
            step.finished = not step.dropped_segments

    def report(self) -> list[StreamStep]:
        """What is recorded so far."""
        with self._lock:
            return [dataclasses.replace(step) for step in self._steps]

    def sources(self, levels: Sequence[LevelRecord], n_chunks: int) -> list[str]:
        """By chunk, the name of the lossy level that its values come from, or ``"exact"``.

        What was recomputed is as good as the chunks before it. A refinement counts once all layers
        have it. What has not arrived yet counts as exact.
        """
        sources = [EXACT] * n_chunks
        # Whatever is written over, or read for a recomputation, was finished before that.
        for step in self.report():
            if step.finished and step.level == TEXT:
                before = [source for source in sources[: step.chunk] if source != EXACT]
                sources[step.chunk] = before[0] if before else EXACT
            elif step.finished:
                level = levels[step.level]
                sources[step.chunk] = EXACT if level.exact else level.name
        return sources
