"""The streamed cache against an untouched cache of transformers, whatever is done to both."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import set_seed
from transformers.cache_utils import Cache

from hf_cachegen import (
    CompressedStreamingCache,
    FormatError,
    PromptMismatch,
    StoreError,
    UnsupportedError,
    save_cache,
)
from hf_cachegen.artifact import Artifact
from hf_cachegen.bench.link import LinkServer
from hf_cachegen.codec.transform import TransformCodec
from hf_cachegen.hf.compat import cache_argument, prefills_in_pieces
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.levels import codec_for
from hf_cachegen.stores import LocalStore
from hf_cachegen.streaming.policy import Refinement

SUFFIX = torch.tensor([[7, 9, 11]])
Operation = Callable[[Cache], object]

IN_PIECES = prefills_in_pieces()  # what is refused otherwise is among the calls of the families

GENERATE = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3},
    **({"chunked prefill": {"do_sample": False, "prefill_chunk_size": 2}} if IN_PIECES else {}),
    "beams": {"num_beams": 3, "do_sample": False},
    "return sequences": {"num_return_sequences": 3, "do_sample": True},
}


def generate(
    published: Any, cache: Cache, prompt: Tensor, mask_length: int | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """(sequences, logits [steps, B, V]) of six new tokens."""
    set_seed(5)
    rows = options.get("num_beams", options.get("num_return_sequences", 1))
    if rows > 1:
        cache.batch_repeat_interleave(rows)
    output = published.model.generate(
        input_ids=prompt,
        attention_mask=torch.ones(1, mask_length or prompt.shape[1], dtype=torch.long),
        max_new_tokens=6,
        min_new_tokens=6,
        output_logits=True,
        return_dict_in_generate=True,
        **{cache_argument(published.model): cache},
        **options,
    )
    return output.sequences, torch.stack(output.logits)


def assert_same_contents(ours: Cache, native: Cache) -> None:
    assert ours.get_seq_length() == native.get_seq_length()
    for (*tensors, window), (*native_tensors, native_window) in zip(ours, native, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, native_tensors, strict=True))
        assert window == native_window


@pytest.mark.parametrize("options", GENERATE.values(), ids=GENERATE.keys())
@pytest.mark.parametrize("level", ["lossless", "raw"])
def test_exact_levels_generate_as_a_native_cache(
    published: Any, level: str, options: dict[str, Any]
) -> None:
    prompt = torch.cat((published.ids[None], SUFFIX), dim=1)
    ours = generate(published, published.load(level), prompt, **options)
    native = generate(published, published.native(), prompt, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours, native, strict=True))


def test_only_new_ids_with_the_full_mask(published: Any) -> None:
    whole = torch.cat((published.ids[None], SUFFIX), dim=1)
    ours = generate(published, published.load(), SUFFIX, mask_length=whole.shape[1])
    native = generate(published, published.native(), whole)
    assert torch.equal(ours[0][:, 3:], native[0][:, whole.shape[1] :])
    assert torch.equal(ours[1], native[1])


def test_prompt_that_equals_the_context(published: Any) -> None:
    cache, native = published.load(), published.native(recording=True)
    inputs = cache.inputs()
    native.crop(-1)
    assert torch.equal(inputs["input_ids"], published.ids[None])
    ours = generate(published, cache, inputs["input_ids"])
    expected = generate(published, native, published.ids[None])
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_inputs_are_what_generate_takes(llama: Any, tiny_tokenizer: Any) -> None:
    cache = llama.load()
    inputs = cache.inputs(tiny_tokenizer, "Who pays?")
    question = tiny_tokenizer("Who pays?", add_special_tokens=False)["input_ids"]
    assert inputs["input_ids"].tolist() == [llama.ids.tolist() + question]
    assert inputs["attention_mask"].shape == inputs["input_ids"].shape
    assert inputs["attention_mask"].all()
    assert inputs[cache_argument(llama.model)] is cache
    answer = llama.model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert torch.equal(answer[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])


def test_old_keyword_is_accepted(llama: Any) -> None:
    prompt = torch.cat((llama.ids[None], SUFFIX), dim=1)
    old = llama.model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=llama.load(),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
    )
    assert torch.equal(old, generate(llama, llama.load(), prompt, do_sample=False)[0])


def test_prompt_that_generate_would_feed_twice_is_refused(llama: Any) -> None:
    assisted = {"prompt_lookup_num_tokens": 2, "max_new_tokens": 6, "min_new_tokens": 6}
    cache = llama.load()
    inputs = cache.inputs(input_ids=SUFFIX)
    with pytest.raises(UnsupportedError, match=r"assisted decoding.*input_ids\[:, 70:\]"):
        llama.model.generate(**inputs, **assisted)
    inputs["input_ids"] = inputs["input_ids"][:, 70:]
    answer = llama.model.generate(**inputs, **assisted)
    whole = torch.cat((llama.ids[None], SUFFIX), dim=1)
    expected = generate(llama, llama.native(), whole, do_sample=False)[0]
    assert torch.equal(answer, expected[:, 70:])


def test_later_passes_may_be_longer_than_the_prompt(llama: Any) -> None:
    ours, native = llama.load(), llama.native()
    generate(llama, ours, ours.inputs(input_ids=SUFFIX)["input_ids"])
    generate(llama, native, torch.cat((llama.ids[None], SUFFIX), dim=1))
    long = torch.arange(3, 203)[None]
    assert torch.equal(llama.forward(ours, long), llama.forward(native, long))


def test_second_turn_on_the_same_object(published: Any) -> None:
    prompt = torch.cat((published.ids[None], SUFFIX), dim=1)
    cache, native = published.load(), published.native()
    first = generate(published, cache, prompt)[0]
    generate(published, native, prompt)
    again = cache.inputs(input_ids=SUFFIX, previous=first)["input_ids"]
    assert torch.equal(again, torch.cat((first, SUFFIX), dim=1))
    ours, expected = (generate(published, c, again) for c in (cache, native))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("length", [1, 2, 9, 10, 40])
def test_another_question_does_not_see_the_one_before(llama: Any, length: int) -> None:
    question = torch.arange(10, 10 + length)
    cache = llama.load()
    generate(llama, cache, cache.inputs(input_ids=SUFFIX)["input_ids"])  # grows by 8 tokens
    ours = generate(llama, cache, cache.inputs(input_ids=question)["input_ids"])
    fresh = llama.load()
    expected = generate(llama, fresh, fresh.inputs(input_ids=question)["input_ids"])
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_question_that_a_sliding_window_cannot_go_back_for(gemma: Any) -> None:
    cache = gemma.load()
    first = generate(gemma, cache, cache.inputs(input_ids=SUFFIX)["input_ids"])[0]
    with pytest.raises(PromptMismatch, match="previous="):
        cache.inputs(input_ids=SUFFIX)
    assert cache.get_seq_length() == first.shape[1] - 1
    assert {layer.get_seq_length() for layer in cache.layers} == {first.shape[1] - 1}


def test_cropped_and_regrown_cache_is_cropped_again(llama: Any) -> None:
    cache = llama.load()
    cache.crop(-20)
    llama.forward(cache, torch.arange(10, 25)[None])  # 65 tokens, the last 15 not the context's
    assert cache.known_length == 50
    ours = generate(llama, cache, cache.inputs(input_ids=SUFFIX)["input_ids"])
    native = llama.native()
    native.crop(-20)
    expected = generate(llama, native, torch.cat((llama.ids[None], SUFFIX), dim=1))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"question": "Who?"}, ValueError),
        ({"question": "Who?", "input_ids": SUFFIX}, ValueError),
        ({"input_ids": SUFFIX.repeat(2, 1)}, ValueError),
        ({"previous": torch.ones(2, 80, dtype=torch.long)}, ValueError),
        ({"previous": torch.ones(1, 80, dtype=torch.long)}, PromptMismatch),
        ({"previous": "the first 60 ids"}, PromptMismatch),
    ],
)
def test_wrong_inputs_are_refused(
    llama: Any, arguments: dict[str, Any], error: type[Exception]
) -> None:
    if arguments.get("previous") == "the first 60 ids":
        arguments = {"previous": llama.ids[:60]}
    cache = llama.load()
    with pytest.raises(error):
        cache.inputs(**arguments)
    assert cache.get_seq_length() == len(llama.ids)


@pytest.mark.parametrize("used", [False, True], ids=["before first use", "after first use"])
@pytest.mark.parametrize("removed", [0, 1, 5, 69, 70, 100])
def test_crop_of_full_layers(llama: Any, removed: int, used: bool) -> None:
    ours, native = llama.load(), llama.native()
    for cache in (ours, native):
        if used:
            llama.forward(cache, SUFFIX)
        cache.crop(-removed)
    assert ours.get_seq_length() == native.get_seq_length()
    assert_same_contents(ours, native)
    assert torch.equal(llama.forward(ours, SUFFIX), llama.forward(native, SUFFIX))
    assert_same_contents(ours, native)


def test_sliding_layers_give_up_one_token_before_first_use(gemma: Any) -> None:
    ours, native = gemma.load(), gemma.native(recording=True)
    for cache in (ours, native):
        cache.crop(-1)
    assert torch.equal(gemma.forward(ours, SUFFIX), gemma.forward(native, SUFFIX))


def test_crop_that_a_sliding_layer_refuses_changes_no_layer(gemma: Any) -> None:
    pending, used = gemma.load(), gemma.load()
    gemma.forward(used, SUFFIX)
    for cache, removed in ((pending, 2), (used, 1)):
        length = cache.get_seq_length()
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-removed)
        assert {layer.get_seq_length() for layer in cache.layers} == {length}
    assert torch.equal(gemma.forward(pending, SUFFIX), gemma.forward(gemma.native(), SUFFIX))


def test_sliding_layers_that_record_are_cropped_after_use(gemma: Any) -> None:
    ours, native = gemma.load(), gemma.native()
    for cache in (ours, native):
        cache.activate_past_recording()
        gemma.forward(cache, SUFFIX)
        cache.crop(-2)
    assert torch.equal(gemma.forward(ours, SUFFIX), gemma.forward(native, SUFFIX))
    assert_same_contents(ours, native)


def test_crop_by_a_positive_number_is_the_callers_mistake(published: Any) -> None:
    with pytest.raises(ValueError, match="-n removes n tokens"):
        published.load().crop(3)


def _reorder(cache: Cache) -> None:
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 0]))


BATCH_OPERATIONS: dict[str, tuple[Operation, int]] = {
    "reorder": (_reorder, 3),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), 2),
    "select one": (lambda cache: cache.batch_select_indices(torch.tensor([0])), 1),
    "select again": (lambda cache: cache.batch_select_indices(torch.tensor([0, 0])), 2),
    "select a slice": (lambda cache: cache.batch_select_indices(slice(0, 1)), 1),
}


@pytest.mark.parametrize("used", [False, True], ids=["before first use", "after first use"])
@pytest.mark.parametrize(
    ("operation", "rows"), BATCH_OPERATIONS.values(), ids=BATCH_OPERATIONS.keys()
)
def test_batch_operations(published: Any, operation: Operation, rows: int, used: bool) -> None:
    ours, native = published.load(), published.native()
    suffix = torch.arange(20, 20 + 2 * rows).view(rows, 2)
    logits = []
    for cache in (ours, native):
        if used:
            published.forward(cache, SUFFIX)
        operation(cache)
        logits += [[published.forward(cache, suffix), published.forward(cache, suffix)]]
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))
    assert_same_contents(ours, native)


@pytest.mark.parametrize("used", [False, True], ids=["before first use", "after first use"])
def test_reset_cache_starts_again(published: Any, used: bool, threads_end: Any) -> None:
    cache = published.load()
    if used:
        published.forward(cache, SUFFIX)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert threads_end()
    native = published.native()
    published.forward(cache, published.ids[None])
    assert_same_contents(cache, native)
    assert torch.equal(published.forward(cache, SUFFIX), published.forward(native, SUFFIX))


@pytest.mark.parametrize("used", [False, True], ids=["before first use", "after first use"])
def test_copy_continues_on_its_own(published: Any, used: bool) -> None:
    cache, native = published.load(), published.native()
    if used:
        published.forward(cache, SUFFIX)
        published.forward(native, SUFFIX)
    clone, native_clone = copy.deepcopy(cache), copy.deepcopy(native)
    published.forward(cache, torch.tensor([[30, 31]]))
    published.forward(native, torch.tensor([[30, 31]]))
    for _ in range(2):
        assert torch.equal(
            published.forward(clone, SUFFIX), published.forward(native_clone, SUFFIX)
        )
    assert_same_contents(cache, native)
    assert_same_contents(clone, native_clone)


def test_copy_can_be_saved_when_the_original_is_gone(llama: Any, tmp_path: Path) -> None:
    with LinkServer(llama.folder) as server:
        cache = CompressedStreamingCache.from_pretrained(server.url, model=llama.model)
        clone = copy.deepcopy(cache)
        cache.reset()
        del cache
        gc.collect()
        clone.save_pretrained(tmp_path / "copy")
    for chunk in (llama.folder / "chunks").iterdir():
        assert (tmp_path / "copy" / "chunks" / chunk.name).read_bytes() == chunk.read_bytes()


def test_iteration_gives_the_native_tensors(published: Any) -> None:
    assert_same_contents(published.load("raw"), published.native())


def test_cache_that_grew_in_inference_mode_grows_outside_of_it(llama: Any) -> None:
    ours, native = llama.load(), llama.native()
    long = torch.arange(3, 303)[None]  # past the headroom, so that the buffers are made anew
    for cache in (ours, native):
        with torch.inference_mode():
            llama.forward(cache, long)
            llama.forward(cache, SUFFIX)
    assert torch.equal(llama.forward(ours, SUFFIX), llama.forward(native, SUFFIX))


def test_gradients_flow_through_a_cache_that_grows(llama: Any) -> None:
    model = copy.deepcopy(llama.model).requires_grad_(False)
    weight = model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    gradients = []
    for cache in (llama.load(), llama.native()):
        # Attention of one token saves the cached keys themselves for the backward pass, those of
        # layer 0 too, which need no gradient.
        arguments = {"input_ids": SUFFIX[:, :1], cache_argument(model): cache}
        loss = model(**arguments).logits.square().sum() + model(**arguments).logits.square().sum()
        gradients += torch.autograd.grad(loss, weight)
    assert gradients[0].any()
    assert torch.equal(*gradients)


def test_appending_within_the_headroom_moves_nothing(llama: Any) -> None:
    cache = llama.load()
    cache.wait()
    places = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    for _ in range(3):
        llama.forward(cache, torch.arange(3, 80)[None])
    assert places == [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]


@pytest.mark.parametrize("level", range(4))
def test_lossy_level_is_off_by_half_a_bin_at_most(published: Any, level: int) -> None:
    cache, native = published.load(f"delta-{level}"), published.native()
    tables = cache.table().tables["delta"]
    row = 0
    for index, (layer, exact) in enumerate(zip(cache.layers, native.layers, strict=True)):
        channels = exact.values.shape[1] * exact.values.shape[3]
        row += channels  # keys come first; they are bounded before RoPE, values as they are
        rows, row = slice(row, row + channels), row + channels
        factor = tables.config.factors[level] * tables.config.bin(index, len(cache.layers))
        steps = torch.from_numpy(np.maximum(tables.spread[rows] * factor, tables.anchor_step[rows]))
        error = (layer.values - exact.values).abs().amax(dim=2).flatten()
        assert (error <= steps / 2 * (1 + 1e-4)).all()
        assert error.any()


def test_lossy_level_keeps_the_first_tokens(llama: Any) -> None:
    for layer, exact in zip(llama.load("delta-0").layers, llama.native().layers, strict=True):
        assert torch.equal(layer.keys[:, :, :4], exact.keys[:, :, :4])
        assert torch.equal(layer.values[:, :, :4], exact.values[:, :, :4])


def test_nothing_is_read_before_it_is_needed(published: Any) -> None:
    cache = published.load()
    layers = published.model.model.layers
    seen = []

    def before(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            seen.append([layer.is_pending for layer in cache.layers])
            assert seen[-1] == [position >= index for position in range(len(layers))]

        return hook

    hooks = [layer.register_forward_pre_hook(before(i)) for i, layer in enumerate(layers)]
    try:
        published.forward(cache, SUFFIX)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) == len(layers)


def test_first_layer_computes_while_the_next_travels(
    llama: Any, tmp_path: Path, tricky_store: Any
) -> None:
    folder = tmp_path / "one-chunk"
    save_cache(llama.model, None, llama.ids, folder, tables=None, levels=["raw"])
    per_layer = 2 * 2 * 16 * len(llama.ids) * 4
    store = tricky_store(folder, withhold_from=per_layer)
    cache = llama.stream(store, level=0)
    assert cache.get_seq_length() == len(llama.ids)
    hook = llama.model.model.layers[0].register_forward_hook(lambda *_: store.gate.set())
    try:
        logits = llama.forward(cache, SUFFIX)  # would wait for ever if layer 0 waited for layer 1
    finally:
        hook.remove()
    assert store.gate.is_set()
    assert torch.equal(logits, llama.forward(llama.native(), SUFFIX))


def test_construction_does_not_wait_for_chunks(
    llama: Any, tricky_store: Any, threads_end: Any
) -> None:
    store = tricky_store(llama.folder, withhold_from=0)
    cache = llama.stream(store)
    assert cache.get_seq_length() == len(llama.ids)
    assert cache.inputs(input_ids=SUFFIX)["input_ids"].shape == (1, 73)
    assert all(layer.is_pending for layer in cache.layers)
    assert not any(step.finished for step in cache.stream_report())
    cache.close()
    assert threads_end()
    with pytest.raises(StoreError, match="closed"):
        llama.forward(cache, SUFFIX)


def test_failing_link_raises_in_generate_and_leaves_no_thread(
    llama: Any, tricky_store: Any, threads_end: Any
) -> None:
    cache = llama.stream(tricky_store(llama.folder, fail_at=2))
    with pytest.raises(StoreError, match="the link to chunks/"):
        llama.model.generate(**cache.inputs(input_ids=SUFFIX), max_new_tokens=2)
    assert threads_end()
    with pytest.raises(StoreError):  # and so does every later use
        cache.wait()


def test_stalled_link_is_given_up_when_the_cache_is_dropped(
    llama: Any, tricky_store: Any, threads_end: Any
) -> None:
    cache = llama.stream(tricky_store(llama.folder, withhold_from=10))
    assert threading.active_count() > 1
    del cache
    gc.collect()
    assert threads_end()


def test_no_thread_is_left_once_everything_is_here(
    llama: Any, tricky_store: Any, threads_end: Any, tmp_path: Path
) -> None:
    for use in (CompressedStreamingCache.wait, lambda c: c.save_pretrained(tmp_path / "a")):
        cache = llama.stream(tricky_store(llama.folder, linger_s=0.1), level=1)
        use(cache)
        assert [transfer.level for transfer in cache.stream_report()] == [1, 1, 1]
        assert threads_end()


def test_concurrent_caches_do_not_disturb_each_other(published: Any) -> None:
    def answer(level: str) -> Tensor:
        return published.forward(published.load(level), SUFFIX)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(answer, ["lossless", "delta-1"] * 4))
    expected = published.forward(published.native(), SUFFIX)
    assert all(torch.equal(logits, expected) for logits in answers[::2])
    assert all(torch.equal(logits, answers[1]) for logits in answers[1::2])


def test_wrong_byte_on_the_link_is_fetched_again(llama: Any, tricky_store: Any) -> None:
    expected = llama.forward(llama.native(), SUFFIX)
    for offset in (0, 1):  # of an index, of a segment
        cache = llama.stream(tricky_store(llama.folder, damage=1, damage_offset=offset))
        assert torch.equal(llama.forward(cache, SUFFIX), expected)


def test_bytes_that_stay_wrong_are_refused_with_their_place(
    llama: Any, tricky_store: Any, threads_end: Any
) -> None:
    cache = llama.stream(tricky_store(llama.folder, damage=99, damage_offset=1))
    with pytest.raises(FormatError, match=r"chunks/\w+\.kv in .*level lossless, layer \d"):
        llama.forward(cache, SUFFIX)
    assert threads_end()
    damaged_index = llama.stream(tricky_store(llama.folder, damage=99))
    with pytest.raises(FormatError, match=r"chunks/\w+\.kv in .*index"):
        llama.forward(damaged_index, SUFFIX)


@pytest.mark.parametrize("cut", ["truncated", "missing"])
def test_chunk_that_is_not_whole_is_refused(llama: Any, tmp_path: Path, cut: str) -> None:
    folder = tmp_path / "cut"
    llama.load("raw").save_pretrained(folder)
    chunk = max((folder / "chunks").iterdir(), key=lambda path: path.stat().st_size)
    if cut == "missing":
        chunk.unlink()
    else:
        chunk.write_bytes(chunk.read_bytes()[:-100])
    cache = CompressedStreamingCache.from_pretrained(folder, model=llama.model, level="raw")
    with pytest.raises(StoreError, match=chunk.name):
        llama.forward(cache, SUFFIX)


def test_level_that_is_not_there_is_named_with_those_that_are(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"'best'.*delta-0.*raw"):
        llama.load("best")
    with pytest.raises(ValueError, match="got both"):
        llama.load("raw", ttft_target_s=1.0)
    with pytest.raises(ValueError, match="above 0"):
        llama.load(None, ttft_target_s=0.0)


def test_levels_by_name(llama: Any) -> None:
    def fetched(**options: Any) -> set[int]:
        cache = CompressedStreamingCache.from_pretrained(llama.folder, model=llama.model, **options)
        cache.wait()
        return {transfer.level for transfer in cache.stream_report()}

    assert fetched(level="coarsest") == {0}
    assert fetched(level="finest") == {4}
    assert fetched() == {3}


@pytest.fixture(scope="module", params=["llama", "gemma"])
def nested(
    request: pytest.FixtureRequest, publish: Any, transform_table: Any, tmp_path_factory: Any
) -> Any:
    """A context with the levels of ``transform``; of Gemma, pairs of sliding and of full layers."""
    model = request.getfixturevalue(f"tiny_{'model' if request.param == 'llama' else 'gemma'}")
    if request.param == "gemma":
        config = copy.deepcopy(model.config)
        config.layer_types = ["sliding_attention"] * 2 + ["full_attention"] * 2
        torch.manual_seed(2)
        model = type(model)(config).eval()
    table = transform_table(model)
    folder = tmp_path_factory.mktemp("nested") / request.param
    published = dataclasses.replace(publish(model), folder=folder)
    save_cache(model, None, published.ids, folder, tables=table, chunk_tokens=32, progress=False)
    return published, table


NESTED = ["transform-0", "transform-1", "transform-2", "lossless"]


def test_levels_of_transform_come_closer_to_the_exact_cache(nested: Any) -> None:
    published, _ = nested
    exact = published.forward(published.native(), SUFFIX).log_softmax(-1)
    distances, sizes = [], []
    for level in NESTED:
        cache = published.load(level)
        found = published.forward(cache, SUFFIX).log_softmax(-1)
        distances.append(float((exact.exp() * (exact - found)).sum(-1).mean()))
        sizes.append(sum(step.size_bytes for step in cache.stream_report()))
        assert cache.get_seq_length() == len(published.ids) + SUFFIX.shape[1]
    assert distances == sorted(distances, reverse=True)
    assert distances[2] < distances[0] / 2
    assert distances[3] == 0
    assert sizes == sorted(sizes)
    manifest = cache.artifact.manifest
    assert [level.name for level in manifest.levels] == NESTED
    chunks = range(len(manifest.chunks))
    assert sizes[:3] == [sum(manifest.read_bytes(k)[level] for k in chunks) for level in range(3)]


def test_streamed_levels_are_what_their_codecs_decode(nested: Any) -> None:
    """Which tokens are in place before, at and after the end of each chunk and window."""
    published, table = nested
    native = cached_layers(published.native(recording=True))
    manifest = published.load().artifact.manifest
    for level in range(3):
        cache = published.load(NESTED[level])
        codecs = [
            codec_for(manifest.levels[part], manifest.identity.layout, table)
            for part in manifest.chain(level)
        ]
        for chunk in manifest.chunks:
            for leader in range(manifest.n_layers):
                members, start = codecs[-1].members(leader), chunk.first_token(leader)
                if start == chunk.end:
                    continue
                tensors = [t for m in members for t in native[m].tokens(start, chunk.end)]
                out = [torch.empty_like(tensor) for tensor in tensors]
                if members:
                    data = b"".join(codec.encode(leader, tensors, start) for codec in codecs)
                    codecs[-1].decode_into(leader, data, out, start)
                places = [(layer, kind) for layer in members for kind in ("keys", "values")]
                for (layer, kind), expected in zip(places, out, strict=True):
                    held = getattr(cache.layers[layer], kind)[0]
                    first = len(published.ids) - held.shape[1]
                    skip = min(max(first - start, 0), chunk.end - start)
                    found = held[:, max(start - first, 0) : max(chunk.end - first, 0)]
                    assert torch.equal(found, expected[:, skip:])


def test_segments_carry_groups_of_layers(nested: Any) -> None:
    published, _ = nested
    artifact = published.load().artifact
    codec = TransformCodec(artifact.manifest.identity.layout, nested[1].tables["transform"], 0)
    for chunk, record in enumerate(artifact.manifest.chunks):
        index = artifact.index(chunk)
        for layer in range(artifact.manifest.n_layers):
            gives = bool(codec.members(layer)) and record.first_token(layer) < record.end
            for level in range(3):
                assert (index.segment(level, layer).size > 0) == gives
    assert any(not codec.members(layer) for layer in range(artifact.manifest.n_layers))


def test_refining_decodes_to_the_bits_of_reading_the_level(nested: Any, scripted: Any) -> None:
    published, table = nested
    refinements = [Refinement(2, 1, 0, 1e6), Refinement(0, 2, 0, 1e6), Refinement(2, 2, 0, 1e6)]

    def stream(levels: tuple[int, ...], refinements: Any = ()) -> Any:
        artifact = Artifact.open(LocalStore(published.folder))
        policy = scripted(levels, refinements)
        return CompressedStreamingCache(artifact, published.model, policy, table)

    refined, direct = stream((0, 2, 0), refinements), stream((2, 2, 2))
    assert torch.equal(published.forward(refined, SUFFIX), published.forward(direct, SUFFIX))
    assert_same_contents(refined, direct)
    assert refined.chunk_sources() == ["transform-2"] * 3


def test_a_cache_read_with_its_embedded_table_grows_and_is_saved(
    nested: Any, tmp_path: Path
) -> None:
    published, _ = nested
    cache = published.load("transform-2")
    ids, _ = generate(published, cache, torch.cat((published.ids[None], SUFFIX), dim=1))
    cache.save_pretrained(tmp_path / "grown", token_ids=ids)
    again = CompressedStreamingCache.from_pretrained(
        tmp_path / "grown", model=published.model, level="transform-2"
    )
    assert again.context_length == ids.shape[1] - 1
    chunks = again.artifact.manifest.chunks
    assert [chunk.source for chunk in chunks][-1] == "transform-2"
    published.forward(again, SUFFIX)
