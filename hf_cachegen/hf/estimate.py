"""The layout of a model's cache from its config alone, without weights."""

from __future__ import annotations

import os
from typing import Any, get_args

from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_cachegen.errors import StoreNotFound, UnsupportedError
from hf_cachegen.hf.compat import layer_configs, storing_layers
from hf_cachegen.hf.describe import TENSOR_NAMES
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
    """Layout of a model's cache, without its rotations.

    Parameters
    ----------
    config
        A transformers config.
    dtype
        Dtype of the cache, by default the config's.

    Raises
    ------
    UnsupportedError
        A layer caches something other than keys and values of full or sliding attention, or the
        dtype is not one of the format.
    """
    text = config.get_text_config(decoder=True)
    windows = [_window(*entry) for entry in enumerate(storing_layers(DynamicCache(config=config)))]
    configs = layer_configs(text)
    return KVLayout(
        dtype=dtype or _config_dtype(config),
        ropes={},
        layers=tuple(
            LayerSpec(
                kind="full_attention" if window is None else "sliding_attention",
                tensors=_tensors(configs[index]),
                window=window,
            )
            for index, window in enumerate(windows)
        ),
    )


def _tensors(text: Any) -> tuple[TensorSpec, ...]:
    latent = getattr(text, "kv_lora_rank", None)
    if latent is not None:  # multi-head latent attention caches one latent and one rotated key
        heads, dims = 1, (latent, text.qk_rope_head_dim)
    else:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dims = (head_dim, head_dim)
    return tuple(
        TensorSpec(name=name, heads=heads, dim=dim)
        for name, dim in zip(TENSOR_NAMES, dims, strict=True)
    )


def _window(index: int, native: Any) -> int | None:
    """The attention window of a native cache layer; None if it sees everything."""
    if type(native) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise UnsupportedError(
            f"layer {index} caches in a {type(native).__name__}; only full and sliding attention "
            "caches are supported"
        )
    window: int | None = getattr(native, "sliding_window", None)
    return window


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
