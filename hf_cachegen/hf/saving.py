"""Encode caches into artefacts: the save hook."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
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
from hf_cachegen.codec.importance import Importance, Mode
from hf_cachegen.config import CHUNK_TOKENS
from hf_cachegen.errors import PromptMismatch, UnsupportedError
from hf_cachegen.hf.codecs import TableSource, load_table
from hf_cachegen.hf.compat import check_text, native_layers
from hf_cachegen.hf.contents import CachedLayer, cached_layers
from hf_cachegen.hf.counting import knows_length
from hf_cachegen.hf.describe import describe_identity, describe_layout
from hf_cachegen.hf.fit import warn_of_misfit
from hf_cachegen.hf.hub import push_artifact
from hf_cachegen.hf.origin import Origin
from hf_cachegen.hf.prefill import PREFILL_TOKENS, prefill
from hf_cachegen.hf.profiling import profile_cache
from hf_cachegen.hf.pruning import Positions, check_prunable, keep, kept_positions
from hf_cachegen.hf.states import LayerStates, cached_states, pack_states
from hf_cachegen.layout import KVLayout
from hf_cachegen.levels import (
    available_levels,
    codec_for,
    default_levels,
    encode_levels,
    recorded_importance,
    select_levels,
    table_codecs,
    weighted_levels,
)
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
    positions: Positions | None = None,
    tables: Tables = "auto",
    levels: Sequence[str] | None = None,
    chunk_tokens: int | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
    importance: Mode | ArrayLike | Tensor | None = None,
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
    positions
        Of a cache from which tokens were evicted, as kvpress or H2O do: where in the context, all
        of which ``text_or_ids`` still is, those were that it holds, in the order of the cache.
        Integers ``[n]``, or for each layer ``[n]`` or ``[H, n]``, n the same for all. ``transform``
        codes layers and heads together, and does so well only where they hold the same tokens. A
        streamed cache knows its own.
    tables
        A model table or where it is; ``"auto"`` takes a streamed cache's own, else makes a small
        one from this cache and embeds it; None stores exact levels only.
    levels
        Names of the levels to store; by default a streamed cache's own, else those of the table's
        best codec and ``lossless``.
    chunk_tokens
        Tokens per chunk; by default a streamed cache's own, else ``CHUNK_TOKENS``.
    prefill_tokens
        Tokens per forward pass.
    importance
        Which tokens ``transform`` spends its bits on: ``"predicted"`` by the model's table;
        ``"recent"``, also by how near the end of the context they are, which is better for
        questions about what came last and worse for others; ``"flat"``, on all alike; or how much
        more an error of each token costs, as natural logs ``[T]``, added to the prediction; of
        a cache from which tokens were evicted ``[n]``, by ascending position. By default as a
        streamed cache's levels record it if the levels are those, else ``"predicted"``.
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
        The model caches something that cannot be saved, or ``cache`` is one of transformers' own
        that cannot tell its length, having nothing but states; or tokens were evicted and the
        model cannot do without, layers hold different numbers of them, or the cache has grown.
    IdentityError
        ``out`` holds an artefact of something else.
    ValueError
        The ids, ``positions``, ``levels`` or ``importance`` are not as above, or ``importance`` is
        missing since the streamed levels were encoded with a caller's own weights.
    """
    if push_options and push_to_hub is None:
        raise ValueError(f"expected no {', '.join(push_options)} without push_to_hub")
    native_layers(model)  # refuses what cannot be saved before the model runs
    ids = context_ids(tokenizer, text_or_ids)
    check_text(model, ids)
    _check_vocabulary(model, ids)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"expected chunks of at least one token, got chunk_tokens={chunk_tokens}")
    if positions is not None:
        check_prunable(model)
    if positions is not None and (cache is None or hasattr(cache, "stream_report")):
        raise ValueError(
            "expected positions only with a cache of transformers' own from which tokens were "
            f"evicted, got {'none' if cache is None else type(cache).__name__}"
        )
    hub_options, named = {"token": token, "endpoint": endpoint}, None
    if cache is None:
        # What is wrong with these should not cost the pass over the context.
        if importance is not None:
            _weighting(importance, len(ids))
        if levels is not None and tables != "auto":
            named = None if tables is None else load_table(tables, **hub_options)
            select_levels(available_levels(named[0] if named else None), levels)
        cache = prefill(model, ids, piece_tokens=prefill_tokens, progress=progress)
    if not knows_length(cache):
        raise UnsupportedError(
            "the cache holds nothing but states and does not know how many tokens it has seen; "
            "call generate() inside record_cache(model, out), or leave cache out and let the model "
            "run"
        )
    length = cache.get_seq_length()
    if not 0 < length <= len(ids):
        raise PromptMismatch(f"expected the ids of all {length} cached tokens, got {len(ids)} ids")
    origin = Origin.of(cache)
    layers, states = cached_layers(cache), cached_states(cache)
    kept = None if origin is None else origin.kept()
    if positions is None:
        ids = ids[:length]
    else:
        layers, kept = keep(layers, positions, len(ids))
    n_cached = _count(kept, length)
    layout = describe_layout(model, [layer.tensors for layer in layers])
    if tables == "auto" and origin is not None and levels is None:
        table, reference = origin.table, origin.manifest.identity.table
        chosen = origin.manifest.levels
    else:
        table, location = _resolve_table(tables, named, model, layout, layers, kept, hub_options)
        available = available_levels(table)
        chosen = default_levels(table) if levels is None else select_levels(available, levels)
        reference = refer(table, location, chosen)
    if importance is None and origin is not None and _alike(chosen, origin.manifest.levels):
        chosen = origin.manifest.levels
        weighting = recorded_importance(chosen, n_cached)
    else:
        weighting = _weighting("predicted" if importance is None else importance, n_cached)
        chosen = weighted_levels(chosen, weighting)
    manifest = _write(
        out,
        describe_identity(model, layout, reference, model_id=model_id, revision=revision),
        chosen,
        chunk_tokens or (origin.manifest.chunk_tokens if origin else CHUNK_TOKENS),
        ids,
        layers,
        states,
        kept,
        table,
        weighting,
        origin=origin,
        overwrite=overwrite,
        progress=progress,
    )
    if push_to_hub is not None:
        push_artifact(out, push_to_hub, token=token, endpoint=endpoint, **push_options)
    return manifest


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

    Raises
    ------
    PromptMismatch
        ``token_ids`` do not continue the context.
    UnsupportedError
        The cache has grown, and tokens were evicted from it.
    ValueError
        ``token_ids`` are missing, or new tokens are to be encoded at levels that were encoded with
        a caller's own weights.
    """
    length, known = cache.get_seq_length(), cache.known_length
    origin = Origin.of(cache)
    assert origin is not None
    kept = origin.kept()
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
    return _write(
        out,
        origin.manifest.identity,
        origin.manifest.levels,
        origin.manifest.chunk_tokens,
        ids[:length],
        cached_layers(cache),
        cached_states(cache),
        kept,
        origin.table,
        recorded_importance(origin.manifest.levels, _count(kept, length)),
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
    states: Mapping[int, LayerStates],
    kept: NDArray[np.bool_] | None,
    table: ModelTable | None,
    importance: Importance | None,
    *,
    origin: Origin | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Manifest:
    positions = kept_positions(kept)
    codecs = [codec_for(level, identity.layout, table, importance, positions) for level in levels]
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
            kept=kept,
            overwrite=overwrite,
        ) as writer,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        plans = writer.missing_chunks()
        if importance is None:
            _check_copied(plans, origin)
        reference = identity.table
        if table is not None and reference is not None and reference.location == EMBEDDED:
            table.save(writer.folder / reference.folder, codecs=reference.codecs)
        for plan in tqdm(plans, "encode", unit="chunk", disable=not progress or len(plans) < 2):
            known = origin.segments(plan) if origin else None
            if known is not None:
                writer.add_chunk(plan, *known)
            else:
                segments = _encode_chunk(plan, layers, codecs, pool)
                writer.add_chunk(plan, segments, origin.source(plan) if origin else EXACT)
        source = origin.states_source(len(token_ids)) if origin else EXACT
        manifest = writer.commit(pack_states(states), source)
    warn_of_misfit(manifest, table)
    return manifest


def _count(kept: NDArray[np.bool_] | None, n_tokens: int) -> int:
    """Tokens that each head has of ``n_tokens``."""
    return n_tokens if kept is None else int(kept[0, 0].sum())


def _check_copied(plans: Sequence[ChunkPlan], origin: Origin | None) -> None:
    """Refuse chunks that are not copied: nobody knows the importance to encode them with."""
    held = {record.name for record in origin.manifest.chunks} if origin else set()
    for plan in plans:
        if plan.name not in held:
            raise ValueError(
                "the levels were encoded with a caller's own weights, which an artefact does not "
                f"hold, so tokens {plan.start} to {plan.end} cannot be encoded alike; give weights "
                "or a mode: save_cache(model, tokenizer, ids, out, cache=cache, importance=...)"
            )


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
        return encode_levels(
            codecs, layer, lambda member: layers[member].tokens(start, plan.end), start
        )

    by_layer = list(pool.map(encode_layer, range(len(layers))))
    return [list(segments) for segments in zip(*by_layer, strict=True)]


def _alike(levels: Sequence[LevelRecord], others: Sequence[LevelRecord]) -> bool:
    """Whether levels are the same but for the importance that they record."""
    some = Importance()
    return weighted_levels(levels, some) == weighted_levels(others, some)


def _weighting(importance: Mode | ArrayLike | Tensor, n_tokens: int) -> Importance:
    if isinstance(importance, str):
        return Importance(cast(Mode, importance), n_tokens)
    expected = f"expected importance as finite numbers [{n_tokens}], one a token"
    try:
        array = importance if isinstance(importance, Tensor) else np.array(importance)
        given = torch.as_tensor(array)
        if given.is_complex() or given.dtype == torch.bool:
            raise TypeError(f"of {given.dtype}")
        weights = given.to(torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(importance).__name__
        raise ValueError(f"{expected}, or the name of a mode; got {kind} ({error})") from error
    if weights.shape != (n_tokens,):
        raise ValueError(f"{expected}, got the shape {tuple(weights.shape)}")
    if not weights.isfinite().all():
        raise ValueError(f"{expected}, got some that are infinite or NaN")
    return Importance("predicted", n_tokens, weights.detach())


def context_ids(
    tokenizer: PreTrainedTokenizerBase | None, text_or_ids: str | Tensor | Sequence[int]
) -> Tensor:
    """Token ids ``[T]`` of a context; ValueError if these are not at least one, of one sequence."""
    if isinstance(text_or_ids, str):
        if tokenizer is None:
            raise ValueError("expected a tokenizer for the text")
        ids = tokenizer(text_or_ids, return_tensors="pt")["input_ids"]
    else:
        ids = text_or_ids
    found = one_sequence(ids)
    if found.numel() == 0:
        raise ValueError("expected a context of at least one token, got none")
    return found


def _check_vocabulary(model: PreTrainedModel, ids: Tensor) -> None:
    """Raise ValueError for ids that the model has no embedding of."""
    n_tokens = model.get_input_embeddings().weight.shape[0]
    if ids.min() < 0 or ids.max() >= n_tokens:
        raise ValueError(
            f"expected ids of 0 to {n_tokens - 1}, which the model knows, got {int(ids.min())} to "
            f"{int(ids.max())}; use the model's own tokenizer"
        )


def one_sequence(token_ids: Tensor | Sequence[int]) -> Tensor:
    """Token ids ``[T]`` on the CPU from ``[T]`` or ``[1, T]``; ValueError for anything else."""
    try:
        ids = torch.as_tensor(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(token_ids).__name__
        raise ValueError(f"expected token ids [T] or [1, T], got {kind} ({error})") from error
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise ValueError(f"expected token ids as integers, got {ids.dtype}")
    if ids.ndim not in (1, 2) or ids.shape[:-1].numel() != 1:
        raise ValueError(f"expected the ids [T] or [1, T] of one sequence, got {tuple(ids.shape)}")
    return ids.reshape(-1).cpu()


def _resolve_table(
    tables: Tables,
    named: tuple[ModelTable, str] | None,
    model: PreTrainedModel,
    layout: KVLayout,
    layers: Sequence[CachedLayer],
    kept: NDArray[np.bool_] | None,
    hub_options: dict[str, Any],
) -> tuple[ModelTable | None, str]:
    """The table, and its Hub repository or "embedded"; ``named`` if it has been read already."""
    if tables is None or not layers:
        return None, EMBEDDED
    if tables == "auto":
        return profile_cache(model, layout, layers, kept_positions(kept)), EMBEDDED
    table, location = named or load_table(tables, **hub_options)
    table.check_layout(layout)
    return table, location


def refer(
    table: ModelTable | None, location: str, levels: Sequence[LevelRecord]
) -> TableRef | None:
    """How an artefact with these levels refers to a table; None if none of them needs it."""
    used = table_codecs(levels)
    if table is None or not used:
        return None
    digests = table.record.digests
    return TableRef(
        name=table.record.model_id,
        codecs={codec: digests[codec] for codec in used},
        location=location,
    )
