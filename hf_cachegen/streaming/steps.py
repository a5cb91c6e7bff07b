"""What a stream did, step by step, beside what it expected of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StreamStep:
    """One decision of a policy and what came of it.

    Seconds are None where a step has no such part, predictions also where nothing was known yet.

    Attributes
    ----------
    chunk, level
        What was chosen: the index of a level, or :data:`~hf_cachegen.streaming.policy.TEXT`.
    started_s
        When the transfer or the recomputation began, in seconds since the stream did.
    refinement
        Whether the chunk was there already, at a coarser level.
    finished
        Whether the chunk has this level now. A refinement may have been given up in between, and
        then some layers may have it.
    dropped_segments
        Segments that had arrived and were not decoded, since it was too late for them.
    size_bytes
        What travelled for it, the chunk's index not counted.
    transfer_s
        From the request to the last byte, waits for a slow decoder included.
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
