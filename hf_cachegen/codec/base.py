"""The interface of a codec: the tensors of one layer and one run of tokens, to bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_cachegen.codec.channels import Positions, kept_positions
from hf_cachegen.layout import KVLayout, TensorSpec


class PlacedSegment(NamedTuple):
    """A segment, and where its values go.

    Attributes
    ----------
    data
        As for :meth:`SegmentCodec.decode_into`.
    first_token, tokens
        ``[:, first_token : first_token + tokens]`` of each tensor.
    """

    data: bytes
    first_token: int
    tokens: int


class SegmentCodec(ABC):
    """Encodes one layer's tensors over consecutive tokens as one segment.

    A segment needs the codec (its level's parameters and the model's table) and, at a level that
    refines others, their segments of the same layer and tokens. Codecs are immutable after
    construction and may be used from several threads at once.

    Parameters
    ----------
    layout
        What the model caches.
    kept
        Of a context from which tokens were evicted, the positions of those that each layer and head
        has, ascending int64 ``[L or 1, H or 1, n]``; None if they have all.

    Attributes
    ----------
    name
        Of the codec, as levels and messages give it.
    """

    name: str

    def __init__(self, layout: KVLayout, kept: Tensor | None = None) -> None:
        self.layout = layout
        self.kept = kept

    def members(self, layer: int) -> Sequence[int]:
        """Layers whose values a layer's segment carries: by default its own.

        A codec that codes a group of layers jointly puts all of it into the segment of the group's
        first layer and leaves the segments of the others empty. Members hold the same tokens.
        """
        return (layer,)

    @abstractmethod
    def encode(self, layer: int, tensors: Sequence[Tensor], start: int) -> bytes:
        """Encode a segment.

        Parameters
        ----------
        layer
            Index of the layer.
        tensors
            The tensors of all :meth:`members`, in order, as their
            :class:`~hf_cachegen.layout.TensorSpec` lists say: each ``[H, T, D]`` in the layout's
            dtype, T the same for all.
        start
            How many tokens of the context come before the first one: of those that are kept, if
            others were evicted.

        Raises
        ------
        ValueError
            The tensors do not fit the layout, or hold values that the codec cannot represent.
        """

    @abstractmethod
    def decode_into(self, layer: int, data: bytes, out: Sequence[Tensor], start: int) -> None:
        """Decode a segment into preallocated tensors.

        Parameters
        ----------
        layer, start
            As for :meth:`encode`.
        data
            What :meth:`encode` returned; of a level that refines others, after what theirs did,
            coarse first.
        out
            Tensors or views ``[H, T, D]`` in the layout's dtype, any strides, any device.

        Raises
        ------
        ValueError
            ``out`` does not fit the layout.
        FormatError
            The bytes are not a segment of this codec, layer and number of tokens.
        """

    def decode_many_into(
        self, layer: int, segments: Sequence[PlacedSegment], out: Sequence[Tensor], start: int
    ) -> None:
        """Decode several segments of a layer, all at once where that is faster.

        Parameters and errors are those of :meth:`decode_into`, with ``start`` of the first token
        that ``out`` has room for. After an error, none of the segments may be in place.
        """
        for data, first, tokens in segments:
            places = [tensor[:, first : first + tokens] for tensor in out]
            self.decode_into(layer, data, places, start + first)

    def check_tensors(self, layer: int, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError unless ``tensors`` have the shapes and dtype of this segment."""
        specs = self.specs(layer)
        if not specs:
            raise ValueError(
                f"layer {layer}: its values are in the segment of the first layer of its group"
            )
        tokens = tensors[0].shape[-2] if tensors and tensors[0].ndim == 3 else -1
        expected = [(spec.heads, tokens, spec.dim) for spec in specs]
        found = [tuple(tensor.shape) for tensor in tensors]
        if found != expected or any(tensor.dtype != self.dtype for tensor in tensors):
            raise ValueError(
                f"layer {layer}: expected tensors [H, T, D] of {expected} in {self.layout.dtype}, "
                f"got {found} in {[str(tensor.dtype) for tensor in tensors]}"
            )

    def specs(self, layer: int) -> list[TensorSpec]:
        """The tensors that a layer's segment carries."""
        return [
            spec for member in self.members(layer) for spec in self.layout.layers[member].tensors
        ]

    def positions(self, layer: int, start: int, tokens: int) -> Positions:
        """Where so many tokens of a layer's segment are in the context, ``start`` as above."""
        return kept_positions(self.layout, self.members(layer), self.kept, start, tokens)

    @property
    def dtype(self) -> torch.dtype:
        """The layout's dtype."""
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        return dtype
