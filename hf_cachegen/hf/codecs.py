"""The codecs of an artefact's levels, with the model table found where the artefact says."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from hf_cachegen.artifact import EMBEDDED, LevelRecord, TableRef
from hf_cachegen.codec.base import SegmentCodec
from hf_cachegen.errors import FormatError, StoreError, TableMismatch
from hf_cachegen.layout import KVLayout
from hf_cachegen.levels import codec_for
from hf_cachegen.stores import HubStore, LocalStore, Store, open_store
from hf_cachegen.tables import ModelTable

TableSource = ModelTable | str | os.PathLike[str]
"""A loaded table, or the folder, URL or Hub repository of one."""


def load_table(source: TableSource, **hub_options: Any) -> tuple[ModelTable, str]:
    """The table that ``source`` names, and the location by which an artefact may refer to it.

    That is the Hub repository it came from, else ``"embedded"``. ``hub_options`` are those of
    :func:`~hf_cachegen.stores.open_store`.
    """
    if isinstance(source, ModelTable):
        return source, EMBEDDED
    with open_store(source, **hub_options) as store:
        table = ModelTable.load(store)
        return table, store.repo_id if isinstance(store, HubStore) else EMBEDDED


class LevelCodecs:
    """Codecs by level index, built when first used.

    The table comes from ``table`` if that is the right one, else from the local table cache, else
    from inside the artefact or from its own repository; it is then kept in the table cache, since
    all artefacts of a model share it.

    Parameters
    ----------
    levels, layout
        Of the artefact.
    reference
        The table the artefact was encoded with; None if no level needs one.
    store
        The artefact's store.
    table
        A table the caller has.
    hub_options
        Options of huggingface_hub for a table in a repository of its own.
    """

    def __init__(
        self,
        levels: Sequence[LevelRecord],
        layout: KVLayout,
        reference: TableRef | None,
        store: Store,
        table: ModelTable | None = None,
        hub_options: Mapping[str, Any] | None = None,
    ) -> None:
        if table is not None and reference is not None and table.digest != reference.digest:
            raise TableMismatch(
                f"the cache was encoded with the table {reference.name} of digest "
                f"{reference.digest}, the given table has {table.digest}; pass the right one, or "
                "none to use the one the cache names"
            )
        self._levels = levels
        self._layout = layout
        self._reference = reference
        self._store = store
        self._table = table
        self._hub_options = hub_options or {}
        self._codecs: dict[int, SegmentCodec] = {}
        self._lock = threading.Lock()

    def __getitem__(self, level: int) -> SegmentCodec:
        with self._lock:
            if level not in self._codecs:
                record = self._levels[level]
                table = None if record.exact else self.table()
                self._codecs[level] = codec_for(record, self._layout, table)
            return self._codecs[level]

    def table(self) -> ModelTable | None:
        """The artefact's table, None if it has none."""
        if self._table is None and self._reference is not None:
            self._table = _find_table(self._reference, self._store, self._hub_options)
        return self._table


def _find_table(reference: TableRef, store: Store, hub_options: Mapping[str, Any]) -> ModelTable:
    cached = Path(HF_HOME) / "hf-cachegen" / "tables" / reference.digest
    if cached.is_dir():
        try:
            table = ModelTable.load(LocalStore(cached))
            if table.digest == reference.digest:
                return table
        except (FormatError, StoreError):
            pass  # a damaged cache entry is fetched again below, and replaced
    if reference.location == EMBEDDED:
        table = ModelTable.load(store, reference.folder)
    else:
        table, _ = load_table(reference.location, **hub_options)
    if table.digest != reference.digest:
        raise TableMismatch(
            f"the cache was encoded with a table of digest {reference.digest}, but "
            f"{reference.location} now holds {table.digest}; pass the original table"
        )
    # A table cache that cannot be written to costs time only.
    with contextlib.suppress(OSError, ValueError):
        table.save(cached)
    return table
