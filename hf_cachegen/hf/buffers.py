"""Where decoded segments go: one preallocated tensor per cached tensor, on the layer's device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cachegen.artifact import Manifest
from hf_cachegen.errors import FormatError
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
        """Decode one segment to its place; returns the layers that it completed for this chunk.

        Raises
        ------
        FormatError
            The segment cannot be decoded, or does not fit the layers that it carries.
        """
        codec = self._codecs[level]
        members = codec.members(layer)
        record = self.manifest.chunks[chunk]
        starts = {record.first_token(member) for member in members}
        if not members and data:
            raise FormatError(
                f"expected an empty segment, since another layer's carries layer {layer}; "
                f"found {len(data)} bytes"
            )
        if len(starts) > 1:
            raise FormatError(
                f"expected one first token of the layers {list(members)}, which are coded "
                f"together; found {sorted(starts)}"
            )
        for start in starts:
            out = [
                self._place(tensor, member, start, record.end)
                for member in members
                for tensor in self.storage(member)
            ]
            codec.decode_into(layer, data, [place for place, _ in out], start)
            for place, held in out:
                if held is not None:
                    held.copy_(place[:, -held.shape[1] :])
        return members

    def _place(
        self, tensor: Tensor, layer: int, start: int, end: int
    ) -> tuple[Tensor, Tensor | None]:
        """Where to decode tokens [start, end) of a layer, and what to copy the last of them to.

        Nothing has to be copied but of a segment that begins before what the layer still needs.
        """
        first = self._first[layer]
        held = tensor[0, :, max(start - first, 0) : end - first]
        if start >= first:
            return held, None
        return held.new_empty(held.shape[0], end - start, held.shape[2]), held

    def tensors(self, layer: int) -> list[Tensor]:
        """A layer's tensors ``[1, H, T, D]``: views of buffers with room for more."""
        length = self.manifest.tokens.n - self._first[layer]
        return [buffer[:, :, :length] for buffer in self.storage(layer)]

    def storage(self, layer: int) -> list[Tensor]:
        """A layer's tensors ``[1, H, capacity, D]``, the first token being :meth:`first_token`."""
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
