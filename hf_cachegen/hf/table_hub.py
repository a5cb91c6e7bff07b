"""Publishing model tables on the Hub, with cards."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData

from hf_cachegen.hf.hub import hub_id
from hf_cachegen.stores import LocalStore
from hf_cachegen.tables import ARRAYS_NAME, CARD_NAME, RECORD_NAME, ModelTable


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

    Parameters
    ----------
    folder
        A complete table.
    repo_id
        ``org/name``, or a name for a repository of one's own; created if need be.
    commit_message, private, token, revision, endpoint
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
        card.write_text(table_card(table), encoding="utf-8")
    api = HfApi(endpoint=endpoint, token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=Path(folder),
        commit_message=commit_message,
        revision=revision,
        allow_patterns=[RECORD_NAME, ARRAYS_NAME, CARD_NAME],
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
    record, params = table.record, table.record.params
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
        codec=record.codec,
        group=params.group,
        bins=", ".join(f"{value:g}" for value in params.bins),
        factors=", ".join(f"{value:g}" for value in params.factors),
        sinks=params.sinks,
        tables=params.tables,
        size_mb=table.size_bytes / 1e6,
        digest=table.digest,
        total=sum(tokens for _, tokens in record.data),
        data=data,
        measured=measured or "Not measured yet: `hf-cachegen bench codec` does it.",
    )))  # fmt: skip


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
| codec | `{codec}` |
| tokens per anchor | {group} |
| bins, shallow to deep | {bins} |
| factors of the levels, coarse to fine | {factors} |
| first tokens stored as they are | {sinks} |
| a probability table for each | {tables} |
| size | {size_mb:.2f} MB |
| digest | `{digest}` |

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
