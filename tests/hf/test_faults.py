"""Two hundred links that misbehave: each run ends, in the right answer or the right error."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hf_cachegen import CacheGenError, CompressedStreamingCache, FormatError, StoreError
from hf_cachegen.artifact import Artifact
from hf_cachegen.bench.link import (
    Busy,
    Fault,
    Gone,
    IgnoreRange,
    LinkServer,
    Reset,
    ShortBody,
    Stall,
    WrongByte,
    WrongRange,
)
from hf_cachegen.bench.loopback import Shaper
from hf_cachegen.stores import HttpStore, LocalStore
from hf_cachegen.streaming.policy import TEXT, Policy, Refinement

N_LINKS, BATCHES, N_KERNEL_LINKS = 200, 4, 20
TIMEOUT_S = 0.2
RETRIES = {True: 100, False: 3}
"""By whether a link can be made good: then a machine that stands still for seconds is no reason to
give it up. Where it cannot, every attempt is made."""

LONGEST_S = 60.0
"""More than all attempts of the reads that one run may have to make good, with their waits."""

SUFFIX = torch.tensor([[7, 9, 11]])
LOSSLESS, RAW = 4, 5


@dataclass(frozen=True)
class Scenario:
    """A link, what is done over it, and whether it can be made good.

    Attributes
    ----------
    opened
        Whether the token ids are there before anything else is asked for.
    """

    faults: tuple[Fault, ...]
    opened: bool
    levels: tuple[int, ...]
    refined: tuple[int, ...]
    passes: bool
    errors: tuple[type[CacheGenError], ...]


def scenarios(seed: int, count: int) -> Iterator[Scenario]:
    """Random ones; request 0 is for the manifest."""
    rng = random.Random(seed)
    for _ in range(count):
        opened = rng.random() < 0.5
        levels = tuple(rng.choice([0, 1, LOSSLESS, RAW, TEXT]) for _ in range(3))
        refined = tuple(rng.sample(range(3), rng.choice([0, 0, 1, 2])))
        if rng.random() < 0.8:
            faults = [_passing(rng) for _ in range(rng.choice([1, 2, 3]))]
            # What is damaged is asked for once more, and not a third time.
            damage = [fault for fault in faults if isinstance(fault, WrongByte)][1:]
            faults = [fault for fault in faults if fault not in damage]
            yield Scenario(tuple(faults), opened, levels, refined, True, ())
        else:
            fault, errors = _lasting(rng)
            yield Scenario((fault,), opened, levels, refined, False, errors)


def _passing(rng: random.Random) -> Fault:
    """Something that goes wrong once, which the reader has to make good."""
    request, at_byte = rng.randrange(1, 9), rng.randrange(0, 4000)
    return rng.choice(
        [
            Stall(request, at_byte, duration_s=rng.choice([0.05, 60.0])),
            Reset(request, at_byte),
            ShortBody(request, at_byte),
            WrongByte(request, at_byte),
            Busy(request, status=rng.choice([429, 503]), retry_after_s=rng.choice([None, 0])),
            IgnoreRange(request),
        ]
    )


def _lasting(rng: random.Random) -> tuple[Fault, tuple[type[CacheGenError], ...]]:
    """Something that stays wrong, and what it may be called."""
    at_byte = rng.randrange(0, 4000)
    return rng.choice(
        [
            (Gone(rng.randrange(0, 9), at_byte), (StoreError,)),
            (Stall(None, at_byte, duration_s=60.0), (StoreError,)),
            (Reset(None, at_byte), (StoreError,)),
            (ShortBody(None, at_byte), (StoreError,)),
            # Of the manifest, whose bytes have no checksum of their own, it may hit anything.
            (WrongByte(None, at_byte), (CacheGenError,)),
            (WrongByte(0, at_byte), (CacheGenError,)),
            (WrongRange(None), (StoreError, FormatError)),
            (Busy(None, status=503), (StoreError,)),
        ]
    )


def run(published: Any, policy: Policy, scenario: Scenario, shaper: Shaper) -> torch.Tensor:
    with LinkServer(published.folder, faults=scenario.faults, shaper=shaper) as server:
        store = HttpStore(server.url, timeout_s=TIMEOUT_S, retries=RETRIES[scenario.passes])
        try:
            artifact = Artifact.open(store, tokens=scenario.opened)
            cache = CompressedStreamingCache(artifact, published.model, policy)
            try:
                return published.forward(cache, SUFFIX)
            finally:
                cache.close()
        finally:
            store.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_links_that_misbehave(llama: Any, scripted: Any, threads_end: Any, batch: int) -> None:
    check_links(llama, scripted, threads_end, scenarios(batch, N_LINKS // BATCHES), Shaper.bucket)


@pytest.mark.usefixtures("kernel_links")
def test_links_of_the_kernel_that_misbehave(llama: Any, scripted: Any, threads_end: Any) -> None:
    """A few more, between two network namespaces: what is lost there is lost as on a real one."""
    check_links(llama, scripted, threads_end, scenarios(BATCHES, N_KERNEL_LINKS), Shaper.tc)


def check_links(
    llama: Any, scripted: Any, threads_end: Any, links: Iterable[Scenario], shaper: Shaper
) -> None:
    def policy(scenario: Scenario) -> Policy:
        refinements = [Refinement(chunk, RAW, 0, 60.0) for chunk in scenario.refined]
        # If one fails, what it has brought stays: the answer has to be the same with and without.
        refinements = [r for r in refinements if scenario.levels[r.chunk] == LOSSLESS]
        return scripted(scenario.levels, refinements)

    gc.collect()
    threads, open_before = set(threading.enumerate()), descriptors()
    answers = []
    for scenario in links:
        cache = CompressedStreamingCache(
            Artifact.open(LocalStore(llama.folder)), llama.model, policy(scenario)
        )
        expected = llama.forward(cache, SUFFIX)
        cache.close()
        started = time.monotonic()
        try:
            logits = run(llama, policy(scenario), scenario, shaper)
        except scenario.errors:
            assert not scenario.passes
            answers.append(False)
        else:
            answers.append(True)
            torch.testing.assert_close(logits, expected)
        assert time.monotonic() - started < LONGEST_S, scenario
        assert threads_end(), scenario
        assert set(threading.enumerate()) <= threads, scenario
    assert sum(answers) > len(answers) / 2
    gc.collect()
    assert descriptors() <= open_before
