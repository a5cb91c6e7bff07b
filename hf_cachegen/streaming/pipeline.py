"""Do what a policy decides: fetch in one thread, decode in others, recompute where it is asked for.

A transfer cuts the arriving bytes into segments and hands each to the decoders as soon as it is
complete and its checksum holds. Whoever needs a layer waits for that layer only, so a model's first
layers compute while its last ones are still being decoded. A chunk that is chosen as text is
recomputed by whoever waits, in that thread: a model belongs to its user, who may have hooked it,
moved it or cast it, and a pass that nobody waits for could outlive the model. No choice is for
good: a chunk that comes too slowly is given up for a coarser level or its text, and chunks that
still wait to be recomputed are fetched from the last one on, if the link turns out to be sooner.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from hf_cachegen.artifact.reader import Artifact
from hf_cachegen.errors import FormatError, StoreError, StoreUnreachable
from hf_cachegen.streaming.costs import StreamCosts
from hf_cachegen.streaming.decoding import DecodeSegment, DecodeSegments, SegmentDecoders
from hf_cachegen.streaming.ledger import Ledger
from hf_cachegen.streaming.meter import MIN_SAMPLE_BYTES, LinkCount, Meter, comes_late
from hf_cachegen.streaming.policy import TEXT, Policy
from hf_cachegen.streaming.rates import MachineRates
from hf_cachegen.streaming.receiving import Receiving
from hf_cachegen.streaming.situation import Situation
from hf_cachegen.streaming.steps import StepLog, StreamStep
from hf_cachegen.streaming.transfer import SegmentReader

logger = logging.getLogger(__name__)

MIN_SEGMENTS_IN_FLIGHT = 8

CHUNKS_TOGETHER = 4
"""Chunks' worth of segments that may wait in memory for decoders that take several at once: of a
codec with a segment a layer, a decoder finds as many of one layer."""

RECONSIDER_S = 0.5
"""How often a policy is asked again about a chunk of which nothing arrives."""

RECONSIDER_FILL_S = 0.05
"""The same of one that was to be recomputed: the processor may wait for it."""

REQUESTS_AHEAD = 5
"""How many chunks may be asked for while another one arrives, where answers take their time: more
connections than that, with its own, no browser opens to a server either."""

LATENCIES = 4.0
"""A link stands still if it is silent for so many times as long as the server's latest answers."""

PrepareLevel = Callable[[int, Meter], None]
"""Called with a level before its first segment is fetched: gets what decoding it needs besides. The
meter, which expects the segments, is to expect that, too, and to be told as it arrives."""

RecomputeChunk = Callable[[int], Iterator[None]]
"""Called with a chunk whose predecessors are in place. Each step of the iterator is a piece of
work; the chunk is in place when there is none left."""


class ChunkStream:
    """Streams an artefact's states, if it has any, and then its chunks into place.

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
    prepare
        Fetches what decoding a level needs besides, as long as it is not at hand.
    besides_bytes
        Says how much that is, None if it is not known.
    decode_many
        Decodes segments of one level and layer; None if that is not faster than one by one.
    recompute
        Computes a chunk from its token ids; None if that cannot be done. If it can, and the policy
        adapts, neither a link that is gone is the end nor a chunk that is missing or damaged.
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
        prepare: PrepareLevel = lambda level, meter: None,
        besides_bytes: Callable[[int], int | None] = lambda level: 0,
        decode_many: DecodeSegments | None = None,
        recompute: RecomputeChunk | None = None,
        holds_past: Sequence[bool] | None = None,
        rates: MachineRates | None = None,
        workers: int | None = None,
        started_at: float | None = None,
    ) -> None:
        manifest = artifact.manifest
        self.artifact = artifact
        workers = workers or os.cpu_count() or 1
        self.costs = StreamCosts(
            manifest, rates or MachineRates(), artifact.store.location, workers
        )
        self._policy = policy
        self._refines = type(policy).refine is not Policy.refine
        self._layers = layers
        self._prepare = prepare
        self._recompute = recompute
        self._link_gone = False
        self._states: Future[bytes] = Future()
        self._steps = StepLog()
        self._reader = SegmentReader(artifact, keep=self._refines)
        self._ahead: deque[_Transfer | None] = deque()  # of the next chunks that are chosen
        self._touched: set[int] = set()  # chunks of which a segment was handed over
        self._link = LinkCount()
        self._latency_s = math.inf  # of the fastest answer: others had to share the link
        self._ledger = Ledger(
            layers,
            # Half a chunk's worth, for which a slow decoder holds up the link. More would show
            # beside the cache itself at levels that are hardly smaller than it, on the CPU.
            room=max(
                manifest.n_layers * CHUNKS_TOGETHER if decode_many else manifest.n_layers // 2,
                MIN_SEGMENTS_IN_FLIGHT,
            ),
            may_turn=policy.adapts and recompute is not None,
        )
        holds_past = [True] * len(layers) if holds_past is None else holds_past
        self._now = Situation(
            manifest,
            self.costs,
            self._ledger,
            None if recompute is None else holds_past,
            time.monotonic() if started_at is None else started_at,
            besides_bytes,
        )
        self._decoders = SegmentDecoders(
            decode,
            decode_many,
            workers,
            ledger=self._ledger,
            steps=self._steps,
            costs=self.costs,
            located=self._reader.located,
        )
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

    def wait_states(self) -> bytes:
        """Wait for the file of the context's states; the same every time until it is released.

        Raises
        ------
        StoreError, FormatError
            It cannot be read, or is damaged.
        """
        return self._states.result()

    def release_states(self) -> None:
        """Forget the file of the states, which nobody will wait for any more."""
        self._states = Future()

    def wait_transfers(self) -> None:
        """Return once everything is fetched, or the stream has ended before that."""
        self._ledger.wait_fetched()

    def report(self) -> list[StreamStep]:
        """The steps so far, in the order of the policy's choices."""
        return self._steps.report()

    def sources(self) -> list[str]:
        """By chunk, where its values come from; see :meth:`StepLog.sources`."""
        return self._steps.sources(self.artifact.manifest.levels, len(self._layers))

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
            self._decoders.end(wait=True)  # what is queued is not decoded any more

    def _run(self) -> None:
        try:
            if self.artifact.manifest.states is not None:
                self._fetch_states()
            for chunk in range(len(self._layers)):
                self._take(chunk)
                if self._ledger.ended:
                    return
            self._fill_from_the_back()
            self._ledger.end_base()
            self._refine()
        except Exception as error:
            self._ledger.fail(error)
        finally:
            for transfer in filter(None, self._ahead):
                transfer.close()
            self._reader.forget()
            self._decoders.end(wait=False)
            self._ledger.end_fetching()

    def _fetch_states(self) -> None:
        """Fetch the states first: any layer may need its own before anything else."""
        meter = Meter()
        try:
            data = self.artifact.read_states()
        except BaseException as error:
            self._states.set_exception(error)
            raise
        meter.received(len(data))
        if meter.size_bytes >= MIN_SAMPLE_BYTES:
            self._note_rates(self._rates_of(meter))
        self._states.set_result(data)

    def _take(self, chunk: int) -> None:
        """Have a chunk brought, or else recomputed."""
        transfer = self._ahead.popleft() if self._ahead else self._ask(chunk)
        while transfer is not None:
            if self._arrives(transfer) or self._ledger.ended:
                return
            transfer = self._turn(transfer)
        self._reader.forget(chunk)
        self._ledger.queue_recompute(self._begin(chunk, TEXT))

    def _ask(
        self, chunk: int, link_free_in_s: float = 0.0, seen: Sequence[float] = ()
    ) -> _Transfer | None:
        """Choose what to do about the next chunk, and ask for it unless it is chosen as text."""
        if self._link_gone:
            return None
        link_free_in_s += self._link.standstill_s
        level = self._policy.choose(self._now.state(self._policy, link_free_in_s, seen))
        if level == TEXT:
            return None
        step = self._begin(chunk, level, self._now.read_bytes(chunk)[level])
        return self._transfer(step, self.artifact.manifest.read_bytes(chunk)[level])

    def _turn(self, transfer: _Transfer) -> _Transfer | None:
        """Ask for a chunk that was given up at the level that is preferred; None if it is text."""
        chunk, level = transfer.step.chunk, transfer.instead
        if level == TEXT:
            return None
        layers = self._layers_instead(transfer, level)
        assert layers is not None  # else there would be nothing to gain
        if len(layers) > len(transfer.layers):
            self._ledger.take_back(chunk)
        return self._ask_for(chunk, level, layers)

    def _ask_for(
        self, chunk: int, level: int, layers: Sequence[int], *, fills: bool = False
    ) -> _Transfer:
        """Ask for what is missing of some layers of a chunk at a level."""
        size_bytes = self._reader.missing_bytes(chunk, level, layers)
        step = self._begin(chunk, level, size_bytes)
        return self._transfer(step, size_bytes, layers=layers, fills=fills)

    def _layers_instead(self, transfer: _Transfer, level: int) -> Sequence[int] | None:
        """Of which layers a chunk's segments are needed if it goes on at another level.

        Within a codec, those that were handed over keep what they have. Another one may have layers
        together that this one has apart: it needs all, which cannot be where some may be in use.
        """
        levels, step = self.artifact.manifest.levels, transfer.step
        layers = self._layers[step.chunk]
        if levels[level].codec == levels[step.level].codec or len(layers) == len(transfer.layers):
            return transfer.layers
        return None if self._recompute is None else layers

    def _fill_from_the_back(self) -> None:
        """Fetch what waits to be recomputed, last chunk first, while the processor is busy.

        Not what was given up before: decoders may still be writing some layers of it.
        """
        if not self._policy.adapts:
            return
        while not self._link_gone and (text := self._ledger.withdraw_recompute()):
            chunk, level = text.chunk, None
            if chunk not in self._touched:
                still_s = self._link.standstill_s
                state = self._now.state_of(self._policy, chunk, still_s, last=True)
                level = self._policy.instead_of_text(state)
            if level is None:
                self._ledger.queue_recompute(text)
                return
            self._steps.remove(text)
            if not self._arrives(self._ask_for(chunk, level, self._layers[chunk], fills=True)):
                if not self._ledger.ended:
                    self._ledger.queue_recompute(self._begin(chunk, TEXT))
                return

    def _arrives(self, transfer: _Transfer) -> bool:
        """As :meth:`_fetch`. What cannot be had is given up, too, where it can be recomputed."""
        step = transfer.step
        try:
            return self._fetch(transfer)
        except (StoreError, FormatError) as error:
            may_turn = self._may_turn(step) and self._now.can_recompute(step.chunk)
            if self._ledger.ended or not may_turn:
                raise
            self._link_gone |= isinstance(error, StoreUnreachable)
            logger.warning("chunk %d is recomputed from its text: %s", step.chunk, error)
            return False

    def _refine(self) -> None:
        while not self._ledger.ended and not self._link_gone:
            ahead = self._ahead.popleft() if self._ahead else None
            transfer = ahead or self._ask_to_refine()
            if transfer is None or not self._improves(transfer):
                return

    def _ask_to_refine(
        self, link_free_in_s: float = 0.0, seen: Sequence[float] = (), busy: Collection[int] = ()
    ) -> _Transfer | None:
        """Choose what to refine and ask for it, unless it is nothing or a chunk that is arriving.

        What that one lacks will be known when it has come.
        """
        wanted = self._policy.refine(self._now.state(self._policy, link_free_in_s, seen))
        if wanted is None or wanted.chunk in busy:
            return None
        step = self._begin(wanted.chunk, wanted.level, wanted.size_bytes, refinement=True)
        return self._transfer(step, wanted.size_bytes, stop_s=wanted.stop_s)

    def _improves(self, transfer: _Transfer) -> bool:
        """Whether a refinement comes to its end; if not, there will be no more."""
        self._ledger.refine_until(self._now.started_at + transfer.stop_s)
        try:
            return self._ledger.await_refinable(transfer.step) and self._fetch(transfer)
        except (StoreError, FormatError):
            return False  # what is in place is good enough
        finally:
            transfer.close()

    def _begin(
        self, chunk: int, level: int, size_bytes: int = 0, *, refinement: bool = False
    ) -> StreamStep:
        return self._steps.add(self._now.begin(chunk, level, size_bytes, refinement=refinement))

    def _transfer(
        self,
        step: StreamStep,
        size_bytes: int,
        *,
        layers: Sequence[int] | None = None,
        fills: bool = False,
        stop_s: float = math.inf,
    ) -> _Transfer:
        """Ask for segments of a chunk: of all layers that need it unless some are named."""
        layers = self._layers[step.chunk] if layers is None else layers
        meter = Meter(size_bytes, LATENCIES * self.artifact.store.latency_s, self._link)
        often_s = RECONSIDER_FILL_S if fills else RECONSIDER_S
        pause_s = often_s if self._may_turn(step) else None
        segments = Receiving(self._read(step, layers, meter), pause_s)
        return _Transfer(step, meter, segments, list(layers), fills, stop_s)

    def _read(
        self, step: StreamStep, layers: Sequence[int], meter: Meter
    ) -> Generator[tuple[int, bytes], None, None]:
        size_bytes = meter.left_bytes
        self._prepare(step.level, meter)
        meter.restart(size_bytes)
        yield from self._reader.read(step.chunk, step.level, layers, meter)

    def _fetch(self, transfer: _Transfer) -> bool:
        """Hand a chunk's segments to the decoders; False if it was given up.

        A refinement is once it is late. Any other chunk is if the policy has come to prefer
        something else, seeing how fast it arrives, or that nothing does.
        """
        step, meter, arrived = transfer.step, transfer.meter, False
        meter.take_turn()
        step.started_s = self._now.elapsed_s()
        if transfer.segments.is_full:
            self._hold_up(meter)
        try:
            self._ask_ahead(transfer)
            for segment in transfer.segments:
                if segment is not None:
                    if not self._ledger.has_room:
                        self._hold_up(meter)
                    if not self._ledger.admit(step, segment[1]):
                        return False
                    self._touched.add(step.chunk)
                    transfer.layers.remove(segment[0])
                    # Before anyone can see the chunk in place: segments may be empty.
                    if not transfer.layers or not meter.left_bytes:
                        self._steps.note_transfer(step, meter.size_bytes, meter.seconds)
                        self._steps.finish(step)
                    self._decoders.put(step, *segment)
                preferred = self._preferred(transfer)
                if preferred is not None:
                    transfer.instead = preferred
                    return False
                self._ask_ahead(transfer)
            arrived = True
        finally:
            transfer.close()
            self._steps.note_transfer(step, meter.size_bytes, meter.seconds)
            # Of a chunk that was given up, the first part may have come over a better link.
            recent = meter.recent_bytes_per_s()
            self._note_rates(self._rates_of(meter) if arrived else [recent] if recent else [])
            if not arrived and recent == 0:
                self._link.note_standstill()
        self._steps.finish(step)
        self._ledger.handed_over(step.chunk)
        if not self._refines:
            self._reader.forget(step.chunk)
        return True

    def _ask_ahead(self, transfer: _Transfer) -> None:
        """Ask for what comes next so early that the link is never idle for want of a request.

        That is as soon as all that was asked for will have come when an answer could; the next
        occasion to ask comes with the next of the transfer's segments.
        """
        step, meter = transfer.step, transfer.meter
        if transfer.fills or not transfer.layers:
            return
        self._latency_s = min(
            self._latency_s,
            self.artifact.store.latency_s if meter.latency_s is None else meter.latency_s,
        )
        seen = self._rates_of(meter)
        rates = [*self._now.throughputs, *seen]
        if not rates:
            return
        needs_index = not step.refinement and not self._reader.brings_index(step.level)
        answer_s = self._latency_s * (2 if needs_index else 1)
        next_s = meter.left_bytes / rates[-1] / len(transfer.layers)
        while len(self._ahead) < REQUESTS_AHEAD and None not in self._ahead:
            asked = [transfer, *filter(None, self._ahead)]
            coming_s = sum(other.meter.left_bytes for other in asked) / rates[-1]
            chunk = step.chunk + len(asked)
            if coming_s - next_s > answer_s or (not step.refinement and chunk == len(self._layers)):
                return
            if step.refinement:
                ahead = self._ask_to_refine(coming_s, seen, {other.step.chunk for other in asked})
                if ahead is None:
                    return
            else:
                ahead = self._ask(chunk, coming_s, seen)
            self._ahead.append(ahead)
            if meter.is_held_up:
                self._hold_up(meter)

    def _hold_up(self, meter: Meter) -> None:
        """Decoders hold up a transfer, and so those that were asked for ahead."""
        for held in (meter, *(transfer.meter for transfer in self._ahead if transfer)):
            held.hold_up()

    def _may_turn(self, step: StreamStep) -> bool:
        """Whether a chunk that is on its way may be given up for something else."""
        return self._policy.adapts and not step.refinement

    def _preferred(self, transfer: _Transfer) -> int | None:
        """What the policy would now rather do about a chunk than receive the rest of it, if it is.

        It is not asked about one that comes about as fast as was expected.
        """
        step, meter, left_bytes = transfer.step, transfer.meter, transfer.meter.left_bytes
        if not self._may_turn(step) or not left_bytes:
            return None
        if transfer.fills:
            return self._preferred_to_fill(transfer)
        rate = meter.recent_bytes_per_s()
        if rate is None:
            return None
        # A link that stands still may do so for as long again: nobody knows more of it.
        left_s = left_bytes / rate if rate else meter.waited_s
        if not comes_late(meter.waited_s, left_s, step.predicted_transfer_s or 0.0):
            return None
        state, left = self._now.state_of(self._policy, step.chunk), self._left_bytes(transfer)
        instead = self._policy.reconsider(
            state.while_arriving(left, left_bytes / left_s), step.level
        )
        # Of a coarser level, such a link brings nothing either.
        brings = bool(rate) or instead is None or instead == TEXT or not left[instead]
        return instead if brings else None

    def _preferred_to_fill(self, transfer: _Transfer) -> int | None:
        """The same of a chunk that was to be recomputed: text, once the processor waits for it.

        It does not wait until it is certain how fast the link is.
        """
        step, meter = transfer.step, transfer.meter
        if not self._ledger.awaits(step.chunk):
            return None
        recent = meter.recent_bytes_per_s()
        rates = [*self._now.throughputs, *self._rates_of(meter)] if recent is None else [recent]
        if not rates or not rates[-1]:
            return TEXT
        silent_s = meter.waited_s if meter.latency_s is None else 0.0
        state = self._now.state_of(self._policy, step.chunk, silent_s, last=True)
        state = dataclasses.replace(state, compute_free_s=state.elapsed_s - silent_s)
        state = state.while_arriving(self._left_bytes(transfer), rates[-1])
        return TEXT if self._policy.instead_of_text(state) is None else None

    def _left_bytes(self, transfer: _Transfer) -> list[int]:
        """What would have to be fetched of a chunk, by level, instead of the rest of it."""
        step, levels = transfer.step, self.artifact.manifest.levels
        own_bytes = transfer.meter.left_bytes  # its parts of segments counted
        missing = [self._missing_bytes(transfer, level) for level in range(len(levels))]
        table_bytes = max(own_bytes - (missing[step.level] or 0), 0)
        left = []
        for level, n_bytes in zip(levels, missing, strict=True):
            besides = table_bytes if level.codec == levels[step.level].codec else 0
            left.append(own_bytes if n_bytes is None else n_bytes + besides)
        left[step.level] = own_bytes
        return left

    def _missing_bytes(self, transfer: _Transfer, level: int) -> int | None:
        layers = self._layers_instead(transfer, level)
        if layers is None:
            return None
        return self._reader.missing_bytes(transfer.step.chunk, level, layers)

    def _rates_of(self, meter: Meter) -> list[float]:
        """What a transfer tells of the link: at most one rate.

        Where latency takes most of the time, it is too low, and better than none.
        """
        rate = meter.bytes_per_s()
        tells = meter.outweighs_latency or not self._now.throughputs
        return [rate] if rate and tells else []

    def _note_rates(self, bytes_per_s: Sequence[float]) -> None:
        for rate in bytes_per_s:
            self._now.throughputs.append(rate)
            self.costs.note_transfer(rate)

    def _recompute_step(self, step: StreamStep) -> bool:
        assert self._recompute is not None
        started = time.monotonic()
        step.started_s = self._now.elapsed_s()
        for _ in self._recompute(step.chunk):
            if self._ledger.ended:
                return False
        seconds = time.monotonic() - started
        self.costs.note_recompute(step.chunk, seconds)
        step.recompute_s = seconds
        self._steps.finish(step)
        return True


@dataclass
class _Transfer:
    """A step that brings a chunk's segments.

    Attributes
    ----------
    segments
        (layer, bytes), as they arrive.
    layers
        Those whose segments were not handed over yet.
    fills
        Whether the chunk was to be recomputed, and still is if it does not come sooner.
    stop_s
        When a refinement is to be given up, in seconds since the stream began.
    instead
        What is to be done if it is given up: a coarser level, or text.
    """

    step: StreamStep
    meter: Meter
    segments: Receiving[tuple[int, bytes]]
    layers: list[int]
    fills: bool
    stop_s: float
    instead: int = TEXT

    def close(self) -> None:
        """End it; what has not arrived is not wanted."""
        self.meter.give_up()
        self.segments.close()
