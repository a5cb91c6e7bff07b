"""What a model caches, layer by layer, as plain validated records.

Nothing above this module assumes "keys and values": a layer is a list of named tensors
(:class:`TensorSpec`), each ``[H, T, D]`` per context, each with or without a rotary embedding.
The records carry no torch types, so that stores and tools can read them.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hf_cachegen.config import DTYPE_BYTES


def canonical_json(values: object) -> bytes:
    """One byte string per value: sorted keys, no spaces, ASCII. Digests are taken of it."""
    return json.dumps(
        values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


class Record(BaseModel):
    """Base of everything that is read from JSON: immutable, no unknown fields, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RopeSpec(Record):
    """The rotation a model applied to a tensor before it was cached.

    Attributes
    ----------
    inv_freq
        Radians per token of each rotated pair, the float32 values that were actually in use.
        Twice as many channels are rotated, from the first of the head on.
    attention_scaling
        Factor on cos and sin (YaRN, longrope). Undoing the rotation divides by its square.
    pairing
        ``half`` pairs channel d with d + len(inv_freq); ``interleaved`` pairs 2d with 2d + 1.
    """

    inv_freq: tuple[float, ...] = Field(min_length=1, max_length=4096, strict=False)
    attention_scaling: float = Field(gt=0)
    pairing: Literal["half", "interleaved"]


DtypeName = Literal["bfloat16", "float16", "float32"]
LayerKind = Literal["full_attention", "sliding_attention"]


class TensorSpec(Record):
    """One cached tensor of a layer: ``[H, T, D]`` for one context.

    ``rope`` names an entry of :attr:`KVLayout.ropes`, or is None for an unrotated tensor.
    """

    name: str = Field(min_length=1, max_length=64)
    heads: int = Field(ge=1, le=1 << 16)
    dim: int = Field(ge=1, le=1 << 16)
    rope: str | None = None

    @property
    def channels(self) -> int:
        """C = H * D."""
        return self.heads * self.dim


class LayerSpec(Record):
    """One layer's cache. ``window`` is the attention window of a sliding layer, in tokens."""

    kind: LayerKind
    tensors: tuple[TensorSpec, ...] = Field(min_length=1, max_length=16, strict=False)
    window: int | None = Field(default=None, ge=1)

    @property
    def channels(self) -> int:
        """Values per token over all tensors."""
        return sum(t.channels for t in self.tensors)

    def first_visible(self, length: int) -> int:
        """First of ``length`` tokens that the next token attends to: a window of W sees W - 1."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def first_token(self, length: int) -> int:
        """First of ``length`` tokens that is worth keeping: one more than is visible.

        With it a cache can give up its last token, as a prompt that equals the context needs.
        """
        return 0 if self.window is None else max(0, length - self.window)


class KVLayout(Record):
    """What a whole model caches of each token.

    ``layers`` are those that cache something of each token, in the model's order: none of a model
    whose layers keep nothing but states.
    """

    dtype: DtypeName
    ropes: dict[str, RopeSpec]
    layers: tuple[LayerSpec, ...] = Field(max_length=4096, strict=False)

    @model_validator(mode="after")
    def _ropes_exist(self) -> KVLayout:
        for layer in self.layers:
            for tensor in layer.tensors:
                rope = None if tensor.rope is None else self.ropes.get(tensor.rope)
                if tensor.rope is not None and rope is None:
                    raise ValueError(
                        f"tensor {tensor.name!r} names an unknown rope {tensor.rope!r}"
                    )
                if rope is not None and 2 * len(rope.inv_freq) > tensor.dim:
                    raise ValueError(
                        f"rope {tensor.rope!r} rotates {2 * len(rope.inv_freq)} channels, "
                        f"tensor {tensor.name!r} has {tensor.dim}"
                    )
        return self

    def rope(self, tensor: TensorSpec) -> RopeSpec | None:
        """The rotation of a tensor of this layout, or None."""
        return None if tensor.rope is None else self.ropes[tensor.rope]

    @property
    def values_per_token(self) -> int:
        """Cached numbers per token over all layers."""
        return sum(layer.channels for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Uncompressed cache bytes per token in this dtype."""
        return self.values_per_token * DTYPE_BYTES[self.dtype]
