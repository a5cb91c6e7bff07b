"""Whether a folder holds already what a save would write, told without running the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from hf_cachegen.artifact import EMBEDDED, Artifact, Manifest
from hf_cachegen.artifact.identity import compare_identity
from hf_cachegen.codec.delta import DeltaTables
from hf_cachegen.codec.importance import Importance, Mode
from hf_cachegen.config import CHUNK_TOKENS
from hf_cachegen.errors import FormatError, StoreError, TableMismatch
from hf_cachegen.hf.codecs import load_table
from hf_cachegen.hf.describe import expected_identity, model_name
from hf_cachegen.hf.profiling import AUTO_CONFIG
from hf_cachegen.hf.saving import Tables, refer
from hf_cachegen.levels import (
    LOSSLESS,
    RAW,
    available_levels,
    default_levels,
    select_levels,
    weighted_levels,
)
from hf_cachegen.stores import LocalStore
from hf_cachegen.tables import ModelTable


def find_saved(
    folder: str | os.PathLike[str],
    model: PreTrainedModel,
    token_ids: Tensor,
    *,
    tables: Tables = "auto",
    levels: Sequence[str] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    importance: Mode = "predicted",
    model_id: str | None = None,
) -> Manifest | None:
    """The complete artefact in a folder, if it is what :func:`save_cache` would write there.

    Of what is cached only the length of the files is looked at.

    Parameters
    ----------
    folder
        Need not exist.
    model
        Whose cache it is.
    token_ids
        ``[T]`` of the context.
    tables, levels, chunk_tokens, importance, model_id
        As for :func:`save_cache`.

    Returns
    -------
    Manifest or None
        None if there is no artefact, one of something else, or a damaged one.

    Raises
    ------
    ValueError, StoreError, FormatError, TableMismatch
        As :func:`save_cache` for ``levels`` and ``tables``.
    """
    artifact = _open(folder)
    if artifact is None or not np.array_equal(artifact.token_ids, token_ids.numpy()):
        return None
    found = artifact.manifest
    if found.kept is not None:
        return None
    exact_only = levels is not None and {LOSSLESS.name, RAW.name}.issuperset(levels)
    table, location = None, EMBEDDED
    if tables == "auto" and found.identity.layout.layers and not exact_only:
        table = _own_table(artifact)
        if table is None:
            return None
    elif tables not in ("auto", None) and found.identity.layout.layers:
        table, location = load_table(tables)
    available = available_levels(table)
    chosen = default_levels(table) if levels is None else select_levels(available, levels)
    chosen = weighted_levels(chosen, Importance(importance, len(token_ids)))
    identity = expected_identity(model, found.identity).model_copy(
        update={
            "model_id": model_id or model_name(model),
            "table": refer(table, location, chosen),
        }
    )
    same = (
        not compare_identity(identity, found.identity)
        and chosen == found.levels
        and chunk_tokens == found.chunk_tokens
    )
    return found if same else None


def _open(folder: str | os.PathLike[str]) -> Artifact | None:
    """The artefact in a folder, None if there is none or a file is missing or damaged."""
    try:
        artifact = Artifact.open(LocalStore(folder))
        sizes = [(Path(folder) / file.path).stat().st_size for file in artifact.manifest.files]
    except (StoreError, FormatError, OSError):
        return None
    intact = sizes == [file.size_bytes for file in artifact.manifest.files]
    return artifact if intact else None


def _own_table(artifact: Artifact) -> ModelTable | None:
    """The table that was made from an artefact's own cache, None if it has none such."""
    reference = artifact.manifest.identity.table
    if reference is None or reference.location != EMBEDDED:
        return None
    try:
        table = ModelTable.load(artifact.store, reference.folder, codecs=reference.codecs)
    except (StoreError, FormatError, TableMismatch):
        return None
    delta = table.tables.get("delta")
    own = isinstance(delta, DeltaTables) and delta.config == AUTO_CONFIG
    return table if own else None
