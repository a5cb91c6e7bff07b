"""What an artefact belongs to: the model, its cache layout and its table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field, StringConstraints

from hf_cachegen.errors import ModelMismatch, TableMismatch
from hf_cachegen.layout import KVLayout, Record, canonical_json

EMBEDDED: Final = "embedded"
"""Location of a table that travels inside the artefact."""

TABLES_FOLDER: Final = "table"

Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16,128}$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
CodecName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
_RepoId = Annotated[
    str,
    StringConstraints(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$", max_length=200
    ),
]

PROVENANCE: Final = frozenset({"model_id", "revision", "table.name", "table.location"})
"""Fields of an identity that say where something came from, not what it is."""

_SHOWN_DIFFERENCES = 12


class TableRef(Record):
    """The model table an artefact was encoded with.

    Attributes
    ----------
    name
        Model that the table is of, for people.
    codecs
        Digest of the table's part for each codec that the artefact uses. What else the table
        holds makes no difference.
    location
        ``"embedded"`` or the id of the model table's repo.
    """

    name: Text
    codecs: dict[CodecName, Hex] = Field(min_length=1, max_length=16)
    location: _RepoId

    @property
    def folder(self) -> str:
        """Where an embedded table's files are in the artefact.

        Named by the digests, so that another table never replaces one still in use.
        """
        name = hashlib.blake2b(canonical_json(self.codecs), digest_size=16).hexdigest()
        return f"{TABLES_FOLDER}/{name}"


class Identity(Record):
    """All that must agree before an artefact's values may be used.

    Attributes
    ----------
    model_id, revision
        Where the model was loaded from.
    weights
        Fingerprint of the weights that filled the cache, hex.
    config
        Digest of the model's config, hex.
    architecture
        Class of the model, such as ``LlamaForCausalLM``.
    layout
        Layers, dtype and RoPE of the cache.
    table
        The model table of the codecs, or None if no level needs one.
    """

    model_id: Text
    revision: Text | None = None
    weights: Hex
    config: Hex
    architecture: Text
    layout: KVLayout
    table: TableRef | None = None

    @property
    def digest(self) -> str:
        """BLAKE2b of the canonical JSON without provenance, 32 hex digits.

        The same weights loaded from a Hub repo and from a local copy have the same digest.
        """
        values = self.model_dump(
            mode="json",
            exclude={"model_id": True, "revision": True, "table": {"name", "location"}},
        )
        return hashlib.blake2b(canonical_json(values), digest_size=16).hexdigest()


class Difference(NamedTuple):
    """One field in which two records differ."""

    field: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected!r}, found {self.found!r}"


class _Summary(str):
    """A value that is shown as it stands."""

    __slots__ = ()
    __repr__ = str.__str__


def differences(path: str, expected: object, found: object) -> Iterator[Difference]:
    """Yield the leaves in which two dumped records differ, by their dotted path."""
    if expected == found:
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            field = f"{path}.{key}" if path else str(key)
            yield from differences(field, expected.get(key), found.get(key))
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        yield from _sequence_differences(path, expected, found)
    else:
        yield Difference(path, expected, found)


def compare_identity(expected: Identity, found: Identity) -> list[Difference]:
    """All fields in which two identities differ, provenance included.

    Layouts are compared down to the field, such as ``layout.layers[3].window``; a vector of
    numbers, such as a RoPE's ``inv_freq``, counts as one field.
    """
    return list(differences("", expected.model_dump(), found.model_dump()))


def check_identity(expected: Identity, found: Identity) -> None:
    """Raise unless an artefact belongs to the model and table at hand.

    Provenance alone (the name the same weights were loaded by) is no mismatch.

    Parameters
    ----------
    expected
        Identity of the model and table at hand.
    found
        Identity in the artefact.

    Raises
    ------
    TableMismatch
        Only the table differs.
    ModelMismatch
        Anything else differs. The message names every field with both values.
    """
    found_differences = compare_identity(expected, found)
    fields = {difference.field for difference in found_differences} - PROVENANCE
    if not fields:
        return
    if all(field.split(".")[0] == "table" for field in fields):
        raise TableMismatch(
            describe("the cache was encoded with another model table", found_differences)
            + "\nload that table, or encode the cache again with this one"
        )
    origin = found.model_id + (f" at revision {found.revision}" if found.revision else "")
    raise ModelMismatch(
        describe("the cache was made with another model", found_differences)
        + f"\nload {origin}, or encode the cache again with this model"
    )


def describe(headline: str, found: Sequence[Difference]) -> str:
    """A message of several lines: the headline and one line per difference."""
    lines = [f"{headline}:", *(f"  {difference}" for difference in found[:_SHOWN_DIFFERENCES])]
    if len(found) > _SHOWN_DIFFERENCES:
        lines.append(f"  ... and {len(found) - _SHOWN_DIFFERENCES} more fields")
    return "\n".join(lines)


def _sequence_differences(
    path: str, expected: Sequence[Any], found: Sequence[Any]
) -> Iterator[Difference]:
    if len(expected) != len(found):
        yield Difference(
            path, _Summary(f"{len(expected)} entries"), _Summary(f"{len(found)} entries")
        )
    elif all(isinstance(value, float) for value in (*expected, *found)):
        unequal = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
        first = unequal[0]
        yield Difference(
            path,
            _Summary(f"{expected[first]:.9g} at [{first}]"),
            _Summary(f"{found[first]:.9g} ({len(unequal)} of {len(expected)} values differ)"),
        )
    else:
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            yield from differences(f"{path}[{i}]", a, b)
