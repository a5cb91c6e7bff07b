"""``hf-cachegen bench codec``: size, quality and speed of every level on real documents."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from os import cpu_count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from hf_cachegen.artifact import LevelRecord, Manifest
from hf_cachegen.bench.baselines import baselines, decoded_cache
from hf_cachegen.bench.quality import Quality, compare, continuation_logits
from hf_cachegen.codec.base import SegmentCodec
from hf_cachegen.codec.importance import Importance, Mode
from hf_cachegen.config import MANIFEST_NAME
from hf_cachegen.errors import CacheGenError
from hf_cachegen.hf.cache import CompressedStreamingCache
from hf_cachegen.hf.contents import CachedLayer, cached_layers
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.hf.saving import save_cache
from hf_cachegen.levels import available_levels, codec_for, encode_levels
from hf_cachegen.tables import ModelTable

SCHEMA = 1
REPEATS = 3
CONTEXT_TOKENS = 1500
CONTINUATION_TOKENS = 256
BF16_BITS = 16


class RoundTripError(CacheGenError):
    """A level did not give back what it must."""


@dataclass(frozen=True)
class Row:
    """One level of one codec, over all documents.

    Attributes
    ----------
    bits_per_value
        Every byte of the artefact that a reader of this level fetches, but the model table.
    ratio_bf16
        16 over that.
    kl_mean, kl_p99, top1, perplexity_ratio
        See :class:`~hf_cachegen.bench.quality.Quality`; means over documents.
    encode_s, decode_s
        Seconds per document; decoding is median of :data:`REPEATS`. None for a baseline.
    decode_gb_per_s
        Gigabytes of bf16 values produced per second. None for a baseline.
    """

    codec: str
    level: str
    bits_per_value: float
    ratio_bf16: float
    kl_mean: float
    kl_p99: float
    top1: float
    perplexity_ratio: float
    encode_s: float | None
    decode_s: float | None
    decode_gb_per_s: float | None


@dataclass(frozen=True)
class _Sample:
    """One document's measurement of one level."""

    bits_per_value: float
    quality: Quality
    encode_s: float | None = None
    decode_s: float | None = None
    values: int = 0


def bench_codec(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    table: ModelTable,
    documents: Mapping[str, str],
    *,
    context: int = CONTEXT_TOKENS,
    continuation: int = CONTINUATION_TOKENS,
    codec: str | None = None,
    importance: Mode = "predicted",
    progress: bool = True,
) -> list[Row]:
    """Measure every level, and the baselines, on documents.

    Parameters
    ----------
    model, tokenizer, table
        What to measure; the table must come from other text than ``documents``.
    documents
        Text by name, each of at least ``context + continuation`` tokens.
    context, continuation
        Tokens that are cached, and real next tokens that are predicted from the cache.
    codec
        Measure only this codec's levels; baselines are always measured.
    importance
        How ``transform`` tells tokens apart, see :func:`~hf_cachegen.save_cache`.

    Raises
    ------
    ValueError
        A document is too short, or the codec is unknown.
    RoundTripError
        An exact level is not exact, or a decoded cache differs from what its codec decodes.
    """
    levels = levels_of(codec, available_levels(table))
    cut = cut_documents(tokenizer, documents, context + continuation)
    samples: dict[tuple[str, str], list[_Sample]] = {}
    for ids in tqdm(cut, "documents", disable=not progress):
        for key, sample in _measure(model, ids[:context], ids[context:], table, levels, importance):
            samples.setdefault(key, []).append(sample)
    return [_summarise(*key, found) for key, found in samples.items()]


def levels_of(codec: str | None, available: Sequence[LevelRecord]) -> list[LevelRecord]:
    """Those levels that are a codec's, all for None; ValueError if there are none."""
    levels = [level for level in available if codec in (None, level.codec)]
    if not levels:
        known = dict.fromkeys(level.codec for level in available)
        raise ValueError(f"unknown codec {codec!r}; expected one of {', '.join(known)}")
    return levels


def cut_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Mapping[str, str], n_tokens: int
) -> list[Tensor]:
    """The first ids ``[n_tokens]`` of each document; ValueError if one of them has fewer."""
    cut = []
    for name, text in documents.items():
        ids = tokenizer(text, return_tensors="pt")["input_ids"][0][:n_tokens]
        if len(ids) < n_tokens:
            raise ValueError(f"{name}: expected at least {n_tokens} tokens, found {len(ids)}")
        cut.append(ids)
    return cut


def _measure(
    model: PreTrainedModel,
    ids: Tensor,
    ahead: Tensor,
    table: ModelTable,
    levels: Sequence[LevelRecord],
    importance: Mode,
) -> Iterator[tuple[tuple[str, str], _Sample]]:
    cache = prefill(model, ids, progress=False)
    layers = cached_layers(cache)
    exact = continuation_logits(model, cache, ahead)
    n_values = sum(tensor.numel() for layer in layers for tensor in layer.tensors)

    def quality(other: Cache) -> Quality:
        return compare(exact, continuation_logits(model, other, ahead), ahead)

    for baseline in baselines(layers[0].tensors[0].dtype):
        size, other = decoded_cache(baseline, cache, layers)
        yield (baseline.name, baseline.level), _Sample(8 * size / n_values, quality(other))
    with tempfile.TemporaryDirectory() as folder:
        names = [level.name for level in levels]
        manifest = save_cache(
            model, None, ids, folder, cache=cache, tables=table, levels=names,
            importance=importance, progress=False,
        )  # fmt: skip
        for index, level in enumerate(levels):
            streamed = CompressedStreamingCache.from_pretrained(
                folder, model=model, level=level.name, tables=table
            )
            codecs = [
                codec_for(
                    levels[part],
                    manifest.identity.layout,
                    table,
                    Importance(importance, manifest.tokens.n),
                )
                for part in manifest.chain(index)
            ]
            found = cached_layers(streamed)
            held = [_since(layer, part.first) for layer, part in zip(layers, found, strict=True)]
            encode_s, decode_s, decoded = _time(codecs, held)
            _check_round_trip(level, held, decoded, found)
            size = _level_bytes(Path(folder), manifest, index)
            yield (
                (level.codec, level.name),
                _Sample(8 * size / n_values, quality(streamed), encode_s, decode_s, n_values),
            )
            streamed.close()


def _level_bytes(folder: Path, manifest: Manifest, level: int) -> int:
    """What a reader fetches for one level: its segments, the indices, tokens and cache.json."""
    shared = (folder / MANIFEST_NAME).stat().st_size
    shared += (folder / manifest.tokens.path).stat().st_size
    indices = sum(chunk.size_bytes - sum(chunk.level_bytes) for chunk in manifest.chunks)
    segments = sum(manifest.read_bytes(chunk)[level] for chunk in range(len(manifest.chunks)))
    return shared + indices + segments


def _time(
    codecs: Sequence[SegmentCodec], layers: Sequence[CachedLayer]
) -> tuple[float, float, list[list[Tensor]]]:
    """Seconds to encode and to decode a whole cache on all CPUs, and what is decoded.

    ``codecs`` are that of a level, last, and those of the levels that it refines.
    """
    codec = codecs[-1]
    leaders = [layer for layer in range(len(layers)) if codec.members(layer)]
    out = [[torch.empty_like(t) for t in layer.tensors] for layer in layers]

    with ThreadPoolExecutor(cpu_count()) as pool:

        def encode(layer: int) -> bytes:
            first = layers[layer].first
            return b"".join(encode_levels(codecs, layer, lambda m: layers[m].tensors, first))

        segments, encode_s = _timed(lambda: list(pool.map(encode, leaders)))

        def decode(layer: int, data: bytes) -> None:
            tensors = [tensor for member in codec.members(layer) for tensor in out[member]]
            codec.decode_into(layer, data, tensors, layers[layer].first)

        seconds = [
            _timed(lambda: list(pool.map(decode, leaders, segments)))[1] for _ in range(REPEATS)
        ]
    return encode_s, statistics.median(seconds), out


def _check_round_trip(
    level: LevelRecord,
    layers: Sequence[CachedLayer],
    decoded: Sequence[Sequence[Tensor]],
    streamed: Sequence[CachedLayer],
) -> None:
    for index, layer in enumerate(layers):
        want = layer.tensors if level.exact else decoded[index]
        for found in (decoded[index], streamed[index].tensors):
            if not all(torch.equal(a, b) for a, b in zip(want, found, strict=True)):
                raise RoundTripError(f"level {level.name}, layer {index}: the round trip differs")


def _since(layer: CachedLayer, first: int) -> CachedLayer:
    """A layer without the tokens before ``first``, which a sliding window has left."""
    return CachedLayer(tuple(t[:, first - layer.first :] for t in layer.tensors), first)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def _summarise(codec: str, level: str, samples: Sequence[_Sample]) -> Row:
    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    bits = statistics.fmean(sample.bits_per_value for sample in samples)
    decode_s = mean([sample.decode_s for sample in samples])
    quality = {
        field: statistics.fmean(getattr(sample.quality, field) for sample in samples)
        for field in asdict(samples[0].quality)
    }
    return Row(
        codec=codec,
        level=level,
        bits_per_value=bits,
        ratio_bf16=BF16_BITS / bits,
        **quality,
        encode_s=mean([sample.encode_s for sample in samples]),
        decode_s=decode_s,
        decode_gb_per_s=2 * samples[0].values / decode_s / 1e9 if decode_s else None,
    )


def report(rows: Sequence[Row], table: ModelTable, model_id: str) -> dict[str, Any]:
    """The benchmark's JSON document."""
    return {
        "schema": SCHEMA,
        "model": model_id,
        "rows": [asdict(row) for row in rows],
        "table_bytes": table.size_bytes(),
    }
