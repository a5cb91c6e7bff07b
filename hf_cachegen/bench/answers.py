"""``hf-cachegen bench answers``: does a compressed cache answer questions as the exact one does?"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from hf_cachegen.bench.baselines import baselines, decoded_cache
from hf_cachegen.bench.ttft import Prompt, build_prompt
from hf_cachegen.codec.importance import Mode
from hf_cachegen.hf.cache import CompressedStreamingCache
from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.hf.saving import save_cache
from hf_cachegen.levels import available_levels
from hf_cachegen.tables import ModelTable

SCHEMA = 1

Questions = Mapping[str, Sequence[str]]
"""Questions by the part of the document that they are about."""


@dataclass(frozen=True)
class AnswersRow:
    """One level of the cache.

    Attributes
    ----------
    same
        By part, how many answers are those of the exact cache, word for word.
    asked
        By part, how many questions there are.
    """

    codec: str
    level: str
    importance: str
    same: dict[str, int]
    asked: dict[str, int]


def read_questions(text: str) -> dict[str, list[str]]:
    """Questions from lines ``part: question``; empty lines and those with ``#`` are skipped.

    Raises
    ------
    ValueError
        A line has no part, or there is no question.
    """
    questions: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            part, colon, question = line.partition(":")
            if not colon or not question.strip():
                raise ValueError(f"line {number}: expected 'part: question', got {line!r}")
            questions.setdefault(part.strip(), []).append(question.strip())
    if not questions:
        raise ValueError("expected lines of 'part: question', got none")
    return questions


def bench_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    table: ModelTable,
    document: str,
    questions: Questions,
    *,
    context: int = 3000,
    answer_tokens: int = 24,
    importance: Sequence[Mode] = ("predicted", "recent"),
    progress: bool = True,
) -> list[AnswersRow]:
    """Ask every question greedily from the exact cache, from each level and from baselines.

    Parameters
    ----------
    model, tokenizer, table
        What to measure.
    document, questions
        What is cached and asked.
    context
        Tokens of the document.
    answer_tokens
        Tokens of an answer.
    importance
        The ways of telling tokens apart to encode with, see :func:`~hf_cachegen.save_cache`.
    progress
        Show a progress bar.
    """
    prompts = {
        part: [build_prompt(tokenizer, document, question, context) for question in asked]
        for part, asked in questions.items()
    }
    ids = next(iter(prompts.values()))[0].context
    exact = prefill(model, ids, progress=False)
    layers = cached_layers(exact)
    expected = _answers(model, exact, prompts, answer_tokens)
    rows = []

    def add(codec: str, level: str, importance: str, cache: Cache) -> None:
        found = _answers(model, cache, prompts, answer_tokens)
        same = {
            part: sum(a == b for a, b in zip(found[part], expected[part], strict=True))
            for part in prompts
        }
        asked = {part: len(answers) for part, answers in expected.items()}
        rows.append(AnswersRow(codec, level, importance, same, asked))

    for baseline in baselines(model.dtype):
        if not baseline.exact:
            add(baseline.name, baseline.level, "", decoded_cache(baseline, exact, layers)[1])
    lossy = [level for level in available_levels(table) if not level.exact]
    bar = tqdm(total=len(lossy) * len(importance), desc="levels", disable=not progress)
    for way in importance:
        # Only transform tells tokens apart, so the others need no second round.
        levels = [level for level in lossy if way == importance[0] or level.codec == "transform"]
        bar.total -= len(lossy) - len(levels)
        with tempfile.TemporaryDirectory() as folder:
            names = [level.name for level in levels]
            save_cache(
                model, None, ids, folder, cache=exact, tables=table, levels=names,
                importance=way, progress=False,
            )  # fmt: skip
            for level in levels:
                shown = way if level.codec == "transform" else ""
                add(level.codec, level.name, shown, _load(model, table, folder, level.name))
                bar.update()
    bar.close()
    return rows


def _load(
    model: PreTrainedModel, table: ModelTable, folder: str | Path, level: str
) -> CompressedStreamingCache:
    return CompressedStreamingCache.from_pretrained(folder, model=model, level=level, tables=table)


def _answers(
    model: PreTrainedModel, cache: Cache, prompts: Mapping[str, Sequence[Prompt]], n_tokens: int
) -> dict[str, list[list[int]]]:
    return {
        part: [_answer(model, cache, prompt, n_tokens) for prompt in asked]
        for part, asked in prompts.items()
    }


def _answer(model: PreTrainedModel, cache: Cache, prompt: Prompt, n_tokens: int) -> list[int]:
    ids = torch.cat((prompt.context, prompt.question))[None].to(model.device)
    arguments: dict[str, Any] = {cache_argument(model): copy.deepcopy(cache)}
    answer: Tensor = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n_tokens,
        do_sample=False,
        **arguments,
    )
    return answer[0, ids.shape[1] :].tolist()
