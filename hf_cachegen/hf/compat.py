"""The only module that knows transformers' versions and the insides of its models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.counting import CountingCache
from hf_cachegen.hf.families import (
    ONE_BY_ONE_MODELS,
    OTHER_STATES,
    STATE_MODELS,
    UNPLACED_MODELS,
    media_tokens,
    rotation_pairing,
    unsupported,
)
from hf_cachegen.layout import RopeSpec

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""RoPE types whose frequencies do not depend on the length of the sequence."""

PIECES_SINCE = (5, 21)
"""First version whose ``generate()`` can run a prompt in pieces on top of a filled cache; those
before run the whole prompt again."""

SERVED_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
)

RECURRENT_AXES = (
    ("num_v_heads", "head_k_dim", "head_v_dim"),
    ("num_heads", "head_dim", "ssm_state_size"),
    ("intermediate_size", "ssm_state_size"),
)
"""By what names a module knows the shape of its recurrent state: the gated delta rule, Mamba 2,
Mamba. Modules of Mamba 2 have all names of Mamba, so the order counts."""

VOLATILE_CONFIG_KEYS = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Config entries that say where or how a model was loaded, not what it computes. The dtype is
compared through the cache layout."""


def text_config(model: PreTrainedModel) -> Any:
    """Config of the decoder that fills the cache."""
    return model.config.get_text_config(decoder=True)


def layer_configs(config: Any) -> Sequence[Any]:
    """Config of each layer of a decoder; newer versions know what differs between layers."""
    configs: Sequence[Any] | None = getattr(config, "per_layer_config", None)
    return configs or [config] * config.num_hidden_layers


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the cache argument of ``forward`` and ``generate``: 5.24 renamed it to ``cache``."""
    known = {*_parameters(type(model).generate), *_parameters(type(model).forward)}
    return "cache" if "cache" in known else "past_key_values"


def _parameters(function: Callable[..., Any]) -> Iterable[str]:
    return inspect.signature(inspect.unwrap(function)).parameters


def output_cache(output: Any) -> Any:
    """The cache of a model output, whatever this version calls it; None if there is none."""
    keys = output.keys() if hasattr(output, "keys") else ()
    return next((output[key] for key in ("cache", "past_key_values") if key in keys), None)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache that can be stored: its sliding layers keep every token, and it can count."""
    cache = DynamicCache(config=model.config)
    cache.layers = storing_layers(cache)
    keep_windows(cache)
    return cache if token_layers(cache.layers) else CountingCache(cache.layers)


def keep_windows(cache: Cache) -> None:
    """Have sliding layers keep every token from now on.

    States that record their past would take another way of computing, to no use: they are stored
    as they are after the last token.
    """
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False):
            layer.activate_past_recording()


def keeps_states(layer: Any) -> bool:
    """Whether a cache layer keeps recurrent or convolutional states."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


@dataclass(frozen=True)
class StateSpec:
    """What a state of a layer has to be.

    Attributes
    ----------
    shape
        Without the batch.
    dtypes
        Any of these.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


def state_specs(model: PreTrainedModel, numbers: Mapping[int, int]) -> dict[str, StateSpec]:
    """By name in the file, what states have to be, as far as the model's modules tell.

    Nothing is run for it. They tell nothing of layers with several states of a kind.

    Parameters
    ----------
    model
        The model that goes on from the states.
    numbers
        By layer that keeps states, how many of each kind it keeps at most.
    """
    specs: dict[str, StateSpec] = {}
    for module in model.get_decoder().modules():
        convolutions = [child for child in module.children() if isinstance(child, nn.Conv1d)]
        layer = getattr(module, "layer_idx", None)
        if len(convolutions) != 1 or layer is None or numbers.get(layer) != 1:
            continue
        (convolution,) = convolutions
        # The state is the beginning of the convolution's next input.
        dtype = convolution.weight.dtype
        shape = convolution.in_channels, *convolution.kernel_size
        specs[f"{layer}.conv_states.0"] = StateSpec(shape, (dtype,))
        recurrent = _recurrent_shape(module)
        if recurrent is not None:
            # Most models keep it in float32, whatever they compute in.
            specs[f"{layer}.recurrent_states.0"] = StateSpec(recurrent, (torch.float32, dtype))
    return specs


def _recurrent_shape(module: nn.Module) -> tuple[int, ...] | None:
    for names in RECURRENT_AXES:
        if all(hasattr(module, name) for name in names):
            return tuple(getattr(module, name) for name in names)
    return None


def token_layers(layers: Sequence[Any]) -> list[int]:
    """Places of the cache layers that keep keys and values of each token."""
    return [index for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]


def place_arguments(model: PreTrainedModel, start: int, ids: Tensor) -> dict[str, Tensor]:
    """What a forward pass needs beside ids ``[1, T]`` that begin at position ``start``."""
    if text_config(model).model_type not in UNPLACED_MODELS:
        return {}
    return {"position_ids": torch.arange(start, start + ids.shape[1], device=ids.device)[None]}


def prefills_in_pieces() -> bool:
    """Whether ``generate()`` can run a prompt in pieces on top of a filled cache."""
    return tuple(map(int, transformers.__version__.split(".")[:2])) >= PIECES_SINCE


def runs_one_by_one(model: PreTrainedModel) -> bool:
    """Whether a model is right only if it is given new tokens one by one."""
    return text_config(model).model_type in ONE_BY_ONE_MODELS


def native_layers(model: PreTrainedModel) -> list[Any]:
    """Empty native cache layers of a model, without those that reuse what others cache.

    Raises
    ------
    UnsupportedError
        A layer caches something other than keys and values of full or sliding attention or known
        states, or the model is no decoder that continues its own cache.
    """
    name = type(model).__name__
    layers = configured_layers(model.config, name)
    reason = unsupported(text_config(model))
    if model.config.is_encoder_decoder:
        reason = "it caches cross-attention to an encoder; only decoders are supported"
    elif not {"cache", "past_key_values"} & set(_parameters(type(model).forward)):
        reason = "its forward pass takes no key-value cache"
    elif runs_one_by_one(model) and not prefills_in_pieces():
        reason = (
            "it goes on from states only token by token, which generate() does from transformers "
            f"{'.'.join(map(str, PIECES_SINCE))} on"
        )
    if reason is not None:
        raise UnsupportedError(f"{name} is not supported: {reason}")
    return layers


def configured_layers(config: Any, name: str) -> list[Any]:
    """Empty native cache layers of any model with this config; ``name`` is for messages.

    Raises
    ------
    UnsupportedError
        A layer caches something other than keys and values of full or sliding attention or known
        states.
    """
    model_type = config.get_text_config(decoder=True).model_type
    layers = storing_layers(DynamicCache(config=config))
    for index, layer in enumerate(layers):
        kind = type(layer).__name__
        if type(layer) not in SERVED_LAYERS:
            state = OTHER_STATES.get(kind, "a state of its own")
            raise UnsupportedError(
                f"layer {index} of {name} caches {state} in a {kind}; only keys and values of full "
                "and sliding attention and the states of known models are supported"
            )
        if keeps_states(layer) and model_type not in STATE_MODELS:
            raise UnsupportedError(
                f"layer {index} of {name} caches a recurrent or convolutional state in a {kind}, "
                f"and how {model_type} goes on from one has not been tested"
            )
    return layers


def check_text(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Raise UnsupportedError if ids ``[T]`` stand for pictures, video or sound.

    The ids are all that tells one context from another, and they do not tell one picture from
    another.
    """
    for name, token in media_tokens(model.config).items():
        places = torch.nonzero(token_ids == token)
        if len(places):
            raise UnsupportedError(
                f"the context has a placeholder ({name} {token}) at position {int(places[0])}; "
                "only contexts of text can be told apart, so encode the text before it"
            )


def storing_layers(cache: Cache) -> list[Any]:
    """Layers without the last ones, which reuse the keys and values of others (Gemma 3n and 4).

    Newer versions have placeholders for those, older ones nothing.
    """
    shared = takewhile(lambda layer: type(layer).__name__ == "DummyLayer", reversed(cache.layers))
    return cache.layers[: len(cache.layers) - len(list(shared))]


def layer_devices(model: PreTrainedModel, n_layers: int) -> list[torch.device]:
    """Device of each of the first decoder layers, where its cache belongs."""
    blocks = next(
        (
            module
            for module in model.get_decoder().modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) >= n_layers
        ),
        [model] * n_layers,
    )
    return [running_device(block) for block in blocks[:n_layers]]


def running_device(module: torch.nn.Module) -> torch.device:
    """Where a module runs; accelerate brings the weights of an offloaded one there for the run."""
    for part in module.modules():
        for hook in _hooks(part):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
    places = (parameter.device for parameter in module.parameters())
    return next((place for place in places if place.type != "meta"), torch.device("cpu"))


def loaded_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, those included that accelerate keeps on the CPU or on disk.

    Tied ones come once, also where offloading has made two of them.
    """
    for name, parameter in model.named_parameters():
        if name not in model.all_tied_weights_keys:
            yield name, parameter if parameter.device.type != "meta" else _offloaded(model, name)


def _offloaded(model: PreTrainedModel, name: str) -> Tensor:
    """An offloaded parameter, from the hook of the module that will need it."""
    parts = name.split(".")
    for depth in reversed(range(len(parts))):
        for hook in _hooks(model.get_submodule(".".join(parts[:depth]))):
            weights = getattr(hook, "weights_map", None) or {}
            with suppress(KeyError):
                return weights[".".join(parts[depth:])]
    raise UnsupportedError(f"the weights of {name} are on the meta device and nowhere else")


def _hooks(module: torch.nn.Module) -> Sequence[Any]:
    """The hooks of accelerate on a module."""
    hook = getattr(module, "_hf_hook", None)
    return getattr(hook, "hooks", [hook])


def rope_specs(model: PreTrainedModel) -> dict[str, RopeSpec]:
    """Rotations of a model's cached keys by layer type; ``""`` where one serves all layers.

    Read from the frequencies in use. Empty for models whose pairing is not known here, and for
    RoPE types whose frequencies move with the length of the sequence.
    """
    pairing = rotation_pairing(text_config(model).model_type)
    rotary = next(
        (m for m in model.get_decoder().modules() if type(m).__name__.endswith("RotaryEmbedding")),
        None,
    )
    if pairing is None or rotary is None:
        return {}
    if hasattr(rotary, "inv_freq"):
        kinds = {"": (rotary.rope_type, rotary.inv_freq, rotary.attention_scaling)}
    else:
        kinds = {
            kind: (
                rope_type,
                getattr(rotary, f"{kind}_inv_freq"),
                getattr(rotary, f"{kind}_attention_scaling"),
            )
            for kind, rope_type in rotary.rope_type.items()
        }
    return {
        kind: RopeSpec(
            inv_freq=tuple(inv_freq.float().tolist()),
            attention_scaling=float(scaling),
            pairing=pairing,
        )
        for kind, (rope_type, inv_freq, scaling) in kinds.items()
        if rope_type in STATIC_ROPE_TYPES
    }


def longrope_limit(model: PreTrainedModel) -> int | None:
    """Tokens past which a model with longrope rotates every key otherwise; None for others."""
    return _original_length(model, "longrope")


def one_pass_limit(model: PreTrainedModel) -> int | None:
    """Tokens past which a context has to run in one pass; None if it may always be cut.

    Past it the frequencies depend on the length of the sequence, so that pieces would be rotated
    as parts of a shorter one. A model that needs new tokens one by one is right about the first
    ones in any case.
    """
    if runs_one_by_one(model):
        return 0
    lengths = (_original_length(model, kind) for kind in ("dynamic", "longrope"))
    return next((length for length in lengths if length is not None), None)


def _original_length(model: PreTrainedModel, rope_type: str) -> int | None:
    """Length for which a rotation of this type was trained; None if the model has none."""
    config = text_config(model)
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        if isinstance(rope, dict) and rope.get("rope_type") == rope_type:
            length = rope.get("original_max_position_embeddings")
            return int(length or config.max_position_embeddings)
    return None
