"""A context that is decoded beside the model on a GPU: who waits for whom there, and who does not.

Streams are simulated: work is in order only where events say so, whatever the host has waited for.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cachegen import CompressedStreamingCache, FormatError, StoreError, save_cache
from hf_cachegen.artifact import Artifact
from hf_cachegen.codec.exact import RawCodec
from hf_cachegen.codec.gpu import SharedTensors
from hf_cachegen.hf.buffers import LayerBuffers
from hf_cachegen.hf.incoming import Incoming
from hf_cachegen.hf.recompute import _FullPast
from hf_cachegen.stores import LocalStore
from hf_cachegen.streaming.controller import FixedLevel, Policy
from hf_cachegen.streaming.policy import TEXT, Refinement

COARSE, LOSSLESS, RAW = 0, 4, 5
LATER = 1e6
SUFFIX = torch.tensor([[7, 9, 11]])

STREAMS = {
    "decoded": ((RAW, LOSSLESS, RAW), ()),
    "refined": ((COARSE,) * 3, ((0, RAW), (1, LOSSLESS), (2, RAW))),
    "recomputed first": ((TEXT, RAW, RAW), ()),
    "recomputed between": ((RAW, TEXT, LOSSLESS), ()),
    "refined after a recomputation has read it": ((COARSE, TEXT, COARSE), ((2, RAW), (0, RAW))),
    "refined after it was recomputed": ((TEXT, COARSE, COARSE), ((0, RAW),)),
}
"""Levels of the three chunks, and refinements (chunk, level)."""


@pytest.fixture
def watched(simulated_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The simulated GPU, to which decoding, recomputation and attention tell what they touch."""
    watch_decoding(simulated_gpu, monkeypatch)
    watch_model(simulated_gpu, monkeypatch)
    everything = ((layer, token) for layer in range(8) for token in range(200))
    simulated_gpu.work("whoever had the memory before", writes=everything)
    return simulated_gpu


def watch_decoding(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = LayerBuffers._decode_placed

    def watched(self: Any, codec: Any, layer: int, segments: Any) -> None:
        try:
            decode(self, codec, layer, segments)
        finally:  # damaged segments are written, too
            places = (
                (member, token)
                for segment in segments
                for member in codec.members(layer)
                for token in range(segment.first_token, segment.first_token + segment.tokens)
            )
            gpu.work("decoding", writes=places)
            gpu.current_stream().synchronize()  # as flags are read

    monkeypatch.setattr(LayerBuffers, "_decode_placed", watched)


def watch_model(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    update, load = _FullPast.update, Incoming._load

    def watched_update(self: Any, key_states: Any, *args: Any, **kwargs: Any) -> Any:
        start, layer = self._length, self._layer
        found = update(self, key_states, *args, **kwargs)
        gpu.work(
            "recomputation",
            reads=((layer, token) for token in range(start)),
            writes=((layer, token) for token in range(start, self._length)),
        )
        return found

    def watched_load(self: Any, layer: int, kept: list[Any]) -> Any:
        keys, values = load(self, layer, kept)
        gpu.work("attention", reads=((layer, token) for token in range(keys.shape[2])))
        return keys, values

    monkeypatch.setattr(_FullPast, "update", watched_update)
    monkeypatch.setattr(Incoming, "_load", watched_load)


def scripted_policy(scripted: Any, name: str) -> Policy:
    levels, refinements = STREAMS[name]
    return scripted(levels, [Refinement(chunk, level, 0, LATER) for chunk, level in refinements])


def open_cache(published: Any, policy: Policy, store: LocalStore | None = None) -> Any:
    artifact = Artifact.open(store or LocalStore(published.folder))
    return CompressedStreamingCache(artifact, published.model, policy)


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("name", STREAMS)
def test_nothing_is_read_or_written_too_early(
    llama: Any, scripted: Any, watched: Any, name: str, own_stream: bool
) -> None:
    """Whichever stream the model is on."""
    models = type(watched.default)(watched) if own_stream else watched.default
    cache = open_cache(llama, scripted_policy(scripted, name))
    with watched.stream(models):
        found = llama.forward(cache, SUFFIX)
    assert watched.races == []
    exact = all(source == "exact" for source in cache.chunk_sources())
    if exact:
        torch.testing.assert_close(found, llama.forward(llama.native(), SUFFIX))
    decoders = [thread for thread, _ in watched.host_waits]
    assert decoders
    assert all("decode" in thread.name for thread in decoders)
    assert {stream for _, stream in watched.host_waits} == set(side_of(watched, models))


def side_of(gpu: Any, models: Any) -> Iterator[Any]:
    """Streams that the model's has waited for, but for those of the model's own thread."""
    return (stream for stream in models.clock if stream not in (models, gpu.default))


@pytest.mark.parametrize("name", STREAMS)
def test_without_events_that_would_show(
    llama: Any, scripted: Any, watched: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedTensors, "record", lambda self: None)
    llama.forward(open_cache(llama, scripted_policy(scripted, name)), SUFFIX)
    assert watched.races


@pytest.fixture
def one_chunk(llama: Any, tmp_path: Path) -> Path:
    """The context as a single chunk."""
    folder = tmp_path / "one-chunk"
    save_cache(llama.model, None, llama.ids, folder, levels=("raw",), progress=False)
    return folder


def test_layers_are_decoded_while_the_model_is_at_earlier_ones(
    llama: Any, one_chunk: Path, watched: Any, tricky_store: Any
) -> None:
    """What the model has queued meanwhile is not waited for."""
    layer_bytes = Artifact.open(LocalStore(one_chunk)).manifest.chunks[0].level_bytes[0] // 3
    store = tricky_store(one_chunk, withhold_from=layer_bytes)
    queued_before = watched.default.clock[watched.default]
    cache = open_cache(llama, FixedLevel(0), store)
    cache.layers[0].materialize()
    (side,) = side_of(watched, watched.default)
    watched.work("the first layers of the model")
    store.gate.set()
    cache.wait()
    assert side.clock[side] == 3
    assert side.clock[watched.default] == queued_before
    assert watched.races == []


@pytest.mark.parametrize("refinement", [False, True])
def test_damaged_segment_is_never_read(
    llama: Any,
    scripted: Any,
    watched: Any,
    refinement: bool,
    threads_end: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel has written by the time that its flags tell of damage."""
    decode = RawCodec.decode_into

    def damaged(self: Any, layer: int, data: bytes, out: Any, start: int) -> None:
        decode(self, layer, data, out, start)
        if (layer, start) == (1, 32):
            out[0].fill_(torch.nan)
            raise FormatError("entropy stream 3 is damaged")

    monkeypatch.setattr(RawCodec, "decode_into", damaged)
    levels = (COARSE,) * 3 if refinement else (RAW,) * 3
    refinements = [Refinement(1, RAW, 0, LATER)] if refinement else []
    cache = open_cache(llama, scripted(levels, refinements))
    for _ in range(2):
        with pytest.raises(FormatError, match=r"chunks/\w+\.kv in .*level raw, layer 1: entropy"):
            cache.layers[1].materialize()
    assert cache.layers[1].is_pending
    assert watched.races == []
    assert all("decode" in thread.name for thread, _ in watched.host_waits)
    assert threads_end()


def test_memory_in_use_by_decoding_is_not_freed_when_the_stream_is_closed(
    llama: Any, one_chunk: Path, watched: Any, tricky_store: Any, threads_end: Any
) -> None:
    layer_bytes = Artifact.open(LocalStore(one_chunk)).manifest.chunks[0].level_bytes[0] // 3
    store = tricky_store(one_chunk, withhold_from=2 * layer_bytes)
    cache = open_cache(llama, FixedLevel(0), store)
    cache.layers[0].materialize()
    (side,) = side_of(watched, watched.default)
    buffers = [cache._incoming._buffers.storage(layer) for layer in (1, 2)]
    while side.clock[side] < 2:
        threading.Event().wait(0.01)
    cache.close()
    with pytest.raises(StoreError, match="closed"):
        cache.layers[2].materialize()
    assert threads_end()
    kept = {address for address, stream in watched.freed_late if stream is side}
    first = {tensor.data_ptr() for tensor in (cache.layers[0].keys, cache.layers[0].values)}
    second = {tensor.data_ptr() for tensor in buffers[0]}
    assert kept == first | second
    assert watched.races == []


@pytest.mark.parametrize("beside_a_pass", [False, True])
@pytest.mark.parametrize(
    ("context", "name"),
    # A window does not reach back to where a chunk in the middle could be recomputed from.
    [*(("llama", name) for name in STREAMS), ("gemma", "decoded"), ("gemma", "refined")],
)
def test_threads_that_wait_at_once_get_the_same(
    request: Any, scripted: Any, tricky_store: Any, context: str, name: str, beside_a_pass: bool
) -> None:
    """And a pass meanwhile or afterwards gets what it gets alone."""
    published = request.getfixturevalue(context)
    alone = published.forward(open_cache(published, scripted_policy(scripted, name)), SUFFIX)
    for _ in range(3):
        store = tricky_store(published.folder, withhold_from=0)
        cache = open_cache(published, scripted_policy(scripted, name), store)
        with ThreadPoolExecutor(3) as pool:
            waits = [pool.submit(cache.wait) for _ in range(3)]
            opening = threading.Timer(0.02, store.gate.set)
            opening.start()
            if beside_a_pass:
                found = published.forward(cache, SUFFIX)
            for wait in waits:
                wait.result(timeout=20)
        if not beside_a_pass:
            found = published.forward(cache, SUFFIX)
        torch.testing.assert_close(found, alone)
        assert all(layer.get_seq_length() == 73 for layer in cache.layers)


def test_waits_of_other_threads_are_not_those_of_a_pass(
    llama: Any, tricky_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tricky_store(llama.folder, withhold_from=0)
    cache = open_cache(llama, FixedLevel(RAW), store)
    incoming, noted = cache._incoming, []
    monkeypatch.setattr(incoming.stream.costs, "note_pass", lambda *args: noted.append(args))
    incoming.begin_pass()
    waiting = threading.Thread(target=cache.wait)
    waiting.start()
    waiting.join(0.1)
    store.gate.set()
    waiting.join(20)
    incoming.end_pass(70, 3)
    ((start, n_tokens, seconds),) = noted
    assert (start, n_tokens) == (70, 3)
    assert seconds >= 0.1


def tensors_of(cache: Any) -> list[torch.Tensor]:
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_gpu_gets_what_the_cpu_gets(
    request: Any, transform_table: Any, tmp_path: Path, name: str
) -> None:
    """At every level, on a stream of the model's own that has other work in front."""
    published = request.getfixturevalue(name)
    table = transform_table(published.model)
    save_cache(
        published.model,
        None,
        published.ids,
        tmp_path,
        tables=table,
        chunk_tokens=32,
        progress=False,
    )
    on_gpu = replace(published, model=copy.deepcopy(published.model).to("cuda"), folder=tmp_path)
    on_cpu = replace(published, folder=tmp_path)
    ballast = torch.ones(4096, 4096, device="cuda")
    for level in Artifact.open(LocalStore(tmp_path)).manifest.levels:
        expected = tensors_of(on_cpu.load(level.name, tables=table))
        for _ in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    ballast @ ballast
                found = tensors_of(on_gpu.load(level.name, tables=table))
            for ours, theirs in zip(found, expected, strict=True):
                allowed = 0.0 if level.exact else 0.01 * float(theirs.abs().max())
                torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=allowed)
