"""Where decoded segments go, above all those that carry several layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cachegen import FormatError
from hf_cachegen.artifact import Artifact, Manifest
from hf_cachegen.codec.base import SegmentCodec
from hf_cachegen.hf.buffers import LayerBuffers
from hf_cachegen.stores import LocalStore

LENGTH, WINDOW = 70, 16


class Positions(SegmentCodec):
    """Decodes every value to its position in the context, for groups of layers."""

    def __init__(self, layout: Any, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(layout)
        self._groups = {group[0]: group for group in groups}

    def members(self, layer: int) -> Sequence[int]:
        return self._groups.get(layer, ())

    def encode(self, layer: int, tensors: Sequence[Tensor], start: int) -> bytes:
        raise NotImplementedError

    def decode_into(self, layer: int, data: bytes, out: Sequence[Tensor], start: int) -> None:
        self.check_tensors(layer, out)
        for tensor in out:
            tensor.copy_(torch.arange(start, start + tensor.shape[1])[:, None])


def buffers(published: Any, groups: Sequence[Sequence[int]], **changes: Any) -> LayerBuffers:
    manifest = Artifact.open(LocalStore(published.folder)).manifest
    if changes:
        chunks = [chunk.model_copy(update=changes) for chunk in manifest.chunks]
        manifest = Manifest.model_construct(**{**dict(manifest), "chunks": tuple(chunks)})
    codec = Positions(manifest.identity.layout, groups)
    devices = [torch.device("cpu")] * manifest.n_layers
    return LayerBuffers(manifest, devices, {0: codec})  # type: ignore[arg-type]


def segments_of(found: LayerBuffers, layer: int, chunks: Sequence[int]) -> list[tuple[int, bytes]]:
    return [(chunk, b"data") for chunk in chunks if layer in found.layers_of(chunk)]


def held(found: LayerBuffers, layer: int) -> list[float]:
    """Positions of the tokens that a layer holds, the same in all its tensors and channels."""
    first, *others = found.tensors(layer)
    positions = first[0, 0, :, 0]
    assert all((tensor == positions[:, None]).all() for tensor in (first, *others))
    return positions.tolist()


def test_group_is_decoded_to_all_its_layers(llama: Any) -> None:
    found = buffers(llama, [(0, 1, 2)])
    for chunk in range(3):
        assert found.decode(chunk, 0, 0, b"data") == (0, 1, 2)
        assert found.decode(chunk, 0, 1, b"") == ()
    for layer in range(3):
        assert held(found, layer) == list(range(LENGTH))


def test_group_of_sliding_layers_keeps_their_window(gemma: Any) -> None:
    """Layers 0 and 2 slide; the chunk begins before what they need."""
    found = buffers(gemma, [(0, 2), (1, 3)], skipped=())
    assert found.layers_of(0) == [1, 3]
    assert found.layers_of(1) == [0, 1, 2, 3]
    for chunk in range(3):
        for layer in found.layers_of(chunk):
            found.decode(chunk, 0, layer, b"" if layer > 1 else b"data")
    for layer in (0, 2):
        assert found.first_token(layer) == LENGTH - WINDOW
        assert held(found, layer) == list(range(LENGTH - WINDOW, LENGTH))
    for layer in (1, 3):
        assert held(found, layer) == list(range(LENGTH))


def test_group_whose_layers_hold_different_tokens_is_refused(gemma: Any) -> None:
    found = buffers(gemma, [(0, 1), (2, 3)])
    with pytest.raises(FormatError, match=r"first token of the layers \[0, 1\].*found \[32, 54\]"):
        found.decode(1, 0, 0, b"data")


def test_bytes_where_another_segment_carries_the_layer_are_refused(llama: Any) -> None:
    found = buffers(llama, [(0, 1, 2)])
    with pytest.raises(FormatError, match=r"expected an empty segment.*carries layer 1; found 3"):
        found.decode(0, 0, 1, b"abc")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 0)])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_segments_of_several_chunks_are_decoded_together(
    request: Any, name: str, order: Sequence[int]
) -> None:
    """Also those of which a sliding layer needs only the end; others are left as they are."""
    groups = {"llama": [(0, 1, 2)], "gemma": [(0, 2), (1, 3)]}[name]
    found = buffers(
        request.getfixturevalue(name), groups, **({"skipped": ()} if groups[1:] else {})
    )
    for group in groups:
        for layer in group:
            for tensor in found.storage(layer):
                tensor.fill_(-1)
        assert found.decode_many(0, group[0], segments_of(found, group[0], order)) == group
    for layer in range(len(groups) * len(groups[0])):
        first = found.first_token(layer)
        positions = [p if p // 32 in order else -1 for p in range(first, LENGTH)]
        assert held(found, layer) == positions


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_no_segment_of_several_may_be_wrong(llama: Any, damaged: int) -> None:
    found = buffers(llama, [(0, 1, 2)])
    segments = [(chunk, b"abc" if chunk == damaged else b"") for chunk in range(3)]
    with pytest.raises(FormatError, match="expected an empty segment"):
        found.decode_many(0, 1, segments)


def test_buffers_that_a_pass_has_begun_with_can_be_filled_by_decoders(llama: Any) -> None:
    """A user's inference mode is not that of the threads that decode."""
    found = buffers(llama, [(0, 1, 2)])
    with torch.inference_mode():
        found.storage(0)
    for chunk in range(3):
        found.decode(chunk, 0, 0, b"data")
    assert held(found, 0) == list(range(LENGTH))


@pytest.mark.parametrize(
    "use",
    [
        lambda found: found.tensors(0),
        lambda found: found.storage(0),
        lambda found: found.decode(0, 0, 0, b"data"),
    ],
)
def test_tensors_that_were_released_are_not_given_again(llama: Any, use: Any) -> None:
    """New ones would hold whatever is in the memory."""
    found = buffers(llama, [(0,), (1,), (2,)])
    found.decode(0, 0, 0, b"data")
    found.release(0)
    with pytest.raises(RuntimeError, match=r"expected the tensors of layer 0, found.*released"):
        use(found)
    found.tensors(1)
