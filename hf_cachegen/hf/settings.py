"""What a save is asked for: read once, and checked before any work is done."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers import PreTrainedModel

from hf_cachegen.artifact import LevelRecord, TableRef
from hf_cachegen.container import MAX_CHUNK_TOKENS
from hf_cachegen.errors import StoreError
from hf_cachegen.hf.codecs import TableSource, load_table
from hf_cachegen.hf.compat import native_layers, token_layers
from hf_cachegen.hf.hub import push_artifact
from hf_cachegen.hf.profiling import AUTO_CONFIG
from hf_cachegen.levels import (
    available_levels,
    default_levels,
    ladder,
    select_levels,
    table_codecs,
)
from hf_cachegen.tables import ModelTable

Tables = TableSource | tuple[ModelTable, str] | Literal["auto"] | None
"""A model table, where it is, or both, as :func:`load_table` returns them; ``"auto"`` makes a small
one from the cache at hand; None encodes only the exact level."""


@dataclass(frozen=True)
class Choice:
    """The levels that a save is to store, and the table for them.

    Attributes
    ----------
    tables
        The table and its location; ``"auto"``: one that is made if a level needs it; None: none.
    levels
        In ladder order.
    """

    tables: tuple[ModelTable, str] | Literal["auto"] | None
    levels: tuple[LevelRecord, ...]

    def reference(self, levels: Sequence[LevelRecord]) -> TableRef | Literal["auto"] | None:
        """How an artefact with some levels is to refer to the table; ``"auto"`` until it is made.

        None if none of them needs it.
        """
        if isinstance(self.tables, tuple):
            return refer(*self.tables, levels)
        return self.tables if table_codecs(levels) else None


def choose(
    tables: Tables,
    levels: Sequence[str] | None,
    model: PreTrainedModel | None = None,
    **hub_options: Any,
) -> Choice:
    """Read the table, if one is named, and find the levels. The model does not run.

    Parameters
    ----------
    tables, levels
        As for :func:`save_cache`.
    model
        Without it, it is taken for one that caches something of each token.
    hub_options
        Those of :func:`~hf_cachegen.stores.open_store`, for the table.

    Raises
    ------
    ValueError
        A level is unknown; the message lists what there is.
    StoreError, FormatError
        The table cannot be read, or is damaged.
    """
    found: tuple[ModelTable, str] | Literal["auto"] | None = None
    available = available_levels(None)
    without_layers = model is not None and not token_layers(native_layers(model))
    if isinstance(tables, str) and tables == "auto":
        found = "auto"
        available = available if without_layers else ladder([AUTO_CONFIG])
    elif tables is not None and not without_layers:
        found = tables if isinstance(tables, tuple) else load_table(tables, **hub_options)
        available = available_levels(found[0])
    chosen = default_levels(available) if levels is None else select_levels(available, levels)
    return Choice(found, chosen)


def refer(table: ModelTable, location: str, levels: Sequence[LevelRecord]) -> TableRef | None:
    """How an artefact with these levels refers to a table; None if none of them needs it."""
    used = table_codecs(levels)
    if not used:
        return None
    digests = table.record.digests
    return TableRef(
        name=table.record.model_id,
        codecs={codec: digests[codec] for codec in used},
        location=location,
    )


def check_chunks(chunk_tokens: int | None) -> None:
    """Raise ValueError for chunks of a length that no artefact has; None is the default one."""
    if chunk_tokens is not None and not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        raise ValueError(
            f"expected chunks of 1 to {MAX_CHUNK_TOKENS} tokens, got chunk_tokens={chunk_tokens}"
        )


def check_push(
    repo_id: str | None,
    options: Mapping[str, Any],
    *,
    token: str | None = None,
    endpoint: str | None = None,
) -> None:
    """Refuse what :func:`push_artifact` would refuse in the end. Nothing is made on the Hub.

    Parameters
    ----------
    repo_id
        Where to push to; None: nowhere.
    options
        Further keywords of :func:`push_artifact`.
    token, endpoint
        As everywhere in huggingface_hub, unless they are among the options.

    Raises
    ------
    ValueError
        An option is unknown or has no push to go with, or the repository's name is malformed.
    StoreError
        The Hub cannot be reached, or does not know the token.
    """
    if repo_id is None:
        if options:
            raise ValueError(f"expected no {', '.join(options)} without push_to_hub")
        return
    known = set(inspect.signature(push_artifact).parameters) - {"folder", "repo_id"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"unknown {', '.join(unknown)}; a push takes {', '.join(sorted(known))}")
    validate_repo_id(repo_id)
    token, endpoint = options.get("token", token), options.get("endpoint", endpoint)
    try:
        _check_token(endpoint, get_token() if token is None else token)
    except (HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise StoreError(
            f"cannot push to {repo_id}: {reason}; pass token=... or run `hf auth login`"
        ) from error


@functools.cache  # the Hub limits how often it is asked, and many saves ask the same
def _check_token(endpoint: str | None, token: str | None) -> None:
    HfApi(endpoint=endpoint, token=token).whoami()
