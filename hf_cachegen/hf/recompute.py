"""Chunks of a context computed by the model itself, in the middle of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from hf_cachegen.artifact import Artifact
from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.buffers import LayerBuffers
from hf_cachegen.hf.compat import (
    STATIC_ROPE_TYPES,
    cache_argument,
    native_layers,
    place_arguments,
    runs_one_by_one,
    token_layers,
)

PIECE_TOKENS = 512
"""Tokens per forward pass: a stream that is closed ends within one, and attention weights, if a
model keeps them, stay small. Matrix products are at full speed with far fewer."""


class Recomputer:
    """Runs a model on chunks of a context whose earlier tokens are in place.

    Keys and values are written to where decoded ones would be, and attention reads the tokens
    before from there, so nothing is copied. Sliding layers keep their window and recurrent ones
    their states from one chunk to the next, as the artefact holds only the last ones.

    Parameters
    ----------
    model
        The model.
    artifact
        The context. Its token ids are asked for when a chunk is computed.
    buffers
        Where the context's tensors are.

    Raises
    ------
    UnsupportedError
        The model cannot be run inside another pass of its own, or computes other values in the
        middle of a context than at its end.
    """

    def __init__(self, model: PreTrainedModel, artifact: Artifact, buffers: LayerBuffers) -> None:
        if artifact.manifest.kept is not None:
            raise UnsupportedError(
                "tokens were evicted from this cache, so its chunks are no parts of the text and "
                "cannot be recomputed; choose a level or another policy"
            )
        check_recomputable(model)
        self._model = model
        self._artifact = artifact
        self._chunks = artifact.manifest.chunks
        self._buffers = buffers
        natives = native_layers(model)
        places = {index: place for place, index in enumerate(token_layers(natives))}
        self._layers = [
            _past(native, buffers, places.get(index)) for index, native in enumerate(natives)
        ]

    def holds_past(self, chunk: int) -> bool:
        """Whether a chunk can be computed from what the artefact holds of the tokens before it."""
        return all(layer.holds_past(self._chunks[chunk].start) for layer in self._layers)

    def __call__(self, chunk: int) -> Iterator[None]:
        """Compute a chunk piece by piece. Every chunk before it has to be in place."""
        record = self._chunks[chunk]
        for layer in self._layers:
            layer.begin(record.start)
        cache = Cache(layers=self._layers)
        held = self._artifact.token_ids[None, record.start : record.end]
        ids = torch.tensor(held, dtype=torch.long, device=self._model.device)
        pieces = torch.split(ids, PIECE_TOKENS, dim=1)
        for start, piece in zip(range(record.start, record.end, PIECE_TOKENS), pieces, strict=True):
            arguments: dict[str, Any] = {
                cache_argument(self._model): cache,
                "use_cache": True,
                **place_arguments(self._model, start, piece),
            }
            with torch.no_grad():
                # forward() and not a call: hooks on the model are about the passes of its user.
                output = self._model.forward(input_ids=piece, logits_to_keep=1, **arguments)
                output.logits[0, -1, 0].item()  # waits for the device, so that times are true
            self._buffers.record_use()
            yield


def check_recomputable(model: PreTrainedModel) -> None:
    """Raise UnsupportedError if a model cannot recompute part of a context."""
    if runs_one_by_one(model):
        raise UnsupportedError(
            f"{type(model).__name__} goes on from states only token by token, so chunks of a "
            "context cannot be recomputed"
        )
    for name, module in model.named_modules():
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            raise UnsupportedError(
                f"{name or type(model).__name__} is offloaded: its weights are only there during "
                "its own pass, so no other can run inside of it"
            )
    for module in model.get_decoder().modules():
        known = getattr(module, "rope_type", "default")
        kinds = set(known.values() if isinstance(known, dict) else [known])
        if not kinds <= STATIC_ROPE_TYPES:
            raise UnsupportedError(
                f"RoPE of type {', '.join(sorted(kinds - STATIC_ROPE_TYPES))} depends on the "
                "length of the whole prompt, so a chunk of it cannot be recomputed"
            )


def _past(native: Any, buffers: LayerBuffers, place: int | None) -> Any:
    """What stands in for a native layer, whose tensors have this place among the buffers."""
    if place is None:
        return _StatePast(native.number_of_states)
    if isinstance(native, LinearAttentionAndFullAttentionLayer):
        return _FullPastWithState(buffers, place, native.number_of_states)
    if isinstance(native, DynamicSlidingWindowLayer):
        return _SlidingPast(buffers, place, native.sliding_window)
    return _FullPast(buffers, place)


class _StatePast(LinearAttentionLayer):
    """A layer that keeps nothing but states, from one chunk to the next."""

    def holds_past(self, start: int) -> bool:
        return start == 0

    def begin(self, start: int) -> None:
        """Let the next tokens be those from ``start`` on."""
        if start == 0:
            self.reset()


class _FullPast(DynamicLayer):
    """A full layer whose tensors are the stream's buffers."""

    def __init__(self, buffers: LayerBuffers, layer: int) -> None:
        super().__init__()
        self._buffers = buffers
        self._layer = layer
        self._length = 0

    def holds_past(self, start: int) -> bool:
        return True

    def begin(self, start: int) -> None:
        """Let the next tokens be those from ``start`` on."""
        self._length = start

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start, self._length = self._length, self._length + key_states.shape[-2]
        keys, values = self._buffers.storage(self._layer)
        keys[:, :, start : self._length] = key_states
        values[:, :, start : self._length] = value_states
        return keys[:, :, : self._length], values[:, :, : self._length]

    def get_seq_length(self) -> int:
        return self._length


class _FullPastWithState(_FullPast, LinearAttentionAndFullAttentionLayer):
    """A full layer that keeps states beside, from one chunk to the next."""

    def __init__(self, buffers: LayerBuffers, layer: int, number_of_states: int) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states)
        self._buffers = buffers
        self._layer = layer
        self._length = 0

    def holds_past(self, start: int) -> bool:
        return start == 0

    def begin(self, start: int) -> None:
        """Let the next tokens be those from ``start`` on."""
        if start == 0:
            LinearAttentionLayer.reset(self)
        super().begin(start)


class _SlidingPast(DynamicSlidingWindowLayer):
    """A sliding layer that also writes to the stream's buffers what these hold of it."""

    def __init__(self, buffers: LayerBuffers, layer: int, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._buffers = buffers
        self._layer = layer
        self._first = buffers.first_token(layer)
        self.cumulative_length = 0

    def holds_past(self, start: int) -> bool:
        return start == 0 or self._first <= self._first_visible(start)

    def begin(self, start: int) -> None:
        """Let the next tokens be those from ``start`` on."""
        if start == 0:
            self.reset()
        elif self.cumulative_length != start:
            held = slice(self._first_visible(start) - self._first, start - self._first)
            past = [tensor[:, :, held] for tensor in self._buffers.storage(self._layer)]
            self.lazy_initialization(*past)
            self.keys, self.values = past
            self.cumulative_length = start

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        end = self.cumulative_length + key_states.shape[-2]
        skipped = max(self._first - self.cumulative_length, 0)
        if skipped < key_states.shape[-2]:
            target = slice(self.cumulative_length + skipped - self._first, end - self._first)
            for tensor, new in zip(
                self._buffers.storage(self._layer), (key_states, value_states), strict=True
            ):
                tensor[:, :, target] = new[:, :, skipped:]
        return super().update(key_states, value_states, *args, **kwargs)

    def _first_visible(self, start: int) -> int:
        return max(start - self.sliding_window + 1, 0)
