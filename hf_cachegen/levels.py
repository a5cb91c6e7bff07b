"""The ladder of levels: which codecs an artefact holds, and the codec of a level record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import get_args

from torch import Tensor

from hf_cachegen.artifact.manifest import LevelRecord
from hf_cachegen.codec.base import SegmentCodec
from hf_cachegen.codec.delta import DeltaCodec, DeltaConfig, DeltaTables
from hf_cachegen.codec.exact import LosslessCodec, RawCodec
from hf_cachegen.codec.importance import Importance, Mode
from hf_cachegen.codec.transform import TransformCodec, encode_ladder
from hf_cachegen.codec.transform_tables import TransformConfig
from hf_cachegen.errors import FormatError, TableMismatch
from hf_cachegen.layout import KVLayout
from hf_cachegen.tables import CodecTables, ModelTable

LOSSLESS = LevelRecord(name="lossless", codec="lossless", exact=True)
RAW = LevelRecord(name="raw", codec="raw", exact=True)

IMPORTANCE = "importance"
"""Parameter of a level that tells its encodings apart; decoding does not depend on it."""

CodecConfig = TransformConfig | DeltaConfig
"""Parameters of a codec that needs a model table."""

TABLE_CODECS = ("transform", "delta")
"""Codecs that need a model table, in ladder order.

A ladder goes from coarse to fine, and readers pick from it by position. At equal quality
``transform`` takes a fraction of the bytes of ``delta``, so all of its levels come before those of
``delta``, and exact ones last: what comes later costs more, as a rule.
"""


def codec_levels(config: CodecConfig) -> tuple[LevelRecord, ...]:
    """The levels of a codec with these parameters, coarse to fine."""
    parameter, steps = _steps(config)
    nested = isinstance(config, TransformConfig)
    codec = "transform" if nested else "delta"
    return tuple(
        LevelRecord(
            name=f"{codec}-{index}",
            codec=codec,
            params={"level": index, parameter: step},
            exact=False,
            refines=f"{codec}-{index - 1}" if nested and index else None,
        )
        for index, step in enumerate(steps)
    )


def lossy_levels(table: ModelTable, codec: str) -> tuple[LevelRecord, ...]:
    """The levels of one of a table's codecs, coarse to fine; none if the table lacks the codec."""
    tables = table.tables.get(codec)
    return () if tables is None else codec_levels(tables.config)


def ladder(configs: Iterable[CodecConfig]) -> tuple[LevelRecord, ...]:
    """Every level of codecs with these parameters, and the exact ones, in ladder order."""
    lossy = [level for config in configs for level in codec_levels(config)]
    return (*sorted(lossy, key=lambda level: TABLE_CODECS.index(level.codec)), LOSSLESS, RAW)


def available_levels(table: ModelTable | None) -> tuple[LevelRecord, ...]:
    """Every level there is, in ladder order; without a table only exact ones."""
    return ladder(tables.config for tables in table.tables.values()) if table else ladder(())


def default_levels(available: Sequence[LevelRecord]) -> tuple[LevelRecord, ...]:
    """What an artefact holds: the levels of the best codec of a ladder, and ``lossless``.

    Others, such as ``raw``, which is ``lossless`` but larger, are there by name.
    """
    lossy = [level for level in available if not level.exact]
    return (*(level for level in lossy if level.codec == lossy[0].codec), LOSSLESS)


def select_levels(
    available: tuple[LevelRecord, ...], names: Sequence[str]
) -> tuple[LevelRecord, ...]:
    """The named levels and those they refine, in ladder order.

    ValueError lists what there is if a name is unknown.
    """
    known = {level.name: level for level in available}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(
            f"unknown level {', '.join(map(repr, unknown)) or '(none given)'}; "
            f"expected some of {', '.join(known)}"
        )
    wanted = set(names)
    for level in reversed(available):
        if level.name in wanted and level.refines is not None:
            wanted.add(level.refines)
    return tuple(level for level in available if level.name in wanted)


def weighted_levels(
    levels: Iterable[LevelRecord], importance: Importance
) -> tuple[LevelRecord, ...]:
    """The levels with what tells an encoder's choice of importance, where they depend on it."""
    return tuple(
        level.model_copy(update={"params": {**level.params, IMPORTANCE: importance.label}})
        if level.codec == "transform"
        else level
        for level in levels
    )


def recorded_importance(levels: Iterable[LevelRecord], n_tokens: int) -> Importance | None:
    """The importance that levels record, for a context of ``n_tokens``.

    None if they record several, or one that is more than a mode: the levels only identify weights
    of the caller's own, and hold none of them. Levels that do not depend on it have the default.
    """
    labels = {level.params[IMPORTANCE] for level in levels if IMPORTANCE in level.params}
    if not labels:
        return Importance(n_tokens=n_tokens)
    modes: tuple[Mode, ...] = get_args(Mode)
    return next((Importance(mode, n_tokens) for mode in modes if labels == {mode}), None)


def table_codecs(levels: Iterable[LevelRecord]) -> tuple[str, ...]:
    """The codecs among these levels that need a model table."""
    used = {level.codec for level in levels}
    return tuple(codec for codec in TABLE_CODECS if codec in used)


def codec_for(
    level: LevelRecord,
    layout: KVLayout,
    table: ModelTable | None,
    importance: Importance | None = None,
    kept: Tensor | None = None,
) -> SegmentCodec:
    """The codec that encodes and decodes a level's segments.

    ``importance`` is for codecs whose encoder can tell tokens apart, ``kept`` as for
    :class:`SegmentCodec`.

    Raises
    ------
    TableMismatch
        The level needs a table and there is none, or one without this codec.
    FormatError
        The level names a codec or parameters that this version does not know.
    """
    if level.codec == "raw":
        return RawCodec(layout)
    if level.codec == "lossless":
        return LosslessCodec(layout)
    if level.codec not in TABLE_CODECS:
        raise FormatError(
            f"level {level.name!r}: unknown codec {level.codec!r}; upgrade hf-cachegen"
        )
    if table is None:
        raise TableMismatch(f"level {level.name!r} needs the model's table, and none was given")
    tables = table.tables.get(level.codec)
    if tables is None:
        raise TableMismatch(
            f"level {level.name!r} needs a table with the codec {level.codec!r}, the given one "
            f"holds {', '.join(table.tables)}"
        )
    index = _level_index(level, tables)
    if isinstance(tables, DeltaTables):
        return DeltaCodec(layout, tables, index, kept)
    return TransformCodec(layout, tables, index, importance, kept)


def encode_levels(
    codecs: Sequence[SegmentCodec],
    layer: int,
    tensors: Callable[[int], Sequence[Tensor]],
    start: int,
) -> list[bytes]:
    """A layer's segment at several levels of one table and importance.

    Parameters
    ----------
    codecs
        Those of the levels.
    layer, start
        As for :meth:`~hf_cachegen.codec.base.SegmentCodec.encode`.
    tensors
        Gives a layer's tensors ``[H, T, D]``.

    Returns
    -------
    list
        One segment a level, empty where another layer's segment carries this layer.
    """

    def stacked(codec: SegmentCodec) -> list[Tensor]:
        return [tensor for member in codec.members(layer) for tensor in tensors(member)]

    leading = [codec for codec in codecs if codec.members(layer)]
    ladder = [codec for codec in leading if isinstance(codec, TransformCodec)]
    segments: dict[SegmentCodec, bytes] = {}
    if ladder:
        encoded = encode_ladder(ladder, layer, stacked(ladder[0]), start)
        segments.update(zip(ladder, encoded, strict=True))
    for codec in leading:
        if codec not in segments:
            segments[codec] = codec.encode(layer, stacked(codec), start)
    return [segments.get(codec, b"") for codec in codecs]


def _steps(config: CodecConfig) -> tuple[str, tuple[float, ...]]:
    """What a codec's levels differ in: its name in a level's parameters, and each level's value."""
    if isinstance(config, TransformConfig):
        return "step", config.steps
    return "factor", config.factors


def _level_index(level: LevelRecord, tables: CodecTables) -> int:
    """The position of a level among its codec's."""
    name, steps = _steps(tables.config)
    params = {key: value for key, value in level.params.items() if key != IMPORTANCE}
    for index, step in enumerate(steps):
        if type(params.get("level")) is int and params == {"level": index, name: step}:
            return index
    raise FormatError(
        f"level {level.name!r}: parameters {level.params} do not fit the table's {name}s, {steps}"
    )
