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


class SinkSplit(NamedTuple):
    """A segment's tensors, cut where the sinks end.

    Attributes
    ----------
    sinks, rest
        Views ``[H, t, D]`` of the tokens that are sinks, and of all others.
    start
        As for :meth:`SegmentCodec.encode`, of the others.
    """

    sinks: list[Tensor]
    rest: list[Tensor]
    start: int


def split_sinks(n_sinks: int, tensors: Sequence[Tensor], start: int) -> SinkSplit:
    """Cut tensors ``[H, T, D]`` of a context whose first ``n_sinks`` tokens are sinks.

    ``start`` is as for :meth:`SegmentCodec.encode`.
    """
    n = min(max(n_sinks - start, 0), tensors[0].shape[1])
    return SinkSplit([t[:, :n] for t in tensors], [t[:, n:] for t in tensors], start + n)


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

    def __init__(self, layout: KVLayout, n_sinks: int, kept: Tensor | None = None) -> None:
        super().__init__(layout, kept)
        self._n_sinks = n_sinks

    def decode_into(self, layer: int, data: bytes, out: Sequence[Tensor], start: int) -> None:
        self.check_tensors(layer, out)
        if self._takes_kernels(out):
            self._decode_on_gpu(layer, [PlacedSegment(data, 0, out[0].shape[1])], out, start)
            return
        reader, rest, rest_start = self._open(layer, data, out, start)
        if rest[0].shape[1]:
            self._decode_rest(reader, layer, rest, rest_start)
        reader.finish()

    def decode_many_into(
        self, layer: int, segments: Sequence[PlacedSegment], out: Sequence[Tensor], start: int
    ) -> None:
        self.check_tensors(layer, out)
        if self._takes_kernels(out):
            self._decode_on_gpu(layer, segments, out, start)
        else:
            super().decode_many_into(layer, segments, out, start)

    def _split(self, tensors: Sequence[Tensor], start: int) -> SinkSplit:
        return split_sinks(self._n_sinks, tensors, start)

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
            reader, rest, rest_start = self._open(layer, data, places, start + first)
            n_rest = rest[0].shape[1]
            if n_rest:
                planes = self._read_planes(reader, n_rest)
                coded.append(CodedSegment(planes, n_rest, first_token=rest_start - start))
            reader.finish()
        self._launch(layer, coded, out, start)()

    def _open(
        self, layer: int, data: bytes, out: Sequence[Tensor], start: int
    ) -> tuple[ByteReader, list[Tensor], int]:
        """Fill the sinks; returns a reader behind them, the other tokens and where these start."""
        reader = ByteReader(data, f"{self.name} segment of layer {layer}")
        sinks, rest, rest_start = self._split(out, start)
        read_tensors(reader, sinks)
        return reader, rest, rest_start
