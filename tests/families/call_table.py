"""The calls of ``docs/compatibility.md``, each with what it has to give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StaticCache,
    pipeline,
    set_seed,
)

from hf_cachegen import PromptMismatch, UnsupportedError
from hf_cachegen.hf.compat import cache_argument, place_arguments
from hf_cachegen.hf.joining import fill_cache

NEW = torch.tensor([[7, 9, 11]])
CONTEXT = 70
KINDS = ("full", "sliding", "states")
"""Families with full attention only, those with sliding windows, and those that keep states."""

GUESSES = "takes back tokens that were guessed wrong"

Runs = tuple[Any, Any]
"""What a streamed cache gave, and what it has to give: (sequences, logits) each."""


def prompts(warm: Any, new: torch.Tensor = NEW) -> torch.Tensor:
    """The context and what follows it, a row for each of ``new``."""
    return torch.cat((warm.ids.expand(len(new), -1), new), dim=1)


def native(warm: Any, prompt: torch.Tensor, rows: int = 1, **options: Any) -> Any:
    """The same call with transformers' own cache, repeated by hand where that is needed."""
    cache = warm.native()
    if rows > 1:  # batch_repeat_interleave leaves states as they are
        cache.reorder_cache(torch.zeros(rows, dtype=torch.long))
    return warm.generate(cache, prompt, **options)


def same_call(warm: Any, prompt: torch.Tensor, rows: int = 1, **options: Any) -> Runs:
    """One call with both caches."""
    set_seed(5)
    ours = warm.generate(warm.load(), prompt, **options)
    set_seed(5)
    return ours, native(warm, prompt, rows, **options)


def new_only(warm: Any, **options: Any) -> Runs:
    """New ids with the mask of all tokens, against the whole prompt."""
    whole = prompts(warm)
    ours = warm.generate(warm.load(), NEW, attention_mask=torch.ones_like(whole), **options)
    sequences, logits = native(warm, whole)
    return ours, (sequences[:, CONTEXT:], logits)


def whole_without_mask(warm: Any) -> Runs:
    return same_call(warm, prompts(warm), attention_mask=None)


def new_without_mask(warm: Any) -> Runs:
    return same_call(warm, torch.arange(10, 90)[None], attention_mask=None)


def embeddings(warm: Any) -> Runs:
    whole = prompts(warm)
    embeds = warm.model.get_input_embeddings()(whole).detach()
    ours = warm.generate(warm.load(), None, inputs_embeds=embeds, attention_mask=None)
    sequences, logits = native(warm, whole)
    return ours, (sequences[:, whole.shape[1] :], logits)


def new_embeddings(warm: Any) -> Runs:
    embeds = warm.model.get_input_embeddings()(torch.arange(10, 90)[None]).detach()
    return warm.generate(warm.load(), None, inputs_embeds=embeds, attention_mask=None), None


def context_itself(warm: Any) -> Runs:
    prompt = warm.ids[None]
    ours = warm.generate(warm.load(), prompt)
    cache = DynamicCache(config=warm.model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        copy.deepcopy(warm.model)(input_ids=warm.ids[None], **{cache_argument(warm.model): cache})
    cache.crop(-1)
    return ours, warm.generate(cache, prompt)


def shorter(warm: Any) -> Runs:
    return same_call(warm, warm.ids[None, :60])


def different(warm: Any) -> Runs:
    prompt = prompts(warm)
    prompt[0, 33] += 1
    return same_call(warm, prompt)


def batch(warm: Any) -> Runs:
    new = torch.tensor([[7, 9, 11], [8, 12, 6], [30, 31, 32]])
    return same_call(warm, prompts(warm, new), rows=3)


def _padded(warm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Questions of three and of five tokens."""
    new = torch.tensor([[0, 0, 7, 9, 11], [8, 12, 6, 5, 4]])
    mask = torch.ones(2, CONTEXT + 5, dtype=torch.long)
    mask[0, CONTEXT : CONTEXT + 2] = 0
    return prompts(warm, new), mask


def padded_between(warm: Any) -> Runs:
    prompt, mask = _padded(warm)
    _, logits = warm.generate(warm.load(), prompt, attention_mask=mask)
    rows = [native(warm, row[keep.bool()][None]) for row, keep in zip(prompt, mask, strict=True)]
    return logits, torch.cat([alone for _, alone in rows], dim=1)


def padded_left(warm: Any) -> Runs:
    prompt, mask = _padded(warm)
    mask = torch.cat((mask[:, CONTEXT:], mask[:, :CONTEXT]), dim=1)
    prompt[0] = torch.cat((prompt[0, CONTEXT : CONTEXT + 2], warm.ids, NEW[0]))
    return same_call(warm, prompt, rows=2, attention_mask=mask)


def padded_behind(warm: Any) -> Runs:
    prompt, mask = _padded(warm)
    mask[0, -1] = 0
    return same_call(warm, prompt, rows=2, attention_mask=mask)


def several_contexts(warm: Any) -> Runs:
    long, short = warm.load(), warm.native_of(warm.ids[9:])
    cache, mask = fill_cache(DynamicCache(config=warm.model.config), long, short)
    rows = [prompts(warm), torch.cat((warm.ids[None, 9:], NEW), dim=1)]
    left = torch.cat((torch.zeros(1, 9, dtype=torch.long), rows[1]), dim=1)
    mask = torch.cat((mask, torch.ones(2, 3, dtype=torch.long)), dim=1)
    _, logits = warm.generate(cache, torch.cat((rows[0], left)), attention_mask=mask)
    alone = [warm.generate(warm.native_of(row[0, :-3]), row)[1] for row in rows]
    return logits, torch.cat(alone, dim=1)


def lookup(warm: Any) -> Runs:
    return same_call(warm, prompts(warm), prompt_lookup_num_tokens=2)


def _assistant(warm: Any) -> Any:
    """A model whose guesses are sometimes right."""
    assistant = copy.deepcopy(warm.model)
    torch.manual_seed(7)
    for parameter in assistant.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return assistant


def assisted(warm: Any) -> Runs:
    return same_call(warm, prompts(warm), assistant_model=_assistant(warm))


def assisted_new(warm: Any) -> Runs:
    return new_only(warm, assistant_model=_assistant(warm))


@torch.no_grad()
def static(warm: Any) -> Runs:
    ours, theirs = (StaticCache(config=warm.model.config, max_cache_len=128) for _ in range(2))
    fill_cache(ours, warm.load())
    copy.deepcopy(warm.model)(input_ids=warm.ids[None], **{cache_argument(warm.model): theirs})
    return warm.generate(ours, prompts(warm)), warm.generate(theirs, prompts(warm))


def quantised(warm: Any) -> Runs:
    caches = [QuantizedCache("fp8", warm.model.config) for _ in range(2)]
    whole = prompts(warm)
    filled = zip(caches, (warm.load(), warm.native()), strict=True)
    ours, theirs = (fill_cache(cache, source)[0] for cache, source in filled)
    return warm.generate(ours, whole), warm.generate(theirs, whole)


def second_turn(warm: Any) -> Runs:
    runs = []
    for cache in (warm.load(), warm.native()):
        first, _ = warm.generate(cache, prompts(warm))
        runs.append(warm.generate(cache, torch.cat((first, NEW), dim=1)))
    return runs[0], runs[1]


def edited_answer(warm: Any) -> Runs:
    cache = warm.load()
    first, _ = warm.generate(cache, prompts(warm))
    first[0, CONTEXT + 4] += 1  # a token of the answer, which is cached
    return warm.generate(cache, torch.cat((first, NEW), dim=1)), None


def two_questions(warm: Any) -> Runs:
    cache = warm.load()
    warm.generate(copy.deepcopy(cache), prompts(warm, torch.tensor([[20, 21]])))
    return warm.generate(cache, prompts(warm)), native(warm, prompts(warm))


@torch.no_grad()
def forward(warm: Any) -> Runs:
    arguments = place_arguments(warm.model, CONTEXT, NEW)
    logits = [
        copy.deepcopy(warm.model)(
            input_ids=NEW, **{cache_argument(warm.model): cache}, **arguments
        ).logits
        for cache in (warm.load(), warm.native())
    ]
    return logits[0], logits[1]


def batch_after_beams(warm: Any) -> Runs:
    cache = warm.load()
    first, _ = warm.generate(cache, prompts(warm), num_beams=3)
    return warm.generate(cache, torch.cat((first, NEW), dim=1)), None


def contrastive(warm: Any) -> Runs:
    return same_call(warm, prompts(warm), penalty_alpha=0.6, top_k=4)


def groups_of_beams(warm: Any) -> Runs:
    return same_call(warm, prompts(warm), num_beams=4, num_beam_groups=2, diversity_penalty=0.5)


def continuous(warm: Any) -> Runs:
    ids = prompts(warm).tolist()
    return warm.model.generate_batch(ids, **{cache_argument(warm.model): warm.load()}), None


def text_pipeline(warm: Any) -> Runs:
    answers = []
    for cache in (warm.load(), warm.native()):
        model = copy.deepcopy(warm.model)
        ask = pipeline("text-generation", model=model, tokenizer=WORDS)
        text = WORDS.decode(prompts(warm)[0])
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}
        answers.append(ask(text, **{cache_argument(model): cache}, **options))
    return answers[0], answers[1]


def chat(warm: Any) -> Runs:
    """Three turns, each with the whole conversation through the chat template."""
    runs: list[Any] = []
    for cache in (warm.load(), warm.native()):
        messages = [{"role": "user", "content": WORDS.decode(warm.ids)}]
        ids = None
        for question in ("w7 w9", "w11", "w4 w5 w6"):
            messages += [{"role": "user", "content": question}]
            prompt = WORDS.apply_chat_template(messages, return_tensors="pt", return_dict=True)
            ids, logits = warm.generate(cache, prompt["input_ids"])
            answer = WORDS.decode(ids[0, prompt["input_ids"].shape[1] :])
            messages += [{"role": "assistant", "content": answer}]
        runs.append((ids, logits))
    return runs[0], runs[1]


def _words() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words w0, w1, ..., with a chat template of their text."""
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(320)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    words.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    return words


WORDS = _words()


@dataclass(frozen=True)
class Call:
    """A row of the table.

    Attributes
    ----------
    what, code
        The call, in words and in code.
    run
        Makes the call; returns what it gave and what it has to give.
    refused
        Part of the message, by kind of attention; kinds that are not named are right.
    error
        The type of the refusal.
    near
        Whether other rows or padding change the order of sums, so that the last bits may differ.
    since
        First version of transformers that can do it.
    """

    what: str
    code: str
    run: Callable[[Any], Runs]
    refused: dict[str, str]
    error: type[Exception] = PromptMismatch
    near: bool = False
    since: str = "5.18"

    def __str__(self) -> str:
        return self.what


def right(what: str, code: str, run: Callable[[Any], Runs], **options: Any) -> Call:
    """A call that is right with every kind of attention."""
    return Call(what, code, run, {}, **options)


def refused(
    what: str, code: str, run: Callable[[Any], Runs], message: str, error: type[Exception]
) -> Call:
    """A call that is refused with every kind of attention."""
    return Call(what, code, run, dict.fromkeys(KINDS, message), error)


CALLS = [
    right("whole prompt", "input_ids=context + new", lambda w: same_call(w, prompts(w))),
    right("whole prompt without a mask", "", whole_without_mask),
    right("new ids with the mask of all", "input_ids=new, attention_mask=ones", new_only),
    refused(
        "new ids without a mask", "input_ids=new", new_without_mask, "position 0", PromptMismatch
    ),
    right("embeddings of the whole prompt", "inputs_embeds=embed(context + new)", embeddings),
    refused(
        "embeddings of new tokens",
        "inputs_embeds=embed(new)",
        new_embeddings,
        "position 0",
        PromptMismatch,
    ),
    Call(
        "prompt that equals the context",
        "input_ids=context",
        context_itself,
        {"states": "states cannot give one up to run on; add a token"},
    ),
    Call(
        "prompt shorter than the context",
        "input_ids=context[:60]",
        shorter,
        {
            "full": r"has 60 tokens and the cache 70.*crop\(-11\)",
            "sliding": "has 60 tokens and the cache 70.*since sliding windows cannot be cropped",
            "states": "has 60 tokens and the cache 70.*since states cannot be cropped",
        },
    ),
    refused("prompt that differs", "", different, "at position 33 of 70", PromptMismatch),
    right("later turn", "input_ids=generated + new", second_turn),
    refused(
        "later turn with an edited answer",
        "",
        edited_answer,
        "at position 74 of 78",
        PromptMismatch,
    ),
    right("two questions", "copy.deepcopy(cache) for each", two_questions),
    right(
        "sampling with a seed", "do_sample=True", lambda w: same_call(w, prompts(w), do_sample=True)
    ),
    right("beams", "num_beams=3", lambda w: same_call(w, prompts(w), rows=3, num_beams=3)),
    right(
        "several answers",
        "num_return_sequences=3",
        lambda w: same_call(w, prompts(w), rows=3, num_return_sequences=3, do_sample=True),
    ),
    right("batch of questions of one length", "input_ids [B, T]", batch),
    Call(
        "batch of questions of different length",
        "",
        padded_between,
        {
            "sliding": "takes up room in sliding windows",
            "states": "takes up room in states",
        },
        UnsupportedError,
        near=True,
    ),
    refused("padding to the left", "padding_side='left'", padded_left, "hides", PromptMismatch),
    refused("padding behind", "padding_side='right'", padded_behind, "found it behind", ValueError),
    right(
        "batch of several contexts",
        "fill_cache(DynamicCache(config=...), a, b)",
        several_contexts,
        near=True,
    ),
    refused(
        "one sequence after a batch",
        "",
        batch_after_beams,
        "the cache has 3 rows and the call 1",
        ValueError,
    ),
    refused(
        "prompt lookup, whole prompt",
        "prompt_lookup_num_tokens=2",
        lookup,
        rf"input_ids\[:, 70:\]|{GUESSES}",
        UnsupportedError,
    ),
    refused(
        "assisted, whole prompt",
        "assistant_model=...",
        assisted,
        rf"input_ids\[:, 70:\]|{GUESSES}",
        UnsupportedError,
    ),
    Call(
        "prompt lookup, new ids with the mask of all",
        "prompt_lookup_num_tokens=2",
        lambda w: new_only(w, prompt_lookup_num_tokens=2),
        {"states": GUESSES},
        UnsupportedError,
        near=True,
    ),
    Call(
        "assisted, new ids with the mask of all",
        "assistant_model=...",
        assisted_new,
        {"states": GUESSES},
        UnsupportedError,
        near=True,
    ),
    right(
        "prefill in pieces",
        "prefill_chunk_size=2",
        lambda w: same_call(w, prompts(w), prefill_chunk_size=2),
        since="5.21",
    ),
    refused(
        "without going on with the cache",
        "use_cache=False",
        lambda w: same_call(w, prompts(w), use_cache=False),
        "use_cache=True",
        ValueError,
    ),
    refused(
        "another cache besides",
        "cache_implementation='static'",
        lambda w: same_call(w, prompts(w), cache_implementation="static"),
        "cache_implementation",
        ValueError,
    ),
    right("static cache", "fill_cache(StaticCache(...), cache)", static, near=True),
    Call(
        "quantised cache",
        'fill_cache(QuantizedCache("fp8", ...), cache)',
        quantised,
        dict.fromkeys(("sliding", "states"), "only supported for models with only full attention"),
        ValueError,
        since="5.22",
    ),
    *(
        refused(what, code, run, "trust_remote_code", ValueError)
        for what, code, run in (
            ("contrastive search", "penalty_alpha=0.6, top_k=4", contrastive),
            ("groups of beams", "num_beams=4, num_beam_groups=2", groups_of_beams),
            ("DoLa", "dola_layers='high'", lambda w: same_call(w, prompts(w), dola_layers="high")),
        )
    ),
    refused(
        "continuous batching",
        "generate_batch(..., cache=cache)",
        continuous,
        "continuous batching takes no cache",
        UnsupportedError,
    ),
    right("pipeline", "pipeline('text-generation', ...)(text, cache=cache)", text_pipeline),
    right("chat template over turns", "apply_chat_template(messages)", chat),
    right("forward pass", "model(input_ids=new, cache=cache)", forward),
]
