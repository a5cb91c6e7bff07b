"""States that layers keep of all tokens so far: taken from a cache, packed and unpacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from hf_cachegen.errors import FormatError, UnsupportedError
from hf_cachegen.hf.compat import StateSpec, keeps_states, storing_layers
from hf_cachegen.layout import DtypeName

STATE_DTYPES = tuple(getattr(torch, name) for name in get_args(DtypeName))

KINDS = ("conv_states", "recurrent_states")
"""What transformers calls them, and the file too."""


@dataclass(frozen=True)
class LayerStates:
    """The states of one layer for one context, by their number in the layer.

    Attributes
    ----------
    conv_states
        ``[C, K]``: the last inputs of a convolution of width K.
    recurrent_states
        Of any shape.
    """

    conv_states: dict[int, Tensor] = field(default_factory=dict)
    recurrent_states: dict[int, Tensor] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        held = (*self.conv_states.values(), *self.recurrent_states.values())
        return sum(tensor.nbytes for tensor in held)


def cached_states(cache: Cache) -> dict[int, LayerStates]:
    """The states in a filled cache of batch size 1, by layer; empty if no layer keeps any."""
    layers = enumerate(storing_layers(cache))
    return {index: _states_of(index, layer) for index, layer in layers if keeps_states(layer)}


def pack_states(states: Mapping[int, LayerStates]) -> bytes | None:
    """A safetensors file of states; None if there are none."""
    tensors = {
        f"{layer}.{kind}.{number}": tensor.contiguous().cpu()
        for layer, held in states.items()
        for kind in KINDS
        for number, tensor in getattr(held, kind).items()
    }
    return safetensors.torch.save(tensors) if tensors else None


def unpack_states(
    data: bytes, numbers: Mapping[int, int], specs: Mapping[str, StateSpec]
) -> dict[int, LayerStates]:
    """The states of a file.

    Parameters
    ----------
    data
        The file.
    numbers
        By layer that keeps states, how many of each kind it keeps at most.
    specs
        By name in the file, the shape and dtype of each state that has to be there, as far as
        known.

    Raises
    ------
    FormatError
        The file is no safetensors file, or not of states of these layers.
    """
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise FormatError(f"states: not a safetensors file ({error}); fetch it again") from error
    states: dict[int, LayerStates] = {layer: LayerStates() for layer in numbers}
    known = {
        f"{layer}.{kind}.{number}": (layer, kind, number)
        for layer, count in numbers.items()
        for kind in KINDS
        for number in range(count)
    }
    for name, tensor in tensors.items():
        if name not in known or tensor.dtype not in STATE_DTYPES:
            raise FormatError(
                f"states: expected {_names(STATE_DTYPES)} of the layers {list(numbers)}, found "
                f"{name!r} of {tensor.dtype}; encode the context again with this model"
            )
        layer, kind, number = known[name]
        getattr(states[layer], kind)[number] = tensor
    empty = [layer for layer, held in states.items() if not held.conv_states]
    if empty:
        raise FormatError(f"states: found none of the layers {empty}; fetch the file again")
    for name, spec in specs.items():
        _check_state(name, tensors.get(name), spec)
    return states


def _check_state(name: str, found: Tensor | None, spec: StateSpec) -> None:
    if found is None or tuple(found.shape) != spec.shape or found.dtype not in spec.dtypes:
        shown = "none" if found is None else f"{list(found.shape)} in {_names([found.dtype])}"
        raise FormatError(
            f"states: expected {name!r} of shape {list(spec.shape)} in {_names(spec.dtypes)}, "
            f"found {shown}; encode the context again with this model"
        )


def _states_of(index: int, layer: Any) -> LayerStates:
    conv, recurrent = (_filled(getattr(layer, kind)) for kind in KINDS)
    if not conv:
        raise UnsupportedError(f"layer {index} of the cache holds no states to save")
    for tensor in (*conv.values(), *recurrent.values()):
        if tensor.shape[0] != 1:
            raise UnsupportedError(
                f"the cache holds a batch of {tensor.shape[0]}, an artefact holds one context; "
                "select one with cache.batch_select_indices"
            )
    widths = layer.conv_kernel_size
    return LayerStates(
        {number: _last(tensor[0], widths[number]) for number, tensor in conv.items()},
        {number: tensor[0].detach() for number, tensor in recurrent.items()},
    )


def _filled(states: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
    return {number: tensor for number, tensor in states.items() if tensor is not None}


def _last(inputs: Tensor, width: int) -> Tensor:
    """The last inputs of a convolution; a layer that records its past holds more, or fewer."""
    held = inputs.detach()[..., -width:]
    return pad(held, (width - held.shape[-1], 0))


def state_numbers(layers: Sequence[Any]) -> dict[int, int]:
    """By layer that keeps states, how many of each kind it keeps at most."""
    return {
        index: layer.number_of_states for index, layer in enumerate(layers) if keeps_states(layer)
    }


def _names(dtypes: Iterable[torch.dtype]) -> str:
    """Names of dtypes for people, without ``torch.``."""
    return " or ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
