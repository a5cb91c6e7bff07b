"""What an artefact must match: a model's identity and the layout of its cache."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_cachegen.artifact import Identity, TableRef
from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.compat import (
    VOLATILE_CONFIG_KEYS,
    loaded_parameters,
    native_layers,
    rope_specs,
    text_config,
    token_layers,
)
from hf_cachegen.hf.families import rotated_tensor
from hf_cachegen.layout import (
    DtypeName,
    KVLayout,
    LayerKind,
    LayerSpec,
    RopeSpec,
    TensorSpec,
    canonical_json,
)

FINGERPRINT_VALUES = 1024
"""Values sampled from each parameter for the fingerprint of the weights."""

TENSOR_NAMES = ("keys", "values")


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """The format's name of a torch dtype."""
    for name in get_args(DtypeName):
        if dtype == getattr(torch, name):
            return cast(DtypeName, name)
    known = ", ".join(get_args(DtypeName))
    raise UnsupportedError(f"caches of {dtype} are not supported, only {known}")


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Digest of the weights in memory, 32 hex digits.

    BLAKE2b over every parameter's name, shape, dtype and :data:`FINGERPRINT_VALUES` evenly spaced
    values. It sees fine-tuning, merged or attached adapters and quantisation, needs no files, and
    takes milliseconds where hashing all bytes takes seconds. Offloaded parameters are read from
    where accelerate keeps them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in loaded_parameters(model):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        if parameter.numel():
            digest.update(_sample(parameter.detach()))
    return digest.hexdigest()


def config_digest(model: PreTrainedModel) -> str:
    """Digest of the config without the entries that say where or how it was loaded."""
    values = _without_volatile(text_config(model).to_dict())
    return hashlib.blake2b(canonical_json(values), digest_size=16).hexdigest()


def describe_layout(model: PreTrainedModel, tensors: Sequence[Sequence[Tensor]]) -> KVLayout:
    """Layout of a filled cache.

    Parameters
    ----------
    model
        The model that filled it.
    tensors
        Per layer that caches keys and values, these ``[..., H, T, D]``.
    """
    ropes = rope_specs(model)
    config = text_config(model)
    natives = native_layers(model)
    kinds = getattr(config, "layer_types", None) or [""] * len(natives)
    layers = []
    for index, layer in zip(token_layers(natives), tensors, strict=True):
        rope = next((_rope_name(key) for key in (kinds[index], "") if key in ropes), None)
        rotated = rotated_tensor(config, index)
        specs = tuple(
            TensorSpec(
                name=name,
                heads=tensor.shape[-3],
                dim=tensor.shape[-1],
                rope=rope if place == rotated else None,
            )
            for place, (name, tensor) in enumerate(zip(TENSOR_NAMES, layer, strict=True))
        )
        window = getattr(natives[index], "sliding_window", None)
        form: LayerKind = "full_attention" if window is None else "sliding_attention"
        layers.append(LayerSpec(kind=form, tensors=specs, window=window))
    return KVLayout(
        dtype=dtype_name(tensors[0][0].dtype if tensors else model.dtype),
        ropes={_rope_name(key): spec for key, spec in ropes.items()},
        layers=tuple(layers),
    )


def model_name(model: PreTrainedModel) -> str:
    """What the model was loaded from; of a local folder, only its name."""
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    return Path(name).name if Path(name).exists() else name


def describe_identity(
    model: PreTrainedModel,
    layout: KVLayout,
    table: TableRef | None,
    *,
    model_id: str | None = None,
    revision: str | None = None,
) -> Identity:
    """Identity of an artefact that ``model`` makes.

    Parameters
    ----------
    layout
        From :func:`describe_layout`.
    table
        The model table in use.
    model_id
        Defaults to :func:`model_name`.
    """
    return Identity(
        model_id=model_id or model_name(model),
        revision=revision,
        weights=weights_fingerprint(model),
        config=config_digest(model),
        architecture=type(model).__name__,
        layout=layout,
        table=table,
    )


def expected_identity(
    model: PreTrainedModel, found: Identity, *, weights: str | None = None
) -> Identity:
    """What ``found`` would be if ``model`` had made it; to be compared before decoding.

    ``weights`` is :func:`weights_fingerprint` of the model, if that is known already.

    Layers follow from the config, which is compared by digest. RoPE frequencies are taken from
    the model and count as equal within float32 rounding, since devices compute them differently;
    those that the artefact does not use do not matter.
    """
    ours = {_rope_name(key): spec for key, spec in rope_specs(model).items()}
    ropes = {
        name: spec if _same_rope(ours[name], spec) else ours[name]
        for name, spec in found.layout.ropes.items()
        if name in ours
    }
    layout = found.layout.model_copy(update={"dtype": dtype_name(model.dtype), "ropes": ropes})
    return found.model_copy(
        update={
            "weights": weights or weights_fingerprint(model),
            "config": config_digest(model),
            "architecture": type(model).__name__,
            "layout": layout,
        }
    )


def _same_rope(a: RopeSpec, b: RopeSpec) -> bool:
    return (
        a.pairing == b.pairing
        and len(a.inv_freq) == len(b.inv_freq)
        and abs(a.attention_scaling - b.attention_scaling) <= 1e-6 * a.attention_scaling
        and all(abs(x - y) <= 1e-6 * abs(x) for x, y in zip(a.inv_freq, b.inv_freq, strict=True))
    )


def _rope_name(kind: str) -> str:
    return kind or "default"


def _sample(parameter: Tensor) -> bytes:
    flat = parameter.flatten()
    stride = -(-flat.numel() // FINGERPRINT_VALUES)
    values = flat[::stride].contiguous().cpu()
    return values.view(torch.uint8).numpy().tobytes()


def _without_volatile(values: Any) -> Any:
    if isinstance(values, dict):
        return {
            str(key): _without_volatile(value)
            for key, value in values.items()
            if key not in VOLATILE_CONFIG_KEYS and not str(key).startswith("_attn")
        }
    if isinstance(values, (list, tuple)):
        return [_without_volatile(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return str(values)
    return values if isinstance(values, (str, int, float, type(None))) else str(values)
