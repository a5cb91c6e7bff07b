"""The part of a codec that is the same for all that Triton kernels can decode."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hf_cachegen.codec.base import PlacedSegment, SegmentCodec
from hf_cachegen.codec.exact import read_tensors
from hf_cachegen.codec.gpu import takes_kernels
from hf_cachegen.codec.planes import ByteReader
from hf_cachegen.layout import KVLayout


class CodedSegment(NamedTuple):
    """The tokens of a segment that are not stored as they are.

    Attributes
    ----------
    planes
        What :meth:`KernelCodec._read_planes` returns.
    tokens
        How many.
    batch, first_token
        Where they go in ``out[batch, :, first_token:]``.
    """

    planes: Any
    tokens: int
    batch: int = 0
    first_token: int = 0


class KernelCodec(SegmentCodec):
    """A codec with kernels for tensors on a GPU. Positions of evicted tokens they do not know.

    Segments begin with the sinks that they hold: values of the context's first tokens, as they are.

    Parameters
    ----------
    layout, kept
        As for :class:`~hf_cachegen.codec.base.SegmentCodec`.
    n_sinks
        How many of a context's first tokens are sinks.
    """

    name: str

    def __init__(self, layout: KVLayout, n_sinks: int, kept: Tensor | None = None) -> None:
        super().__init__(layout, kept)
        self._n_sinks = n_sinks

    def decode_into(self, layer: int, data: bytes, out: Sequence[Tensor], start: int) -> None:
        self.check_tensors(layer, out)
        tokens = out[0].shape[1]
        if self._takes_kernels(out):
            self._decode_on_gpu(layer, [PlacedSegment(data, 0, tokens)], out, start)
            return
        reader, sinks = self._open(layer, data, out, start)
        if tokens > sinks:
            self._decode_rest(reader, layer, [tensor[:, sinks:] for tensor in out], start + sinks)
        reader.finish()

    def decode_many_into(
        self, layer: int, segments: Sequence[PlacedSegment], out: Sequence[Tensor], start: int
    ) -> None:
        self.check_tensors(layer, out)
        if self._takes_kernels(out):
            self._decode_on_gpu(layer, segments, out, start)
        else:
            super().decode_many_into(layer, segments, out, start)

    def _sinks(self, start: int, tokens: int) -> int:
        """How many of some tokens are sinks."""
        return min(max(self._n_sinks - start, 0), tokens)

    @abstractmethod
    def _decode_rest(
        self, reader: ByteReader, layer: int, out: Sequence[Tensor], start: int
    ) -> None:
        """Decode what comes after the sinks, of one token at least, without kernels."""

    @abstractmethod
    def _read_planes(self, reader: ByteReader, tokens: int) -> Any:
        """What is coded of so many tokens after the sinks, of one at least."""

    @abstractmethod
    def _launch(
        self, layer: int, segments: Sequence[CodedSegment], out: Sequence[Tensor], start: int
    ) -> Callable[[], None]:
        """Launch the decoding of segments on the current stream; returns the wait for its check."""

    def _takes_kernels(self, out: Sequence[Tensor]) -> bool:
        return self.kept is None and takes_kernels(out)

    def _decode_on_gpu(
        self, layer: int, segments: Sequence[PlacedSegment], out: Sequence[Tensor], start: int
    ) -> None:
        coded = []
        for data, first, tokens in segments:
            places = [tensor[:, first : first + tokens] for tensor in out]
            reader, sinks = self._open(layer, data, places, start + first)
            if tokens > sinks:
                planes = self._read_planes(reader, tokens - sinks)
                coded.append(CodedSegment(planes, tokens - sinks, first_token=first + sinks))
            reader.finish()
        self._launch(layer, coded, out, start)()

    def _open(
        self, layer: int, data: bytes, out: Sequence[Tensor], start: int
    ) -> tuple[ByteReader, int]:
        """A reader of a segment behind its sinks, which are read, and how many these are."""
        reader = ByteReader(data, f"{self.name} segment of layer {layer}")
        sinks = self._sinks(start, out[0].shape[1])
        read_tensors(reader, [tensor[:, :sinks] for tensor in out])
        return reader, sinks
