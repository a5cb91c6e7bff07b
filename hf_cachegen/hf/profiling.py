"""Profile a model: statistics for its codecs from caches of sample text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_cachegen.codec.delta import DeltaConfig
from hf_cachegen.codec.delta_profile import DeltaProfiler
from hf_cachegen.codec.transform_profile import TransformProfiler
from hf_cachegen.codec.transform_tables import TransformConfig
from hf_cachegen.config import CHUNK_TOKENS, GRADIENT_SAMPLES, MIN_SAMPLE_TOKENS
from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.checkpoint import Checkpoint
from hf_cachegen.hf.compat import native_layers, runs_one_by_one, token_layers
from hf_cachegen.hf.contents import CachedLayer, cached_layers
from hf_cachegen.hf.describe import config_digest, describe_layout, model_name
from hf_cachegen.hf.gradients import Gradients, cache_gradients
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.layout import KVLayout
from hf_cachegen.tables import ModelTable, TableRecord

CONTINUATION_TOKENS = 256
"""At the end of a sample, whose loss is differentiated; at most a quarter of the sample."""

LABEL_DRAWS = 2

FEW_SAMPLES = 16
"""For what has few parameters: the importance regression and the shared probability tables."""

AUTO_CONFIG = DeltaConfig(tables="tensor")
"""For a table made from one cache: few enough numbers to travel with it."""


def profile_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Mapping[str, str],
    *,
    configs: Sequence[TransformConfig | DeltaConfig] = (TransformConfig(), DeltaConfig()),
    sample_tokens: int = CHUNK_TOKENS,
    max_samples: int | None = None,
    gradient_samples: int = GRADIENT_SAMPLES,
    model_id: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> ModelTable:
    """Make a model's table from sample texts.

    Every text is cut into samples of ``sample_tokens``; a rest of less than half that is dropped.
    Memory holds one sample's cache and the statistics, however much text there is: samples run
    through the model once per pass.

    Parameters
    ----------
    model, tokenizer
        What to profile.
    samples
        Text by name.
    configs
        The codecs to profile for, by their parameters.
    sample_tokens
        Tokens per sample.
    max_samples
        Stop after so many.
    gradient_samples
        How many of them ``transform`` also takes gradients on, which is several times as dear.
    model_id
        What to record as the model's name, if not what it was loaded from.
    checkpoint
        A file that keeps what was gathered until the table is made. A call for the same work
        goes on from there.
    progress
        Show progress bars.

    Raises
    ------
    ValueError
        The texts hold not even one sample, samples are too short, or no codec, no sample or no
        gradient sample is asked for.
    UnsupportedError
        The model caches something that has no codec, or nothing of each token, or forgets its
        states over the continuation that ``transform`` takes gradients of.
    """
    _check_profilable(model, configs)
    if not configs or gradient_samples < 1 or (max_samples is not None and max_samples < 1):
        raise ValueError(
            "expected at least one codec's parameters, one sample and one gradient sample, "
            f"got {len(configs)}, {max_samples} and {gradient_samples}"
        )
    if sample_tokens < MIN_SAMPLE_TOKENS:
        raise ValueError(
            f"expected samples of at least {MIN_SAMPLE_TOKENS} tokens, got {sample_tokens}"
        )
    pieces = _pieces(tokenizer, samples, sample_tokens)[:max_samples]
    if not pieces:
        raise ValueError(f"expected text of at least {sample_tokens // 2} tokens, got less")
    layout = describe_layout(
        model, [layer.tensors for layer in _Sample(model, pieces[0][1], 0).layers]
    )
    gradients_on = _spread(len(pieces), gradient_samples)
    profiles = [_profile(layout, config, gradients_on) for config in configs]
    work = [
        config_digest(model),
        layout.model_dump(mode="json"),
        [config.model_dump(mode="json") for config in configs],
        gradients_on,
        [ids.tolist() for _, ids in pieces],
    ]
    kept = Checkpoint(None if checkpoint is None else Path(checkpoint), work)
    _observe(profiles, model, pieces, kept, progress=progress)
    tokens: dict[str, int] = {}
    for name, ids in pieces:
        tokens[name] = tokens.get(name, 0) + len(ids)
    table = ModelTable.build(
        *(profile.profiler.finish() for profile in profiles),
        model_id=model_id or model_name(model),
        config=config_digest(model),
        layout=layout,
        data=tuple(tokens.items()),
    )
    kept.remove()
    return table


def _check_profilable(
    model: PreTrainedModel, configs: Sequence[TransformConfig | DeltaConfig]
) -> None:
    """Refuse what has no table before the model runs."""
    name = type(model).__name__
    if not token_layers(native_layers(model)):
        raise UnsupportedError(
            f"{name} keeps nothing but states, which are stored as they are; it needs no table"
        )
    if runs_one_by_one(model) and any(isinstance(c, TransformConfig) for c in configs):
        raise UnsupportedError(
            f"{name} goes on from states only token by token, so there are no gradients of several "
            "for `transform`; profile it for `delta` alone"
        )


def _observe(
    profiles: Sequence[_DeltaProfile | _TransformProfile],
    model: PreTrainedModel,
    pieces: Sequence[tuple[str, Tensor]],
    kept: Checkpoint,
    *,
    progress: bool,
) -> None:
    """Run every pass over all samples, from where a checkpoint says."""
    accumulators = {
        f"{type(profile.profiler).__name__}.{name}": array
        for profile in profiles
        for name, array in profile.profiler.accumulators().items()
    }
    first_pass, done = kept.restore(accumulators)
    n_passes = max(len(profile.passes) for profile in profiles)
    for number in range(first_pass, n_passes):
        bar = tqdm(
            pieces[done:], f"profile: pass {number + 1} of {n_passes}", unit="sample",
            initial=done, total=len(pieces), disable=not progress,
        )  # fmt: skip
        for index, (_, ids) in enumerate(bar, done):
            sample = _Sample(model, ids, index)
            for profile in profiles:
                profile.observe(number, sample)
            kept.save(number, index + 1, accumulators, last=index + 1 == len(pieces))
        done = 0


def profile_cache(
    model: PreTrainedModel,
    layout: KVLayout,
    layers: Sequence[CachedLayer],
    kept: Tensor | None = None,
) -> ModelTable:
    """Make a small table from one cache, which is then the only one it fits well.

    ``kept`` as for :class:`~hf_cachegen.codec.base.SegmentCodec`.
    """
    profiler = DeltaProfiler(layout, AUTO_CONFIG, kept)
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


def is_of_one_cache(record: TableRecord) -> bool:
    """Whether :func:`profile_cache` made a table, so that no other context has the same."""
    return any(entry.params == AUTO_CONFIG for entry in record.codecs)


class _Sample:
    """One sample's cache, and gradients, each if somebody asks for it."""

    def __init__(self, model: PreTrainedModel, token_ids: Tensor, index: int) -> None:
        self.index = index
        self._model = model
        self._token_ids = token_ids

    @cached_property
    def layers(self) -> list[CachedLayer]:
        """The cache of the whole sample."""
        return cached_layers(prefill(self._model, self._token_ids, progress=False))

    @cached_property
    def gradients(self) -> Gradients:
        """Of the loss of the sample's end by the cache of what comes before it."""
        context = len(self._token_ids) - min(CONTINUATION_TOKENS, len(self._token_ids) // 4)
        return cache_gradients(
            self._model,
            prefill(self._model, self._token_ids[:context], progress=False),
            self._token_ids[context:],
            draws=LABEL_DRAWS,
            generator=torch.Generator().manual_seed(self.index),
        )


class _DeltaProfile:
    """The passes of ``delta``."""

    def __init__(self, layout: KVLayout, config: DeltaConfig) -> None:
        self.profiler = DeltaProfiler(layout, config)
        self.passes = (self.profiler.observe_moments, self.profiler.observe_counts)

    def observe(self, number: int, sample: _Sample) -> None:
        """What a pass takes from a sample."""
        if number < len(self.passes):
            for index, layer in enumerate(sample.layers):
                self.passes[number](index, layer.tensors, layer.first)


class _TransformProfile:
    """The passes of ``transform``: its later ones need few samples, having few parameters."""

    def __init__(
        self, layout: KVLayout, config: TransformConfig, gradients_on: Sequence[int]
    ) -> None:
        self.profiler = TransformProfiler(layout, config)
        self.passes = (self._covariances, self._importance, self._counts)
        self._gradients_on = set(gradients_on)
        few = _spread(len(gradients_on), FEW_SAMPLES)
        self._again_on = {gradients_on[position] for position in few}

    def observe(self, number: int, sample: _Sample) -> None:
        """What a pass takes from a sample."""
        if number == 0 or sample.index in self._again_on:
            self.passes[number](sample)

    def _covariances(self, sample: _Sample) -> None:
        for index, group in enumerate(self.profiler.groups):
            self.profiler.observe(index, *_stacked(sample.layers, group))
            if sample.index in self._gradients_on:
                for draw in sample.gradients.draws:
                    self.profiler.observe_gradients(index, *_stacked(draw, group))

    def _importance(self, sample: _Sample) -> None:
        for index, group in enumerate(self.profiler.groups):
            tensors, first = _stacked(sample.gradients.layers, group)
            for draw in sample.gradients.draws:
                gradients, _ = _stacked(draw, group)
                self.profiler.observe_importance(index, tensors, gradients, first)

    def _counts(self, sample: _Sample) -> None:
        for index, group in enumerate(self.profiler.groups):
            self.profiler.observe_counts(index, *_stacked(sample.layers, group))


def _profile(
    layout: KVLayout, config: TransformConfig | DeltaConfig, gradients_on: Sequence[int]
) -> _DeltaProfile | _TransformProfile:
    if isinstance(config, DeltaConfig):
        return _DeltaProfile(layout, config)
    return _TransformProfile(layout, config, gradients_on)


def _spread(n: int, wanted: int) -> list[int]:
    """At most ``wanted`` of the positions 0 to n - 1, evenly spread."""
    count = min(n, wanted)
    return [position * n // count for position in range(count)]


def _stacked(layers: Sequence[CachedLayer], group: range) -> tuple[list[Tensor], int]:
    """The tensors of a group of layers, and the position of their first token."""
    members = [layers[layer] for layer in group]
    return [tensor for member in members for tensor in member.tensors], members[0].first


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
