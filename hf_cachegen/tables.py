"""Model tables: the statistics a codec needs of a model, profiled once and published beside it.

A table is a folder::

    table.json            what it belongs to and how it was made (:class:`TableRecord`)
    table.safetensors     the codec's arrays
    README.md             a card for people
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from hf_cachegen.codec.delta import DeltaConfig, DeltaTables
from hf_cachegen.errors import FormatError, TableMismatch
from hf_cachegen.layout import KVLayout, Record, canonical_json
from hf_cachegen.stores.base import Store

RECORD_NAME = "table.json"
ARRAYS_NAME = "table.safetensors"
CARD_NAME = "README.md"

MAX_RECORD_BYTES = 64 << 20
MAX_ARRAYS_BYTES = 4 << 30

SampleData = tuple[tuple[str, int], ...]


class TableRecord(Record):
    """``table.json``.

    Attributes
    ----------
    model_id
        Model that was profiled, for people.
    config
        Digest of the model's config.
    layout
        What the model caches; an encoder's layout must agree.
    params
        Parameters of the codec.
    data
        (name, tokens) of each sample the statistics come from.
    arrays
        BLAKE2b of ``table.safetensors``, 32 hex digits.
    """

    format: Literal["hf-cachegen-table"] = "hf-cachegen-table"
    version: Literal[1] = 1
    library_version: str = Field(default_factory=lambda: importlib.metadata.version("hf-cachegen"))
    model_id: str
    config: str
    codec: Literal["delta"] = "delta"
    layout: KVLayout
    params: DeltaConfig
    data: SampleData = Field(strict=False)
    arrays: str = Field(pattern=r"^[0-9a-f]{32}$")


@dataclass(frozen=True)
class ModelTable:
    """A validated table, ready for a codec.

    Attributes
    ----------
    record
        Identity and parameters.
    tables
        The codec's statistics.
    payload
        The bytes of ``table.safetensors``, which :attr:`digest` covers.
    """

    record: TableRecord
    tables: DeltaTables
    payload: bytes

    @classmethod
    def build(
        cls, tables: DeltaTables, *, model_id: str, config: str, layout: KVLayout, data: SampleData
    ) -> ModelTable:
        """Wrap freshly profiled statistics."""
        arrays = {name: np.ascontiguousarray(array) for name, array in tables.to_arrays().items()}
        payload = safetensors.numpy.save(arrays)
        record = TableRecord(
            model_id=model_id,
            config=config,
            layout=layout,
            params=tables.config,
            data=data,
            arrays=_digest(payload),
        )
        return cls(record, tables, payload)

    @classmethod
    def load(cls, store: Store, folder: str = "") -> ModelTable:
        """Read and check a table.

        Parameters
        ----------
        store
            Where the table is.
        folder
            Its folder inside the store.

        Raises
        ------
        StoreNotFound, StoreError
            A file is missing or cannot be read.
        FormatError
            The files are damaged, do not belong together, or are of a newer version.
        """
        prefix = f"{folder}/" if folder else ""
        where = f"{prefix}{RECORD_NAME} in {store.location}"
        try:
            record = TableRecord.model_validate_json(
                store.read(prefix + RECORD_NAME, max_bytes=MAX_RECORD_BYTES)
            )
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"])) or "document"
            raise FormatError(
                f"{where}: not a model table of this version ({field}: {first['msg']})"
            ) from error
        payload = store.read(prefix + ARRAYS_NAME, max_bytes=MAX_ARRAYS_BYTES)
        if _digest(payload) != record.arrays:
            raise FormatError(
                f"{prefix}{ARRAYS_NAME} in {store.location}: expected digest {record.arrays}, "
                f"found {_digest(payload)}; the file is damaged or of another table"
            )
        tables = DeltaTables.from_arrays(record.params, _read_arrays(payload, where), record.layout)
        return cls(record, tables, payload)

    @property
    def digest(self) -> str:
        """BLAKE2b of all that decoding depends on, 32 hex digits: codec, params, layout, arrays."""
        fields = {"codec", "params", "layout", "arrays", "version"}
        return _digest(canonical_json(self.record.model_dump(mode="json", include=fields)))

    @property
    def size_bytes(self) -> int:
        """Bytes a reader has to fetch."""
        return len(self.payload) + len(self._record_bytes())

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

    def save(self, folder: str | os.PathLike[str], card: str | None = None) -> Path:
        """Write the table's files and, if given, its card. The folder appears whole or not at all.

        A folder that holds this very table keeps its files; a card is replaced.

        Raises
        ------
        ValueError
            The folder holds something other than a table, which would be lost.
        """
        target = Path(folder)
        if not self._is_in(target):
            if target.exists() and not _may_be_replaced(target):
                raise ValueError(
                    f"expected a new folder or that of a table, {target} holds other files"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            self._replace(target)
        if card is not None:
            (target / CARD_NAME).write_text(card, encoding="utf-8")
        return target

    def _replace(self, target: Path) -> None:
        scratch = Path(tempfile.mkdtemp(prefix=".table-", dir=target.parent))
        new, old = scratch / "new", scratch / "old"
        try:
            new.mkdir()
            _write(new / ARRAYS_NAME, self.payload)
            _write(new / RECORD_NAME, self._record_bytes())
            self._put_in_place(new, target, old)
        finally:
            if old.exists() and not target.exists():
                old.rename(target)
            shutil.rmtree(scratch, ignore_errors=True)

    def _put_in_place(self, new: Path, target: Path, old: Path) -> None:
        """Rename ``new`` to ``target``; others may be doing the same."""
        with contextlib.suppress(OSError):
            new.rename(target)  # fails unless there is nothing, or an empty folder
        if self._is_in(target):
            return
        with contextlib.suppress(FileNotFoundError):
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if not self._is_in(target):
                raise

    def _is_in(self, folder: Path) -> bool:
        try:
            record = TableRecord.model_validate_json((folder / RECORD_NAME).read_bytes())
            return record == self.record and (folder / ARRAYS_NAME).read_bytes() == self.payload
        except (OSError, ValidationError):
            return False

    def _record_bytes(self) -> bytes:
        return self.record.model_dump_json(indent=1).encode()


def _may_be_replaced(folder: Path) -> bool:
    """Whether a folder holds a table, intact or not, or nothing."""
    ours = {RECORD_NAME, ARRAYS_NAME, CARD_NAME}
    return folder.is_dir() and all(path.name in ours for path in folder.iterdir())


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _read_arrays(payload: bytes, where: str) -> dict[str, NDArray[Any]]:
    try:
        return dict(safetensors.numpy.load(payload))
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise FormatError(f"{where}: not a safetensors file ({error}); fetch it again") from error
