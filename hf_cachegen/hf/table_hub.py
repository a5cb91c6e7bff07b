"""Publishing model tables on the Hub, with cards."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData

from hf_cachegen.artifact.files import write_file
from hf_cachegen.hf.hub import hub_id, prepare_repo
from hf_cachegen.levels import lossy_levels
from hf_cachegen.stores import LocalStore
from hf_cachegen.tables import CARD_NAME, RECORD_NAME, ModelTable


def push_table(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    commit_message: str = "Upload model table with hf-cachegen",
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Upload a table folder to a model repository; a card is written if there is none.

    Files of an earlier table that this one does not have are removed, in the same commit.

    Parameters
    ----------
    folder
        A complete table.
    repo_id
        ``org/name``, or a name for a repository of one's own; created if need be.
    revision
        Branch, created if need be; by default the main one.
    commit_message, private, token, endpoint
        As everywhere in huggingface_hub.

    Returns
    -------
    str
        URL of the commit.
    """
    with LocalStore(folder) as store:
        table = ModelTable.load(store)
    card = Path(folder) / CARD_NAME
    if not card.exists():
        write_file(card, table_card(table).encode())
    api = HfApi(endpoint=endpoint, token=token)
    repo_id = prepare_repo(api, repo_id, private, revision)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=Path(folder),
        commit_message=commit_message,
        revision=revision,
        allow_patterns=[RECORD_NAME, *table.payloads, CARD_NAME],
        delete_patterns=["*.safetensors"],
    )
    return str(commit.commit_url)


def table_card(table: ModelTable, measured: str = "") -> str:
    """Card of a table: whose it is, what it was made from, its size, and how to use it.

    Parameters
    ----------
    table
        The table.
    measured
        Markdown: what the table's levels were measured to do.
    """
    record = table.record
    metadata = ModelCardData(
        library_name="hf-cachegen",
        tags=["kv-cache", "kv-cache-table"],
        base_model=hub_id(record.model_id),
    )
    data = "\n".join(f"| {name} | {tokens} |" for name, tokens in record.data)
    return str(ModelCard(_CARD.format(
        metadata=metadata.to_yaml(),
        model=record.model_id,
        config=record.config,
        codecs="\n".join(_codec_section(table, codec) for codec in record.codec_names),
        total=sum(tokens for _, tokens in record.data),
        data=data,
        measured=measured or "Not measured yet: `hf-cachegen bench codec` does it.",
    )))  # fmt: skip


def _codec_section(table: ModelTable, codec: str) -> str:
    """What a table holds for one codec."""
    (entry,) = table.record.subset([codec]).codecs
    params = entry.params.model_dump(mode="json")
    return _CODEC.format(
        codec=codec,
        levels=", ".join(f"`{level.name}`" for level in lossy_levels(table, codec)),
        size_mb=entry.arrays.size_bytes / 1e6,
        digest=table.record.digests[codec],
        params="\n".join(f"| `{name}` | {_shown(value)} |" for name, value in params.items()),
    )


def _shown(value: object) -> str:
    """A parameter for people."""
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


_CODEC = """
## Codec `{codec}`

Levels {levels}, coarse to fine. A reader fetches {size_mb:.2f} MB, once for all caches of
the model. The digest is `{digest}`.

| parameter | value |
|---|---|
{params}
"""

_CARD = """---
{metadata}
---

# KV cache table of {model}

The statistics with which hf-cachegen encodes and decodes
KV caches of `{model}`. What was encoded with this table needs this very table to be decoded.

| | |
|---|---|
| base model | `{model}` |
| digest of its config | `{config}` |
{codecs}
## Data

Profiled on {total} tokens:

| text | tokens |
|---|---|
{data}

## Measured rate and quality

{measured}

## Use

```python
from hf_cachegen import save_cache

save_cache(model, tokenizer, document, "my-cache", tables="this repository or folder")
```
"""
