"""The codecs of an artefact's levels, with the model table found where the artefact says."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from hf_cachegen.streaming.meter import Meter
from hf_cachegen.tables import ModelTable, TableRecord
from hf_cachegen.tables.download import arrived_bytes, download_table, stream_table

TableSource = ModelTable | str | os.PathLike[str]
"""A loaded table, or the folder, URL or Hub repository of one."""


def load_table(
    source: TableSource, codecs: Collection[str] | None = None, /, **hub_options: Any
) -> tuple[ModelTable, str]:
    """The table that ``source`` names, and the location by which an artefact may refer to it.

    That is the Hub repository it came from, else ``"embedded"``. ``codecs`` says what to read of
    it, as for :meth:`ModelTable.load`; a loaded table is returned as it is. What is fetched is
    kept in the table cache. ``hub_options`` are those of :func:`~hf_cachegen.stores.open_store`.
    """
    if isinstance(source, ModelTable):
        return source, EMBEDDED
    with open_store(source, **hub_options) as store:
        table = _acquire(TableRecord.read(store).subset(codecs), store)
        return table, store.repo_id if isinstance(store, HubStore) else EMBEDDED


def load_counted_table(
    source: str | os.PathLike[str], **hub_options: Any
) -> tuple[ModelTable, dict[str, int]]:
    """As :func:`load_table`, with the bytes by codec that this machine did not have of it."""
    with open_store(source, **hub_options) as store:
        record = TableRecord.read(store)
        missing: dict[str, int] = {
            entry.codec: entry.arrays.size_bytes
            for entry in record.codecs
            if not (isinstance(store, LocalStore) or _is_kept(record.digests[entry.codec]))
        }
        return _acquire(record, store), missing


class LevelCodecs:
    """Codecs by level index, built when first used.

    The part of the table that a codec needs comes from ``tables`` if given, else from a local
    artefact that it is embedded in, else from the local table cache, else from the artefact or the
    table's own repository. It is then kept in the table cache, by its digest, since all artefacts
    of a model share it, unless it was made of this one's context. When the artefact's store is
    closed before all of it has come, the next session goes on from there. Nothing is read for
    codecs that are not used. The table cache is the folder ``hf-cachegen/tables`` of ``HF_HOME``,
    which may be deleted at any time.

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
        self._store = store
        self._parts = None
        if reference is not None:
            self._parts = _TableParts(reference, layout, store, tables, hub_options or {})
        self._codecs: dict[int, SegmentCodec] = {}
        # One for each: what needs no table does not wait for one.
        self._locks = [threading.Lock() for _ in levels]

    def __getitem__(self, level: int) -> SegmentCodec:
        with self._locks[level]:
            if level not in self._codecs:
                record = self._levels[level]
                table = None
                if self._parts is not None and table_codecs([record]):
                    table = self._parts.part(record.codec, lambda: not self._store.is_closed)
                self._codecs[level] = codec_for(record, self._layout, table, kept=self._kept)
            return self._codecs[level]

    def prepare(self, level: int, meter: Meter) -> None:
        """Fetch the part of the table that a level needs, unless it is at hand.

        The meter expects it from then on, and is told as it arrives, whoever may fetch it.
        """
        needed = table_codecs([self._levels[level]])
        if self._parts is not None and not all(map(self._parts.is_at_hand, needed)):
            with self._parts.watchers.joined_by(meter):
                self[level]

    def missing_bytes(self, level: int) -> int | None:
        """What :meth:`prepare` would fetch for a level, besides the table's record.

        0 if the level needs no table, or its part is at hand; else what is missing of the part:
        what an interrupted fetch has left counts as there, and so does what another process is
        fetching. None as long as the part's size is not known, since no request is made for it:
        it is once the record was read, by the constructor if ``tables`` is a location, else when
        the part is first prepared.
        """
        needed = table_codecs([self._levels[level]])
        if self._parts is None or not needed:
            return 0
        return self._parts.missing_bytes(self._levels[level].codec)

    def table(self) -> ModelTable | None:
        """The artefact's table, all of its codecs; None if it has none."""
        return None if self._parts is None else self._parts.whole()


class _Watchers:
    """Meters of transfers that wait for a table to arrive."""

    def __init__(self) -> None:
        self._meters: list[Meter] = []
        self._expected_bytes = 0
        self._left_bytes = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def joined_by(self, meter: Meter) -> Iterator[None]:
        """A meter expects what is left of the table, and is told of it."""
        with self._lock:
            self._meters.append(meter)
            meter.expect_more(self._left_bytes)
        try:
            yield
        finally:
            with self._lock:
                self._meters.remove(meter)

    def expect(self, size_bytes: int) -> None:
        """So much of a table is about to arrive."""
        with self._lock:
            self._expected_bytes = self._left_bytes = size_bytes
            for meter in self._meters:
                meter.expect_more(size_bytes)

    def progress(self, size_bytes: int) -> None:
        """Some of it has arrived, or was damaged if negative."""
        with self._lock:
            self._progress(size_bytes)

    def begin_again(self) -> None:
        """What has arrived counts no more."""
        with self._lock:
            self._progress(self._left_bytes - self._expected_bytes)

    def _progress(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes
        for meter in self._meters if size_bytes else ():
            meter.progress(size_bytes)


class _TableParts:
    """The parts of an artefact's table, one for each codec, found when first asked for.

    Attributes
    ----------
    watchers
        Who is told as a part arrives.
    """

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
        self._records: dict[str, TableRecord] = {}
        self._locks = {codec: threading.Lock() for codec in reference.codecs}
        self.watchers = _Watchers()
        if source is not None:
            self._check_source(source)

    def part(self, codec: str, is_wanted: Callable[[], bool] = lambda: True) -> ModelTable:
        """A table that holds this codec.

        Its download ends with a StoreError once ``is_wanted`` says no.
        """
        if codec not in self._reference.codecs:
            raise TableMismatch(
                f"the cache has levels of the codec {codec!r} but names a table for "
                f"{', '.join(self._reference.codecs)} only; encode it again"
            )
        with self._locks[codec]:
            if codec not in self._found:
                table = self._find(codec, is_wanted)
                table.check_layout(self._layout)
                self._found[codec] = table
            return self._found[codec]

    def is_at_hand(self, codec: str) -> bool:
        """Whether this machine has the part of a codec."""
        digest = self._reference.codecs.get(codec)
        return digest is not None and (
            codec in self._found
            or isinstance(self._source, ModelTable)
            or self._is_on_disk
            or _is_kept(digest)
        )

    def missing_bytes(self, codec: str) -> int | None:
        """What is not here yet of the part of a codec; None if its size is not known."""
        if self.is_at_hand(codec):
            return 0
        record = self._records.get(codec)
        if record is None:
            return None
        here_bytes = arrived_bytes(record, _cache_folder(record.digests[codec]))
        return record.size_bytes - here_bytes

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
        """Check the digests of some codecs, and note what the record says of each."""
        digests = record.digests
        for codec in codecs:
            expected = self._reference.codecs[codec]
            if digests.get(codec) != expected:
                raise TableMismatch(
                    f"the cache was encoded with a table of {self._reference.name} whose part for "
                    f"{codec} has the digest {expected}, {found} {digests.get(codec, 'none')}; "
                    "pass the original table, or none to use the one the cache names"
                )
            self._records[codec] = record.subset([codec])

    def _find(self, codec: str, is_wanted: Callable[[], bool]) -> ModelTable:
        if isinstance(self._source, ModelTable):
            return self._source  # which was checked already
        if not self._is_on_disk:  # what is should show if it is damaged
            kept = _kept(codec, self._reference.codecs[codec])
            if kept is not None:
                return kept
        with self._opened() as (store, folder):
            record = TableRecord.read(store, folder).subset([codec])
            self._check(record, [codec], f"{self._location} now holds")
            return _acquire(record, store, folder, is_wanted, self.watchers)

    @property
    def _location(self) -> str | os.PathLike[str]:
        assert not isinstance(self._source, ModelTable)
        return self._reference.location if self._source is None else self._source

    @property
    def _is_on_disk(self) -> bool:
        if self._location == EMBEDDED:
            return isinstance(self._store, LocalStore)
        return self._source is not None and Path(self._location).is_dir()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Store, str]]:
        """The store that the table is in, and its folder there."""
        if self._location == EMBEDDED:
            yield self._store, self._reference.folder
        else:
            with open_store(self._location, **self._hub_options) as store:
                yield store, ""


def _acquire(
    record: TableRecord,
    store: Store,
    folder: str = "",
    is_wanted: Callable[[], bool] = lambda: True,
    watchers: _Watchers | None = None,
) -> ModelTable:
    """The table of a record, of whose codecs the table cache has or gets each that it may keep."""
    if isinstance(store, LocalStore):
        return ModelTable.read(record, store, folder)
    watchers = watchers or _Watchers()
    if is_of_one_cache(record):
        watchers.expect(record.size_bytes)
        return stream_table(record, store, folder, progress=watchers.progress, is_wanted=is_wanted)
    parts = [
        _acquire_part(record.subset([codec]), store, folder, is_wanted, watchers)
        for codec in record.codec_names
    ]
    return ModelTable(
        record,
        {name: tables for part in parts for name, tables in part.tables.items()},
        {name: payload for part in parts for name, payload in part.payloads.items()},
    )


def _acquire_part(
    record: TableRecord,
    store: Store,
    folder: str,
    is_wanted: Callable[[], bool],
    watchers: _Watchers,
) -> ModelTable:
    ((codec, digest),) = record.digests.items()
    kept = _kept(codec, digest)
    if kept is not None:
        return kept
    watchers.expect(record.size_bytes)
    # A table cache that cannot be written to, or that somebody else holds, costs time only.
    with contextlib.suppress(OSError, ValueError):
        return download_table(
            record,
            store,
            folder,
            _cache_folder(digest),
            progress=watchers.progress,
            is_wanted=is_wanted,
        )
    watchers.begin_again()
    return stream_table(record, store, folder, progress=watchers.progress, is_wanted=is_wanted)


def _kept(codec: str, digest: str) -> ModelTable | None:
    """The part of a digest in the table cache, None if it is not there or damaged."""
    if not _is_kept(digest):
        return None
    # A damaged entry is fetched again, and replaced.
    with contextlib.suppress(FormatError, StoreError, TableMismatch):
        table = ModelTable.load(LocalStore(_cache_folder(digest)), codecs=[codec])
        return table if table.record.digests[codec] == digest else None
    return None


def _is_kept(digest: str) -> bool:
    return _cache_folder(digest).is_dir()


def _cache_folder(digest: str) -> Path:
    return Path(HF_HOME) / "hf-cachegen" / "tables" / digest
