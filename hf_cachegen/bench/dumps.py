"""Caches in one file without a codec, as they are shipped today: 16-bit values, or 8-bit ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_cachegen.hf.contents import CachedLayer
from hf_cachegen.stores.base import Store

EIGHT_BIT_STEPS = 127


@dataclass(frozen=True)
class Dump:
    """A way to write a tensor ``[H, T, D]`` as others, and to read it back in any dtype."""

    name: str
    pack: Callable[[Tensor], Mapping[str, Tensor]]
    unpack: Callable[[Mapping[str, Tensor], torch.dtype], Tensor]

    @property
    def path(self) -> str:
        """The file in the folder of the artefact."""
        return f"{self.name}.safetensors"

    def save(self, folder: Path, layers: Sequence[CachedLayer]) -> None:
        """Write a whole cache."""
        tensors = {
            f"{layer}.{place}.{part}": packed.contiguous()
            for layer, contents in enumerate(layers)
            for place, tensor in enumerate(contents.tensors)
            for part, packed in self.pack(tensor).items()
        }
        safetensors.torch.save_file(tensors, folder / self.path)

    def load(self, store: Store, size_bytes: int, model: PreTrainedModel) -> DynamicCache:
        """Fetch a cache as a whole and unpack it, ready for use."""
        tensors = safetensors.torch.load(store.read(self.path, max_bytes=size_bytes))
        cache = DynamicCache(config=model.config)
        for layer, target in enumerate(cache.layers):
            keys, values = (
                self.unpack(_parts(tensors, f"{layer}.{place}."), model.dtype).to(model.device)
                for place in range(2)
            )
            target.update(keys[None], values[None])
        return cache


def _parts(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}


def _pack_8_bit(tensor: Tensor) -> dict[str, Tensor]:
    """Symmetric, with a 16-bit scale per token and head, as ``bench codec`` has it."""
    scale = (tensor.float().abs().amax(-1, keepdim=True) / EIGHT_BIT_STEPS).clamp_min(1e-12)
    scale = scale.bfloat16()
    q = (tensor.float() / scale.float()).round().clamp(-EIGHT_BIT_STEPS, EIGHT_BIT_STEPS)
    return {"q": q.to(torch.int8), "scale": scale}


DUMPS = {
    dump.name: dump
    for dump in (
        Dump(
            "bf16",
            lambda tensor: {"values": tensor.bfloat16()},
            lambda parts, dtype: parts["values"].to(dtype),
        ),
        Dump(
            "uniform-8",
            _pack_8_bit,
            lambda parts, dtype: parts["q"].to(dtype) * parts["scale"].to(dtype),
        ),
    )
}
