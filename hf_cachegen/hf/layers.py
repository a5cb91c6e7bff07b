"""Cache layers whose tensors arrive later, and grow in place once they have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

GROWTH = 1.25
"""Factor by which a full buffer is enlarged. Native layers copy everything on every token."""

LoadTensors = Callable[[], tuple[Tensor, Tensor]]
"""Blocks until a layer is decoded and returns its keys and values ``[1, H, T, D]``.

They are the same however often it is called, from whichever threads.
"""

ARRIVAL = threading.Lock()
"""Held while a layer takes what has arrived, or changes how much of it it will take.

It is one for all layers, since they are copied, and it is held for moments only: nobody waits for a
stream with it, let alone recomputes chunks. Threads that wait for the same layer are all given its
tensors, and the first one attaches them: after that they may have grown already.
"""


class GrowingBuffer:
    """A tensor ``[B, H, capacity, D]`` of which the first tokens are in use.

    It owns its memory, so appending writes in place; a tensor that came from elsewhere is copied
    into a new buffer first.

    Parameters
    ----------
    storage
        ``[B, H, capacity, D]``.
    """

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage

    def append(self, current: Tensor, new: Tensor) -> Tensor:
        """``current`` followed by ``new`` along T, as a view of this buffer."""
        used, total = current.shape[-2], current.shape[-2] + new.shape[-2]
        owned = (
            current.data_ptr() == self.storage.data_ptr()
            and current.shape[:2] == self.storage.shape[:2]
            and current.stride() == self.storage.stride()
            # A tensor made in inference mode may not be written to outside of it.
            and (torch.is_inference_mode_enabled() or not self.storage.is_inference())
        )
        if not owned or total > self.storage.shape[-2]:
            shape = (*current.shape[:2], max(total, int(GROWTH * used)), current.shape[-1])
            self.storage = torch.empty(shape, dtype=current.dtype, device=current.device)
            self.storage[:, :, :used] = current
        self.storage[:, :, used:total] = new
        return self.storage[:, :, :total]


class _Streamed:
    """Mixin of layers whose keys and values are loaded at first use.

    Until then only lengths are known. Whatever needs tensors triggers the load, in any thread.
    """

    _load: LoadTensors | None = None
    _keys: Tensor | None = None
    _values: Tensor | None = None

    def attach(self, load: LoadTensors, length: int, first: int = 0) -> None:
        """Take tokens [first, length) from ``load`` when tensors are first needed."""
        self._load = load
        self._length = length
        self._first = first
        self.is_initialized = True

    @property
    def is_pending(self) -> bool:
        """Whether the tensors are still to be loaded."""
        return self._load is not None

    @property
    def rows(self) -> int:
        """Sequences that are cached."""
        return 1 if self._keys is None else self._keys.shape[0]

    def materialize(self) -> None:
        """Block until the tensors are here."""
        load = self._load
        if load is None:
            return
        keys, values = load()
        with ARRIVAL:
            if self._load is load:  # neither attached meanwhile nor reset
                self.device = keys.device
                self._keys, self._values = self._visible(keys), self._visible(values)
                self._load = None  # last: who finds the layer loaded takes its tensors

    def _visible(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, : self._length]

    @property
    def keys(self) -> Tensor | None:
        """``[B, H, T, D]``; loads them if need be."""
        self.materialize()
        return self._keys

    @keys.setter
    def keys(self, tensor: Tensor | None) -> None:
        self._keys = tensor

    @property
    def values(self) -> Tensor | None:
        """``[B, H, T, D]``; loads them if need be."""
        self.materialize()
        return self._values

    @values.setter
    def values(self, tensor: Tensor | None) -> None:
        self._values = tensor

    def reset(self) -> None:
        """Forget everything; what is still on its way is not waited for."""
        with ARRIVAL:
            self._load = None
        super().reset()  # type: ignore[misc]


class StreamedLayer(_Streamed, DynamicLayer):
    """A full-attention layer that is decoded at first use and then grows in place."""

    _buffers: tuple[GrowingBuffer, ...] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.materialize()
        if self._keys is None or self._values is None:
            return super().update(key_states, value_states, *args, **kwargs)
        if torch.is_grad_enabled():
            # A graph may hold earlier keys and values, which in-place writes would change.
            return super().update(key_states, value_states, *args, **kwargs)
        if self._buffers is None:
            self._buffers = tuple(GrowingBuffer(_storage(t)) for t in (self._keys, self._values))
        self._keys = self._buffers[0].append(self._keys, key_states)
        self._values = self._buffers[1].append(self._values, value_states)
        return self._keys, self._values

    def get_seq_length(self) -> int:
        return self._length if self.is_pending else super().get_seq_length()

    def reset(self) -> None:
        self._buffers = None
        super().reset()

    def can_crop(self, tokens_to_remove: int) -> bool:
        """Whether :meth:`crop` can remove so many tokens."""
        return True

    def crop(self, tokens_to_remove: int) -> None:
        with ARRIVAL:
            if self.is_pending and tokens_to_remove <= 0:
                self._length = max(self._length + tokens_to_remove, 0)
                return
        if self.is_initialized:  # which older native layers take for granted
            super().crop(tokens_to_remove)


class StreamedPrunedLayer(StreamedLayer):
    """A full-attention layer that is decoded at first use, and from which tokens were evicted.

    As a sliding layer does, it counts all tokens that there were, so that new ones get the
    positions that follow them. To masks the tokens that are held are the last ones of the context,
    in a row: they must only come before every new one, since their positions are in their keys.
    """

    evicted = 0
    """Tokens that there were and that are not held."""

    _complete_from = 0

    def attach(
        self, load: LoadTensors, length: int, first: int = 0, complete_from: int = 0
    ) -> None:
        """Take all but ``first`` of ``length`` tokens from ``load`` when tensors are first needed.

        Every head holds all tokens from position ``complete_from`` on.
        """
        super().attach(load, length, first)
        self.evicted = first
        self._complete_from = complete_from

    def _visible(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, : self._length - self.evicted]

    def get_seq_length(self) -> int:
        return self._length if self.is_pending else super().get_seq_length() + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() - self.evicted + query_length, self.evicted

    def can_crop(self, tokens_to_remove: int) -> bool:
        """Whether :meth:`crop` can remove so many tokens: all heads must hold them."""
        return not tokens_to_remove or (
            self.get_seq_length() + tokens_to_remove >= self._complete_from
        )

    def reset(self) -> None:
        self.evicted = self._complete_from = 0
        super().reset()


class StreamedSlidingLayer(_Streamed, DynamicSlidingWindowLayer):
    """A sliding-window layer that is decoded at first use.

    Before that it can be cropped, unlike a native one, as far as the tokens that are on their way
    reach back: one at least, which a prompt equal to the cached context needs.
    """

    def attach(self, load: LoadTensors, length: int, first: int = 0) -> None:
        super().attach(load, length, first)
        self.cumulative_length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.materialize()  # before the native layer counts the new tokens
        return super().update(key_states, value_states, *args, **kwargs)

    def _visible(self, tensor: Tensor) -> Tensor:
        end = self.cumulative_length - self._first
        return tensor[:, :, max(end - self.sliding_window + 1, 0) : end]

    def can_crop(self, tokens_to_remove: int) -> bool:
        """Whether :meth:`crop` can remove so many tokens."""
        if not self.is_pending:
            return self.cumulative_length < self.sliding_window or self.record_past
        length = max(self.cumulative_length + tokens_to_remove, 0)
        return max(length - self.sliding_window + 1, 0) >= self._first

    def crop(self, tokens_to_remove: int) -> None:
        with ARRIVAL:
            if self.is_pending and self.can_crop(tokens_to_remove):
                self.cumulative_length = max(self.cumulative_length + tokens_to_remove, 0)
                return
        if self.is_initialized:  # which the native layer takes for granted
            self.materialize()
            super().crop(tokens_to_remove)


def _storage(tensor: Tensor) -> Tensor:
    """The preallocated tensor that ``tensor`` is the beginning of."""
    base = tensor._base
    return tensor if base is None or base.data_ptr() != tensor.data_ptr() else base
