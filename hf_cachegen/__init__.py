"""Publish, fetch and stream compressed KV caches with Hugging Face transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_cachegen.errors import (
    BackendUnavailable,
    CacheGenError,
    FormatError,
    IdentityError,
    ModelMismatch,
    PromptMismatch,
    StoreError,
    StoreNotFound,
    TableMismatch,
    UnsupportedError,
)

if TYPE_CHECKING:
    from hf_cachegen.hf import (
        CompressedStreamingCache,
        fill_cache,
        load_longest_prefix,
        profile_model,
        push_artifact,
        record_cache,
        save_cache,
    )
    from hf_cachegen.tables import ModelTable

__all__ = [
    "BackendUnavailable",
    "CacheGenError",
    "CompressedStreamingCache",
    "FormatError",
    "IdentityError",
    "ModelMismatch",
    "ModelTable",
    "PromptMismatch",
    "StoreError",
    "StoreNotFound",
    "TableMismatch",
    "UnsupportedError",
    "fill_cache",
    "load_longest_prefix",
    "profile_model",
    "push_artifact",
    "record_cache",
    "save_cache",
]


def __getattr__(name: str) -> Any:
    # transformers and torch take seconds to import: `hf-cachegen info` should not wait for them.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_cachegen import hf, tables

    return getattr(tables if name == "ModelTable" else hf, name)
