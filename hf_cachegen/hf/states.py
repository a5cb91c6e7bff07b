"""States that layers keep of all tokens so far: taken from a cache, packed and unpacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_cachegen.errors import FormatError, UnsupportedError
from hf_cachegen.hf.compat import keeps_states, storing_layers

KINDS = ("conv_states", "recurrent_states")
"""What transformers calls them, and the file too."""

RECURRENT_AXES = (
    ("num_v_heads", "head_k_dim", "head_v_dim"),
    ("num_heads", "head_dim", "ssm_state_size"),
    ("intermediate_size", "ssm_state_size"),
)
"""By what names a module knows the shape of its recurrent state: the gated delta rule, Mamba 2,
Mamba. Modules of Mamba 2 have all names of Mamba, so the order counts."""


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
    data: bytes, numbers: Mapping[int, int], shapes: Mapping[str, Sequence[int]]
) -> dict[int, LayerStates]:
    """The states of a file.

    Parameters
    ----------
    data
        The file.
    numbers
        By layer that keeps states, how many of each kind it keeps at most.
    shapes
        By name in the file, the shape of each state that has to be there, as far as known.

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
        if name not in known or not tensor.is_floating_point():
            raise FormatError(
                f"states: expected floating-point states of the layers {list(numbers)}, found "
                f"{name!r} of {tensor.dtype}; encode the context again with this model"
            )
        layer, kind, number = known[name]
        getattr(states[layer], kind)[number] = tensor
    empty = [layer for layer, held in states.items() if not held.conv_states]
    if empty:
        raise FormatError(f"states: found none of the layers {empty}; fetch the file again")
    _check_shapes(tensors, shapes)
    return states


def _check_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    for name, shape in shapes.items():
        found = list(tensors[name].shape) if name in tensors else None
        if found != list(shape):
            raise FormatError(
                f"states: expected {name!r} of shape {list(shape)}, found {found or 'none'}; "
                "encode the context again with this model"
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


def state_shapes(model: PreTrainedModel, numbers: Mapping[int, int]) -> dict[str, tuple[int, ...]]:
    """By name in the file, the shapes of states, as far as the model's modules tell them.

    Nothing is run for it. They tell no shapes of layers with several states of a kind.

    Parameters
    ----------
    model
        The model that goes on from the states.
    numbers
        By layer that keeps states, how many of each kind it keeps at most.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for module in model.get_decoder().modules():
        convolutions = [child for child in module.children() if isinstance(child, nn.Conv1d)]
        layer = getattr(module, "layer_idx", None)
        if len(convolutions) != 1 or layer is None or numbers.get(layer) != 1:
            continue
        (convolution,) = convolutions
        shapes[f"{layer}.conv_states.0"] = convolution.in_channels, *convolution.kernel_size
        recurrent = _recurrent_shape(module)
        if recurrent is not None:
            shapes[f"{layer}.recurrent_states.0"] = recurrent
    return shapes


def _recurrent_shape(module: nn.Module) -> tuple[int, ...] | None:
    for names in RECURRENT_AXES:
        if all(hasattr(module, name) for name in names):
            return tuple(getattr(module, name) for name in names)
    return None
