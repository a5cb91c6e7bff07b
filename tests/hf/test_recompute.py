"""Chunks that the model computes itself, between others that are decoded."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor
from transformers import LlamaForCausalLM

from hf_cachegen import CompressedStreamingCache, StoreError, UnsupportedError, save_cache
from hf_cachegen.artifact import Artifact
from hf_cachegen.hf.calibration import calibrate
from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.hf.recompute import check_recomputable
from hf_cachegen.stores import LocalStore
from hf_cachegen.streaming.policy import TEXT, Policy, Refinement

SUFFIX = torch.tensor([[7, 9, 11]])
COARSE, LOSSLESS, RAW = 0, 4, 5
LATER = 1e6


def open_cache(published: Any, policy: Policy, store: LocalStore | None = None) -> Any:
    artifact = Artifact.open(store or LocalStore(published.folder))
    return CompressedStreamingCache(artifact, published.model, policy)


def assert_close(ours: Any, native: Any) -> None:
    """Equal but for the order of additions, which depends on how many tokens a pass has."""
    for (keys, values, _), (native_keys, native_values, _) in zip(ours, native, strict=True):
        torch.testing.assert_close(keys, native_keys)
        torch.testing.assert_close(values, native_values)


def generate(published: Any, cache: Any) -> Tensor:
    prompt = torch.cat((published.ids[None], SUFFIX), dim=1)
    arguments = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        cache_argument(published.model): cache,
    }
    return published.model.generate(**arguments, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("levels", [*itertools.product((TEXT, LOSSLESS), repeat=3)])
def test_any_chunk_of_full_layers(llama: Any, scripted: Any, levels: tuple[int, ...]) -> None:
    cache = open_cache(llama, scripted(levels))
    assert torch.equal(generate(llama, cache), generate(llama, llama.native()))
    cache = open_cache(llama, scripted(levels))
    assert_close(cache, llama.native())
    steps = cache.stream_report()
    assert [step.level for step in steps] == list(levels)
    assert all(step.finished for step in steps)
    assert [step.recompute_s is not None for step in steps] == [level == TEXT for level in levels]
    assert cache.chunk_sources() == ["exact"] * 3


@pytest.mark.parametrize(
    "levels", [(TEXT,) * 3, (TEXT, TEXT, RAW), (TEXT, RAW, RAW), (TEXT, TEXT, LOSSLESS)]
)
def test_first_chunks_of_sliding_layers(gemma: Any, scripted: Any, levels: Any) -> None:
    assert_close(open_cache(gemma, scripted(levels)), gemma.native())
    cache = open_cache(gemma, scripted(levels))
    assert torch.equal(generate(gemma, cache), generate(gemma, gemma.native()))


def test_last_chunk_of_sliding_layers_whose_window_is_held(
    gemma: Any, scripted: Any, tmp_path: Any
) -> None:
    """The window before a last chunk of two tokens is not all in the artefact, before none is."""
    for tokens, chunk_tokens, possible in ((66, 65, True), (66, 64, False)):
        ids = gemma.ids[:tokens]
        folder = tmp_path / str(chunk_tokens)
        save_cache(
            gemma.model, None, ids, folder, tables=None, chunk_tokens=chunk_tokens, progress=False
        )
        cache = open_cache(gemma, scripted((0, TEXT)), LocalStore(folder))
        if possible:
            native = gemma.native()
            native = type(native)(config=gemma.model.config)
            gemma.forward(native, ids[None])
            assert_close(cache, native)
        else:
            with pytest.raises(UnsupportedError, match="recompute chunk 1"):
                cache.wait()


@pytest.mark.parametrize("levels", [(RAW, TEXT, RAW), (RAW, RAW, TEXT), (TEXT, RAW, TEXT)])
def test_chunks_whose_window_is_gone_are_refused(gemma: Any, scripted: Any, levels: Any) -> None:
    with pytest.raises(UnsupportedError, match="recompute chunk"):
        open_cache(gemma, scripted(levels)).wait()


def test_policy_knows_which_chunks_can_be_recomputed(gemma: Any, scripted: Any) -> None:
    calibrate(gemma.model)
    policy = scripted((TEXT, RAW, RAW))
    open_cache(gemma, policy).wait()
    finite = [[seconds < LATER for seconds in state.recompute_s] for state in policy.states[:3]]
    # Chunks 1 and 2 can follow recomputed ones only.
    assert finite == [[True] * 3, [True] * 3, [True, True, False]]


def test_text_after_lossy_chunks_is_as_good_as_they_are(llama: Any, scripted: Any) -> None:
    cache = open_cache(llama, scripted((COARSE, TEXT, LOSSLESS)))
    cache.wait()
    assert cache.chunk_sources() == ["delta-0", "delta-0", "exact"]
    native = llama.native()
    for layer, exact in zip(cache.layers, native.layers, strict=True):
        assert torch.equal(layer.keys[:, :, 64:], exact.keys[:, :, 64:])
    deep = cache.layers[-1].keys[:, :, 32:64] - native.layers[-1].keys[:, :, 32:64]
    assert 0 < deep.abs().max() < 1


def test_recomputation_happens_in_the_thread_that_waits(llama: Any, scripted: Any) -> None:
    threads = []
    layer = llama.model.model.layers[0]
    hook = layer.register_forward_pre_hook(lambda *_: threads.append(threading.current_thread()))
    try:
        cache = open_cache(llama, scripted((LOSSLESS, TEXT, TEXT)))
        cache._stream.wait_transfers()
        assert threads == []
        cache.wait()
    finally:
        hook.remove()
    assert threads == [threading.current_thread()] * 2


def test_hooks_on_the_model_do_not_see_it(llama: Any, scripted: Any) -> None:
    passes = []
    hook = llama.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        generate(llama, open_cache(llama, scripted((TEXT,) * 3)))
    finally:
        hook.remove()
    assert len(passes) == 6


def test_concurrent_users_recompute_once(llama: Any, scripted: Any) -> None:
    policy = scripted((TEXT, LOSSLESS, TEXT))
    cache = open_cache(llama, policy)
    threads = [threading.Thread(target=layer.materialize) for layer in cache.layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert_close(cache, llama.native())


def test_model_that_fails_in_the_middle_fails_every_later_use(
    llama: Any, scripted: Any, threads_end: Any
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no memory left")

    cache = open_cache(llama, scripted((LOSSLESS, TEXT, LOSSLESS)))
    hook = llama.model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(MemoryError, match="no memory"):
            generate(llama, cache)
    finally:
        hook.remove()
    with pytest.raises(MemoryError):
        cache.wait()
    assert threads_end()


def test_interrupted_user_leaves_no_half_chunk(llama: Any, scripted: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    cache = open_cache(llama, scripted((LOSSLESS, TEXT, LOSSLESS)))
    hook = llama.model.model.layers[1].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            cache.wait()
    finally:
        hook.remove()
    with pytest.raises(StoreError, match="interrupted"):
        cache.wait()


def test_close_from_elsewhere_ends_a_recomputation(
    llama: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_cachegen.hf.recompute.PIECE_TOKENS", 4)
    cache = open_cache(llama, scripted((TEXT,) * 3))
    passes = []

    def close(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 3:
            cache.close()

    hook = llama.model.model.layers[0].register_forward_pre_hook(close)
    try:
        with pytest.raises(StoreError, match="closed"):
            cache.wait()
    finally:
        hook.remove()
    assert len(passes) == 3


def test_gradients_are_not_recorded(llama: Any, scripted: Any) -> None:
    cache = open_cache(llama, scripted((TEXT,) * 3))
    with torch.enable_grad():
        cache.wait()
    assert not any(layer.keys.requires_grad for layer in cache.layers)
    with torch.inference_mode():
        other = open_cache(llama, scripted((TEXT,) * 3))
        other.wait()
    assert torch.equal(llama.forward(other, SUFFIX), llama.forward(cache, SUFFIX))


def test_saved_again_it_is_not_called_exact(llama: Any, scripted: Any, tmp_path: Any) -> None:
    cache = open_cache(llama, scripted((COARSE, TEXT, TEXT)))
    generated = generate(llama, cache)
    cache.save_pretrained(tmp_path / "grown", token_ids=generated)
    manifest = Artifact.open(LocalStore(tmp_path / "grown")).manifest
    assert [chunk.source for chunk in manifest.chunks] == ["exact", "exact", "delta-0"]


def test_refinements_write_over_what_is_there(llama: Any, scripted: Any) -> None:
    refinements = [Refinement(chunk, LOSSLESS, 0, LATER) for chunk in (2, 0, 1)]
    cache = open_cache(llama, scripted((COARSE,) * 3, refinements))
    for ours, exact in zip(cache.layers, llama.native().layers, strict=True):
        assert torch.equal(ours.keys, exact.keys)
        assert torch.equal(ours.values, exact.values)
    steps = cache.stream_report()
    assert [(s.chunk, s.refinement, s.finished) for s in steps[3:]] == [
        (chunk, True, True) for chunk in (2, 0, 1)
    ]
    assert cache.chunk_sources() == ["exact"] * 3


def test_text_in_front_and_refinements_behind(published: Any, scripted: Any) -> None:
    refinements = [Refinement(2, RAW, 0, LATER), Refinement(1, RAW, 0, LATER)]
    cache = open_cache(published, scripted((TEXT, COARSE, COARSE), refinements))
    assert_close(cache, published.native())
    assert cache.chunk_sources() == ["exact"] * 3


def test_models_whose_rotation_moves_with_the_length_are_refused(llama: Any) -> None:
    config = copy.deepcopy(llama.model.config)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedError, match="dynamic depends on the length"):
        check_recomputable(LlamaForCausalLM(config))


def test_offloaded_model_is_refused(llama: Any) -> None:
    model = copy.deepcopy(llama.model)
    cpu_offload(model, execution_device="cpu")
    with pytest.raises(UnsupportedError, match="is offloaded"):
        check_recomputable(model)


def test_model_that_cannot_recompute_streams_all_the_same(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: Any) -> None:
        raise UnsupportedError("it cannot")

    monkeypatch.setattr("hf_cachegen.hf.recompute.check_recomputable", refuse)
    with pytest.raises(UnsupportedError, match="it cannot"):
        llama.load(None, policy="text")
    # In less than no time: otherwise it would be recomputed.
    cache = llama.load(None, policy="robust", ttft_target_s=1e-6)
    cache.wait()
    assert TEXT not in [step.level for step in cache.stream_report()]
