"""The transformers and Hub side: the cache, the save hook, profiling, publishing."""

from hf_cachegen.hf.cache import CompressedStreamingCache
from hf_cachegen.hf.hub import push_artifact
from hf_cachegen.hf.profiling import profile_model
from hf_cachegen.hf.saving import record_cache, save_cache

__all__ = [
    "CompressedStreamingCache",
    "profile_model",
    "push_artifact",
    "record_cache",
    "save_cache",
]
