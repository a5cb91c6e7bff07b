"""What is known of model families: how they rotate keys, and which cannot be served, and why.

Each entry is tested with a model of that family in ``tests/families``.
"""

from __future__ import annotations

from typing import Any, Literal

HALF_ROTATION_MODELS = frozenset(
    {
        *("apertus", "arcee", "bamba", "bitnet", "cwm", "diffllama", "exaone", "falcon"),
        *("falcon_h1", "gemma", "gemma2", "lfm2", "lfm2_moe", "qwen3_5_moe_text", "qwen3_5_text"),
        *("olmo_hybrid", "qwen3_next"),
        *("gemma3_text", "gemma3n_text", "gemma4_text", "glm4_moe", "gpt_neox", "gpt_oss"),
        *("granite", "granitemoe", "hunyuan_v1_dense", "internlm3", "jais2", "llama", "minimax_m2"),
        *("ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3"),
        *("olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
        *("qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2"),
        *("vaultgemma", "afmoe", "deepseek_v3", "minicpm3", "glm4_moe_lite"),
    }
)
"""Model types whose cached keys pair channel d with d + n, n being the rotated pairs."""

INTERLEAVED_ROTATION_MODELS = frozenset(
    {
        *("cohere", "cohere2", "cohere2_moe", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "glm"),
        *("glm4", "helium", "llama4_text"),
    }
)
"""Model types whose cached keys pair channel 2d with 2d + 1.

Keys of model types in neither set are coded as they are cached: right, but larger, since an encoder
may un-rotate only what it knows how to rotate back."""

SLIDING_ROTATION_MODELS = frozenset({"afmoe", "cohere2", "cohere2_moe"})
"""Model types that rotate in sliding layers only."""

SLOT_POSITION_MODELS = frozenset({"mpt"})
"""Model types whose positions count padding, whatever the attention mask says."""

BIASED_MODELS = frozenset({"bloom", "mpt"})
"""Model types whose attention goes by how far apart queries and keys are in the cache (ALiBi)."""

STATE_MODELS = frozenset(
    {
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2"),
        *("lfm2_moe", "mamba", "mamba2", "olmo_hybrid", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_next", "zamba2"),
    }
)
"""Model types whose recurrent or convolutional states are known to be all that they go on from."""

ONE_BY_ONE_MODELS = frozenset({"falcon_mamba", "jamba", "mamba"})
"""Model types whose scan over several new tokens begins with no state, whatever is cached. One new
token at a time they go on from it."""

UNPLACED_MODELS = frozenset({"bamba"})
"""Model types whose forward pass counts positions from 0, whatever is cached, unless it is given
them. ``generate()`` gives them."""

UNCONTINUABLE_MODELS = {
    "moshi": "its attention sees more than the sliding window that it caches",
    "recurrent_gemma": "its recurrent state, which older versions of transformers keep outside of "
    "the cache, has not been tested",
}
"""Model types whose own cache gives other logits than the whole prompt at once, as far as known."""

CAUSAL_MODELS = frozenset({"gpt_neox", "gpt_neox_japanese"})
"""Model types that attend backwards only, though their config says that they are no decoders."""

MEDIA = ("image", "video", "audio")

OTHER_STATES = {
    "DynamicIndexedLayer": "keys of an index beside keys and values",
    "LinearAttentionAndSlidingWindowAttentionLayer": "a recurrent state beside a sliding window",
}
"""What the cache layers hold that cannot be stored, by class name."""


def rotation_pairing(model_type: str) -> Literal["half", "interleaved"] | None:
    """How a model type pairs the channels that it rotates; None if that is not known."""
    if model_type in HALF_ROTATION_MODELS:
        return "half"
    return "interleaved" if model_type in INTERLEAVED_ROTATION_MODELS else None


def rotated_tensor(config: Any, layer: int) -> int | None:
    """Which of a layer's two cached tensors is rotated; None in a layer without positions.

    Parameters
    ----------
    config
        Config of the decoder.
    layer
        The layer. Multi-head latent attention caches the rotated part of its keys in the place of
        the values.
    """
    rotated = getattr(config, "no_rope_layers", None)  # 1 where there is a rotation
    if rotated and not rotated[layer]:
        return None
    sliding_only = config.model_type in SLIDING_ROTATION_MODELS
    if sliding_only and config.layer_types[layer] != "sliding_attention":
        return None
    return 0 if getattr(config, "kv_lora_rank", None) is None else 1


def unsupported(config: Any) -> str | None:
    """Why a decoder with this config cannot be served, whatever its layers; None if it can."""
    if getattr(config, "is_decoder", None) is False and config.model_type not in CAUSAL_MODELS:
        return (
            "its attention sees later tokens, so a cache cannot be continued (config.is_decoder is "
            "False)"
        )
    return UNCONTINUABLE_MODELS.get(config.model_type)


def needs_every_token(config: Any) -> str | None:
    """Why a decoder with this config cannot do without some cached tokens; None if it can."""
    if config.model_type in BIASED_MODELS or getattr(config, "alibi", False):
        return "it takes positions from places in the cache (ALiBi)"
    return None


def media_tokens(config: Any) -> dict[str, int]:
    """Ids that stand for pictures, video or sound in a prompt, by the name of the config's entry.

    Tokens alone do not say which picture they stand for, so a context that has them cannot be told
    from another one.

    Parameters
    ----------
    config
        The config of the whole model, not of its decoder alone.
    """
    entries = (f"{medium}_token_{kind}" for medium in MEDIA for kind in ("id", "index"))
    found = {name: getattr(config, name, None) for name in entries}
    return {name: token for name, token in found.items() if token is not None}
