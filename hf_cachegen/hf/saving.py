"""Encode caches into artefacts: the save hook."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from hf_cachegen.artifact import (
    EMBEDDED,
    EXACT,
    ArtifactWriter,
    ChunkPlan,
    Identity,
    LevelRecord,
    Manifest,
    TableRef,
)
from hf_cachegen.codec.base import SegmentCodec
from hf_cachegen.config import CHUNK_TOKENS
from hf_cachegen.errors import PromptMismatch, UnsupportedError
from hf_cachegen.hf.codecs import TableSource, load_table
from hf_cachegen.hf.compat import native_layers, output_cache
from hf_cachegen.hf.contents import CachedLayer, cached_layers
from hf_cachegen.hf.describe import describe_identity, describe_layout
from hf_cachegen.hf.hub import push_artifact
from hf_cachegen.hf.origin import Origin
from hf_cachegen.hf.prefill import PREFILL_TOKENS, prefill
from hf_cachegen.hf.profiling import profile_cache
from hf_cachegen.layout import KVLayout
from hf_cachegen.levels import available_levels, codec_for, default_levels, select_levels
from hf_cachegen.tables import ModelTable

if TYPE_CHECKING:
    from hf_cachegen.hf.cache import CompressedStreamingCache

Tables = TableSource | Literal["auto"] | None
"""A model table or where it is; ``"auto"`` makes a small one from the cache at hand; None encodes
only the exact level."""


def save_cache(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text_or_ids: str | Tensor | Sequence[int],
    out: str | os.PathLike[str],
    *,
    cache: Cache | None = None,
    tables: Tables = "auto",
    levels: Sequence[str] | None = None,
    chunk_tokens: int | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
    model_id: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    token: str | None = None,
    endpoint: str | None = None,
    push_to_hub: str | None = None,
    **push_options: Any,
) -> Manifest:
    """Encode a context's KV cache into an artefact folder.

    Parameters
    ----------
    model, tokenizer
        The model; the tokenizer may be None if ids are given.
    text_or_ids
        The context.
    out
        Folder of the artefact. An artefact of the same model whose context begins this one is
        extended: chunks that it holds already are not written again.
    cache
        A cache that already holds the context, such as ``generate()`` returns; without it the
        model runs. Ids of tokens past the cache's length are ignored. Of a
        :class:`CompressedStreamingCache` the chunks are copied that the settings leave as they are.
    tables
        A model table or where it is; ``"auto"`` takes a streamed cache's own, else makes a small
        one from this cache and embeds it; None stores exact levels only.
    levels
        Names of the levels to store; by default a streamed cache's own, else every lossy one and
        ``lossless``.
    chunk_tokens
        Tokens per chunk; by default a streamed cache's own, else ``CHUNK_TOKENS``.
    prefill_tokens
        Tokens per forward pass.
    model_id, revision
        What to record as the model's origin, if not what it was loaded from.
    overwrite
        Replace an artefact of another context, model or setting.
    progress
        Show progress bars.
    token, endpoint
        As everywhere in huggingface_hub; for a table on the Hub, and to upload.
    push_to_hub
        Repository to upload to; ``push_options`` as for :func:`push_artifact`.

    Returns
    -------
    Manifest
        What was written.

    Raises
    ------
    UnsupportedError
        The model caches something that cannot be saved.
    IdentityError
        ``out`` holds an artefact of something else.
    """
    if push_options and push_to_hub is None:
        raise ValueError(f"expected no {', '.join(push_options)} without push_to_hub")
    native_layers(model)  # refuses what cannot be saved before the model runs
    ids = _token_ids(tokenizer, text_or_ids)
    if cache is None:
        cache = prefill(model, ids, piece_tokens=prefill_tokens, progress=progress)
    length = cache.get_seq_length()
    if not 0 < length <= len(ids):
        raise PromptMismatch(f"expected the ids of all {length} cached tokens, got {len(ids)} ids")
    ids = ids[:length]
    origin = Origin.of(cache)
    layers = cached_layers(cache)
    layout = describe_layout(model, [layer.tensors for layer in layers])
    if tables == "auto" and origin is not None and levels is None:
        table, reference = origin.table, origin.manifest.identity.table
        chosen = origin.manifest.levels
    else:
        hub_options = {"token": token, "endpoint": endpoint}
        table, reference = _resolve_table(tables, model, layout, layers, hub_options)
        available = available_levels(table)
        chosen = default_levels(table) if levels is None else select_levels(available, levels)
    manifest = _write(
        out,
        describe_identity(model, layout, reference, model_id=model_id, revision=revision),
        chosen,
        chunk_tokens or (origin.manifest.chunk_tokens if origin else CHUNK_TOKENS),
        ids,
        layers,
        table,
        origin=origin,
        overwrite=overwrite,
        progress=progress,
    )
    if push_to_hub is not None:
        push_artifact(out, push_to_hub, token=token, endpoint=endpoint, **push_options)
    return manifest


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
    """
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
    ids = torch.tensor(recorder.token_ids)
    save_cache(model, None, ids, out, cache=recorder.cache, **save_options)


class _Recorder:
    """Forward hooks that keep the cache and the ids of the tokens in it."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.token_ids: list[int] = []
        self._position = 0

    def before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = output_cache(kwargs)
        self._position = 0 if cache is None else cache.get_seq_length()
        if cache is not None and self._position == 0:
            cache.activate_past_recording()

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
        if cache is not self.cache:
            self.token_ids = _known_ids(cache, self._position)
        # A cache may have been cropped since the last pass, as assisted decoding does.
        self.token_ids[self._position :] = ids[0].tolist()
        self.cache = cache


def save_extended(
    cache: CompressedStreamingCache,
    out: str | os.PathLike[str],
    *,
    token_ids: Tensor | None = None,
    progress: bool = True,
) -> Manifest:
    """Save a streamed cache, copying the chunks it came from and encoding what it has grown by.

    Parameters
    ----------
    cache
        The cache.
    out
        Folder of the artefact.
    token_ids
        Ids of all cached tokens; needed once the cache has grown past its context.
    """
    length, known = cache.get_seq_length(), cache.known_length
    if token_ids is None and length > known:
        raise ValueError(
            f"the cache has grown from {known} to {length} tokens; pass token_ids, the ids that "
            "generate() returned"
        )
    ids = cache.token_ids if token_ids is None else one_sequence(token_ids)
    common = min(length, known)
    if not 0 < length <= len(ids) or not torch.equal(ids[:common], cache.token_ids[:common]):
        raise PromptMismatch(
            f"expected the ids of all {length} cached tokens, at least one, starting with the "
            f"context's {common}; got {len(ids)} ids"
        )
    origin = Origin.of(cache)
    assert origin is not None
    return _write(
        out,
        origin.manifest.identity,
        origin.manifest.levels,
        origin.manifest.chunk_tokens,
        ids[:length],
        cached_layers(cache),
        origin.table,
        origin=origin,
        progress=progress,
    )


def _write(
    out: str | os.PathLike[str],
    identity: Identity,
    levels: Sequence[LevelRecord],
    chunk_tokens: int,
    token_ids: Tensor,
    layers: Sequence[CachedLayer],
    table: ModelTable | None,
    *,
    origin: Origin | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Manifest:
    codecs = [codec_for(level, identity.layout, table) for level in levels]
    held_from = [layer.first for layer in layers]
    if origin is not None and origin.is_same(identity, levels, chunk_tokens, token_ids):
        held_from = origin.held_from()
    with (
        ArtifactWriter(
            out,
            identity,
            levels,
            chunk_tokens,
            token_ids.numpy(),
            held_from=held_from,
            overwrite=overwrite,
        ) as writer,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        if table is not None and identity.table is not None and identity.table.location == EMBEDDED:
            table.save(writer.folder / identity.table.folder)
        plans = writer.missing_chunks()
        for plan in tqdm(plans, "encode", unit="chunk", disable=not progress or len(plans) < 2):
            known = origin.segments(plan) if origin else None
            if known is not None:
                writer.add_chunk(plan, *known)
            else:
                segments = _encode_chunk(plan, layers, codecs, pool)
                writer.add_chunk(plan, segments, origin.source(plan) if origin else EXACT)
        return writer.commit()


def _encode_chunk(
    plan: ChunkPlan,
    layers: Sequence[CachedLayer],
    codecs: Sequence[SegmentCodec],
    pool: ThreadPoolExecutor,
) -> list[list[bytes]]:
    """Segments by level and layer, encoded in parallel."""
    skipped = dict(plan.skipped)

    def encode_layer(layer: int) -> list[bytes]:
        start = plan.start + skipped.get(layer, 0)
        if start == plan.end:
            return [b""] * len(codecs)
        segments = []
        for codec in codecs:
            members = codec.members(layer)
            tensors = [t for member in members for t in layers[member].tokens(start, plan.end)]
            segments.append(codec.encode(layer, tensors, start) if members else b"")
        return segments

    by_layer = list(pool.map(encode_layer, range(len(layers))))
    return [list(segments) for segments in zip(*by_layer, strict=True)]


def _token_ids(
    tokenizer: PreTrainedTokenizerBase | None, text_or_ids: str | Tensor | Sequence[int]
) -> Tensor:
    if isinstance(text_or_ids, str):
        if tokenizer is None:
            raise ValueError("expected a tokenizer for the text")
        ids = tokenizer(text_or_ids, return_tensors="pt")["input_ids"]
    else:
        ids = torch.as_tensor(text_or_ids)
    if ids.numel() == 0:
        raise ValueError("expected a context of at least one token, got none")
    return one_sequence(ids)


def one_sequence(ids: Tensor) -> Tensor:
    """Token ids ``[T]`` on the CPU from ``[T]`` or ``[1, T]``; ValueError for anything else."""
    if ids.ndim not in (1, 2) or ids.shape[:-1].numel() != 1:
        raise ValueError(f"expected the ids [T] or [1, T] of one sequence, got {tuple(ids.shape)}")
    return ids.reshape(-1).cpu()


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


def _resolve_table(
    tables: Tables,
    model: PreTrainedModel,
    layout: KVLayout,
    layers: Sequence[CachedLayer],
    hub_options: dict[str, Any],
) -> tuple[ModelTable | None, TableRef | None]:
    """The table and how the artefact refers to it: by its Hub repository, else embedded."""
    if tables is None:
        return None, None
    if tables == "auto":
        table, location = profile_cache(model, layout, layers), EMBEDDED
    else:
        table, location = load_table(tables, **hub_options)
        table.check_layout(layout)
    return table, TableRef(name=table.record.model_id, digest=table.digest, location=location)
