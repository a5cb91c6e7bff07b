"""A model of a family, and the artefact of a context's cache."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from family_table import TINY, Family
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_cachegen import CompressedStreamingCache, save_cache
from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.hf.counting import CountingCache
from hf_cachegen.hf.families import ONE_BY_ONE_MODELS

CONTEXT_TOKENS = 70
CHUNK_TOKENS = 32


def build(family: Family) -> PreTrainedModel:
    """A model of a family with random weights, fp32, in eval mode."""
    config_class = CONFIG_MAPPING[family.model_type]
    known = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})}
    tiny = {name: value for name, value in TINY.items() if name in known}
    torch.manual_seed(0)
    config = config_class(**{**tiny, **family.config})
    sees = hasattr(config, "vision_config")
    auto_class = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return auto_class.from_config(config, dtype=torch.float32).eval()


@dataclass(frozen=True)
class Warm:
    """A model, a context, and the artefact of its cache with a lossy and an exact level."""

    model: PreTrainedModel
    ids: Tensor
    folder: Path

    def load(self, level: str = "lossless") -> CompressedStreamingCache:
        """A new streamed cache."""
        return CompressedStreamingCache.from_pretrained(self.folder, model=self.model, level=level)

    def native(self) -> DynamicCache:
        """The same context in an untouched cache of transformers."""
        return self.native_of(self.ids)

    @torch.no_grad()
    def native_of(self, ids: Tensor) -> DynamicCache:
        """Ids ``[T]`` in a cache of transformers; one that counts where none of its layers does."""
        cache = DynamicCache(config=self.model.config)
        if all(cache.is_linear):
            cache = CountingCache(cache.layers)
        copy.deepcopy(self.model)(input_ids=ids[None], **{cache_argument(self.model): cache})
        return cache

    def generate(self, cache: Any, prompt: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        """(sequences, logits [steps, B, V]) of six new tokens; without a cache if it is None."""
        # Dynamic RoPE changes the model itself, so every run has a model of its own.
        return generate(copy.deepcopy(self.model), cache, prompt, **options)


def generate(
    model: PreTrainedModel, cache: Any, prompt: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """As :meth:`Warm.generate`, with this very model."""
    defaults = {
        "attention_mask": None if prompt is None else torch.ones_like(prompt),
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
        "use_cache": True,  # the configs of some families turn it off
    }
    warm = {} if cache is None else {cache_argument(model): cache}
    if cache is not None and model.config.model_type in ONE_BY_ONE_MODELS:
        options["prefill_chunk_size"] = 1  # or transformers' own cache is forgotten
    output = model.generate(
        input_ids=prompt,
        output_logits=True,
        return_dict_in_generate=True,
        **{**defaults, **warm, **options},
    )
    return output.sequences, torch.stack(output.logits)


def random_ids(n_tokens: int, seed: int = 2) -> Tensor:
    """Token ids ``[T]`` that every tiny vocabulary has."""
    return torch.randint(3, 300, (n_tokens,), generator=torch.Generator().manual_seed(seed))


def publish(family: Family, folder: Path) -> Warm:
    """A model of a family, and its cache saved in ``folder``."""
    model, ids = build(family), random_ids(CONTEXT_TOKENS)
    lossy = [] if family.layers == "states" else ["delta-3"]
    save_cache(
        copy.deepcopy(model),
        None,
        ids,
        folder,
        levels=[*lossy, "lossless"],
        chunk_tokens=CHUNK_TOKENS,
        progress=False,
    )
    return Warm(model, ids, folder)
