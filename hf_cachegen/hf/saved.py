"""What a folder holds of what a save would write, told without running the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from hf_cachegen.artifact import (
    EMBEDDED,
    Artifact,
    ArtifactWriter,
    LevelRecord,
    Manifest,
    TableRef,
)
from hf_cachegen.artifact.identity import compare_identity
from hf_cachegen.artifact.writer import ADVICE, check_free, open_previous
from hf_cachegen.codec.importance import Importance, Mode
from hf_cachegen.config import CHUNK_TOKENS
from hf_cachegen.errors import FormatError, IdentityError, StoreError, TableMismatch
from hf_cachegen.hf.describe import expected_identity, model_name
from hf_cachegen.hf.profiling import is_of_one_cache
from hf_cachegen.hf.settings import Tables, choose, refer
from hf_cachegen.levels import weighted_levels
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
    choice = choose(tables, levels, model)
    chosen = weighted_levels(choice.levels, Importance(importance, len(token_ids)))
    reference = choice.reference(chosen)
    if reference == "auto":
        table = _own_table(artifact)
        if table is None:
            return None
        reference = refer(table, EMBEDDED, chosen)
    identity = expected_identity(model, found.identity).model_copy(
        update={"model_id": model_id or model_name(model), "table": reference}
    )
    same = (
        not compare_identity(identity, found.identity)
        and chosen == found.levels
        and chunk_tokens == found.chunk_tokens
    )
    return found if same else None


def check_target(
    folder: str | os.PathLike[str],
    model: PreTrainedModel,
    token_ids: Tensor,
    levels: Sequence[LevelRecord],
    chunk_tokens: int,
    reference: TableRef | Literal["auto"] | None,
    kept: NDArray[np.bool_] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Refuse a folder that a save would refuse in the end. Nothing is made.

    Parameters
    ----------
    folder
        Need not exist.
    model, token_ids, levels, chunk_tokens, kept, overwrite
        Of the save, as for :class:`~hf_cachegen.artifact.ArtifactWriter`.
    reference
        The table in use; ``"auto"``: one that is still to be made from the cache.

    Raises
    ------
    IdentityError, FormatError, StoreError
        As :class:`~hf_cachegen.artifact.ArtifactWriter`.
    """
    check_free(Path(folder))
    artifact = None if overwrite else open_previous(Path(folder))
    if artifact is None:
        return
    found = artifact.manifest.identity
    if reference == "auto":
        if not np.array_equal(artifact.token_ids, token_ids.numpy()):
            raise IdentityError(
                f"{folder} holds a cache of other tokens, which cannot be extended with a table "
                f"of its own for each context, as tables='auto' makes; {ADVICE}"
            )
        reference = found.table
    identity = expected_identity(model, found).model_copy(update={"table": reference})
    ArtifactWriter(folder, identity, levels, chunk_tokens, token_ids.numpy(), kept=kept).close()


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
    return table if is_of_one_cache(table.record) else None
