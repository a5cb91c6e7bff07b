"""Streams over links that the kernel shapes: with real TCP, at rates that change, and cut."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
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
from hf_cachegen.stores.client import RangeClient
from hf_cachegen.streaming.controller import FixedLevel
from hf_cachegen.streaming.policy import TEXT
from hf_cachegen.streaming.rates import PrefillCost
from hf_cachegen.streaming.steps import StreamStep

pytestmark = pytest.mark.usefixtures("kernel_links")

SUFFIX = torch.tensor([[7, 9, 11]])
LOSSLESS = 4
FAR_TOO_LONG_S = 50.0
"""What is compared with it takes a few seconds on an idle machine."""

SLOW, FAST = 5e4, 4e5
"""Bytes per second: a chunk of 100 tokens has 10 kB at the coarsest level, 66 kB without loss."""


def over_tc(folder: Path, **options: Any) -> LinkServer:
    return LinkServer(folder, shaper=Shaper.tc, **options)


def load(server: LinkServer, published: Any, **options: Any) -> CompressedStreamingCache:
    return CompressedStreamingCache.from_pretrained(server.url, model=published.model, **options)


class CuttingStore(HttpStore):
    """Takes the link down when the first bytes of a chunk have come."""

    def __init__(self, server: LinkServer, **options: Any) -> None:
        super().__init__(server.url, **options)
        self._server = server
        self._is_cut = False

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        for piece in super()._pieces(path, offset, size, max_bytes):
            if path.startswith("chunks/") and not self._is_cut:
                self._is_cut = True
                self._server.link.set_rate(0.0)
            yield piece


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


@pytest.mark.flaky(reruns=2)
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
            assert time.monotonic() - started < 6
            cache.close()
        steps = cache.stream_report()
        assert {step.chunk for step in steps if step.finished} == set(range(8))
        found[name] = chosen(steps)
    assert found["falls"] < found["rises"] / 2


@pytest.mark.parametrize("policy", ["robust", "layered"])
def test_link_that_is_cut_is_not_waited_for(llama: Any, policy: str, threads_end: Any) -> None:
    """What it has not brought is recomputed, of which the policy believes that it takes long.

    The first chunk may have come as a whole, if its reader was busy with something else.
    """
    slow = dataclasses.replace(llama, model=copy.deepcopy(llama.model))
    machine_rates(slow.model).prefill = PrefillCost(0.0, 0.08, 0.0)
    table, *_ = (load_table(folder)[0] for folder in (llama.folder / "table").iterdir())
    with over_tc(slow.folder, rate_bytes_per_s=2e4) as server:
        artifact = Artifact.open(CuttingStore(server))
        chosen = resolve_policy(artifact.manifest.levels, policy=policy, ttft_target_s=3.0)
        started = time.monotonic()
        cache = CompressedStreamingCache(artifact, slow.model, chosen, table)
        logits = slow.forward(cache, SUFFIX)
        assert time.monotonic() - started < FAR_TOO_LONG_S
        cache.close()
        assert threads_end()
    first, *others = cache.chunk_sources()
    assert others == ["exact"] * 2
    if first == "exact":
        assert any(not step.finished and step.level != TEXT for step in cache.stream_report())
        torch.testing.assert_close(logits, slow.forward(slow.native(), SUFFIX))


def test_link_that_stays_down_ends_in_an_error(llama: Any, threads_end: Any) -> None:
    with (
        over_tc(llama.folder, rate_bytes_per_s=1e5) as server,
        CuttingStore(server, timeout_s=0.3, retries=2) as store,
    ):
        cache = CompressedStreamingCache(Artifact.open(store), llama.model, FixedLevel(LOSSLESS))
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"gave up on .* after 3 attempts"):
            llama.forward(cache, SUFFIX)
        assert time.monotonic() - started < FAR_TOO_LONG_S
        cache.close()
        assert threads_end()


def test_link_that_comes_back_in_time_brings_every_bit(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the third attempt."""
    attempt = RangeClient._attempt

    def with_link(*arguments: Any) -> Generator[bytes, None, None]:
        *_, number = arguments
        if number == 3:
            server.link.set_rate(1e6)
        return attempt(*arguments)

    monkeypatch.setattr(RangeClient, "_attempt", with_link)
    with over_tc(llama.folder, rate_bytes_per_s=1e5) as server:
        with CuttingStore(server, timeout_s=0.3, retries=30) as store:
            cache = CompressedStreamingCache(
                Artifact.open(store), llama.model, FixedLevel(LOSSLESS)
            )
            logits = llama.forward(cache, SUFFIX)
            cache.close()
        assert sum(request.path.startswith("chunks/") for request in server.requests) > 3
    torch.testing.assert_close(logits, llama.forward(llama.native(), SUFFIX))
