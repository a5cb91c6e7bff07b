"""A small model's identity, and saves of made-up segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import ArrayLike

from hf_cachegen.artifact import ArtifactWriter, ChunkPlan, Identity, LevelRecord, Manifest
from hf_cachegen.layout import KVLayout, LayerSpec, RopeSpec, TensorSpec

Save = Callable[..., Manifest]

CHUNK_TOKENS = 8


@pytest.fixture(scope="session")
def identity() -> Identity:
    """A model of two full layers, and a sliding one that holds 5 tokens."""
    tensors = (
        TensorSpec(name="key", heads=2, dim=4, rope="default"),
        TensorSpec(name="value", heads=2, dim=4),
    )
    full = LayerSpec(kind="full_attention", tensors=tensors)
    sliding = LayerSpec(kind="sliding_attention", tensors=tensors, window=5)
    rope = RopeSpec(inv_freq=(1.0, 0.01), attention_scaling=1.0, pairing="half")
    return Identity(
        model_id="org/model",
        revision="0123abc",
        weights="ab" * 16,
        config="cd" * 16,
        architecture="LlamaForCausalLM",
        layout=KVLayout(dtype="bfloat16", ropes={"default": rope}, layers=(full, sliding, full)),
    )


@pytest.fixture(scope="session")
def levels() -> tuple[LevelRecord, ...]:
    """A coarse and an exact level."""
    return (
        LevelRecord(name="low", codec="delta", params={"bits": 3, "step": 0.5}, exact=False),
        LevelRecord(name="raw", codec="raw", exact=True),
    )


def _segments(plan: ChunkPlan, n_levels: int) -> list[list[bytes]]:
    """Bytes that depend on the chunk, the level and the layer, of different lengths."""
    return [
        [f"{plan.name}-{level}-{layer}".encode() * (level + 1) for layer in range(3)]
        for level in range(n_levels)
    ]


@pytest.fixture(scope="session")
def save(identity: Identity, levels: tuple[LevelRecord, ...]) -> Save:
    """``save(folder, token_ids, states=None, **changes)`` writes a whole artefact."""

    def save(
        folder: Path, token_ids: ArrayLike, states: bytes | None = None, **changes: Any
    ) -> Manifest:
        arguments: dict[str, Any] = {
            "identity": identity,
            "levels": levels,
            "chunk_tokens": CHUNK_TOKENS,
        }
        with ArtifactWriter(folder, token_ids=token_ids, **{**arguments, **changes}) as writer:
            for plan in writer.missing_chunks():
                writer.add_chunk(plan, _segments(plan, len(writer.levels)))
            return writer.commit(states)

    return save
