"""The families of ``docs/compatibility.md``, each with a tiny configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 16
MIXED = ["sliding_attention", "full_attention"]

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""Values of every family whose config has an entry of that name."""

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MLA_EXPERTS = {**MLA, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 8}
DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT_ONLY = "contexts of text; a context with images is refused"
GUESSES = (
    "prompt lookup, new ids with the mask of all",
    "assisted, new ids with the mask of all",
)
NO_EMBEDDINGS = {
    "embeddings of the whole prompt": "doesn't have its forwarding implemented",
}
ONE_BY_ONE = {
    "embeddings of the whole prompt": "new tokens one by one",
    "batch of several contexts": "new tokens one by one",
    "static cache": "new tokens one by one",
    "forward pass": "one new token a pass",
}
ONLY_STATES = {
    "batch of several contexts": "has nothing but states",
    "static cache": "has nothing but states",
}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """Config entry of a RoPE type."""
    return {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": kind, **parameters}}


@dataclass(frozen=True)
class Family:
    """A row of the table: one model type with one configuration.

    Attributes
    ----------
    name
        Name of the row.
    model_type
        As in transformers.
    rotation
        Rotation of cached keys that the codecs undo. ``half`` and ``interleaved`` say how channels
        are paired, ``partial`` that some channels are not rotated; ``MLA`` that the rotated part
        is cached in the place of the values; ``NoPE`` that some layers do not rotate.
    layers
        The kinds of attention; ``states`` are recurrent or convolutional ones.
    config
        What differs from :data:`TINY`.
    refused
        Part of the message with which the family is refused.
    note
        Remark in the table.
    sinks
        Whether attention depends on how many tokens there are, as with learned attention sinks.
    tolerance
        How far logits may be off where sums are made in another order, as in a batch.
    refused_calls
        Part of the message with which single calls are refused, here or by transformers, by their
        name.
    recomputed
        Whether chunks can come as text and be recomputed in the middle of a stream.
    calls_since
        First version of transformers that can do single calls, by their name.
    right_calls
        Names of calls that are right, though not with others of these kinds of attention.
    since
        First version of transformers that can serve it.
    """

    name: str
    model_type: str
    rotation: str = "half"
    layers: str = "full"
    config: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    note: str = ""
    sinks: bool = False
    tolerance: float = 1e-5
    refused_calls: dict[str, str] = field(default_factory=dict)
    recomputed: bool = True
    calls_since: dict[str, str] = field(default_factory=dict)
    right_calls: tuple[str, ...] = ()
    since: str = "5.18"

    @property
    def kind(self) -> str:
        """Which of the columns of the table of calls it belongs to."""
        return next((kind for kind in ("states", "sliding") if kind in self.layers), "full")

    def __str__(self) -> str:
        return self.name


def _half(*model_types: str) -> list[Family]:
    """Families that differ in nothing that matters here."""
    return [Family(name, name) for name in model_types]


FAMILIES = [
    Family("llama", "llama"),
    Family("llama, linear RoPE scaling", "llama", config=rope("linear", factor=2.0)),
    Family(
        "llama, dynamic NTK scaling",
        "llama",
        rotation="as cached",
        config={**rope("dynamic", factor=2.0), "max_position_embeddings": 64},
        note="rotation moves with the length; past the original length the answer is that of a "
        "native warm cache, which is not quite that of a whole prompt",
        tolerance=2e-3,
        recomputed=False,
    ),
    Family(
        "llama, YaRN",
        "llama",
        config=rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    Family(
        "llama, llama3 scaling",
        "llama",
        config=rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    Family("qwen2", "qwen2"),
    Family(
        "qwen2, sliding window",
        "qwen2",
        layers="full, sliding",
        config={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    Family("qwen3", "qwen3"),
    Family("mistral", "mistral", layers="sliding", config={"sliding_window": WINDOW}),
    Family("mistral, no window", "mistral", config={"sliding_window": None}),
    Family("gemma", "gemma"),
    Family(
        "gemma2",
        "gemma2",
        layers="full, sliding",
        config={"layer_types": MIXED, "sliding_window": WINDOW},
    ),
    Family(
        "gemma3_text",
        "gemma3_text",
        layers="full, sliding",
        config={"layer_types": MIXED, "sliding_window": WINDOW},
        note="two rotations",
    ),
    Family(
        "gemma3n_text",
        "gemma3n_text",
        layers="full, sliding",
        config={
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": MIXED * 2,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": 320,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [96] * 4,
        },
        note="two rotations; layers that share keys and values cost nothing",
    ),
    Family(
        "gemma4_text",
        "gemma4_text",
        layers="full, sliding",
        config={
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": MIXED * 2,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": 320,
            "hidden_size_per_layer_input": 16,
            "global_head_dim": 32,
        },
        note="two rotations; layers that share keys and values cost nothing",
    ),
    Family("gpt_neox", "gpt_neox", rotation="half, partial"),
    Family("gpt_neox_japanese", "gpt_neox_japanese", rotation="as cached"),
    Family("phi", "phi", rotation="half, partial"),
    Family("phi3", "phi3"),
    Family(
        "phi3, longrope",
        "phi3",
        rotation="as cached",
        config={
            **rope(
                "longrope",
                short_factor=[1.0] * 8,
                long_factor=[2.0] * 8,
                factor=4.0,
                original_max_position_embeddings=128,
            ),
            "original_max_position_embeddings": 128,
        },
        note="rotation depends on the length",
        recomputed=False,
    ),
    Family(
        "gpt_oss",
        "gpt_oss",
        layers="full, sliding",
        config={"layer_types": MIXED, "sliding_window": WINDOW},
        note="attention sinks, YaRN",
        sinks=True,
    ),
    Family(
        "llama4_text",
        "llama4_text",
        rotation="interleaved, NoPE",
        layers="full, sliding",
        config={"num_hidden_layers": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 64},
        calls_since={"static cache": "5.20"},
        note="chunked attention is stored as sliding",
    ),
    Family("cohere", "cohere", rotation="interleaved"),
    Family(
        "cohere2",
        "cohere2",
        rotation="interleaved, NoPE",
        layers="full, sliding",
        config={"layer_types": MIXED, "sliding_window": WINDOW},
    ),
    Family(
        "cohere2_moe",
        "cohere2_moe",
        rotation="interleaved, NoPE",
        layers="full, sliding",
        config={"layer_types": MIXED, "sliding_window": WINDOW},
    ),
    Family("smollm3", "smollm3", rotation="half, NoPE", config={"num_hidden_layers": 4}),
    Family(
        "afmoe",
        "afmoe",
        rotation="half, NoPE",
        layers="full, sliding",
        config={"layer_types": MIXED, "sliding_window": WINDOW, "num_dense_layers": 1},
    ),
    Family("gpt2", "gpt2", rotation="none", config={"n_embd": 64, "n_layer": 2, "n_head": 4}),
    Family("opt", "opt", rotation="none", config={"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Family(
        "bloom",
        "bloom",
        rotation="none",
        config={"n_layer": 2, "n_head": 4},
        note="ALiBi",
        calls_since={"static cache": "5.22"},
    ),
    Family(
        "mpt",
        "mpt",
        rotation="none",
        config={"d_model": 64, "n_layers": 2, "n_heads": 4, "expansion_ratio": 1},
        note="ALiBi; its config has `use_cache` off: pass `use_cache=True`",
        refused_calls={"batch of questions of different length": "this model's positions"},
    ),
    Family("falcon", "falcon"),
    Family(
        "gptj",
        "gptj",
        rotation="as cached",
        config={"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    ),
    Family(
        "exaone4",
        "exaone4",
        rotation="as cached",
        layers="full, sliding",
        config={"layer_types": MIXED, "sliding_window": WINDOW},
    ),
    Family("deepseek_v2", "deepseek_v2", rotation="interleaved, MLA", config=MLA_EXPERTS),
    Family("deepseek_v3", "deepseek_v3", rotation="half, MLA", config=MLA_EXPERTS),
    Family("glm4_moe_lite", "glm4_moe_lite", rotation="half, MLA", config=MLA_EXPERTS),
    Family("minicpm3", "minicpm3", rotation="half, MLA", config={**MLA, "head_dim": 8}),
    Family("glm", "glm", rotation="interleaved, partial"),
    Family("glm4", "glm4", rotation="interleaved, partial"),
    Family(
        "glm4_moe", "glm4_moe", rotation="half, partial", config={"n_group": 1, "topk_group": 1}
    ),
    Family("ernie4_5", "ernie4_5", rotation="interleaved"),
    Family("ernie4_5_moe", "ernie4_5_moe", rotation="interleaved"),
    Family("helium", "helium", rotation="interleaved"),
    Family("nemotron", "nemotron", rotation="half, partial"),
    Family("persimmon", "persimmon", rotation="half, partial"),
    Family("stablelm", "stablelm", rotation="half, partial"),
    Family(
        "olmo3",
        "olmo3",
        layers="full, sliding",
        config={"layer_types": MIXED, "sliding_window": WINDOW},
    ),
    Family(
        "cwm",
        "cwm",
        layers="full, sliding",
        config={
            "layer_types": MIXED,
            "sliding_window": WINDOW,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family("ministral", "ministral", layers="sliding", config={"sliding_window": WINDOW}),
    Family(
        "vaultgemma",
        "vaultgemma",
        layers="full, sliding",
        config={"layer_types": MIXED, "sliding_window": WINDOW},
    ),
    *_half("apertus", "arcee", "bitnet", "diffllama", "exaone", "granite", "granitemoe"),
    *_half("hunyuan_v1_dense", "internlm3", "jais2", "minimax_m2", "ministral3", "mixtral", "olmo"),
    *_half("olmo2", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "seed_oss", "solar_open"),
    *_half("starcoder2"),
    Family(
        "gemma3",
        "gemma3",
        layers="full, sliding",
        config={
            "text_config": {**TINY, "layer_types": MIXED, "sliding_window": WINDOW},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
        note=f"two rotations; {TEXT_ONLY}",
        refused_calls=NO_EMBEDDINGS,
    ),
    Family(
        "mistral3",
        "mistral3",
        config={
            "text_config": {**TINY, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
        },
        note=TEXT_ONLY,
    ),
    Family(
        "llava, with llama",
        "llava",
        config={
            "text_config": {**TINY, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
        },
        note=TEXT_ONLY,
    ),
    Family(
        "qwen2_5_vl",
        "qwen2_5_vl",
        rotation="as cached",
        config={
            "text_config": {**TINY, **rope("default", mrope_section=[2, 3, 3])},
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "out_hidden_size": 64,
                "num_heads": 2,
            },
        },
        note=f"M-RoPE; {TEXT_ONLY}",
        refused_calls={"assisted, new ids with the mask of all": "Sizes of tensors must match"},
    ),
    Family(
        "qwen3_next",
        "qwen3_next",
        rotation="half, partial",
        layers="full, states",
        config=DELTA_NET,
    ),
    Family(
        "qwen3_5_text",
        "qwen3_5_text",
        rotation="half, partial",
        layers="full, states",
        config=DELTA_NET,
    ),
    Family(
        "qwen3_5_moe_text",
        "qwen3_5_moe_text",
        rotation="half, partial",
        layers="full, states",
        config=DELTA_NET,
    ),
    Family(
        "olmo_hybrid",
        "olmo_hybrid",
        layers="full, states",
        config={**DELTA_NET, "linear_num_value_heads": 2},
    ),
    Family(
        "granitemoehybrid",
        "granitemoehybrid",
        rotation="none",
        layers="full, states",
        config={**MAMBA_2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    Family(
        "zamba2",
        "zamba2",
        rotation="none",
        layers="full, states",
        config={
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "hybrid_layer_ids": [1],
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
        },
        note="states beside keys and values in some layers",
        refused_calls=NO_EMBEDDINGS,
    ),
    Family(
        "bamba",
        "bamba",
        rotation="half, partial",
        layers="full, states",
        config={**MAMBA_2, "attn_layer_indices": [1]},
        note="a forward pass without `generate()` needs `position_ids`",
        refused_calls=NO_EMBEDDINGS,
    ),
    Family(
        "falcon_h1",
        "falcon_h1",
        layers="full, states",
        config={**MAMBA_2, "mamba_d_ssm": 128},
        note="states beside keys and values in every layer",
        refused_calls=NO_EMBEDDINGS,
    ),
    Family(
        "lfm2",
        "lfm2",
        layers="full, states",
        config={"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
        note="convolutional states only",
        right_calls=GUESSES,
    ),
    Family(
        "lfm2_moe",
        "lfm2_moe",
        layers="full, states",
        config={"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        note="convolutional states only",
        right_calls=GUESSES,
    ),
    Family(
        "jamba",
        "jamba",
        rotation="none",
        layers="full, states",
        config={
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        note="new tokens run one by one",
        refused_calls=ONE_BY_ONE,
        recomputed=False,
        since="5.21",
    ),
    Family(
        "mamba2",
        "mamba2",
        rotation="none",
        layers="states",
        config={"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1},
        note="nothing but states",
        refused_calls=ONLY_STATES,
        since="5.24",
    ),
    Family(
        "mamba",
        "mamba",
        rotation="none",
        layers="states",
        config={"state_size": 8},
        note="nothing but states; new tokens run one by one",
        refused_calls={**ONE_BY_ONE, **ONLY_STATES},
        since="5.24",
    ),
    Family(
        "falcon_mamba",
        "falcon_mamba",
        rotation="none",
        layers="states",
        config={"state_size": 8},
        note="nothing but states; new tokens run one by one",
        refused_calls={**ONE_BY_ONE, **ONLY_STATES},
        since="5.24",
    ),
    Family(
        "deepseek_v32",
        "deepseek_v32",
        config={**MLA_EXPERTS, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
        refused="keys of an index beside keys and values",
    ),
    Family(
        "recurrent_gemma",
        "recurrent_gemma",
        config={"lru_width": 64, "attention_window_size": WINDOW},
        refused="has not been tested",
    ),
    Family(
        "rwkv",
        "rwkv",
        config={"attention_hidden_size": 64},
        refused="its forward pass takes no key-value cache",
    ),
    Family("megatron-bert", "megatron-bert", refused="its attention sees later tokens"),
    Family(
        "moshi",
        "moshi",
        config={"ffn_dim": 96, "sliding_window": WINDOW},
        refused="sees more than the sliding window that it caches",
    ),
]

KNOWN = [
    family
    for family in FAMILIES
    if family.model_type in CONFIG_MAPPING
    and Version(transformers.__version__) >= Version(family.since)
]
"""Those that the installed transformers can serve or refuse."""

SUPPORTED = [family for family in KNOWN if family.refused is None]
REFUSED = [family for family in KNOWN if family.refused is not None]
