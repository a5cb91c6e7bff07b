"""Cache layers whose recurrent and convolutional states arrive later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.layers import ARRIVAL, StreamedLayer
from hf_cachegen.hf.states import LayerStates

LoadStates = Callable[[], LayerStates]
"""Blocks until the states of a layer are here: the same ones however often it is called."""


class _StreamedStates(LinearAttentionLayer):
    """A layer whose states are loaded at first use.

    They are those after the last token of the context, and none before it can be had back.
    """

    # Passes that are compiled would hold on to places of states that are not here yet.
    is_compileable = False

    _load_states: LoadStates | None = None
    _one_by_one = False

    def attach_states(
        self, load: LoadStates, device: torch.device, *, one_by_one: bool = False
    ) -> None:
        """Take the states from ``load`` when they are first needed.

        Parameters
        ----------
        load
            Called until it has succeeded, and let go of then.
        device
            Where the states belong.
        one_by_one
            Whether the model goes on from them only if it is given new tokens one by one.
        """
        self._load_states = load
        self._one_by_one = one_by_one
        self.device = device
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), True)

    def materialize_states(self) -> None:
        """Block until the states are here."""
        load = self._load_states
        if load is None:
            return
        # They are changed where they are, which may be outside of inference mode.
        with torch.inference_mode(False):
            states = load()
            with ARRIVAL:
                if self._load_states is load:  # neither attached meanwhile nor reset
                    self._attach_loaded(states)

    def _attach_loaded(self, states: LayerStates) -> None:
        for number, conv in states.conv_states.items():
            self._conv_states[number] = conv[None].to(self.device)
            self.is_conv_states_initialized[number] = True
            self.conv_kernel_size[number] = conv.shape[-1]
            self.dtype = conv.dtype
        for number, recurrent in states.recurrent_states.items():
            self._recurrent_states[number] = recurrent[None].to(self.device)
            self.is_recurrent_states_initialized[number] = True
        self.has_previous_state = dict(self.is_conv_states_initialized)
        self._load_states = None  # last: until then an interrupt leaves all of it to be done again

    @property
    def states_pending(self) -> bool:
        """Whether the states are still to be loaded."""
        return self._load_states is not None

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """``[B, C, K]`` by number; loads them if need be."""
        self.materialize_states()
        return self._conv_states

    @conv_states.setter
    def conv_states(self, states: dict[int, Tensor | None]) -> None:
        self._conv_states = states

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """``[B, ...]`` by number; loads them if need be."""
        self.materialize_states()
        return self._recurrent_states

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, Tensor | None]) -> None:
        self._recurrent_states = states

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.materialize_states()
        n_new = conv_states.shape[-1]
        if self._one_by_one and n_new > 1 and any(self.has_previous_state.values()):
            raise UnsupportedError(
                f"this model would forget the cached context over a pass of {n_new} tokens: give "
                "it one new token a pass, or let generate() do that"
            )
        updated: Tensor = super().update_conv_state(conv_states, *args, **kwargs)
        return updated

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.materialize_states()
        updated: Tensor = super().update_recurrent_state(recurrent_states, *args, **kwargs)
        return updated

    @property
    def is_croppable(self) -> bool:
        """Whether all that was added while past states were recorded can be removed again."""
        self.materialize_states()
        return super().is_croppable

    def can_crop_states(self, tokens_to_remove: int) -> bool:
        """Whether :meth:`crop_states` can remove so many tokens."""
        if tokens_to_remove == 0:
            return True
        widths = self.conv_kernel_size
        return (
            self.record_past
            and self.is_croppable
            and all(
                conv is not None and conv.shape[-1] + tokens_to_remove >= widths[number]
                for number, conv in self.conv_states.items()
            )
        )

    def crop_states(self, tokens_to_remove: int) -> None:
        """Remove tokens that were added while past states were recorded."""
        if self.record_past and not self.states_pending:
            LinearAttentionLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.materialize_states()
        super().reorder_cache(beam_idx)

    def repeat_states(self, repeats: int) -> None:
        """Make so many rows of each."""
        self._change_states(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def select_states(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._change_states(lambda tensor: tensor[indices, ...])

    def reset(self) -> None:
        """Forget everything; what is still on its way is not waited for."""
        with ARRIVAL:
            self._load_states = None
        super().reset()

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for number, tensor in states.items():
                if tensor is not None:
                    states[number] = change(tensor)


class StreamedStateLayer(_StreamedStates):
    """A layer that keeps nothing but states, which are loaded at first use."""

    is_sliding = False

    @property
    def is_pending(self) -> bool:
        """Whether the states are still to be loaded."""
        return self.states_pending

    @property
    def rows(self) -> int:
        """Sequences that are cached."""
        tensors = (tensor for tensor in self._conv_states.values() if tensor is not None)
        return next((len(tensor) for tensor in tensors), 1)

    def materialize(self) -> None:
        """Block until the states are here."""
        self.materialize_states()

    def can_crop(self, tokens_to_remove: int) -> bool:
        """Whether :meth:`crop` can remove so many tokens."""
        return self.can_crop_states(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        self.crop_states(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make so many rows of each."""
        self.repeat_states(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.select_states(indices)


class StreamedLayerWithState(_StreamedStates, StreamedLayer, LinearAttentionAndFullAttentionLayer):
    """A full-attention layer that keeps states beside its keys and values."""

    def materialize(self) -> None:
        """Block until the states, the keys and the values are here."""
        self.materialize_states()
        super().materialize()

    def can_crop(self, tokens_to_remove: int) -> bool:
        """Whether :meth:`crop` can remove so many tokens: its recurrent state goes on only."""
        return tokens_to_remove == 0

    def crop(self, tokens_to_remove: int) -> None:
        self.crop_states(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make so many rows of each."""
        self.repeat_states(repeats)
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.select_states(indices)
        super().batch_select_indices(indices)
