"""Where decoded segments go: one preallocated tensor per cached tensor, on the layer's device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cachegen.artifact import Manifest
from hf_cachegen.hf.codecs import LevelCodecs

HEADROOM_TOKENS = 256
"""Room for a question and an answer, so that appending them moves nothing."""


class LayerBuffers:
    """The tensors of a whole cache, filled segment by segment from several threads.

    Parameters
    ----------
    manifest
        The artefact.
    devices
        Device of each layer.
    codecs
        Codec of each level.
    """

    def __init__(
        self, manifest: Manifest, devices: Sequence[torch.device], codecs: LevelCodecs
    ) -> None:
        self.manifest = manifest
        self._devices = devices
        self._codecs = codecs
        self._first = [self._first_held(layer) for layer in range(manifest.n_layers)]
        self._buffers: list[list[Tensor] | None] = [None] * manifest.n_layers
        self._lock = threading.Lock()

    def layers_of(self, chunk: int) -> list[int]:
        """Layers that need a chunk: a sliding layer does not need what its window has left."""
        record = self.manifest.chunks[chunk]
        return [
            layer
            for layer, first in enumerate(self._first)
            if record.end > max(first, record.first_token(layer))
        ]

    def decode(self, chunk: int, level: int, layer: int, data: bytes) -> Sequence[int]:
        """Decode one segment to its place; returns the layers that it completed for this chunk."""
        record = self.manifest.chunks[chunk]
        start, first = record.first_token(layer), self._first[layer]
        codec = self._codecs[level]
        members = codec.members(layer)
        if not members:
            return members
        buffers = [buffer[0] for member in members for buffer in self._layer(member)]
        out = [buffer[:, max(start - first, 0) : record.end - first] for buffer in buffers]
        if start >= first:
            codec.decode_into(layer, data, out, start)
            return members
        # The segment begins before what this layer still needs.
        n_tokens = record.end - start
        whole = [o.new_empty(o.shape[0], n_tokens, o.shape[2]) for o in out]
        codec.decode_into(layer, data, whole, start)
        for target, values in zip(out, whole, strict=True):
            target.copy_(values[:, first - start :])
        return members

    def tensors(self, layer: int) -> list[Tensor]:
        """A layer's tensors ``[1, H, T, D]``: views of buffers with room for more."""
        length = self.manifest.tokens.n - self._first[layer]
        return [buffer[:, :, :length] for buffer in self._layer(layer)]

    def release(self, layer: int) -> None:
        """Forget a layer's tensors, which now belong to the cache layer."""
        self._buffers[layer] = None

    def first_token(self, layer: int) -> int:
        """First token of the document that a layer's tensors hold."""
        return self._first[layer]

    def _first_held(self, layer: int) -> int:
        wanted = self.manifest.identity.layout.layers[layer].first_token(self.manifest.tokens.n)
        stored = (
            chunk.first_token(layer)
            for chunk in self.manifest.chunks
            if chunk.first_token(layer) > chunk.start
        )
        return max(wanted, *stored, 0)

    def _layer(self, layer: int) -> list[Tensor]:
        with self._lock:
            buffers = self._buffers[layer]
            if buffers is None:
                layout = self.manifest.identity.layout
                capacity = self.manifest.tokens.n - self._first[layer] + HEADROOM_TOKENS
                buffers = self._buffers[layer] = [
                    torch.empty(
                        (1, spec.heads, capacity, spec.dim),
                        dtype=getattr(torch, layout.dtype),
                        device=self._devices[layer],
                    )
                    for spec in layout.layers[layer].tensors
                ]
            return buffers
