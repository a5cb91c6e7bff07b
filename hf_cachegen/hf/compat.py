"""The only module that knows transformers' versions and the insides of its models."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_cachegen.errors import UnsupportedError
from hf_cachegen.layout import RopeSpec

HALF_ROTATION_MODELS = frozenset(
    {"gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"}
)
"""Model types whose cached keys pair channel d with d + D/2. For others keys are coded as they are
cached: right, but larger, since an encoder may un-rotate only what it knows how to rotate back."""

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""RoPE types whose frequencies do not depend on the length of the sequence."""

VOLATILE_CONFIG_KEYS = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Config entries that say where or how a model was loaded, not what it computes. The dtype is
compared through the cache layout."""


def text_config(model: PreTrainedModel) -> Any:
    """Config of the decoder that fills the cache."""
    return model.config.get_text_config(decoder=True)


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the cache argument of ``forward`` and ``generate``: 5.24 renamed it to ``cache``."""
    parameters = inspect.signature(inspect.unwrap(type(model).generate)).parameters
    forward = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return "cache" if "cache" in forward or "cache" in parameters else "past_key_values"


def output_cache(output: Any) -> Any:
    """The cache of a model output, whatever this version calls it; None if there is none."""
    keys = output.keys() if hasattr(output, "keys") else ()
    return next((output[key] for key in ("cache", "past_key_values") if key in keys), None)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache whose sliding layers keep every token, so that all of it can be stored."""
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


def native_layers(model: PreTrainedModel) -> list[DynamicLayer]:
    """Empty native cache layers of a model.

    Raises
    ------
    UnsupportedError
        A layer caches something other than keys and values of full or sliding attention, or the
        model has an encoder.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{type(model).__name__} caches cross-attention to an encoder; only decoders are "
            "supported"
        )
    layers = DynamicCache(config=model.config).layers
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedError(
                f"layer {index} of {type(model).__name__} caches in a {type(layer).__name__}; "
                "only full and sliding attention caches are supported"
            )
    return layers


def layer_devices(model: PreTrainedModel, n_layers: int) -> list[torch.device]:
    """Device of each decoder layer, where its cache belongs."""
    execution = getattr(model, "hf_device_map", None) or {}
    main = next((p.device for p in model.parameters() if p.device.type != "meta"), model.device)
    devices = [main] * n_layers
    for name, module in model.named_modules():
        head, _, index = name.rpartition(".")
        if head.endswith("layers") and index.isdigit() and int(index) < n_layers:
            own = next(module.parameters(), None)
            if own is not None and own.device.type != "meta":
                devices[int(index)] = own.device
            elif name in execution and execution[name] != "disk":
                devices[int(index)] = torch.device(execution[name])
    return devices


def rope_specs(model: PreTrainedModel) -> dict[str, RopeSpec]:
    """Rotations of a model's cached keys by layer type; ``""`` where one serves all layers.

    Read from the frequencies in use. Empty for models whose pairing is not known here, and for
    RoPE types whose frequencies move with the length of the sequence.
    """
    config = text_config(model)
    if config.model_type not in HALF_ROTATION_MODELS:
        return {}
    rotary = next(
        (m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None
    )
    if rotary is None:
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
            pairing="half",
        )
        for kind, (rope_type, inv_freq, scaling) in kinds.items()
        if rope_type in STATIC_ROPE_TYPES
    }
