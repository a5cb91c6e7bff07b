"""What ``table.json`` says: the model, and each codec's parameters and files."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from numpy.typing import NDArray
from pydantic import Field, StringConstraints, ValidationError, model_validator

from hf_cachegen.codec.delta import DeltaConfig, DeltaTables
from hf_cachegen.codec.transform_tables import TransformConfig, TransformTables
from hf_cachegen.errors import FormatError, TableMismatch
from hf_cachegen.layout import KVLayout, Record, canonical_json
from hf_cachegen.stores.base import Store, intact

RECORD_NAME = "table.json"

MAX_RECORD_BYTES = 64 << 20
MAX_ARRAYS_BYTES = 4 << 30

SampleData = tuple[tuple[str, int], ...]
Arrays = Mapping[str, NDArray[Any]]


class ArraysFile(Record):
    """A safetensors file of a table: its BLAKE2b, 32 hex digits, and its length."""

    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    size_bytes: int = Field(ge=0, le=MAX_ARRAYS_BYTES)

    @classmethod
    def of(cls, payload: bytes) -> ArraysFile:
        """What describes these bytes."""
        return cls(digest=digest_of(payload), size_bytes=len(payload))


class CodecRecord(Record):
    """What a table holds for one codec.

    Attributes
    ----------
    codec
        Name of the codec.
    params
        Parameters of the codec.
    arrays
        The file of its statistics.
    """

    codec: str
    params: Record
    arrays: ArraysFile

    @property
    def file_name(self) -> str:
        """Name of the file."""
        return f"{self.codec}.safetensors"


class DeltaRecord(CodecRecord):
    """A table's part for ``delta``."""

    codec: Literal["delta"] = "delta"
    params: DeltaConfig

    def tables(self, layout: KVLayout, arrays: Arrays) -> DeltaTables:
        """The statistics in these arrays; FormatError when anything does not fit."""
        return DeltaTables.from_arrays(self.params, arrays, layout)


class TransformRecord(CodecRecord):
    """A table's part for ``transform``."""

    codec: Literal["transform"] = "transform"
    params: TransformConfig

    def tables(self, layout: KVLayout, arrays: Arrays) -> TransformTables:
        """The statistics in these arrays; FormatError when anything does not fit."""
        return TransformTables.from_arrays(self.params, arrays, layout)


class TableRecord(Record):
    """``table.json``.

    Attributes
    ----------
    model_id
        Model that was profiled, for people.
    config
        Digest of the model's config.
    layout
        What the model caches; that of whoever uses the table must agree.
    data
        (name, tokens) of each sample the statistics come from.
    codecs
        What the folder holds, codec by codec.
    """

    format: Literal["hf-cachegen-table"] = "hf-cachegen-table"
    version: Literal[2] = 2
    library_version: str = Field(default_factory=lambda: importlib.metadata.version("hf-cachegen"))
    model_id: str
    config: str
    layout: KVLayout
    data: SampleData = Field(strict=False)
    codecs: tuple[Annotated[DeltaRecord | TransformRecord, Field(discriminator="codec")], ...] = (
        Field(min_length=1, strict=False)
    )

    @model_validator(mode="after")
    def _each_codec_once(self) -> Self:
        if len(self.codec_names) != len(self.codecs):
            raise ValueError(f"expected each codec once, found {[c.codec for c in self.codecs]}")
        return self

    @classmethod
    def read(cls, store: Store, folder: str = "") -> TableRecord:
        """Read and check ``table.json``, and no other file.

        Parameters
        ----------
        store
            Where the table is.
        folder
            Its folder inside the store.

        Raises
        ------
        StoreNotFound, StoreError
            The file is missing or cannot be read.
        FormatError
            It is damaged or of another version.
        """
        path = path_in(folder, RECORD_NAME)

        def read() -> TableRecord:
            try:
                return cls.model_validate_json(store.read(path, max_bytes=MAX_RECORD_BYTES))
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                field = ".".join(map(str, first["loc"])) or "document"
                raise FormatError(
                    f"{path} in {store.location}: not a model table of this version "
                    f"({field}: {first['msg']})"
                ) from error

        return intact(read)

    @property
    def codec_names(self) -> tuple[str, ...]:
        """The codecs of the table."""
        return tuple(dict.fromkeys(entry.codec for entry in self.codecs))

    @property
    def size_bytes(self) -> int:
        """What there is to fetch of the table, ``table.json`` left out."""
        return sum(entry.arrays.size_bytes for entry in self.codecs)

    @property
    def digests(self) -> dict[str, str]:
        """By codec, the BLAKE2b of all that its segments depend on, 32 hex digits.

        That is the codec's name, parameters and arrays, the layout and the version.
        """
        shared = {"layout": self.layout.model_dump(mode="json"), "version": self.version}
        return {
            entry.codec: digest_of(
                canonical_json(
                    {
                        **shared,
                        "codec": entry.codec,
                        "params": entry.params.model_dump(mode="json"),
                        "arrays": entry.arrays.digest,
                    }
                )
            )
            for entry in self.codecs
        }

    def subset(self, codecs: Collection[str] | None = None) -> TableRecord:
        """The record of a folder with some codecs only.

        Parameters
        ----------
        codecs
            Names of codecs; None: all.

        Raises
        ------
        TableMismatch
            The table lacks one of the codecs.
        """
        names = set(self.codec_names if codecs is None else codecs)
        if not names:
            raise ValueError("expected at least one codec, got none")
        if missing := sorted(names - set(self.codec_names)):
            raise TableMismatch(
                f"the table of {self.model_id} holds {', '.join(self.codec_names)}; expected "
                f"{', '.join(missing)} too: profile the model for it, or use other levels"
            )
        kept = tuple(entry for entry in self.codecs if entry.codec in names)
        return self.model_copy(update={"codecs": kept})

    def to_bytes(self) -> bytes:
        """The JSON of ``table.json``."""
        return self.model_dump_json(indent=1).encode()


def path_in(folder: str, name: str) -> str:
    """A file of a table whose folder is ``folder`` in its store; ``""`` is the store's root."""
    return f"{folder}/{name}" if folder else name


new_hash = functools.partial(hashlib.blake2b, digest_size=16)
"""Makes the hash object of a table's digests."""


def digest_of(data: bytes) -> str:
    """BLAKE2b of some bytes, 32 hex digits."""
    return new_hash(data).hexdigest()
