"""The codecs of an artefact's levels, with the model table found where the artefact says."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME
from torch import Tensor

from hf_cachegen.artifact import EMBEDDED, LevelRecord, TableRef
from hf_cachegen.codec.base import SegmentCodec
from hf_cachegen.errors import FormatError, StoreError, TableMismatch
from hf_cachegen.hf.profiling import is_of_one_cache
from hf_cachegen.layout import KVLayout
from hf_cachegen.levels import codec_for, table_codecs
from hf_cachegen.stores import HubStore, LocalStore, Store, open_store
from hf_cachegen.tables import ModelTable, TableRecord

TableSource = ModelTable | str | os.PathLike[str]
"""A loaded table, or the folder, URL or Hub repository of one."""


def load_table(
    source: TableSource, codecs: Collection[str] | None = None, /, **hub_options: Any
) -> tuple[ModelTable, str]:
    """The table that ``source`` names, and the location by which an artefact may refer to it.

    That is the Hub repository it came from, else ``"embedded"``. ``codecs`` says what to read of
    it, as for :meth:`ModelTable.load`; a loaded table is returned as it is. ``hub_options`` are
    those of :func:`~hf_cachegen.stores.open_store`.
    """
    if isinstance(source, ModelTable):
        return source, EMBEDDED
    with open_store(source, **hub_options) as store:
        table = ModelTable.load(store, codecs=codecs)
        return table, store.repo_id if isinstance(store, HubStore) else EMBEDDED


class LevelCodecs:
    """Codecs by level index, built when first used.

    The part of the table that a codec needs comes from ``tables`` if given, else from a local
    artefact that it is embedded in, else from the local table cache, else from the artefact or the
    table's own repository. It is then kept in the table cache, by its digest, since all artefacts
    of a model share it, unless it was made of this one's context. Nothing is read for codecs that
    are not used. The table cache is the folder ``hf-cachegen/tables`` of ``HF_HOME``, which may be
    deleted at any time.

    Parameters
    ----------
    levels, layout
        Of the artefact.
    reference
        The table the artefact was encoded with; None if no level needs one.
    store
        The artefact's store.
    tables
        A table the caller has, or where it is.
    hub_options
        Options of huggingface_hub for a table in a repository of its own.
    kept
        As for :class:`SegmentCodec`.

    Raises
    ------
    TableMismatch
        ``tables`` is not the table that the artefact was encoded with.
    StoreError, FormatError
        ``tables`` is a location whose ``table.json`` cannot be read, or is damaged.
    """

    def __init__(
        self,
        levels: Sequence[LevelRecord],
        layout: KVLayout,
        reference: TableRef | None,
        store: Store,
        tables: TableSource | None = None,
        hub_options: Mapping[str, Any] | None = None,
        *,
        kept: Tensor | None = None,
    ) -> None:
        self._levels = levels
        self._kept = kept
        self._layout = layout
        self._parts = None
        if reference is not None:
            self._parts = _TableParts(reference, layout, store, tables, hub_options or {})
        self._codecs: dict[int, SegmentCodec] = {}
        self._lock = threading.Lock()

    def __getitem__(self, level: int) -> SegmentCodec:
        with self._lock:
            if level not in self._codecs:
                record = self._levels[level]
                table = None
                if self._parts is not None and table_codecs([record]):
                    table = self._parts.part(record.codec)
                self._codecs[level] = codec_for(record, self._layout, table, kept=self._kept)
            return self._codecs[level]

    def prepare(self, level: int) -> None:
        """Fetch the part of the table that a level needs, unless it is at hand."""
        needed = table_codecs([self._levels[level]])
        if self._parts is not None and not all(map(self._parts.is_at_hand, needed)):
            self[level]

    def table(self) -> ModelTable | None:
        """The artefact's table, all of its codecs; None if it has none."""
        with self._lock:
            return None if self._parts is None else self._parts.whole()


class _TableParts:
    """The parts of an artefact's table, one for each codec, found when first asked for."""

    def __init__(
        self,
        reference: TableRef,
        layout: KVLayout,
        store: Store,
        source: TableSource | None,
        hub_options: Mapping[str, Any],
    ) -> None:
        self._reference = reference
        self._layout = layout
        self._store = store
        self._source = source
        self._hub_options = hub_options
        self._found: dict[str, ModelTable] = {}
        if source is not None:
            self._check_source(source)

    def part(self, codec: str) -> ModelTable:
        """A table that holds this codec."""
        if codec not in self._reference.codecs:
            raise TableMismatch(
                f"the cache has levels of the codec {codec!r} but names a table for "
                f"{', '.join(self._reference.codecs)} only; encode it again"
            )
        if codec not in self._found:
            table = self._find(codec)
            table.check_layout(self._layout)
            self._found[codec] = table
        return self._found[codec]

    def is_at_hand(self, codec: str) -> bool:
        """Whether this machine has the part of a codec."""
        if codec in self._found or isinstance(self._source, ModelTable):
            return True
        if self._source is not None:
            return Path(self._source).is_dir()
        return self._is_in_local_artifact or self._cache_folder(codec).is_dir()

    def whole(self) -> ModelTable:
        """All parts in one table."""
        if isinstance(self._source, ModelTable):
            return self._source
        parts = [self.part(codec) for codec in self._reference.codecs]
        return parts[0] if len(parts) == 1 else ModelTable.join(parts)

    def _check_source(self, source: TableSource) -> None:
        if isinstance(source, ModelTable):
            record = source.record
        else:
            with open_store(source, **self._hub_options) as store:
                record = TableRecord.read(store)
        self._check(record, self._reference.codecs, "the given table has")

    def _check(self, record: TableRecord, codecs: Collection[str], found: str) -> None:
        digests = record.digests
        for codec in codecs:
            expected = self._reference.codecs[codec]
            if digests.get(codec) != expected:
                raise TableMismatch(
                    f"the cache was encoded with a table of {self._reference.name} whose part for "
                    f"{codec} has the digest {expected}, {found} {digests.get(codec, 'none')}; "
                    "pass the original table, or none to use the one the cache names"
                )

    def _find(self, codec: str) -> ModelTable:
        if isinstance(self._source, ModelTable):
            return self._source  # which was checked already
        if self._source is not None:
            table, _ = load_table(self._source, [codec], **self._hub_options)
            self._check(table.record, [codec], f"{self._source} now holds")
            return table
        if self._is_in_local_artifact:
            return self._fetch(codec)  # it is at hand, and should show if it is damaged
        kept = self._kept(codec)
        if kept is not None:
            return kept
        table = self._fetch(codec)
        if not is_of_one_cache(table):
            # A table cache that cannot be written to costs time only.
            with contextlib.suppress(OSError, ValueError):
                table.save(self._cache_folder(codec))
        return table

    @property
    def _is_in_local_artifact(self) -> bool:
        return self._reference.location == EMBEDDED and isinstance(self._store, LocalStore)

    def _fetch(self, codec: str) -> ModelTable:
        location = self._reference.location
        if location == EMBEDDED:
            table = ModelTable.load(self._store, self._reference.folder, [codec])
        else:
            table, _ = load_table(location, [codec], **self._hub_options)
        self._check(table.record, [codec], f"{location} now holds")
        return table

    def _kept(self, codec: str) -> ModelTable | None:
        """The part in the table cache, None if it is not there or damaged."""
        folder = self._cache_folder(codec)
        if not folder.is_dir():
            return None
        # A damaged entry is fetched again, and replaced.
        with contextlib.suppress(FormatError, StoreError, TableMismatch):
            table = ModelTable.load(LocalStore(folder), codecs=[codec])
            self._check(table.record, [codec], "the table cache has")
            return table
        return None

    def _cache_folder(self, codec: str) -> Path:
        return Path(HF_HOME) / "hf-cachegen" / "tables" / self._reference.codecs[codec]
