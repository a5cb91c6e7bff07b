"""Publishing artefacts on the Hub, with cards."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import RevisionNotFoundError

from hf_cachegen.artifact import Artifact, Manifest
from hf_cachegen.artifact.files import SCRATCH_PREFIX, write_file
from hf_cachegen.artifact.summary import stored_values, summarise_levels
from hf_cachegen.artifact.writer import LOCK_NAME
from hf_cachegen.config import DTYPE_BYTES
from hf_cachegen.stores import LocalStore
from hf_cachegen.stores.download import PART_SUFFIX
from hf_cachegen.tables import CARD_NAME

UNPUBLISHED = [
    LOCK_NAME,
    *(".*.tmp", "**/.*.tmp"),
    *(f"*{PART_SUFFIX}", f"*{PART_SUFFIX}/*", f"*/{SCRATCH_PREFIX}*"),
]
"""Files of a save or a fetch in progress."""


def push_artifact(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    commit_message: str = "Upload KV cache with hf-cachegen",
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    endpoint: str | None = None,
) -> str:
    """Upload an artefact folder, with a card, to a model repository.

    Files that the repository holds already are not sent again, and files of an earlier version that
    the artefact no longer names are removed, in one commit.

    Parameters
    ----------
    folder
        A complete artefact.
    repo_id
        ``org/name``, or a name for a repository of one's own; created if need be.
    revision
        Branch, created if need be; by default the main one.
    commit_message, private, token, create_pr, endpoint
        As everywhere in huggingface_hub.

    Returns
    -------
    str
        URL of the commit.
    """
    with LocalStore(folder) as store:
        manifest = Artifact.open(store).manifest
    api = HfApi(endpoint=endpoint, token=token)
    repo_id = prepare_repo(api, repo_id, private, None if create_pr else revision)
    write_file(Path(folder) / CARD_NAME, str(artifact_card(manifest, repo_id)).encode())
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=Path(folder),
        commit_message=commit_message,
        revision=revision,
        create_pr=create_pr,
        ignore_patterns=UNPUBLISHED,
        delete_patterns=[
            "chunks/*.kv",
            "tokens-*.safetensors",
            "states-*.safetensors",
            "kept-*.safetensors",
            "table/*",
        ],
    )
    return str(commit.commit_url)


def prepare_repo(api: HfApi, repo_id: str, private: bool | None, branch: str | None) -> str:
    """Make a model repository and a branch of it, unless they exist; the repository's full name."""
    full_name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if branch is not None:
        try:
            api.repo_info(full_name, revision=branch)
        except RevisionNotFoundError:
            api.create_branch(full_name, branch=branch, exist_ok=True)
    return full_name


def artifact_card(manifest: Manifest, repo_id: str) -> ModelCard:
    """Card of an artefact: whose cache it is, its levels and sizes, and how to load it."""
    identity = manifest.identity
    data = ModelCardData(
        library_name="hf-cachegen", tags=["kv-cache"], base_model=hub_id(identity.model_id)
    )
    raw_bytes = stored_values(manifest) * DTYPE_BYTES[identity.layout.dtype]
    rows = [
        f"| `{level.name}` | {'bit-exact' if level.exact else 'lossy'} | "
        f"{level.size_bytes / 1e6:.2f} MB | {level.bits_per_value:.2f} | {level.ratio:.1f}x |"
        for level in summarise_levels(manifest)
    ]
    return ModelCard(_CARD.format(
        metadata=data.to_yaml(),
        tokens=manifest.tokens.n,
        kept="" if manifest.kept is None else f"Each head has kept {manifest.kept.n} tokens. ",
        model=identity.model_id,
        architecture=identity.architecture,
        dtype=identity.layout.dtype,
        raw_mb=raw_bytes / 1e6,
        chunks=len(manifest.chunks),
        chunk_tokens=manifest.chunk_tokens,
        rows="\n".join(rows),
        repo_id=repo_id,
    ))  # fmt: skip


def hub_id(model_id: str) -> str | None:
    """The Hub repository that a model's name is, None if it is none: what a card may link to."""
    return model_id if model_id.count("/") == 1 else None


_CARD = """---
{metadata}
---

# KV cache of {tokens} tokens for {model}

The KV cache of one context, encoded with hf-cachegen. {kept}It
fits `{architecture}` with the very weights it was made with, in {dtype}; anything else is refused.
The context's token ids are part of this repository: publish it only if you may publish the text.

| level | values | size | bits/value | against {dtype} ({raw_mb:.1f} MB) |
|---|---|---|---|---|
{rows}

{chunks} chunks of up to {chunk_tokens} tokens. To continue from it:

```python
from hf_cachegen import CompressedStreamingCache

cache = CompressedStreamingCache.from_pretrained("{repo_id}", model=model)
model.generate(**cache.inputs(tokenizer, "Your question"))
```
"""
