"""Layers whose states arrive later against native ones, under any sequence of operations."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.state_layers import StreamedLayerWithState, StreamedStateLayer
from hf_cachegen.hf.states import LayerStates

CPU = torch.device("cpu")
CHANNELS, WIDTH, LENGTH = 6, 4, 9

operations = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.just(torch.tensor([0]))),
        st.tuples(st.just("reorder"), st.just(torch.tensor([-1, 0]))),
        st.tuples(st.just("crop"), st.integers(-3, 0)),
        st.tuples(st.just("record"), st.none()),
        st.tuples(st.just("copy"), st.none()),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=8,
)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys(tokens: int) -> tuple[Tensor, Tensor]:
    return drawn(tokens, 2, 1, 2, tokens, 4).unbind()  # type: ignore[return-value]


def stored(*, recurrent: bool) -> LayerStates:
    states = {0: drawn(2, 3, 5)} if recurrent else {}
    return LayerStates({0: drawn(1, CHANNELS, WIDTH)}, states)


def streamed(*, recurrent: bool, attention: bool) -> Any:
    """A layer of which everything is still to come."""
    layer = StreamedLayerWithState() if attention else StreamedStateLayer()
    layer.attach_states(lambda: stored(recurrent=recurrent), CPU)
    if attention:
        layer.attach(lambda: keys(LENGTH), LENGTH)
    return layer


def native(*, recurrent: bool, attention: bool) -> Any:
    """A native layer with the same contents."""
    layer = LinearAttentionAndFullAttentionLayer() if attention else LinearAttentionLayer()
    states = stored(recurrent=recurrent)
    layer.update_conv_state(states.conv_states[0][None])
    if recurrent:
        layer.update_recurrent_state(states.recurrent_states[0][None])
    if attention:
        layer.update(*keys(LENGTH))
    return layer


def rows_of(layer: Any) -> int:
    conv = layer.conv_states[0]
    return 1 if conv is None else len(conv)


def step(layer: Any, name: str, argument: Any) -> Any:
    """Apply one operation; returns the layer that goes on."""
    rows, attention = rows_of(layer), hasattr(layer, "get_seq_length")
    recurrent = layer.recurrent_states[0]
    if name == "copy":
        return copy.deepcopy(layer)
    if name == "record":
        layer.activate_past_recording()
    elif name == "update":
        layer.update_conv_state(drawn(argument, 1, CHANNELS, argument).repeat(rows, 1, 1))
        if recurrent is not None:
            layer.update_recurrent_state(recurrent * 0.5 + argument)
        if attention:
            layer.update(*(tensor.repeat(rows, 1, 1, 1) for tensor in keys(argument)))
    elif name == "step":  # what a pass over one token does
        layer.conv_states[0].copy_(layer.conv_states[0].roll(-1, -1))
        if recurrent is not None:
            recurrent.mul_(0.5)
    elif name == "crop":
        layer.crop(argument)
    elif name == "reset":
        layer.reset()
    elif isinstance(layer, (StreamedStateLayer, StreamedLayerWithState)):
        methods = {"repeat": "batch_repeat_interleave", "select": "batch_select_indices"}
        layer_argument = argument % rows if name == "reorder" else argument
        getattr(layer, methods.get(name, "reorder_cache"))(layer_argument)
    else:  # native layers repeat and select keys and values only
        indices = {
            "repeat": lambda: torch.arange(rows).repeat_interleave(argument),
            "select": lambda: argument,
            "reorder": lambda: argument % rows,
        }[name]()
        layer.reorder_cache(indices)
    return layer


def croppable(layer: Any, removed: int) -> bool:
    """Whether a native layer can give up so many tokens, which it does not itself find out."""
    conv = layer.conv_states[0]
    if removed == 0:
        return True
    held = conv is not None and conv.shape[-1] + removed >= WIDTH
    return bool(layer.record_past and layer.is_croppable and held)


def assert_alike(ours: Any, exact: Any) -> None:
    for kind in ("conv_states", "recurrent_states"):
        for found, expected in zip(
            getattr(ours, kind).values(), getattr(exact, kind).values(), strict=True
        ):
            assert (found is None) == (expected is None), kind
            assert found is None or torch.equal(found, expected), kind
    assert ours.has_previous_state == exact.has_previous_state
    if hasattr(exact, "get_seq_length"):
        assert ours.get_seq_length() == exact.get_seq_length()
        if exact.keys is not None:
            assert torch.equal(ours.keys, exact.keys)
            assert torch.equal(ours.values, exact.values)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("recurrent", [False, True])
@settings(deadline=None, derandomize=True, max_examples=100)
@given(steps=operations)
def test_layer_with_states_is_a_native_layer(
    attention: bool, recurrent: bool, steps: list[tuple[str, Any]]
) -> None:
    ours = streamed(recurrent=recurrent, attention=attention)
    exact = native(recurrent=recurrent, attention=attention)
    for name, argument in steps:
        if name == "step" and not all(exact.has_previous_state.values()):
            continue
        if name == "crop":
            possible = croppable(exact, argument) and not (attention and argument)
            assert ours.can_crop(argument) == possible
            if not possible or not exact.record_past:  # native ones raise even for nothing
                continue
        with torch.no_grad():
            ours, exact = step(ours, name, argument), step(exact, name, argument)
        assert_alike(ours, exact)


@pytest.mark.parametrize("attention", [False, True])
def test_nothing_is_read_before_it_is_needed(attention: bool) -> None:
    def load() -> Any:
        raise AssertionError("loaded too early")

    layer: Any = StreamedLayerWithState() if attention else StreamedStateLayer()
    layer.attach_states(load, CPU)
    if attention:
        layer.attach(load, LENGTH)
    assert layer.is_pending
    assert layer.states_pending
    assert layer.rows == 1
    assert layer.has_previous_state == {0: True}
    assert not layer.can_crop(-1)
    layer.crop(0)
    layer.reset()
    assert not layer.states_pending
    assert layer.conv_states == {0: None}


def test_layer_may_keep_several_states() -> None:
    states = LayerStates({0: drawn(1, 2, 3), 2: drawn(2, 4, 5)}, {2: drawn(3, 2)})
    layer = StreamedStateLayer(3)
    layer.attach_states(lambda: states, CPU)
    layer.materialize()
    assert layer.has_previous_state == {0: True, 1: False, 2: True}
    assert layer.conv_kernel_size == {0: 3, 1: None, 2: 5}
    layer.batch_repeat_interleave(2)
    assert layer.rows == 2
    assert layer.conv_states[1] is None
    assert layer.conv_states[2].shape == (2, 4, 5)
    assert layer.recurrent_states[2].shape == (2, 2)


def test_model_that_goes_on_token_by_token_may_begin_with_several() -> None:
    layer = StreamedStateLayer()
    layer.attach_states(lambda: stored(recurrent=True), CPU, one_by_one=True)
    layer.update_conv_state(drawn(1, 1, CHANNELS, 1))
    with pytest.raises(UnsupportedError, match="over a pass of 2 tokens"):
        layer.update_conv_state(drawn(1, 1, CHANNELS, 2))
    layer.reset()
    layer.update_conv_state(drawn(1, 1, CHANNELS, 2))


@pytest.mark.parametrize("attention", [False, True])
def test_interrupted_layer_is_filled_at_the_next_use(attention: bool) -> None:
    class Interrupted(dict[int, Tensor]):
        def items(self) -> Any:
            raise KeyboardInterrupt

    contents = stored(recurrent=True)
    half = LayerStates(contents.conv_states, Interrupted(contents.recurrent_states))
    answers = iter((half, half, contents))
    layer = streamed(recurrent=True, attention=attention)
    layer.attach_states(lambda: next(answers), CPU)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            layer.materialize_states()
        assert layer.states_pending
    assert_alike(layer, native(recurrent=True, attention=attention))
    assert not layer.states_pending


@pytest.mark.parametrize("change", ["update", "reset"])
@pytest.mark.parametrize("attention", [False, True])
def test_thread_that_has_waited_undoes_nothing(attention: bool, change: str) -> None:
    """Another has changed the states after the first was given them and before it took them."""
    layer = streamed(recurrent=True, attention=attention)
    given, changed = threading.Event(), threading.Event()

    def load() -> LayerStates:
        if threading.current_thread() is waiting:
            given.set()
            assert changed.wait(10)
        return stored(recurrent=True)

    layer.attach_states(load, CPU)
    waiting = threading.Thread(target=layer.materialize_states)
    waiting.start()
    assert given.wait(10)
    newest = drawn(3, 1, 3, 5)
    if change == "update":
        layer.update_recurrent_state(newest)
    else:
        layer.reset()
    changed.set()
    waiting.join(10)
    assert not layer.states_pending
    if change == "update":
        assert torch.equal(layer.recurrent_states[0], newest)
    else:
        assert not any(layer.has_previous_state.values())
