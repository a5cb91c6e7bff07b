"""Timed answers of a model. Imports transformers: for use inside commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from hf_cachegen.hf.cache import CompressedStreamingCache


@dataclass(frozen=True)
class Answer:
    """What a model said and when.

    Attributes
    ----------
    prompt
        Ids ``[1, T]`` that it answered.
    first_token_s, total_s
        Seconds from the start until the first new token and until the last.
    """

    text: str
    prompt: Tensor
    n_tokens: int
    first_token_s: float
    total_s: float


class _TimedStreamer(TextStreamer):  # type: ignore[misc]  # transformers has no types
    """Prints the answer as it comes and notes when its first token is there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.first_token_at: float | None = None

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt and self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        super().put(value)


def answer_from_cache(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    open_cache: Callable[[], CompressedStreamingCache],
    question: str,
    max_new_tokens: int,
) -> tuple[Answer, CompressedStreamingCache]:
    """Answer from a cache that is opened now; its transfer counts into the times."""
    started = time.perf_counter()
    cache = open_cache()
    try:
        inputs = cache.inputs(tokenizer, question)
        return _answer(model, tokenizer, inputs, max_new_tokens, started), cache
    finally:
        cache.close()


def answer_from_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Tensor,
    max_new_tokens: int,
) -> Answer:
    """Answer the same prompt ``[1, T]`` with a cache that the model fills itself."""
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    return _answer(model, tokenizer, inputs, max_new_tokens, time.perf_counter())


def _answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, Any],
    max_new_tokens: int,
    started: float,
) -> Answer:
    streamer = _TimedStreamer(tokenizer)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=padding,
        streamer=streamer,
    )
    ended = time.perf_counter()
    new = ids[0, inputs["input_ids"].shape[1] :]
    assert streamer.first_token_at is not None  # max_new_tokens is at least 1
    return Answer(
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt=inputs["input_ids"],
        n_tokens=len(new),
        first_token_s=streamer.first_token_at - started,
        total_s=ended - started,
    )
