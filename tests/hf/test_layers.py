"""Streamed layers against native ones, under any sequence of operations."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_cachegen.hf.layers import (
    GrowingBuffer,
    StreamedLayer,
    StreamedPrunedLayer,
    StreamedSlidingLayer,
)

LENGTH, CAPACITY, WINDOW = 9, 14, 5

operations = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 6)),
        st.tuples(st.just("crop"), st.integers(-10, 0)),
        st.tuples(st.just("batch_repeat_interleave"), st.integers(1, 2)),
        st.tuples(st.just("batch_select_indices"), st.just(torch.tensor([0]))),
        st.tuples(st.just("reorder_cache"), st.just(torch.tensor([-1, 0]))),
        st.tuples(st.just("copy"), st.none()),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=8,
)


def states(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(2, 1, 2, tokens, 4, generator=generator).unbind()


def loading(first: int = 0) -> Any:
    """A load function: views of preallocated buffers, as the stream makes them."""

    def load() -> tuple[Tensor, Tensor]:
        buffers = torch.empty(2, 1, 2, CAPACITY, 4).unbind()
        buffers = tuple(buffer.clone() for buffer in buffers)
        views = [buffer[:, :, : LENGTH - first] for buffer in buffers]
        for view, state in zip(views, states(LENGTH), strict=True):
            view.copy_(state[:, :, first:])
        return views[0], views[1]

    return load


def step(layer: Any, name: str, argument: Any) -> tuple[Any, list[Tensor]]:
    """Apply one operation; returns the layer that goes on, and what the operation returned."""
    if name == "copy":
        return copy.deepcopy(layer), []
    if name == "reset":
        layer.reset()
    elif name == "update":
        rows = layer.keys.shape[0] if layer.get_seq_length() else 1
        new = [state.repeat(rows, 1, 1, 1) for state in states(argument)]
        with torch.no_grad():
            return layer, list(layer.update(*new))
    elif name == "reorder_cache":
        rows = layer.keys.shape[0] if layer.get_seq_length() else 1
        layer.reorder_cache(argument % rows)
    elif name != "crop" or layer.get_seq_length():  # an empty native layer fails to crop
        getattr(layer, name)(argument)
    return layer, []


def assert_alike(ours: Any, native: Any, steps: list[tuple[str, Any]]) -> None:
    """Equal results, lengths and errors after every step."""
    for name, argument in steps:
        results = []
        for layer in (ours, native):
            try:
                results.append(step(layer, name, argument))
            except RuntimeError:
                results.append((layer, [torch.tensor(0)]))
        (ours, found), (native, expected) = results
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
        assert ours.get_seq_length() == native.get_seq_length(), name
        assert ours.get_mask_sizes(2) == native.get_mask_sizes(2), name
    if native.keys is not None:
        assert torch.equal(ours.keys, native.keys)
        assert torch.equal(ours.values, native.values)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(steps=operations)
def test_full_layer_is_a_native_layer(steps: list[tuple[str, Any]]) -> None:
    ours, native = StreamedLayer(), DynamicLayer()
    ours.attach(loading(), LENGTH)
    native.update(*states(LENGTH))
    assert_alike(ours, native, steps)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(steps=operations)
def test_sliding_layer_in_use_is_a_native_layer(steps: list[tuple[str, Any]]) -> None:
    ours, native = StreamedSlidingLayer(sliding_window=WINDOW), DynamicSlidingWindowLayer(WINDOW)
    first = LENGTH - WINDOW
    ours.attach(loading(first), LENGTH, first)
    ours.materialize()
    native.update(*states(LENGTH))
    assert_alike(ours, native, steps)


@pytest.mark.parametrize("first", range(LENGTH - WINDOW + 1))
@pytest.mark.parametrize("removed", range(LENGTH + 2))
def test_sliding_layer_before_use_is_cropped_as_far_as_it_holds(first: int, removed: int) -> None:
    layer = StreamedSlidingLayer(sliding_window=WINDOW)
    layer.attach(loading(first), LENGTH, first)
    length = max(LENGTH - removed, 0)
    possible = first == 0 or length - WINDOW + 1 >= first
    assert layer.can_crop(-removed) == possible
    if not possible:
        with pytest.raises(RuntimeError):
            layer.crop(-removed)
        return
    layer.crop(-removed)
    native = DynamicSlidingWindowLayer(WINDOW)
    if length:
        native.update(*(state[:, :, :length] for state in states(LENGTH)))
    assert layer.is_pending
    for found, expected in zip(layer.update(*states(2)), native.update(*states(2)), strict=True):
        assert torch.equal(found, expected)


def test_pending_layer_reads_nothing_for_lengths_crops_and_resets() -> None:
    def load() -> tuple[Tensor, Tensor]:
        raise AssertionError("loaded too early")

    full, sliding = StreamedLayer(), StreamedSlidingLayer(sliding_window=WINDOW)
    for layer in (full, sliding):
        layer.attach(load, LENGTH)
        assert layer.get_seq_length() == LENGTH
        layer.get_mask_sizes(3)
        layer.crop(-2)
        assert layer.get_seq_length() == LENGTH - 2
        assert layer.is_pending
        layer.reset()
        layer.crop(-1)
        assert layer.get_seq_length() == 0
        assert layer.keys is None


LAYERS = {
    "full": StreamedLayer,
    "pruned": StreamedPrunedLayer,
    "sliding": lambda: StreamedSlidingLayer(sliding_window=WINDOW),
}


@pytest.mark.parametrize(
    ("change", "length"),
    [
        (lambda layer: layer.update(*states(2)), LENGTH + 2),
        (lambda layer: layer.crop(-2), LENGTH - 2),
        (lambda layer: layer.reset(), 0),
    ],
    ids=["update", "crop", "reset"],
)
@pytest.mark.parametrize("kind", LAYERS)
def test_thread_that_has_waited_undoes_nothing(kind: str, change: Any, length: int) -> None:
    """Another changes the layer after the first was given its tensors and before it takes them."""
    expected, layer = LAYERS[kind](), LAYERS[kind]()
    tensors = loading()()
    for prepared in (expected, layer):
        prepared.attach(lambda: tuple(tensor.clone() for tensor in tensors), LENGTH)
    change(expected)
    given, changed = threading.Event(), threading.Event()

    def load() -> tuple[Tensor, ...]:
        if threading.current_thread() is waiting:
            given.set()
            assert changed.wait(10)
        return tensors

    layer.attach(load, LENGTH)
    waiting = threading.Thread(target=layer.materialize)
    waiting.start()
    assert given.wait(10)
    with torch.no_grad():
        change(layer)
    changed.set()
    waiting.join(10)
    assert not layer.is_pending
    assert layer.get_seq_length() == expected.get_seq_length() == length
    for found, wanted in ((layer.keys, expected.keys), (layer.values, expected.values)):
        assert (found is None) == (wanted is None) == (length == 0)
        assert found is None or torch.equal(found, wanted)


@given(pieces=st.lists(st.integers(1, 7), min_size=1, max_size=12))
@settings(deadline=None, derandomize=True)
def test_buffer_grows_as_concatenation_does(pieces: list[int]) -> None:
    start = torch.zeros(1, 2, 3, 4)
    buffer, current, expected = GrowingBuffer(start), start, start
    for tokens in pieces:
        new = states(tokens)[0]
        current = buffer.append(current, new)
        expected = torch.cat((expected, new), dim=2)
        assert torch.equal(current, expected)
        assert buffer.storage.shape[2] <= max(expected.shape[2] * 1.25, 3)
    assert torch.equal(start, torch.zeros(1, 2, 3, 4))


def test_tensor_from_elsewhere_is_not_written_to() -> None:
    storage = torch.zeros(1, 1, 8, 2)
    buffer = GrowingBuffer(storage)
    for foreign in (torch.ones(1, 1, 4, 2), storage[:, :, 1:3], storage.new_zeros(2, 1, 2, 2)):
        before = foreign.clone()
        new = torch.full((foreign.shape[0], 1, 1, 2), 5.0)
        assert torch.equal(buffer.append(foreign, new), torch.cat((before, new), dim=2))
        assert torch.equal(foreign, before)
        buffer = GrowingBuffer(storage)
    assert not storage.any()
