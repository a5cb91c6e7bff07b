"""The transformers and Hub side: the cache, the save hook, profiling, publishing."""

from hf_cachegen.hf.cache import CompressedStreamingCache
from hf_cachegen.hf.hub import push_artifact
from hf_cachegen.hf.joining import fill_cache
from hf_cachegen.hf.prefixes import load_longest_prefix
from hf_cachegen.hf.profiling import profile_model
from hf_cachegen.hf.recording import record_cache
from hf_cachegen.hf.saving import save_cache

__all__ = [
    "CompressedStreamingCache",
    "fill_cache",
    "load_longest_prefix",
    "profile_model",
    "push_artifact",
    "record_cache",
    "save_cache",
]
