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
    from hf_cachegen.hf.cache import CompressedStreamingCache
    from hf_cachegen.hf.hub import push_artifact
    from hf_cachegen.hf.profiling import profile_model
    from hf_cachegen.hf.saving import record_cache, save_cache
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
    "profile_model",
    "push_artifact",
    "record_cache",
    "save_cache",
]


def __getattr__(name: str) -> Any:
    # transformers and torch take seconds to import: `hf-cachegen info` should not wait for them.
    if name == "CompressedStreamingCache":
        from hf_cachegen.hf.cache import CompressedStreamingCache as found
    elif name == "ModelTable":
        from hf_cachegen.tables import ModelTable as found
    elif name == "profile_model":
        from hf_cachegen.hf.profiling import profile_model as found
    elif name == "push_artifact":
        from hf_cachegen.hf.hub import push_artifact as found
    elif name == "record_cache":
        from hf_cachegen.hf.saving import record_cache as found
    elif name == "save_cache":
        from hf_cachegen.hf.saving import save_cache as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
