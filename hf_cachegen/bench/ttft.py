"""Time to the first token of one question, from text and from each level of an encoded cache."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from hf_cachegen.bench.link import LinkServer
from hf_cachegen.bench.quality import compare, continuation_logits
from hf_cachegen.hf.cache import CompressedStreamingCache
from hf_cachegen.hf.compat import cache_argument, new_cache
from hf_cachegen.hf.saving import save_cache
from hf_cachegen.levels import available_levels
from hf_cachegen.tables import ModelTable

ANSWER_TOKENS = 24
AHEAD_TOKENS = 64
"""Next tokens of the document whose predictions are compared."""

BF16_BITS = 16


@dataclass(frozen=True)
class Prompt:
    """A question about a document as token ids ``[T]``.

    Attributes
    ----------
    context
        The part that is cached: how a chat begins, and the document.
    question
        What follows the context.
    ahead
        How the document goes on after the context; only the quality is measured on it.
    """

    context: Tensor
    question: Tensor
    ahead: Tensor


@dataclass(frozen=True)
class Answer:
    """What the model said, and after how many seconds its first token was there."""

    text: str
    ttft_s: float


@dataclass(frozen=True)
class LevelResult:
    """One level of the cache, streamed over the link.

    Attributes
    ----------
    size_bytes
        Every byte that came over the link: all that the level needs but the model's table.
    bits_per_value
        Those bytes over the values of the context's cache.
    ratio_bf16
        16 over that.
    answer
        Its time counts from the call of ``from_pretrained``.
    kl_mean
        Divergence from the exact cache's predictions, nats per token.
    """

    level: str
    size_bytes: int
    bits_per_value: float
    ratio_bf16: float
    answer: Answer
    kl_mean: float


@dataclass(frozen=True)
class TtftResult:
    """Everything one run has measured, and on what.

    Attributes
    ----------
    load
        Processes that wanted a CPU in the minute before, those of others included.
    text
        The answer without a cache.
    table_bytes
        Size of the model's table, which is at hand.
    """

    model: str
    dtype: str
    cpu_capability: str
    threads: int
    load: float
    context_tokens: int
    link_mbps: float
    runs: int
    table_bytes: int
    text: Answer
    levels: tuple[LevelResult, ...]


def build_prompt(
    tokenizer: PreTrainedTokenizerBase, document: str, question: str, context_tokens: int
) -> Prompt:
    """Tokenise a question about the beginning of a document, the document first.

    Parameters
    ----------
    tokenizer
        Its chat template is used if it has one.
    document, question
        Text.
    context_tokens
        Tokens that are cached.

    Raises
    ------
    ValueError
        The document is too short.
    """
    document, ask = document.strip(), f"\n\n{question}"
    if tokenizer.chat_template is None:
        chat = f"{document}{ask}\nAnswer:"
    else:
        turn = [{"role": "user", "content": document + ask}]
        chat = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    cut = chat.rindex(ask)

    def encode(text: str) -> Tensor:
        return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]

    ids = encode(chat[:cut])
    end = context_tokens + AHEAD_TOKENS
    if len(ids) < end:
        raise ValueError(f"expected a document of at least {end} tokens, found {len(ids)}")
    return Prompt(ids[:context_tokens], encode(chat[cut:]), ids[context_tokens:end])


def measure_ttft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    table: ModelTable,
    prompt: Prompt,
    *,
    link_mbps: float = 100.0,
    runs: int = 1,
    progress: bool = True,
) -> TtftResult:
    """Ask from text, save the cache that this leaves behind, and ask from each of its levels.

    Parameters
    ----------
    model, tokenizer, table
        What to measure. The table is at hand wherever the cache is loaded.
    prompt
        The question.
    link_mbps
        Rate of the HTTP link in Mbit/s.
    runs
        Runs of which the median time counts.
    progress
        Show a progress bar.
    """
    load = os.getloadavg()[0]
    levels = [level.name for level in available_levels(table)]
    text, cache = ask_from_text(model, tokenizer, prompt, runs)
    exact = continuation_logits(model, cache, prompt.ahead)
    with tempfile.TemporaryDirectory() as folder:
        save_cache(
            model, None, prompt.context, folder,
            cache=cache, tables=table, levels=levels, progress=False,
        )  # fmt: skip
        with LinkServer(folder, rate_bytes_per_s=link_mbps * 1e6 / 8) as server:
            asker = CacheAsker(model, tokenizer, table, prompt, server, exact)
            bar = tqdm(levels, "ask from caches", unit="level", disable=not progress)
            results = tuple(asker.ask(level, runs) for level in bar)
    return TtftResult(
        model=model.name_or_path,
        dtype=str(model.dtype).removeprefix("torch."),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        load=load,
        context_tokens=len(prompt.context),
        link_mbps=link_mbps,
        runs=runs,
        table_bytes=table.size_bytes(),
        text=text,
        levels=results,
    )


def ask_from_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, runs: int
) -> tuple[Answer, Cache]:
    """The answer without a cache, and the context's cache that it leaves behind."""
    # What torch sets up on its first call is no part of a prefill.
    model.generate(prompt.question[None].to(model.device), max_new_tokens=2, do_sample=False)
    ids = torch.cat((prompt.context, prompt.question))[None].to(model.device)

    def open_text() -> dict[str, Any]:
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            cache_argument(model): new_cache(model),
        }

    answer, arguments = _ask(model, tokenizer, open_text, runs)
    cache: Cache = arguments[cache_argument(model)]
    cache.crop(len(prompt.context) - cache.get_seq_length())
    return answer, cache


@dataclass(frozen=True)
class CacheAsker:
    """Asks the question from a level of the cache that a server offers.

    Attributes
    ----------
    exact
        Logits ``[T, V]`` of the tokens ahead with the exact cache.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    table: ModelTable
    prompt: Prompt
    server: LinkServer
    exact: Tensor

    def ask(self, level: str, runs: int) -> LevelResult:
        """Measure a level: its quality, then its size and time over the link."""
        # First the quality: what numba compiles for the first decoding is no part of a transfer.
        local = self._open(self.server.folder, level)
        logits = continuation_logits(self.model, local, self.prompt.ahead)
        n_values = local.artifact.manifest.identity.layout.values_per_token * local.context_length
        n_requests = len(self.server.requests)
        answer, _ = _ask(
            self.model,
            self.tokenizer,
            lambda: self._open(self.server.url, level).inputs(input_ids=self.prompt.question),
            runs,
        )
        sent = [request.sent_bytes for request in self.server.requests[n_requests:]]
        size_bytes = sum(sent) // runs
        return LevelResult(
            level=level,
            size_bytes=size_bytes,
            bits_per_value=8 * size_bytes / n_values,
            ratio_bf16=BF16_BITS * n_values / (8 * size_bytes),
            answer=answer,
            kl_mean=compare(self.exact, logits, self.prompt.ahead).kl_mean,
        )

    def _open(self, location: str | Path, level: str) -> CompressedStreamingCache:
        return CompressedStreamingCache.from_pretrained(
            location, model=self.model, level=level, tables=self.table
        )


class _Clock(BaseStreamer):
    """Notes when ``generate()`` hands out tokens: the prompt, then one at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    open_prompt: Callable[[], dict[str, Any]],
    runs: int,
) -> tuple[Answer, dict[str, Any]]:
    """The answer, with the median time over runs, and the last run's arguments of generate()."""
    seconds = []
    for _ in range(runs):
        clock = _Clock()
        started = time.perf_counter()
        arguments = open_prompt()
        ids = model.generate(
            **arguments, max_new_tokens=ANSWER_TOKENS, do_sample=False, streamer=clock
        )
        seconds.append(clock.times[1] - started)
    new = ids[0, arguments["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True).strip()
    return Answer(text, statistics.median(seconds)), arguments
