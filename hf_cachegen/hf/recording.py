"""Save what ``generate()`` has cached, without being in its way."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_cachegen.artifact.writer import check_free
from hf_cachegen.codec.importance import Importance, Mode
from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.compat import keep_windows, output_cache
from hf_cachegen.hf.counting import CountingCache, knows_length
from hf_cachegen.hf.saving import save_cache
from hf_cachegen.hf.settings import Choice, check_chunks, check_push, choose


@contextmanager
def record_cache(
    model: PreTrainedModel, out: str | os.PathLike[str], **save_options: Any
) -> Iterator[None]:
    """Save what ``model.generate()`` caches inside the block.

    Usage: ``with record_cache(model, "chat-kv"): model.generate(**inputs)``. The ids are taken from
    the forward passes, so the artefact holds just what is in the cache: the prompt and all
    generated tokens but the last. Nothing is saved if the block raises.

    Parameters
    ----------
    model
        The model; only hooks are added to it, for the time of the block.
    out
        Folder of the artefact.
    **save_options
        As for :func:`save_cache`.

    Raises
    ------
    UnsupportedError
        The block ran no forward pass with a cache, or ran a batch.
    ValueError, StoreError, FormatError
        An option is wrong, told before the block runs.
    """
    choice = _check_settings(model, out, **save_options)
    recorder = _Recorder()
    hooks = [
        model.register_forward_pre_hook(recorder.before, with_kwargs=True),
        model.register_forward_hook(recorder.after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if recorder.cache is None:
        raise UnsupportedError("no forward pass with a cache ran inside record_cache")
    ids, cache = torch.tensor(recorder.token_ids), recorder.cache
    if not knows_length(cache):
        cache = CountingCache(cache.layers, len(ids))
    save_cache(model, None, ids, out, cache=cache, **{**save_options, "tables": choice.tables})


def _check_settings(
    model: PreTrainedModel, out: str | os.PathLike[str], **save_options: Any
) -> Choice:
    """Refuse what :func:`save_cache` would refuse after the block; the table and the levels."""
    signature = inspect.signature(save_cache)
    given = signature.bind(model, None, (), out, cache=None, **save_options)
    given.apply_defaults()
    asked = given.arguments
    hub_options = {"token": asked["token"], "endpoint": asked["endpoint"]}
    check_chunks(asked["chunk_tokens"])
    if isinstance(asked["importance"], str):
        Importance(cast(Mode, asked["importance"]), n_tokens=1)
    check_push(asked["push_to_hub"], asked["push_options"], **hub_options)
    check_free(Path(out))
    return choose(asked["tables"], asked["levels"], model, **hub_options)


class _Recorder:
    """Forward hooks that keep the cache and the ids of the tokens in it."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.token_ids: list[int] = []
        self._position = 0

    def before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = output_cache(kwargs)
        self._position = 0 if cache is None else self._length(cache)
        if cache is not None and self._position == 0:
            keep_windows(cache)

    def after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        cache = output_cache(output)
        cache = output_cache(kwargs) if cache is None else cache
        ids = kwargs.get("input_ids", args[0] if args else None)
        if cache is None or ids is None:
            return
        if ids.shape[0] != 1:
            raise UnsupportedError(f"record_cache records one sequence, got a batch of {len(ids)}")
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2 and not mask.all():
            raise UnsupportedError("record_cache records one sequence without padding, got a mask")
        if knows_length(cache) and cache.get_seq_length() != self._position + ids.shape[1]:
            raise UnsupportedError(
                f"the cache holds {cache.get_seq_length()} tokens after a pass to "
                f"{self._position + ids.shape[1]}: some were evicted, and record_cache does not "
                "know which; use save_cache(model, tokenizer, all_ids, out, cache=cache, "
                "positions=...)"
            )
        if cache is not self.cache:
            self.token_ids = _known_ids(cache, self._position)
        # A cache may have been cropped since the last pass, as assisted decoding does.
        self.token_ids[self._position :] = ids[0].tolist()
        self.cache = cache

    def _length(self, cache: Cache) -> int:
        """Tokens in a cache before a pass."""
        if knows_length(cache):
            return cache.get_seq_length()
        if cache is self.cache:
            return len(self.token_ids)
        if cache.has_previous_state():
            raise UnsupportedError(
                "the cache already held states of tokens that are not known; begin the block "
                "before its first pass"
            )
        return 0


def _known_ids(cache: Cache, length: int) -> list[int]:
    if length == 0:
        return []
    ids = getattr(cache, "token_ids", None)
    if ids is None or getattr(cache, "known_length", 0) < length:
        raise UnsupportedError(
            f"the cache already held {length} tokens whose ids are not known; use "
            "save_cache(model, tokenizer, all_ids, out, cache=cache)"
        )
    return list(ids[:length].tolist())
