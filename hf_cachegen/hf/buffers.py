"""Where decoded segments go: one preallocated tensor per cached tensor, on the layer's device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cachegen.artifact import Manifest
from hf_cachegen.codec.base import PlacedSegment, SegmentCodec
from hf_cachegen.codec.gpu import SharedTensors, on_streams, side_streams
from hf_cachegen.errors import FormatError
from hf_cachegen.hf.codecs import LevelCodecs

HEADROOM_TOKENS = 256
"""Room for a question and an answer, so that appending them moves nothing."""


class LayerBuffers:
    """The tensors of a whole cache, filled segment by segment from several threads.

    On a GPU they are allocated at once, on the current stream, and filled on a stream beside it.
    What is done with :meth:`storage` and :meth:`tensors` comes after what has filled them, on
    whichever stream, without the host waiting for that.

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
        self._buffers: list[SharedTensors | None] = [None] * manifest.n_layers
        self._released: set[int] = set()
        self._lock = threading.Lock()
        self._side = side_streams(devices)
        if self._side:
            for layer in range(manifest.n_layers):
                # Later, this stream would have work of the model's first layers, and to fill the
                # memory would have to wait for it.
                self._shared(layer)

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
        return self.decode_many(level, layer, [(chunk, data)])

    @property
    def decodes_together(self) -> bool:
        """Whether :meth:`decode_many` is faster than one segment after another."""
        return bool(self._side)

    def decode_many(
        self, level: int, layer: int, segments: Sequence[tuple[int, bytes]]
    ) -> Sequence[int]:
        """Decode the segments of a layer of several chunks, each a (chunk, data), to their places.

        Returns and raises as :meth:`decode`. After an error, none of them may be in place.
        """
        codec = self._codecs[level]
        members = codec.members(layer)
        placed = [self._placed(chunk, layer, members, data) for chunk, data in segments]
        if members:
            with on_streams(self._side):
                self._decode_placed(codec, layer, placed)
                for member in members:
                    self._shared(member).record()
        return members

    def record_use(self) -> None:
        """Have decoding wait for what the current streams do with the buffers up to now."""
        for buffers in self._buffers:
            if buffers is not None:
                buffers.record()

    def _placed(self, chunk: int, layer: int, members: Sequence[int], data: bytes) -> PlacedSegment:
        """A segment, placed in tensors that would begin with the context's first token."""
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
        start = min(starts, default=record.end)
        return PlacedSegment(data, start, record.end - start)

    def _decode_placed(
        self, codec: SegmentCodec, layer: int, segments: Sequence[PlacedSegment]
    ) -> None:
        members = codec.members(layer)
        first = max(self._first[member] for member in members)
        whole = [segment for segment in segments if segment.first_token >= first]
        if whole:
            begin = min(segment.first_token for segment in whole)
            end = max(segment.first_token + segment.tokens for segment in whole)
            out = [place for member in members for place in self._places(member, begin, end)]
            moved = [segment._replace(first_token=segment.first_token - begin) for segment in whole]
            codec.decode_many_into(layer, moved, out, begin)
        for segment in segments:
            if segment.first_token < first:
                self._decode_end(codec, layer, segment)

    def _decode_end(self, codec: SegmentCodec, layer: int, segment: PlacedSegment) -> None:
        """Decode a segment that begins before what a layer still needs, and keep the rest of it."""
        data, start, tokens = segment
        out, held = [], []
        for member in codec.members(layer):
            begin = max(start, self._first[member])
            for place in self._places(member, begin, start + tokens):
                held.append(place)
                out.append(place.new_empty(place.shape[0], tokens, place.shape[2]))
        codec.decode_into(layer, data, out, start)
        for place, decoded in zip(held, out, strict=True):
            place.copy_(decoded[:, tokens - place.shape[1] :])

    def _places(self, layer: int, begin: int, end: int) -> list[Tensor]:
        """Views ``[H, T, D]`` of where tokens [begin, end) of a layer are."""
        first = self._first[layer]
        return [tensor[0, :, begin - first : end - first] for tensor in self.storage(layer)]

    def tensors(self, layer: int) -> list[Tensor]:
        """A layer's tensors ``[1, H, T, D]``: views of buffers with room for more.

        Raises
        ------
        RuntimeError
            They were released.
        """
        length = self.manifest.n_cached - self._first[layer]
        return [buffer[:, :, :length] for buffer in self.storage(layer)]

    def storage(self, layer: int) -> Sequence[Tensor]:
        """A layer's tensors ``[1, H, capacity, D]``, the first token being :meth:`first_token`.

        Raises
        ------
        RuntimeError
            They were released.
        """
        return self._shared(layer).use()

    def _shared(self, layer: int) -> SharedTensors:
        with self._lock:
            if layer in self._released:
                raise RuntimeError(
                    f"expected the tensors of layer {layer}, found that they were released to the "
                    "cache's layer; take them from there"
                )
            buffers = self._buffers[layer]
            if buffers is None:
                buffers = self._buffers[layer] = SharedTensors(self._allocated(layer))
            return buffers

    def _allocated(self, layer: int) -> list[Tensor]:
        layout = self.manifest.identity.layout
        capacity = self.manifest.n_cached - self._first[layer] + HEADROOM_TOKENS
        with torch.inference_mode(False):  # else only threads in that mode could write to them
            return [
                torch.empty(
                    (1, spec.heads, capacity, spec.dim),
                    dtype=getattr(torch, layout.dtype),
                    device=self._devices[layer],
                )
                for spec in layout.layers[layer].tensors
            ]

    def release(self, layer: int) -> None:
        """Forget a layer's tensors, which now belong to the cache layer, and give them no more."""
        with self._lock:
            self._released.add(layer)
            self._buffers[layer] = None

    def first_token(self, layer: int) -> int:
        """First token of the document that a layer's tensors hold."""
        return self._first[layer]

    def _first_held(self, layer: int) -> int:
        wanted = self.manifest.identity.layout.layers[layer].first_token(self.manifest.n_cached)
        stored = (
            chunk.first_token(layer)
            for chunk in self.manifest.chunks
            if chunk.first_token(layer) > chunk.start
        )
        return max(wanted, *stored, 0)
