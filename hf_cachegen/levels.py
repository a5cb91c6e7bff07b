"""The ladder of levels: which codecs an artefact holds, and the codec of a level record."""

from __future__ import annotations

from collections.abc import Sequence

from hf_cachegen.artifact.manifest import LevelRecord
from hf_cachegen.codec.base import SegmentCodec
from hf_cachegen.codec.delta import DeltaCodec
from hf_cachegen.codec.exact import LosslessCodec, RawCodec
from hf_cachegen.errors import FormatError, TableMismatch
from hf_cachegen.layout import KVLayout
from hf_cachegen.tables import ModelTable

LOSSLESS = LevelRecord(name="lossless", codec="lossless", exact=True)
RAW = LevelRecord(name="raw", codec="raw", exact=True)


def delta_levels(table: ModelTable) -> tuple[LevelRecord, ...]:
    """The lossy levels of a table, coarse to fine."""
    return tuple(
        LevelRecord(
            name=f"delta-{index}",
            codec="delta",
            params={"level": index, "factor": factor},
            exact=False,
        )
        for index, factor in enumerate(table.record.params.factors)
    )


def available_levels(table: ModelTable | None) -> tuple[LevelRecord, ...]:
    """Every level there is, coarse to fine; without a table only exact ones."""
    return (*(delta_levels(table) if table else ()), LOSSLESS, RAW)


def default_levels(table: ModelTable | None) -> tuple[LevelRecord, ...]:
    """What an artefact holds: every lossy level and ``lossless``, which is ``raw`` but smaller."""
    return available_levels(table)[:-1]


def select_levels(
    available: tuple[LevelRecord, ...], names: Sequence[str]
) -> tuple[LevelRecord, ...]:
    """The named levels in ladder order; ValueError lists what there is if a name is unknown."""
    unknown = [name for name in names if name not in {level.name for level in available}]
    if unknown or not names:
        raise ValueError(
            f"unknown level {', '.join(map(repr, unknown)) or '(none given)'}; "
            f"expected some of {', '.join(level.name for level in available)}"
        )
    return tuple(level for level in available if level.name in names)


def codec_for(level: LevelRecord, layout: KVLayout, table: ModelTable | None) -> SegmentCodec:
    """The codec that encodes and decodes a level's segments.

    Raises
    ------
    TableMismatch
        The level needs a table and there is none.
    FormatError
        The level names a codec or parameters that this version does not know.
    """
    if level.codec == "raw":
        return RawCodec(layout)
    if level.codec == "lossless":
        return LosslessCodec(layout)
    if level.codec != "delta":
        raise FormatError(
            f"level {level.name!r}: unknown codec {level.codec!r}; upgrade hf-cachegen"
        )
    if table is None:
        raise TableMismatch(f"level {level.name!r} needs the model's table, and none was given")
    index = level.params.get("level")
    factors = table.record.params.factors
    known = isinstance(index, int) and 0 <= index < len(factors)
    if not known or factors[int(index or 0)] != level.params.get("factor"):
        raise FormatError(
            f"level {level.name!r}: parameters {level.params} do not fit the table's {factors}"
        )
    return DeltaCodec(layout, table.tables, int(index or 0))
