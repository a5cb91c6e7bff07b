"""Profile a model: statistics for its codecs from caches of sample text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_cachegen.codec.delta import DeltaConfig
from hf_cachegen.codec.delta_profile import DeltaProfiler
from hf_cachegen.config import CHUNK_TOKENS
from hf_cachegen.hf.compat import native_layers
from hf_cachegen.hf.contents import CachedLayer, cached_layers
from hf_cachegen.hf.describe import config_digest, describe_layout, model_name
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.layout import KVLayout
from hf_cachegen.tables import ModelTable

AUTO_CONFIG = DeltaConfig(tables="tensor")
"""For a table made from one cache: few enough numbers to travel with it."""


def profile_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Mapping[str, str],
    *,
    config: DeltaConfig | None = None,
    sample_tokens: int = CHUNK_TOKENS,
    max_samples: int | None = None,
    model_id: str | None = None,
    progress: bool = True,
) -> ModelTable:
    """Make a model's table from sample texts.

    Every text is cut into samples of ``sample_tokens``; a rest of less than half that is dropped.
    Memory holds one sample's cache and the histograms, however much text there is: the samples run
    through the model twice.

    Parameters
    ----------
    model, tokenizer
        What to profile.
    samples
        Text by name.
    config
        The codec's parameters.
    sample_tokens
        Tokens per sample.
    max_samples
        Stop after so many.
    model_id
        What to record as the model's name, if not what it was loaded from.
    progress
        Show progress bars.

    Raises
    ------
    ValueError
        The texts hold not even one sample.
    UnsupportedError
        The model caches something that has no codec.
    """
    native_layers(model)  # refuses what has no table before the model runs
    pieces = _pieces(tokenizer, samples, sample_tokens)[:max_samples]
    if not pieces:
        raise ValueError(f"expected text of at least {sample_tokens // 2} tokens, got less")
    profiler: DeltaProfiler | None = None
    for description, observe in (
        ("profile: moments", DeltaProfiler.observe_moments),
        ("profile: counts", DeltaProfiler.observe_counts),
    ):
        for _, ids in tqdm(pieces, description, unit="sample", disable=not progress):
            layers = cached_layers(prefill(model, ids, progress=False))
            if profiler is None:
                layout = describe_layout(model, [layer.tensors for layer in layers])
                profiler = DeltaProfiler(layout, config or DeltaConfig())
            for index, layer in enumerate(layers):
                observe(profiler, index, layer.tensors, layer.first)
    assert profiler is not None
    tokens: dict[str, int] = {}
    for name, ids in pieces:
        tokens[name] = tokens.get(name, 0) + len(ids)
    return ModelTable.build(
        profiler.finish(),
        model_id=model_id or model_name(model),
        config=config_digest(model),
        layout=profiler.layout,
        data=tuple(tokens.items()),
    )


def profile_cache(
    model: PreTrainedModel, layout: KVLayout, layers: Sequence[CachedLayer]
) -> ModelTable:
    """Make a small table from one cache, which is then the only one it fits well."""
    profiler = DeltaProfiler(layout, AUTO_CONFIG)
    for observe in (profiler.observe_moments, profiler.observe_counts):
        for index, layer in enumerate(layers):
            observe(index, layer.tensors, layer.first)
    length = layers[0].first + layers[0].tensors[0].shape[1]
    return ModelTable.build(
        profiler.finish(),
        model_id=model_name(model),
        config=config_digest(model),
        layout=layout,
        data=(("the cached context itself", length),),
    )


def _pieces(
    tokenizer: PreTrainedTokenizerBase, samples: Mapping[str, str], sample_tokens: int
) -> list[tuple[str, Tensor]]:
    """Samples in turns, so that the first few are already of every text."""
    turns: dict[int, list[tuple[str, Tensor]]] = {}
    for name, text in samples.items():
        ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
        for turn, piece in enumerate(torch.split(ids, sample_tokens)):
            if 2 * len(piece) >= sample_tokens:
                turns.setdefault(turn, []).append((name, piece))
    return [piece for turn in sorted(turns) for piece in turns[turn]]
