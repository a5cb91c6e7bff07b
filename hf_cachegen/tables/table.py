"""A model's table: loaded and saved whole or in part."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from hf_cachegen.artifact.files import holds_files, replace_folder, temporaries, write_file
from hf_cachegen.codec.delta import DeltaTables
from hf_cachegen.codec.transform_tables import TransformTables
from hf_cachegen.errors import FormatError, TableMismatch
from hf_cachegen.layout import KVLayout
from hf_cachegen.stores.base import Store, intact
from hf_cachegen.tables.record import (
    RECORD_NAME,
    Arrays,
    ArraysFile,
    DeltaRecord,
    SampleData,
    TableRecord,
    TransformRecord,
    path_in,
)

CARD_NAME = "README.md"

CodecTables = DeltaTables | TransformTables
"""A codec's statistics: ``config``, ``to_arrays()`` and ``from_arrays()``."""

_TABLE_FILE = re.compile(r"table\.json|README\.md|[a-z0-9_-]+\.safetensors")


@dataclass(frozen=True, eq=False)
class ModelTable:
    """A validated table, ready for codecs.

    Attributes
    ----------
    record
        Identity and parameters of what this table holds.
    tables
        The codecs' statistics by name.
    payloads
        The bytes of the safetensors files by name.
    """

    record: TableRecord
    # Not in the representation: of megabytes, that takes half a second.
    tables: Mapping[str, CodecTables] = field(repr=False)
    payloads: Mapping[str, bytes] = field(repr=False)

    @classmethod
    def build(
        cls,
        *tables: CodecTables,
        model_id: str,
        config: str,
        layout: KVLayout,
        data: SampleData,
    ) -> ModelTable:
        """Wrap freshly profiled statistics, one of each codec."""
        entries: list[DeltaRecord | TransformRecord] = []
        payloads: dict[str, bytes] = {}
        for statistics in tables:
            payload = _to_bytes(statistics.to_arrays())
            entry = _entry(statistics, ArraysFile.of(payload))
            entries.append(entry)
            payloads[entry.file_name] = payload
        record = TableRecord(
            model_id=model_id, config=config, layout=layout, data=data, codecs=tuple(entries)
        )
        return cls(record, dict(zip(record.codec_names, tables, strict=True)), payloads)

    @classmethod
    def load(
        cls, store: Store, folder: str = "", codecs: Collection[str] | None = None
    ) -> ModelTable:
        """Read and check a table, or part of it.

        Parameters
        ----------
        store
            Where the table is.
        folder
            Its folder inside the store.
        codecs
            Names of the codecs whose files are read; None: all.

        Raises
        ------
        StoreNotFound, StoreError
            A file is missing or cannot be read.
        FormatError
            The files are damaged, do not belong together, or are of another version.
        TableMismatch
            The table lacks one of the codecs.
        """
        return cls.read(TableRecord.read(store, folder).subset(codecs), store, folder)

    @classmethod
    def read(cls, record: TableRecord, store: Store, folder: str = "") -> ModelTable:
        """Read and check the files of a record that was read; else as :meth:`load`."""
        payloads = {
            entry.file_name: intact(
                partial(_read, store, path_in(folder, entry.file_name), entry.arrays)
            )
            for entry in record.codecs
        }
        return cls.parse(record, payloads, f"{store.location}/{folder}".rstrip("/"))

    @classmethod
    def parse(cls, record: TableRecord, payloads: Mapping[str, bytes], where: str) -> ModelTable:
        """The table of a record and its files.

        Parameters
        ----------
        record
            What the files are said to hold.
        payloads
            By name, bytes that the record's digests are of.
        where
            Folder that they come from, for messages.

        Raises
        ------
        FormatError
            A file is not what the record says.
        """
        tables: dict[str, CodecTables] = {}
        for entry in record.codecs:
            name = entry.file_name
            arrays = _to_arrays(payloads[name], f"{name} in {where}")
            tables[entry.codec] = entry.tables(record.layout, arrays)
        return cls(record, tables, payloads)

    @classmethod
    def join(cls, parts: Sequence[ModelTable]) -> ModelTable:
        """One table of parts that have the same layout and different codecs.

        Everything else, such as the data, is said to be that of the first part.
        """
        first = parts[0].record
        if any(part.record.layout != first.layout for part in parts):
            raise FormatError(
                "expected parts of a table with the same layout, found several layouts"
            )
        entries = [entry for part in parts for entry in part.record.codecs]
        return cls(
            TableRecord.model_validate(dict(first) | {"codecs": tuple(entries)}),
            {name: tables for part in parts for name, tables in part.tables.items()},
            {name: payload for part in parts for name, payload in part.payloads.items()},
        )

    def size_bytes(self) -> int:
        """Length of the table's files, without a card."""
        return sum(map(len, self.files().values()))

    def check_layout(self, layout: KVLayout) -> None:
        """Raise TableMismatch unless the table was profiled on a model that caches the same."""
        ours, theirs = (
            value.model_dump(exclude={"dtype"}) for value in (layout, self.record.layout)
        )
        if ours != theirs:
            raise TableMismatch(
                f"the table was profiled on {self.record.model_id}, whose cache has another layout "
                f"({len(self.record.layout.layers)} layers of "
                f"{self.record.layout.layers[0].channels} values a token; this model: "
                f"{len(layout.layers)} of {layout.layers[0].channels}) or another RoPE; profile "
                "this model with `hf-cachegen profile`, or pass tables='auto'"
            )

    def save(
        self,
        folder: str | os.PathLike[str],
        card: str | None = None,
        *,
        codecs: Collection[str] | None = None,
    ) -> Path:
        """Write the table's files and, if given, its card. The folder appears whole or not at all.

        A folder that holds this very table keeps its files; a card is replaced.

        Parameters
        ----------
        folder
            Created if need be.
        card
            Markdown for people.
        codecs
            Write part of the table only, as for :meth:`load`.

        Raises
        ------
        ValueError
            The folder holds something other than a table, which would be lost.
        TableMismatch
            The table lacks one of the codecs.
        """
        target, files = Path(folder), self.files(codecs)
        if not holds_files(target, files):
            check_replaceable(target)
            replace_folder(target, files)
        if card is not None:
            write_file(target / CARD_NAME, card.encode())
        return target

    def files(self, codecs: Collection[str] | None = None) -> dict[str, bytes]:
        """The bytes of the table's files by name, or of those that some codecs need."""
        record = self.record.subset(codecs)
        names = [entry.file_name for entry in record.codecs]
        return {RECORD_NAME: record.to_bytes(), **{name: self.payloads[name] for name in names}}


def check_replaceable(folder: Path) -> None:
    """Raise ValueError if a folder holds other files than those of a table, intact or not."""
    if not folder.exists():
        return
    if not folder.is_dir() or not all(
        _TABLE_FILE.fullmatch(path.name) for path in {*folder.iterdir()} - {*temporaries(folder)}
    ):
        raise ValueError(f"expected a new folder or that of a table, {folder} holds other files")


def _entry(tables: CodecTables, arrays: ArraysFile) -> DeltaRecord | TransformRecord:
    if isinstance(tables, DeltaTables):
        return DeltaRecord(params=tables.config, arrays=arrays)
    return TransformRecord(params=tables.config, arrays=arrays)


def _to_bytes(arrays: Arrays) -> bytes:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    payload: bytes = safetensors.numpy.save(contiguous)
    return payload


def check_payload(payload: bytes, file: ArraysFile, where: str) -> None:
    """Raise FormatError unless these bytes, which come from a place, are those of a record."""
    found = ArraysFile.of(payload)
    if found != file:
        raise FormatError(
            f"{where}: expected {file.size_bytes} bytes of digest {file.digest}, found "
            f"{found.size_bytes} of {found.digest}; the file is damaged or of another table"
        )


def _read(store: Store, path: str, file: ArraysFile) -> bytes:
    """The bytes of a file, checked against the record."""
    payload = store.read(path, max_bytes=file.size_bytes)
    check_payload(payload, file, f"{path} in {store.location}")
    return payload


def _to_arrays(payload: bytes, where: str) -> dict[str, NDArray[Any]]:
    try:
        return dict(safetensors.numpy.load(payload))
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise FormatError(f"{where}: not a safetensors file ({error}); fetch it again") from error
