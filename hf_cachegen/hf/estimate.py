"""What a model caches, from its config alone, without weights."""

from __future__ import annotations

import os
from typing import Any, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_cachegen.errors import StoreNotFound, UnsupportedError
from hf_cachegen.hf.compat import (
    cache_argument,
    configured_layers,
    keeps_states,
    layer_configs,
    new_cache,
    token_layers,
)
from hf_cachegen.hf.describe import TENSOR_NAMES
from hf_cachegen.hf.states import cached_states
from hf_cachegen.layout import DtypeName, KVLayout, LayerSpec, TensorSpec

DEFAULT_DTYPE: DtypeName = "bfloat16"
"""For a config that names none."""


def load_config(source: str | os.PathLike[str]) -> Any:
    """The config that a folder, a ``config.json`` or a Hub repository holds.

    Raises
    ------
    StoreNotFound
        There is no config that transformers can read.
    """
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise StoreNotFound(f"cannot read the config of {os.fspath(source)!r}: {reason}") from error


def estimate_layout(config: Any, dtype: DtypeName | None = None) -> KVLayout:
    """Layout of what a model caches of each token, without its rotations.

    Parameters
    ----------
    config
        A transformers config.
    dtype
        Dtype of the cache, by default the config's.

    Raises
    ------
    UnsupportedError
        A layer caches something that is not supported, or the dtype is not one of the format.
    """
    text = config.get_text_config(decoder=True)
    configs, layers = layer_configs(text), configured_layers(config, text.model_type)
    return KVLayout(
        dtype=dtype or _config_dtype(config),
        ropes={},
        layers=tuple(_layer_spec(configs[index], layers[index]) for index in token_layers(layers)),
    )


def estimate_states_bytes(config: Any, dtype: DtypeName | None = None) -> int:
    """Bytes of the states that a model keeps of a context, however long; 0 if it keeps none.

    The model runs on two tokens without weights or values, since only it knows their shapes.

    Parameters
    ----------
    config, dtype
        As for :func:`estimate_layout`.

    Raises
    ------
    UnsupportedError
        As for :func:`estimate_layout`.
    """
    layers = configured_layers(config, config.get_text_config(decoder=True).model_type)
    if not any(keeps_states(layer) for layer in layers):
        return 0
    with torch.device("meta"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, dtype or _config_dtype(config)),
            experts_implementation="batched_mm",  # which asks for no values
        )
        cache = new_cache(model)
        arguments: dict[str, Any] = {cache_argument(model): cache}
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=True, **arguments)
    return sum(states.size_bytes for states in cached_states(cache).values())


def _layer_spec(text: Any, native: Any) -> LayerSpec:
    window = getattr(native, "sliding_window", None)
    return LayerSpec(
        kind="full_attention" if window is None else "sliding_attention",
        tensors=_tensors(text),
        window=window,
    )


def _tensors(text: Any) -> tuple[TensorSpec, ...]:
    latent = getattr(text, "kv_lora_rank", None)
    if latent is not None:  # multi-head latent attention caches one latent and one rotated key
        heads, dims = 1, (latent, text.qk_rope_head_dim)
    else:
        heads = _cached_heads(text)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dims = (head_dim, head_dim)
    return tuple(
        TensorSpec(name=name, heads=heads, dim=dim)
        for name, dim in zip(TENSOR_NAMES, dims, strict=True)
    )


def _cached_heads(text: Any) -> int:
    """Heads of keys and of values as they are cached."""
    if getattr(text, "new_decoder_architecture", False):  # Falcon repeats them before it caches
        return int(text.num_attention_heads)
    if getattr(text, "multi_query", False):
        return 1
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def _config_dtype(config: Any) -> DtypeName:
    text = config.get_text_config(decoder=True)
    found = getattr(config, "dtype", None) or getattr(text, "dtype", None) or DEFAULT_DTYPE
    name = str(found).removeprefix("torch.")
    for known in get_args(DtypeName):
        if name == known:
            return known
    raise UnsupportedError(
        f"caches of {name} are not supported, only {', '.join(get_args(DtypeName))}"
    )
