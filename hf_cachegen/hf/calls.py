"""Calls of ``generate()`` with a streamed cache: put right, or refused before the model runs.

``generate()`` trusts a filled cache. It compares no tokens, takes new ids without a mask for a
whole prompt, and feeds a prompt that is as long as the cache twice, all in silence. The checks here
see what it is given, which a cache alone does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_cachegen.errors import PromptMismatch, UnsupportedError
from hf_cachegen.hf.compat import longrope_limit, prefills_in_pieces, text_config
from hf_cachegen.hf.families import SLOT_POSITION_MODELS

ASSISTED_OPTIONS = (
    "assistant_model",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
)
"""What makes ``generate()`` check several guessed tokens at once."""

DEFAULT_NEW_TOKENS = 20
"""Tokens that ``generate()`` adds if nothing says how many."""

RIGHT_CALL = "model.generate(**cache.inputs(tokenizer, question)) makes the right call"


class StreamedCache(Protocol):
    """What the checks need of a cache."""

    token_ids: Tensor
    history: Tensor
    """What is known of all cached ids; set here, and cut by the cache when it is cropped."""
    layers: list[Any]
    one_by_one: bool
    """Whether the model goes on from the cache only if it is given new tokens one by one."""

    @property
    def keeps_states(self) -> bool:
        """Whether a layer keeps a recurrent or convolutional state."""

    @property
    def uncroppable_part(self) -> str:
        """What cannot give up tokens, where something cannot."""

    @property
    def known_length(self) -> int:
        """First tokens that are certainly those of ``token_ids``."""

    def get_seq_length(self) -> int:
        """Tokens in the cache."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make so many rows of each."""


@dataclass(frozen=True)
class GenerateCall:
    """The arguments of one ``generate()`` that matter to a filled cache.

    Attributes
    ----------
    input_ids
        ``[B, T]``; None if there are none.
    inputs_embeds
        ``[B, T, D]`` instead of ids; None if there are none.
    attention_mask
        ``[B, M]``; None if there is none.
    rows
        Sequences that the model runs on: the batch times beams or returned sequences.
    assisted
        Whether several guessed tokens are checked at once.
    in_pieces
        Whether the prompt is run in pieces.
    use_cache
        Whether ``generate()`` goes on with the cache after its first pass.
    max_new_tokens
        Tokens that it may add.
    """

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Tensor | None
    rows: int
    assisted: bool
    in_pieces: bool
    use_cache: bool
    max_new_tokens: int

    @classmethod
    def of(cls, model: PreTrainedModel, arguments: Mapping[str, Any]) -> GenerateCall:
        """The call that ``generate(**arguments)`` is, options of its configs included."""
        configs = (arguments.get("generation_config"), model.generation_config)

        def option(name: str) -> Any:
            values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
            return next((value for value in values if value is not None), None)

        ids = arguments.get("input_ids", arguments.get("inputs"))
        embeds = arguments.get("inputs_embeds")
        prompt = ids if embeds is None else embeds
        batch = 1 if prompt is None else prompt.shape[0]
        copies = max(option("num_beams") or 1, option("num_return_sequences") or 1)
        return cls(
            input_ids=ids,
            inputs_embeds=embeds,
            attention_mask=arguments.get("attention_mask"),
            rows=batch * copies,
            assisted=any(option(name) for name in ASSISTED_OPTIONS),
            in_pieces=option("prefill_chunk_size") is not None,
            use_cache=option("use_cache") is not False,
            max_new_tokens=option("max_new_tokens") or option("max_length") or DEFAULT_NEW_TOKENS,
        )

    @property
    def length(self) -> int:
        """Tokens that are passed."""
        prompt = self.input_ids if self.inputs_embeds is None else self.inputs_embeds
        return 0 if prompt is None else prompt.shape[1]

    @property
    def mask_length(self) -> int:
        """Tokens that the mask covers; those that are passed if there is no mask."""
        return self.length if self.attention_mask is None else self.attention_mask.shape[-1]


def known_ids(cache: StreamedCache) -> Tensor:
    """Ids ``[T]`` of the first tokens of a cache, as far as they are known.

    Those of the context, and of what ``generate()`` has added if it was given ids of one sequence.
    """
    context = cache.token_ids[: cache.known_length]
    return getattr(cache, "history", context)[: cache.get_seq_length()]


def check_call(cache: StreamedCache, call: GenerateCall, model: PreTrainedModel) -> None:
    """Refuse a call that would go wrong, or change the cache so that it goes right.

    A prompt that equals what is cached makes the cache give up its last token, since ``generate()``
    needs one to run on; a cache of one row is repeated for several.

    Parameters
    ----------
    cache
        The cache, not empty.
    call
        What ``generate()`` is given.
    model
        Whose ``generate()`` it is.

    Raises
    ------
    PromptMismatch
        The prompt is not a continuation of what is cached; the message says where it differs.
    UnsupportedError
        ``generate()`` or the model cannot do this from a filled cache.
    ValueError
        The arguments do not fit together or do not fit the cache.
    """
    past = cache.get_seq_length()
    if not call.use_cache:
        raise ValueError("generate() has use_cache=False and a cache; pass use_cache=True")
    if call.in_pieces and not prefills_in_pieces():
        raise UnsupportedError(
            "with prefill_chunk_size this version of transformers runs the whole prompt again on "
            "top of a filled cache; leave it out, or upgrade transformers"
        )
    if call.length == 0:
        raise PromptMismatch(f"generate() is given a cache and no prompt; {RIGHT_CALL}")
    if call.attention_mask is not None:
        _check_mask(cache, call.attention_mask, model)
    if call.assisted and not all(layer.is_croppable for layer in cache.layers):
        raise UnsupportedError(
            "assisted decoding takes back tokens that were guessed wrong, which recurrent states "
            "cannot; call generate() without it"
        )
    if call.mask_length == past + call.length and call.inputs_embeds is None:
        _check_rotation(model, past, past + call.length + call.max_new_tokens, whole=False)
    elif call.mask_length == call.length:
        _check_prompt(cache, call, model, past)
        _check_rotation(model, past, call.length, whole=True)
        if call.assisted:
            raise UnsupportedError(
                "assisted decoding feeds a whole prompt on top of a filled cache; give it the new "
                f"tokens, input_ids[:, {past}:], with the attention mask of all"
            )
    else:
        raise ValueError(
            f"expected an attention mask of {call.length} tokens with the whole prompt"
            + (
                f", or of {past + call.length} with new tokens only"
                if call.input_ids is not None
                else ""
            )
            + f"; got {call.mask_length} for {call.length} tokens on {past} that are cached"
        )
    if cache.one_by_one and call.inputs_embeds is not None:
        raise UnsupportedError(
            "this model goes on from a cache only if it is given new tokens one by one, which "
            "generate() cannot do with embeddings; pass ids"
        )
    _fit_rows(cache, call.rows)


def _check_prompt(
    cache: StreamedCache, call: GenerateCall, model: PreTrainedModel, past: int
) -> None:
    """Check a whole prompt against what is cached; crop one token if there is no other."""
    known = known_ids(cache)
    differing = _first_difference(call, known, model)
    if differing is not None:
        raise PromptMismatch(
            f"the prompt differs from what is cached at position {differing} of {past}: pass the "
            "whole prompt from the context's first token on, or new ids with the attention mask of "
            f"all; {RIGHT_CALL}"
        )
    if call.length < past:
        removed = past - call.length + 1
        raise PromptMismatch(
            f"the prompt has {call.length} tokens and the cache {past}: pass the whole prompt, or "
            + (
                f"cache.crop({-removed}) first"
                if all(layer.can_crop(-removed) for layer in cache.layers)
                else f"load a shorter context, since {cache.uncroppable_part} cannot be cropped"
            )
            + f"; {RIGHT_CALL}"
        )
    if call.length == past:
        if not all(layer.can_crop(-1) for layer in cache.layers):
            raise PromptMismatch(
                f"the prompt ends with the {past} tokens that are cached, and "
                f"{cache.uncroppable_part} cannot give one up to run on; add a token, or use a "
                "fresh cache of fewer"
            )
        cache.crop(-1)


def _first_difference(call: GenerateCall, known: Tensor, model: PreTrainedModel) -> int | None:
    """First position at which a prompt is not what is known to be cached, in any row."""
    n = min(call.length, len(known))
    if call.inputs_embeds is None:
        assert call.input_ids is not None
        same = call.input_ids[:, :n].cpu() == known[:n]
    else:
        embed = model.get_input_embeddings()
        with torch.no_grad():
            expected = embed(known[:n].to(call.inputs_embeds.device)).to(call.inputs_embeds.dtype)
        same = (
            torch.isclose(call.inputs_embeds[:, :n], expected, rtol=1e-3, atol=1e-5).all(-1).cpu()
        )
    wrong = torch.nonzero(~same.all(dim=0))
    return int(wrong[0]) if len(wrong) else None


def _check_mask(cache: StreamedCache, mask: Tensor, model: PreTrainedModel) -> None:
    if mask.ndim != 2:
        raise UnsupportedError(
            f"expected an attention mask [B, T] with a streamed cache, got {tuple(mask.shape)}"
        )
    if not mask[:, : cache.get_seq_length()].all():
        raise PromptMismatch(
            "the attention mask hides tokens that are cached: put padding between the context and "
            "the question, not to the left of the context"
        )
    if mask.all():
        return
    if not mask[:, -1].all():
        raise ValueError("expected padding between the context and the question, found it behind")
    room: str | None
    if cache.keeps_states:
        room = "states"
    elif text_config(model).model_type in SLOT_POSITION_MODELS:
        room = "this model's positions"
    else:
        room = "sliding windows" if any(layer.is_sliding for layer in cache.layers) else None
    if room is not None:
        raise UnsupportedError(
            f"padding between context and question takes up room in {room}; ask questions of "
            "different length one by one, each with a copy.deepcopy(cache)"
        )


def _check_rotation(model: PreTrainedModel, past: int, length: int, *, whole: bool) -> None:
    """Models with longrope rotate all keys otherwise once a sequence passes a limit."""
    limit = longrope_limit(model)
    if limit is None or past > limit or length <= limit:
        return
    raise UnsupportedError(
        f"past {limit} tokens this model rotates its keys with other factors (longrope) than those "
        f"of the {past} cached tokens: "
        + ("run this prompt without the cache" if whole else "pass the whole prompt, not new ids")
    )


def _fit_rows(cache: StreamedCache, rows: int) -> None:
    """Repeat a cache of one row; a row for each sequence that ``generate()`` runs on."""
    cached = cache.layers[0].rows
    if cached == rows:
        return
    if cached != 1:
        raise ValueError(
            f"the cache has {cached} rows and the call {rows}: take a copy.deepcopy(cache) before "
            "each call with beams or a batch, or keep one row with cache.batch_select_indices"
        )
    cache.batch_repeat_interleave(rows)
