"""What the guard of ``generate()`` touches, and what it leaves alone."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, LlamaForCausalLM

from hf_cachegen import PromptMismatch, UnsupportedError
from hf_cachegen.hf.calls import known_ids
from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.hf.guard import GuardedGenerate, guard_generate

NEW = torch.tensor([[7, 9, 11]])
OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.fixture
def guarded(llama: Any) -> Any:
    """A guarded copy of the tiny Llama."""
    model = copy.deepcopy(llama.model)
    guard_generate(model)
    return model


def whole(published: Any) -> torch.Tensor:
    """The context and three tokens."""
    return torch.cat((published.ids[None], NEW), dim=1)


def test_calls_without_a_streamed_cache_are_not_touched(llama: Any, guarded: Any) -> None:
    plain = type(guarded).generate(guarded, whole(llama), **OPTIONS)
    assert torch.equal(guarded.generate(whole(llama), **OPTIONS), plain)
    native = {cache_argument(guarded): llama.native()}
    assert torch.equal(guarded.generate(whole(llama), **native, **OPTIONS), plain)
    cache = llama.load()
    cache.reset()
    emptied = {cache_argument(guarded): cache}
    assert torch.equal(guarded.generate(whole(llama), **emptied, **OPTIONS), plain)


def test_guard_looks_like_generate_and_is_set_once(guarded: Any) -> None:
    guard = guarded.generate
    guard_generate(guarded)
    assert guarded.generate is guard
    assert guard.__doc__ == LlamaForCausalLM.generate.__doc__
    assert next(iter(inspect.signature(guard).parameters)) == "inputs"


def test_copy_of_a_guarded_model_is_guarded_itself(llama: Any, guarded: Any) -> None:
    clone = copy.deepcopy(guarded)
    torch.nn.init.zeros_(clone.lm_head.weight)
    answer = clone.generate(whole(llama), **OPTIONS)[0, -4:]
    assert answer.tolist() == [1] * 4  # of equal logits, without eos: its own weights
    with pytest.raises(PromptMismatch):
        clone.generate(NEW, **{cache_argument(clone): llama.load()}, **OPTIONS)


def test_guarded_model_can_be_pickled(llama: Any, guarded: Any) -> None:
    stream = io.BytesIO()
    torch.save(guarded, stream)
    stream.seek(0)
    other = torch.load(stream, weights_only=False)
    assert not isinstance(other.generate, GuardedGenerate)
    assert torch.equal(
        other.generate(whole(llama), **OPTIONS), guarded.generate(whole(llama), **OPTIONS)
    )


def test_guard_does_not_keep_a_model_alive(guarded: Any) -> None:
    model = copy.deepcopy(guarded)
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["keyword", "config", "model"])
def test_options_count_wherever_they_are_set(llama: Any, guarded: Any, where: str) -> None:
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 2}
    if where == "config":
        options = {"generation_config": GenerationConfig(**options)}
    elif where == "model":
        guarded.generation_config.prompt_lookup_num_tokens = 2
        options = {}
    with pytest.raises(UnsupportedError, match="assisted decoding"):
        guarded.generate(whole(llama), **{cache_argument(guarded): llama.load()}, **options)


def test_prompt_in_pieces_needs_a_version_that_can(
    llama: Any, guarded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.20.9")
    with pytest.raises(UnsupportedError, match="runs the whole prompt again"):
        guarded.generate(
            whole(llama), prefill_chunk_size=2, **{cache_argument(guarded): llama.load()}, **OPTIONS
        )


def test_arguments_count_in_any_order(llama: Any, guarded: Any) -> None:
    prompt = whole(llama)
    prompt[0, 5] += 1
    for arguments in ((prompt, GenerationConfig(max_new_tokens=2)), (prompt,)):
        with pytest.raises(PromptMismatch, match="at position 5 of 70"):
            guarded.generate(*arguments, **{cache_argument(guarded): llama.load()})
    with pytest.raises(PromptMismatch, match="at position 5 of 70"):
        guarded.generate(inputs=prompt, past_key_values=llama.load())


def test_each_row_has_to_continue_the_context(llama: Any, guarded: Any) -> None:
    rows = whole(llama).repeat(3, 1)
    rows[2, 40] += 1
    with pytest.raises(PromptMismatch, match="at position 40 of 70"):
        guarded.generate(rows, **{cache_argument(guarded): llama.load()}, **OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, PromptMismatch, "no prompt"),
        ({"input_ids": NEW, "attention_mask": torch.ones(1, 72)}, ValueError, "of 73 with new"),
        ({"input_ids": NEW, "attention_mask": torch.ones(1, 1, 3, 73)}, UnsupportedError, "B, T"),
    ],
)
def test_call_that_fits_nothing_is_refused(
    llama: Any, guarded: Any, arguments: Any, error: type[Exception], message: str
) -> None:
    cache = llama.load()
    with pytest.raises(error, match=message):
        guarded.generate(**arguments, **{cache_argument(guarded): cache}, **OPTIONS)
    assert cache.get_seq_length() == 70


def test_prompt_that_ends_where_a_used_window_does_is_refused(gemma: Any) -> None:
    model = copy.deepcopy(gemma.model)
    guard_generate(model)
    cache = gemma.load()
    argument = {cache_argument(model): cache}
    answer = model.generate(whole(gemma), **argument, **OPTIONS)
    with pytest.raises(PromptMismatch, match="cannot give one up"):
        model.generate(answer[:, : cache.get_seq_length()], **argument, **OPTIONS)


def test_ids_of_what_was_generated_are_known(llama: Any, guarded: Any) -> None:
    argument = {cache_argument(guarded): llama.load()}
    cache = argument[cache_argument(guarded)]
    assert torch.equal(known_ids(cache), llama.ids)
    answer = guarded.generate(whole(llama), **argument, **OPTIONS)
    assert torch.equal(known_ids(cache), answer[0, :-1])
    mask = torch.ones(1, answer.shape[1] + 2, dtype=torch.long)
    more = torch.cat((answer[:, -1:], NEW[:, :2]), dim=1)  # the last token is not cached yet
    new = guarded.generate(more, attention_mask=mask, **argument, **OPTIONS)
    assert torch.equal(known_ids(cache), torch.cat((answer[0, :-1], new[0, :-1])))
    sampled = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 2}
    following = torch.cat((answer[:, :-1], new, NEW), dim=1)
    known = known_ids(cache)
    guarded.generate(following, **argument, **sampled)
    assert torch.equal(known_ids(cache), known)  # two rows went on differently
