"""Encode caches into artefacts: the save hook."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

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
from hf_cachegen.hf.compat import check_text, native_layers
from hf_cachegen.hf.contents import CachedLayer, cached_layers
from hf_cachegen.hf.counting import knows_length
from hf_cachegen.hf.describe import config_digest, describe_identity, describe_layout
from hf_cachegen.hf.fit import warn_of_misfit
from hf_cachegen.hf.hub import push_artifact
from hf_cachegen.hf.origin import Origin
from hf_cachegen.hf.prefill import PREFILL_TOKENS, prefill
from hf_cachegen.hf.profiling import profile_cache
from hf_cachegen.hf.pruning import Positions, check_prunable, keep, kept_positions
from hf_cachegen.hf.saved import check_target
from hf_cachegen.hf.settings import Choice, Tables, check_chunks, check_push, choose, refer
from hf_cachegen.hf.states import LayerStates, cached_states, pack_states
from hf_cachegen.layout import KVLayout
from hf_cachegen.levels import (
    codec_for,
    encode_levels,
    recorded_importance,
    table_codecs,
    weighted_levels,
)
from hf_cachegen.tables import ModelTable

if TYPE_CHECKING:
    from hf_cachegen.hf.cache import CompressedStreamingCache


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

    What is wrong with the settings, the table or the folder is told before the model runs.

    Parameters
    ----------
    model, tokenizer
        The model; the tokenizer may be None if ids are given.
    text_or_ids
        The context.
    out
        Folder of the artefact. An artefact of the same model, table and settings whose context
        begins this one is extended: chunks that it holds already are not written again.
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
        A model table, where it is, or both, as :func:`~hf_cachegen.hf.codecs.load_table` returns
        them; ``"auto"`` takes a streamed cache's own, else makes a small one from this cache and
        embeds it; None stores exact levels only.
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
    TableMismatch
        The table is of a model that caches something else.
    StoreError, FormatError
        ``out`` cannot be written, or another save is writing to it; a table or an artefact there
        cannot be read, or is damaged; the Hub does not know the token of ``push_to_hub``.
    ValueError
        The ids, ``positions``, ``levels`` or ``importance`` are not as above, or ``importance`` is
        missing since the streamed levels were encoded with a caller's own weights.
    """
    native_layers(model)  # refuses what cannot be saved before the model runs
    ids = context_ids(tokenizer, text_or_ids)
    check_text(model, ids)
    _check_vocabulary(model, ids)
    if positions is not None:
        check_prunable(model)
    if positions is not None and (cache is None or hasattr(cache, "stream_report")):
        raise ValueError(
            "expected positions only with a cache of transformers' own from which tokens were "
            f"evicted, got {'none' if cache is None else type(cache).__name__}"
        )
    check_chunks(chunk_tokens)
    hub_options = {"token": token, "endpoint": endpoint}
    check_push(push_to_hub, push_options, **hub_options)
    choice = choose(tables, levels, model, **hub_options)
    held = None if cache is None else _Held.of(cache, ids, positions)
    origin, kept = (None, None) if held is None else (held.origin, held.kept)
    ids = ids if held is None else held.token_ids
    own = origin if levels is None and choice.tables == "auto" else None
    chosen = choice.levels if own is None else own.manifest.levels
    n_cached = _count(kept, len(ids))
    if importance is None and origin is not None and _alike(chosen, origin.manifest.levels):
        chosen = origin.manifest.levels
        weighting = recorded_importance(chosen, n_cached)
    else:
        weighting = _weighting("predicted" if importance is None else importance, n_cached)
        chosen = weighted_levels(chosen, weighting)
    if chunk_tokens is None:
        chunk_tokens = CHUNK_TOKENS if origin is None else origin.manifest.chunk_tokens
    planned = choice.reference(chosen) if own is None else own.manifest.identity.table
    check_target(out, model, ids, chosen, chunk_tokens, planned, kept, overwrite=overwrite)
    if held is None:
        if isinstance(choice.tables, tuple):
            _check_fit(choice.tables[0], model, ids)
        filled = prefill(model, ids, piece_tokens=prefill_tokens, progress=progress)
        held = _Held.of(filled, ids, None)
    layout = describe_layout(model, [layer.tensors for layer in held.layers])
    table, reference = _table_for(chosen, choice, own, model, layout, held)
    manifest = _write(
        out,
        describe_identity(model, layout, reference, model_id=model_id, revision=revision),
        chosen,
        chunk_tokens,
        ids,
        held.layers,
        held.states,
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


@dataclass(frozen=True)
class _Held:
    """What there is to be saved of a filled cache.

    Attributes
    ----------
    token_ids
        ``[T]`` of all tokens that it has seen.
    layers, states
        What it holds.
    kept
        Which tokens that is, bool ``[L or 1, H or 1, T]``; None: all.
    origin
        Where it was streamed from; None of a cache of transformers' own.
    """

    token_ids: Tensor
    layers: Sequence[CachedLayer]
    states: Mapping[int, LayerStates]
    kept: NDArray[np.bool_] | None
    origin: Origin | None

    @classmethod
    def of(cls, cache: Cache, ids: Tensor, positions: Positions | None) -> _Held:
        """Take it from a cache; ``ids`` and ``positions`` as for :func:`save_cache`."""
        if not knows_length(cache):
            raise UnsupportedError(
                "the cache holds nothing but states and does not know how many tokens it has seen; "
                "call generate() inside record_cache(model, out), or leave cache out and let the "
                "model run"
            )
        length = cache.get_seq_length()
        if not 0 < length <= len(ids):
            raise PromptMismatch(
                f"expected the ids of all {length} cached tokens, got {len(ids)} ids"
            )
        origin = Origin.of(cache)
        layers, states = cached_layers(cache), cached_states(cache)
        if positions is None:
            kept = None if origin is None else origin.kept()
            return cls(ids[:length], layers, states, kept, origin)
        layers, kept = keep(layers, positions, len(ids))
        return cls(ids, layers, states, kept, origin)


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


def _table_for(
    levels: Sequence[LevelRecord],
    choice: Choice,
    own: Origin | None,
    model: PreTrainedModel,
    layout: KVLayout,
    held: _Held,
) -> tuple[ModelTable | None, TableRef | None]:
    """The table for levels of what is held, and the reference to it.

    It is that of the artefact ``own``, the one that was chosen, or made now if a level needs one.
    """
    if own is not None:
        return own.table, own.manifest.identity.table
    if isinstance(choice.tables, tuple):
        table, location = choice.tables
        table.check_layout(layout)
        return table, refer(table, location, levels)
    if not table_codecs(levels):
        return None, None
    table = profile_cache(model, layout, held.layers, kept_positions(held.kept))
    return table, refer(table, EMBEDDED, levels)


def _check_fit(table: ModelTable, model: PreTrainedModel, ids: Tensor) -> None:
    """Raise TableMismatch for a table of a model that caches something else.

    Only a cache tells what is cached. One of a single token will do, and is needed only if the
    table is of another model.
    """
    if table.record.config != config_digest(model):
        layers = cached_layers(prefill(model, ids[:1], progress=False))
        table.check_layout(describe_layout(model, [layer.tensors for layer in layers]))


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
