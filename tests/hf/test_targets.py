"""Policies on a model's own cache and over links: what they choose, and that it is used right."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from hf_cachegen import CompressedStreamingCache, profile_model, save_cache
from hf_cachegen.artifact import Artifact
from hf_cachegen.bench.link import Busy, Fault, Gone, LinkServer, Stall, WrongByte, WrongRange
from hf_cachegen.bench.loopback import Link
from hf_cachegen.codec.transform_tables import TransformConfig
from hf_cachegen.errors import StoreUnreachable
from hf_cachegen.hf.calibration import calibrate, machine_rates
from hf_cachegen.hf.codecs import load_table
from hf_cachegen.hf.policies import resolve_policy
from hf_cachegen.stores import HttpStore, LocalStore
from hf_cachegen.streaming.controller import FixedLevel
from hf_cachegen.streaming.estimate import RateEstimate
from hf_cachegen.streaming.pipeline import RECONSIDER_S
from hf_cachegen.streaming.policy import TEXT, Refinement
from hf_cachegen.streaming.rates import PrefillCost

SUFFIX = torch.tensor([[7, 9, 11]])

FAR_TOO_LONG_S = 30.0
"""What is compared with it takes a few seconds on an idle machine."""


@pytest.mark.parametrize("policy", ["robust", "layered", "paper"])
def test_generous_target_gives_the_exact_context(published: Any, policy: str) -> None:
    """As text, as an exact level, or as a coarse one that is refined until nothing is lost."""
    expected = published.forward(published.native(), SUFFIX)
    cache = published.load(None, policy=policy, ttft_target_s=30.0)
    torch.testing.assert_close(published.forward(cache, SUFFIX), expected)
    assert cache.chunk_sources() == ["exact"] * 3


@pytest.mark.parametrize("policy", ["robust", "layered"])
def test_link_that_is_too_slow_is_not_waited_for(llama: Any, policy: str) -> None:
    """The coarsest level would take some 60 s. The model is so small that text takes none."""
    with LinkServer(llama.folder) as server, HttpStore(server.url) as store:
        artifact = Artifact.open(store)
        server.link = Link([(0.0, 40.0)])
        started = time.monotonic()
        cache = adapting(artifact, llama, policy, target_s=0.5)
        logits = llama.forward(cache, SUFFIX)
        assert time.monotonic() - started < FAR_TOO_LONG_S
        cache.close()
    if all(step.level == TEXT for step in cache.stream_report() if step.finished):
        torch.testing.assert_close(logits, llama.forward(llama.native(), SUFFIX))


@pytest.mark.parametrize("policy", ["robust", "layered"])
def test_link_that_stands_still_is_not_waited_for(
    llama: Any, policy: str, threads_end: Any
) -> None:
    """No byte of a chunk comes. The store would ask again after 10 s, and give up after a minute.

    All chunks are recomputed in the end, of which the policy has to believe that it takes long.
    """
    slow = slowly_computing(llama, token_s=0.08)
    with LinkServer(slow.folder) as server, HttpStore(server.url) as store:
        artifact = Artifact.open(store)
        opening = len(server.requests)
        server.faults = tuple(Stall(opening + i, 0, duration_s=60.0) for i in range(100))
        chosen = resolve_policy(artifact.manifest.levels, policy=policy, ttft_target_s=3.0)
        started = time.monotonic()
        cache = CompressedStreamingCache(artifact, slow.model, chosen)
        logits = slow.forward(cache, SUFFIX)
        assert time.monotonic() - started < FAR_TOO_LONG_S
        assert any(not step.finished and step.level != TEXT for step in cache.stream_report())
        assert cache.chunk_sources() == ["exact"] * 3
        torch.testing.assert_close(logits, slow.forward(slow.native(), SUFFIX))
        cache.close()
        assert threads_end()


def test_text_needs_no_link(llama: Any) -> None:
    with LinkServer(llama.folder) as server:
        cache = CompressedStreamingCache.from_pretrained(
            server.url, model=llama.model, policy="text"
        )
        cache.wait()
        assert not any(request.path.startswith("chunks/") for request in server.requests)
    torch.testing.assert_close(llama.forward(cache, SUFFIX), llama.forward(llama.native(), SUFFIX))


def test_layers_do_not_wait_for_refinements_when_there_is_no_time(llama: Any) -> None:
    """The base alone takes longer than the target: the first layer is used before the last."""
    cache = llama.load(None, policy="layered", ttft_target_s=1e-3)
    llama.forward(cache, SUFFIX)
    assert not any(step.refinement for step in cache.stream_report())


def test_nested_levels_are_refined_by_what_they_add(
    tiny_model: Any, tiny_tokenizer: Any, scripted: Any, tmp_path: Path
) -> None:
    texts = {"numbers": " ".join(map(str, range(300)))}
    table = profile_model(
        tiny_model, tiny_tokenizer, texts, configs=[TransformConfig()], progress=False
    )
    ids = torch.arange(3, 203)
    save_cache(tiny_model, None, ids, tmp_path, tables=table, chunk_tokens=70, progress=False)
    refinements = [Refinement(0, 2, 0, 1e6), Refinement(2, 1, 0, 1e6), Refinement(2, 2, 0, 1e6)]

    def stream(levels: Sequence[int], refinements: Sequence[Refinement] = ()) -> Any:
        artifact = Artifact.open(LocalStore(tmp_path))
        cache = CompressedStreamingCache(artifact, tiny_model, scripted(levels, refinements), table)
        cache.wait()
        return cache

    refined, direct = stream((0, 2, 0), refinements), stream((2, 2, 2))
    for ours, theirs in zip(refined.layers, direct.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    own = [chunk.level_bytes for chunk in refined.artifact.manifest.chunks]
    assert [step.size_bytes for step in refined.stream_report()] == [
        own[0][0],
        sum(own[1][:3]),
        own[2][0],
        sum(own[0][1:3]),
        own[2][1],
        own[2][2],
    ]
    assert refined.chunk_sources() == ["transform-2"] * 3


def test_question_is_reckoned_with(llama: Any) -> None:
    calibrate(llama.model)
    cache = llama.load(None, policy="paper", ttft_target_s=9.0)
    cache.wait()  # so that nothing else changes what is known
    costs = cache._stream.costs
    cache.inputs(input_ids=SUFFIX)
    short_s = costs.tail_s(0.0)
    cache.inputs(input_ids=torch.arange(3, 203))
    assert costs.prompt_tokens == 200
    assert costs.tail_s(0.0) > short_s
    cache.close()


def test_question_teaches_what_the_next_one_will_take(llama: Any) -> None:
    slow = slowly_computing(llama, token_s=1e-4)
    rates = machine_rates(slow.model)
    slow.model.model.layers[0].register_forward_hook(lambda *_: time.sleep(0.5))
    cache = slow.load(None, policy="fixed:delta-1")
    before_s = rates.prefill_s(70, 200)
    slow.forward(cache, torch.arange(3, 203)[None])
    learned_s = rates.prefill_s(70, 200)
    assert learned_s > before_s + 0.2
    slow.forward(cache, SUFFIX)  # not the pass after the stream
    assert rates.prefill_s(70, 200) == learned_s


def test_report_sets_what_happened_beside_what_was_expected(llama: Any) -> None:
    """Whatever happens: a busy machine may take longer than it knows of itself."""
    slow = slowly_computing(llama, token_s=0.01)
    rates = machine_rates(slow.model)
    with LinkServer(slow.folder, rate_bytes_per_s=2e6) as server:
        started = time.monotonic()
        for _ in range(2):
            known = rates.link_bytes_per_s(urlsplit(server.url).netloc)
            cache = CompressedStreamingCache.from_pretrained(
                server.url, model=slow.model, policy="fixed:delta-3"
            )
            cache.wait()
            cache.close()
        text = CompressedStreamingCache.from_pretrained(server.url, model=slow.model, policy="text")
        text.wait()
        longest_s = time.monotonic() - started
    first, *_ = cache.stream_report()
    expected_s = RateEstimate.from_throughputs(known).median_s(first.size_bytes)
    assert first.predicted_transfer_s == pytest.approx(expected_s)
    for step in cache.stream_report():
        assert 0 < step.transfer_s < longest_s
        assert step.predicted_transfer_s > 0
        assert step.predicted_decode_s > 0
        assert 0 < step.decode_s < longest_s
        assert step.recompute_s is None
    for step, n_tokens in zip(text.stream_report(), (32, 32, 6), strict=True):
        assert 0 < step.predicted_recompute_s <= n_tokens * 0.01
        assert 0 < step.recompute_s < longest_s
        assert step.transfer_s is None


def slowly_computing(published: Any, token_s: float = 1000.0) -> Any:
    """The same with a model that is known to be slow.

    By default text is nothing to wish for, for however long the link may stand still.
    """
    slow = dataclasses.replace(published, model=copy.deepcopy(published.model))
    machine_rates(slow.model).prefill = PrefillCost(0.0, token_s, 0.0)
    return slow


def adapting(
    artifact: Artifact, published: Any, policy: str, target_s: float | None = 3.0
) -> CompressedStreamingCache:
    """A streamed cache with the table at hand."""
    table, _ = load_table(next((published.folder / "table").iterdir()))
    target_s = None if policy.startswith("soonest") else target_s
    chosen = resolve_policy(artifact.manifest.levels, policy=policy, ttft_target_s=target_s)
    return CompressedStreamingCache(artifact, published.model, chosen, table)


@pytest.mark.parametrize("policy", ["robust", "layered", "paper", "soonest:lossless"])
@pytest.mark.parametrize("request_", range(6))
@pytest.mark.parametrize("at_byte", [100, 1000, 2500, 4500])
def test_link_that_is_gone_is_not_the_end(
    llama: Any, scripted: Any, policy: str, request_: int, at_byte: int
) -> None:
    """In the middle of a chunk, while somebody waits: what is missing is recomputed.

    The answer is that of a cache whose chunks come from the same sources, undisturbed. So no layer
    was used before it was certain where it comes from.
    """
    slow = slowly_computing(llama)
    with LinkServer(slow.folder) as server, HttpStore(server.url, retries=1) as store:
        artifact = Artifact.open(store)
        server.faults = (Gone(len(server.requests) + request_, at_byte),)
        cache = adapting(artifact, slow, policy)
        logits = slow.forward(cache, SUFFIX)
        cache.close()
    if (request_, at_byte) == (0, 100):
        assert server.is_gone
        assert all(step.level == TEXT for step in cache.stream_report() if step.finished)
    refinements = [step for step in cache.stream_report() if step.refinement]
    if any(not step.finished for step in refinements):
        return  # some of its layers have it, which ones is up to chance
    base = {step.chunk: step.level for step in cache.stream_report() if not step.refinement}
    undisturbed = CompressedStreamingCache(
        Artifact.open(LocalStore(slow.folder)),
        slow.model,
        scripted(
            [base[chunk] for chunk in range(3)],
            [Refinement(step.chunk, step.level, 0, 1e6) for step in refinements],
        ),
    )
    torch.testing.assert_close(logits, slow.forward(undisturbed, SUFFIX))


def test_link_that_is_gone_ends_a_stream_that_knows_nothing_else(llama: Any) -> None:
    with LinkServer(llama.folder) as server, HttpStore(server.url, retries=1) as store:
        artifact = Artifact.open(store)
        server.faults = (Gone(len(server.requests), at_byte=100),)
        cache = CompressedStreamingCache(artifact, llama.model, FixedLevel(0))
        with pytest.raises(StoreUnreachable, match="gave up"):
            llama.forward(cache, SUFFIX)
        cache.close()


@pytest.mark.parametrize("policy", ["robust", "layered", "paper", "soonest:lossless"])
@pytest.mark.parametrize("fault", [WrongByte(None, 300), WrongRange(None), Busy(None, status=403)])
def test_chunks_that_cannot_be_had_are_recomputed(
    llama: Any, policy: str, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged or refused ones, by a server that goes on answering: and the reason is logged."""
    slow = slowly_computing(llama)
    with LinkServer(slow.folder) as server, HttpStore(server.url, retries=1) as store:
        artifact = Artifact.open(store)
        server.faults = (fault,)
        cache = adapting(artifact, slow, policy)
        logits = slow.forward(cache, SUFFIX)
        assert cache.chunk_sources() == ["exact"] * 3
        cache.close()
    torch.testing.assert_close(logits, slow.forward(slow.load(None, policy="text"), SUFFIX))
    assert "chunk 0 is recomputed from its text: " in caplog.text


@pytest.mark.parametrize("policy", ["robust", "layered", "paper", "soonest:lossless"])
def test_latency_is_no_link_that_stands_still(llama: Any, policy: str) -> None:
    """Each answer takes longer than a link may stand still that had answered at once."""
    slow = slowly_computing(llama)
    latency_s = 1.2 * RECONSIDER_S
    with LinkServer(slow.folder, latency_s=latency_s) as server, HttpStore(server.url) as store:
        cache = adapting(Artifact.open(store), slow, policy)
        slow.forward(cache, SUFFIX)
        cache.close()
    assert all(step.level != TEXT for step in cache.stream_report())
