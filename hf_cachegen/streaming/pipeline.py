"""Do what a policy decides: fetch in one thread, decode in others, recompute where it is asked for.

A transfer cuts the arriving bytes into segments and hands each to the decoders as soon as it is
complete and its checksum holds. Whoever needs a layer waits for that layer only, so a model's first
layers compute while its last ones are still being decoded. A chunk that is chosen as text is
recomputed by whoever waits, in that thread: a model belongs to its user, who may have hooked it,
moved it or cast it, and a pass that nobody waits for could outlive the model.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from hf_cachegen.artifact.manifest import EXACT
from hf_cachegen.artifact.reader import Artifact
from hf_cachegen.errors import CacheGenError, FormatError, StoreError
from hf_cachegen.streaming.costs import StreamCosts
from hf_cachegen.streaming.ledger import Ledger
from hf_cachegen.streaming.policy import TEXT, Policy, Refinement
from hf_cachegen.streaming.rates import MachineRates
from hf_cachegen.streaming.situation import Situation
from hf_cachegen.streaming.steps import StreamStep
from hf_cachegen.streaming.transfer import Meter, SegmentReader

MIN_SEGMENTS_IN_FLIGHT = 8

RECONSIDER_S = 0.5
"""How long a chunk may take in any case before the policy is asked about it again."""

DecodeSegment = Callable[[int, int, int, bytes], Sequence[int]]
"""Called with (chunk, level, layer, data), from several threads; returns the layers that now have
all their values of this chunk."""

RecomputeChunk = Callable[[int], Iterator[None]]
"""Called with a chunk whose predecessors are in place. Each step of the iterator is a piece of
work; the chunk is in place when there is none left."""


class ChunkStream:
    """Streams an artefact's chunks into place.

    Parameters
    ----------
    artifact
        Where the chunks are. Its store is closed with the stream.
    policy
        Chooses what to do about each chunk.
    layers
        Per chunk, the layers that need it, ascending.
    decode
        Decodes one segment to where its values belong.
    recompute
        Computes a chunk from its token ids; None if that cannot be done.
    holds_past
        Per chunk, whether it can be recomputed from what the artefact holds of its predecessors.
        Any other can only follow a chunk that was recomputed just before. By default all can.
    rates
        What is known of this machine's speed, and is to learn from this stream.
    workers
        Decoding threads; by default one per CPU.
    started_at
        When the stream's time begins, as :func:`time.monotonic` counts; by default now.
    """

    def __init__(
        self,
        artifact: Artifact,
        policy: Policy,
        layers: Sequence[Sequence[int]],
        decode: DecodeSegment,
        *,
        recompute: RecomputeChunk | None = None,
        holds_past: Sequence[bool] | None = None,
        rates: MachineRates | None = None,
        workers: int | None = None,
        started_at: float | None = None,
    ) -> None:
        manifest = artifact.manifest
        self.artifact = artifact
        self._workers = workers or os.cpu_count() or 1
        self.costs = StreamCosts(
            manifest, rates or MachineRates(), artifact.store.location, self._workers
        )
        self._policy = policy
        self._layers = layers
        self._decode = decode
        self._recompute = recompute
        self._steps: list[StreamStep] = []
        self._sources = [EXACT] * len(layers)
        self._reader = SegmentReader(artifact, keep=_refines(policy))
        self._ledger = Ledger(
            layers,
            # Half a chunk's worth, for which a slow decoder holds up the link. More would show
            # beside the cache itself at levels that are hardly smaller than it.
            room=max(manifest.n_layers // 2, MIN_SEGMENTS_IN_FLIGHT),
        )
        holds_past = [True] * len(layers) if holds_past is None else holds_past
        self._now = Situation(
            manifest,
            self.costs,
            self._ledger,
            None if recompute is None else holds_past,
            time.monotonic() if started_at is None else started_at,
        )
        self._lock = threading.Lock()  # of the steps' seconds and the sources
        self._decoders = ThreadPoolExecutor(self._workers, thread_name_prefix="hf-cachegen-decode")
        self._fetcher = threading.Thread(target=self._run, name="hf-cachegen-fetch", daemon=True)
        self._fetcher.start()

    def wait_layer(self, layer: int) -> None:
        """Return once every chunk of a layer is in place; recompute meanwhile what is to be.

        Raises
        ------
        StoreError, FormatError
            What ended the stream before that.
        """
        self._ledger.wait_layer(layer, self._recompute_step)

    def wait_transfers(self) -> None:
        """Return once everything is fetched, or the stream has ended before that."""
        self._ledger.wait_fetched()

    def report(self) -> list[StreamStep]:
        """The steps so far, in the order of the policy's choices."""
        with self._lock:
            return [dataclasses.replace(step) for step in self._steps]

    def sources(self) -> list[str]:
        """By chunk, the name of the lossy level that its values come from, or ``"exact"``.

        What was recomputed is as good as the chunks before it.
        """
        with self._lock:
            return list(self._sources)

    def close(self, *, wait: bool = True) -> None:
        """End transfers and decoding.

        Parameters
        ----------
        wait
            Return when the threads have ended, which their own threads must not wait for.
        """
        self._ledger.close()
        self.artifact.store.close()
        if wait:
            self._fetcher.join()
            self._decoders.shutdown()  # what is queued is not decoded any more

    def _run(self) -> None:
        try:
            for chunk in range(len(self._layers)):
                level = self._policy.choose(self._now.state(self._policy))
                self._take(chunk, level)
                if self._ledger.ended:
                    return
            self._ledger.end_base()
            self._refine()
        except Exception as error:
            self._ledger.fail(error)
        finally:
            self._reader.forget()
            self._decoders.shutdown(wait=False)  # they end when nothing is left to decode
            self._ledger.end_fetching()

    def _take(self, chunk: int, level: int) -> None:
        if level != TEXT and not self._fetch(self._begin(chunk, level)):
            level = TEXT  # unless the stream has ended
        if level == TEXT and not self._ledger.ended:
            self._ledger.queue_recompute(self._begin(chunk, level))
        self._now.chosen.append(level)

    def _refine(self) -> None:
        while not self._ledger.ended:
            wanted = self._policy.refine(self._now.state(self._policy))
            if wanted is None or not self._improve(wanted):
                return

    def _improve(self, wanted: Refinement) -> bool:
        """Begin a refinement; False if there will be no more."""
        stop_at = self._now.started_at + wanted.stop_s
        self._ledger.refine_until(stop_at)
        step = self._begin(wanted.chunk, wanted.level, wanted)
        if wanted.level == TEXT:
            self._ledger.queue_recompute(step, stop_at - (step.predicted_recompute_s or 0.0))
        else:
            try:
                if not self._ledger.await_refinable(step) or not self._fetch(step):
                    return False
            except (StoreError, FormatError):
                return False  # what is in place is good enough
        self._now.chosen[wanted.chunk] = wanted.level
        return True

    def _begin(self, chunk: int, level: int, wanted: Refinement | None = None) -> StreamStep:
        step = self._now.begin(chunk, level, wanted)
        with self._lock:
            self._steps.append(step)
        return step

    def _fetch(self, step: StreamStep) -> bool:
        """Hand a chunk's segments to the decoders; False if it was given up.

        A refinement is once it is late. Any other chunk is if the policy has come to prefer its
        text, seeing how fast it arrives.
        """
        meter = Meter()
        segments = self._reader.read(step.chunk, step.level, self._layers[step.chunk], meter)
        try:
            for layer, data in segments:
                if not self._ledger.has_room:
                    meter.hold_up()
                if not self._ledger.admit(step, data):
                    return False
                self._decoders.submit(self._decode_segment, step, layer, data)
                if self._prefers_text(step, meter):
                    return False
        finally:
            segments.close()
            step.size_bytes, step.transfer_s = meter.size_bytes, meter.seconds
            self._note_rate(meter)
        self._finish(step)
        self._ledger.handed_over(step.chunk)
        return True

    def _prefers_text(self, step: StreamStep, meter: Meter) -> bool:
        """Whether the policy would now rather recompute a chunk that is late.

        It is not asked before the chunk has taken as long as was expected for all of it: the first
        bytes come after a latency, and tell little.
        """
        if step.refinement or not self._policy.adapts or self._recompute is None:
            return False
        rate = meter.bytes_per_s()
        if rate is None or meter.seconds < max(step.predicted_transfer_s or 0.0, RECONSIDER_S):
            return False
        now = self._now.state_during(self._policy, step, meter.size_bytes, rate)
        return min(now.sizes_bytes[step.chunk]) > 0 and self._policy.choose(now) == TEXT

    def _note_rate(self, meter: Meter) -> None:
        rate = meter.bytes_per_s()
        if rate is not None:
            self._now.throughputs.append(rate)
            self.costs.note_transfer(rate)

    def _decode_segment(self, step: StreamStep, layer: int, data: bytes) -> None:
        done: Sequence[int] = ()
        try:
            if not self._ledger.ended:
                started = time.perf_counter()
                done = self._decode(step.chunk, step.level, layer, data)
                self._note_decoded(step, done, time.perf_counter() - started)
        except CacheGenError as error:
            self._ledger.fail(self._reader.located(step.chunk, step.level, layer, error))
        except Exception as error:
            self._ledger.fail(error)
        finally:
            self._ledger.decoded(step, data, done)

    def _note_decoded(self, step: StreamStep, layers: Sequence[int], seconds: float) -> None:
        self.costs.note_decode(step.chunk, step.level, layers, seconds)
        with self._lock:
            step.decode_s = (step.decode_s or 0.0) + seconds / self._workers

    def _recompute_step(self, step: StreamStep) -> bool:
        assert self._recompute is not None
        started = time.monotonic()
        step.started_s = started - self._now.started_at
        for _ in self._recompute(step.chunk):
            if self._ledger.ended:
                return False
        seconds = time.monotonic() - started
        self.costs.note_recompute(step.chunk, seconds)
        step.recompute_s = seconds
        self._finish(step)
        return True

    def _finish(self, step: StreamStep) -> None:
        levels = self.artifact.manifest.levels
        with self._lock:
            step.finished = True
            if step.level == TEXT:
                before = [source for source in self._sources[: step.chunk] if source != EXACT]
                self._sources[step.chunk] = before[0] if before else EXACT
            else:
                exact = levels[step.level].exact
                self._sources[step.chunk] = EXACT if exact else levels[step.level].name


def _refines(policy: Policy) -> bool:
    """Whether a policy may ever ask for a refinement."""
    return type(policy).refine is not Policy.refine
