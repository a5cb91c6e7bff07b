"""Constants of the format and the vocabulary that every module shares.

Axis vocabulary, in this order wherever a tensor has several of them:

=====  ==========================================================================
``L``  layers of the model that hold a cache
``B``  batch (an artefact holds one context, so B is 1 until a cache is repeated)
``H``  KV heads
``T``  tokens
``D``  values per head and token
``C``  channels of one tensor in one layer: C = H * D, channel index = h * D + d
=====  ==========================================================================

Unit suffixes in names: ``_bytes``, ``_s`` (seconds), ``_tokens``, ``_bits``.
"""

from __future__ import annotations

FORMAT_VERSION = 1
"""Version of `cache.json` and of the chunk file. Any change of output bytes is a new version."""

CHUNK_TOKENS = 1500
"""Tokens per chunk (CacheGen, SIGCOMM 2024, section 5)."""

GRADIENT_SAMPLES = 40
"""Samples that a profile takes gradients on: docs/log.md has what more of them are worth."""

MIN_SAMPLE_TOKENS = 8
"""Of a profile: a quarter of half of it, the shortest sample there is, is one token to predict."""

PROB_BITS = 12
"""Static probabilities are integers that sum to ``1 << PROB_BITS``."""

RANS_LANES = 32
"""Interleaved rANS states per stream: one GPU warp."""

RANS_STATE_WORDS = 2 * RANS_LANES
"""The states at the head of a stream, in 16-bit words."""

RANS_LOW = 1 << 16
"""Lower bound of a rANS state: states live in [2^16, 2^32), renormalised 16 bits at a time."""

MAX_ALPHABET = 256
"""Symbols are bytes."""

CHECKSUM_BYTES = 8
"""BLAKE2b digest length of a segment."""

MANIFEST_NAME = "cache.json"
CHUNKS_FOLDER = "chunks"

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Cache dtypes that the format knows, with their size."""
