"""Streams over links that the kernel shapes: with real TCP, at rates that change, and cut."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cachegen import CompressedStreamingCache, StoreError, save_cache
from hf_cachegen.artifact import Artifact
from hf_cachegen.bench.link import LinkServer
from hf_cachegen.bench.loopback import Shaper
from hf_cachegen.hf.calibration import machine_rates
from hf_cachegen.hf.codecs import load_table
from hf_cachegen.hf.policies import resolve_policy
from hf_cachegen.stores import HttpStore
from hf_cachegen.streaming.controller import FixedLevel
from hf_cachegen.streaming.policy import TEXT
from hf_cachegen.streaming.rates import PrefillCost
from hf_cachegen.streaming.steps import StreamStep

pytestmark = pytest.mark.usefixtures("kernel_links")

SUFFIX = torch.tensor([[7, 9, 11]])
LOSSLESS = 4
SLOW, FAST = 5e4, 4e5
"""Bytes per second: a chunk of 100 tokens has 10 kB at the coarsest level, 66 kB without loss."""


def over_tc(folder: Path, **options: Any) -> LinkServer:
    return LinkServer(folder, shaper=Shaper.tc, **options)


def load(server: LinkServer, published: Any, **options: Any) -> CompressedStreamingCache:
    return CompressedStreamingCache.from_pretrained(server.url, model=published.model, **options)


def cut_amid_a_chunk(
    server: LinkServer, after_s: float = 0.05, back_after_s: float | None = None
) -> threading.Thread:
    """A thread that takes the link down soon after a chunk was asked for, and maybe up again."""

    def cut() -> None:
        deadline = time.monotonic() + 20
        while not any(request.path.startswith("chunks/") for request in server.requests):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(after_s)
        server.link.set_rate(0.0)
        if back_after_s is not None:
            time.sleep(back_after_s)
            server.link.set_rate(1e6)

    thread = threading.Thread(target=cut)
    thread.start()
    return thread


@pytest.mark.parametrize("level", ["delta-1", "lossless"])
def test_stream_is_that_from_a_folder(published: Any, level: str) -> None:
    local = published.load(level)
    local.wait()
    with over_tc(published.folder, rate_bytes_per_s=2.5e6) as server:
        cache = load(server, published, level=level)
        cache.wait()
    for ours, theirs in zip(cache.layers, local.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


@pytest.fixture(scope="module")
def long(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A context of eight chunks."""
    ids = torch.randint(3, 300, (800,), generator=torch.Generator().manual_seed(3))
    folder = tmp_path_factory.mktemp("published") / "long"
    save_cache(llama.model, None, ids, folder, chunk_tokens=100, progress=False)
    return dataclasses.replace(llama, ids=ids, folder=folder)


def levels_of_last_chunks(steps: Sequence[StreamStep]) -> int:
    return sum(step.level for step in steps[-3:])


def refined_bytes_since_the_change(steps: Sequence[StreamStep]) -> int:
    return sum(step.size_bytes for step in steps if step.refinement and step.started_s > 0.4)


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [("robust", levels_of_last_chunks), ("layered", refined_bytes_since_the_change)],
)
def test_policy_follows_a_rate_that_changes(
    long: Any,
    policy: str,
    chosen: Callable[[Sequence[StreamStep]], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of the stream: what is chosen from then on is little or much."""
    # A model this small recomputes in no time what a large one takes seconds for.
    monkeypatch.setattr("hf_cachegen.hf.incoming._recomputer", lambda *_: None)
    found = {}
    for name, rates in (("falls", (FAST, SLOW)), ("rises", (SLOW, FAST))):
        with over_tc(long.folder, trace=[(0.0, rates[0]), (0.3, rates[1])]) as server:
            server.link.restart()
            started = time.monotonic()
            cache = load(server, long, policy=policy, ttft_target_s=1.5)
            long.forward(cache, SUFFIX)
            # Without any loss it would take 8 s on the link that falls.
            assert time.monotonic() - started < 4
            cache.close()
        steps = cache.stream_report()
        assert {step.chunk for step in steps if step.finished} == set(range(8))
        found[name] = chosen(steps)
    assert found["falls"] < found["rises"] / 2


@pytest.mark.parametrize("policy", ["robust", "layered"])
def test_link_that_is_cut_is_not_waited_for(llama: Any, policy: str, threads_end: Any) -> None:
    """What it has not brought is recomputed, of which the policy believes that it takes long.

    Some 5 kB come before, after the token ids: the first chunk or most of it.
    """
    slow = dataclasses.replace(llama, model=copy.deepcopy(llama.model))
    machine_rates(slow.model).prefill = PrefillCost(0.0, 0.06, 0.0)
    table, *_ = (load_table(folder)[0] for folder in (llama.folder / "table").iterdir())
    with over_tc(slow.folder, rate_bytes_per_s=2e4) as server:
        cutter = cut_amid_a_chunk(server, after_s=0.25)
        artifact = Artifact.open(HttpStore(server.url))
        chosen = resolve_policy(artifact.manifest.levels, policy=policy, ttft_target_s=3.0)
        started = time.monotonic()
        cache = CompressedStreamingCache(artifact, slow.model, chosen, table)
        logits = slow.forward(cache, SUFFIX)
        assert time.monotonic() - started < 6
        cutter.join()
        cache.close()
        assert threads_end()
    assert any(not step.finished and step.level != TEXT for step in cache.stream_report())
    first, *others = cache.chunk_sources()
    assert others == ["exact"] * 2
    if first == "exact":
        torch.testing.assert_close(logits, slow.forward(slow.native(), SUFFIX))


def test_link_that_stays_down_ends_in_an_error(llama: Any, threads_end: Any) -> None:
    with over_tc(llama.folder, rate_bytes_per_s=1e5) as server:
        cutter = cut_amid_a_chunk(server)
        with HttpStore(server.url, timeout_s=0.3, retries=2) as store:
            cache = CompressedStreamingCache(
                Artifact.open(store), llama.model, FixedLevel(LOSSLESS)
            )
            started = time.monotonic()
            with pytest.raises(StoreError, match=r"gave up on .* after 3 attempts"):
                llama.forward(cache, SUFFIX)
            assert time.monotonic() - started < 4
            cutter.join()
            cache.close()
            assert threads_end()


def test_link_that_comes_back_in_time_brings_every_bit(llama: Any) -> None:
    with over_tc(llama.folder, rate_bytes_per_s=1e5) as server:
        cutter = cut_amid_a_chunk(server, back_after_s=0.5)
        with HttpStore(server.url, timeout_s=0.3, retries=5) as store:
            cache = CompressedStreamingCache(
                Artifact.open(store), llama.model, FixedLevel(LOSSLESS)
            )
            logits = llama.forward(cache, SUFFIX)
            cutter.join()
            cache.close()
        assert sum(request.path.startswith("chunks/") for request in server.requests) > 3
    torch.testing.assert_close(logits, llama.forward(llama.native(), SUFFIX))
