"""The artefact: a folder with one document's encoded KV cache, its token ids and its identity.

`cache.json` is the only file that ever changes; all others are immutable and named by what they
hold, so a save is the addition of files followed by one rename.
"""

from hf_cachegen.artifact.identity import (
    EMBEDDED,
    Difference,
    Identity,
    TableRef,
    check_identity,
    compare_identity,
)
from hf_cachegen.artifact.manifest import (
    EXACT,
    ChunkRecord,
    KeptRecord,
    LevelRecord,
    Manifest,
    StatesRecord,
    TokensRecord,
)
from hf_cachegen.artifact.naming import ChunkPlan, chunk_names
from hf_cachegen.artifact.reader import Artifact, VerifyReport
from hf_cachegen.artifact.writer import ArtifactWriter

__all__ = [
    "EMBEDDED",
    "EXACT",
    "Artifact",
    "ArtifactWriter",
    "ChunkPlan",
    "ChunkRecord",
    "Difference",
    "Identity",
    "KeptRecord",
    "LevelRecord",
    "Manifest",
    "StatesRecord",
    "TableRef",
    "TokensRecord",
    "VerifyReport",
    "check_identity",
    "chunk_names",
    "compare_identity",
]
