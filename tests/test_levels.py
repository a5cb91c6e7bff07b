"""The ladder of levels and the codecs behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_cachegen.artifact import LevelRecord
from hf_cachegen.codec.delta import DeltaCodec, DeltaConfig
from hf_cachegen.codec.delta_profile import DeltaProfiler
from hf_cachegen.codec.exact import LosslessCodec, RawCodec
from hf_cachegen.codec.importance import Importance, Mode
from hf_cachegen.codec.transform import TransformCodec
from hf_cachegen.codec.transform_tables import TransformTables
from hf_cachegen.errors import FormatError, TableMismatch
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec
from hf_cachegen.levels import (
    LOSSLESS,
    RAW,
    available_levels,
    codec_for,
    default_levels,
    encode_levels,
    lossy_levels,
    recorded_importance,
    select_levels,
    table_codecs,
    weighted_levels,
)
from hf_cachegen.tables import ModelTable

SPEC = TensorSpec(name="keys", heads=1, dim=4)
LAYOUT = KVLayout(
    dtype="float32", ropes={}, layers=(LayerSpec(kind="full_attention", tensors=(SPEC,)),)
)


@pytest.fixture(scope="module")
def table() -> ModelTable:
    """Of one layer with one tensor of four channels, two levels."""
    profiler = DeltaProfiler(LAYOUT, DeltaConfig(factors=(1.0, 0.25)))
    values = [torch.randn(1, 50, 4, generator=torch.Generator().manual_seed(0))]
    profiler.observe_moments(0, values, 0)
    profiler.observe_counts(0, values, 0)
    return ModelTable.build(
        profiler.finish(), model_id="me/model", config="ab" * 16, layout=LAYOUT, data=(("a", 50),)
    )


@pytest.fixture(scope="module")
def both(table: ModelTable, random_transform_tables: Callable[..., TransformTables]) -> ModelTable:
    """With ``transform`` too, of three levels."""
    transform = random_transform_tables(LAYOUT, step=0.9, levels=3)
    return ModelTable.build(
        table.tables["delta"],
        transform,
        model_id="me/model",
        config="ab" * 16,
        layout=LAYOUT,
        data=(("a", 50),),
    )


def names(levels: tuple[LevelRecord, ...]) -> list[str]:
    return [level.name for level in levels]


def test_ladder_goes_from_coarse_to_exact(table: ModelTable) -> None:
    assert names(available_levels(table)) == ["delta-0", "delta-1", "lossless", "raw"]
    assert names(default_levels(available_levels(table))) == ["delta-0", "delta-1", "lossless"]
    assert names(available_levels(None)) == ["lossless", "raw"]
    assert names(default_levels(available_levels(None))) == ["lossless"]
    assert [level.exact for level in available_levels(table)] == [False, False, True, True]


def test_transform_comes_first_and_is_the_default(both: ModelTable) -> None:
    transform = ["transform-0", "transform-1", "transform-2"]
    assert names(available_levels(both)) == [*transform, "delta-0", "delta-1", "lossless", "raw"]
    assert names(default_levels(available_levels(both))) == [*transform, "lossless"]
    assert [level.params for level in lossy_levels(both, "transform")] == [
        {"level": 0, "step": 0.9},
        {"level": 1, "step": 0.9 / 3},
        {"level": 2, "step": 0.9 / 9},
    ]
    assert [level.exact for level in available_levels(both)] == [False] * 5 + [True, True]
    chosen = select_levels(available_levels(both), ["raw", "delta-1", "transform-2"])
    assert names(chosen) == [*transform, "delta-1", "raw"], "with those that transform-2 refines"


def test_levels_of_transform_refine_each_other(both: ModelTable) -> None:
    refined = {level.name: level.refines for level in available_levels(both)}
    assert refined.pop("transform-1") == "transform-0"
    assert refined.pop("transform-2") == "transform-1"
    assert set(refined.values()) == {None}
    for last in range(3):
        chosen = select_levels(available_levels(both), [f"transform-{last}", "lossless"])
        assert names(chosen) == [*(f"transform-{i}" for i in range(last + 1)), "lossless"]


@pytest.mark.parametrize("weights", [None, torch.linspace(-1, 1, 9)])
def test_importance_tells_encodings_apart_where_they_depend_on_it(
    both: ModelTable, weights: torch.Tensor | None
) -> None:
    levels, importance = available_levels(both), Importance("recent", 9, weights)
    weighted = weighted_levels(levels, importance)
    assert names(weighted) == names(levels)
    for before, after in zip(levels, weighted, strict=True):
        if before.codec == "transform":
            assert after.params == {**before.params, "importance": importance.label}
            assert after.model_copy(update={"params": before.params}) == before
        else:
            assert after == before
    assert weighted_levels(weighted, importance) == weighted
    assert weighted_levels(weighted, Importance("flat"))[0].params["importance"] == "flat"


@pytest.mark.parametrize("mode", ["flat", "predicted", "recent"])
def test_importance_is_read_off_the_levels_that_record_it(both: ModelTable, mode: Mode) -> None:
    levels = weighted_levels(available_levels(both), Importance(mode, 5))
    assert recorded_importance(levels, 9) == Importance(mode, 9)


def test_levels_that_do_not_depend_on_importance_have_the_default(table: ModelTable) -> None:
    assert recorded_importance(available_levels(table), 9) == Importance("predicted", 9)


def test_importance_that_levels_only_identify_is_not_known(both: ModelTable) -> None:
    transform = lossy_levels(both, "transform")
    weighted = weighted_levels(transform, Importance("predicted", 9, torch.zeros(9)))
    assert recorded_importance(weighted, 9) is None
    several = weighted_levels(transform[:1], Importance("flat")) + weighted[1:]
    assert recorded_importance(several, 9) is None
    (newer, *_) = weighted
    newer = newer.model_copy(update={"params": {**newer.params, "importance": 1}})
    assert recorded_importance([newer], 9) is None


def test_importance_reaches_the_encoder_and_does_not_matter_to_a_decoder(both: ModelTable) -> None:
    importance = Importance("flat", 40, torch.linspace(-5, 5, 40))
    (level, *_) = weighted_levels(lossy_levels(both, "transform"), importance)
    values = [torch.randn(1, 40, 4, generator=torch.Generator().manual_seed(1))]
    encoder, plain = (codec_for(level, LAYOUT, both, given) for given in (importance, None))
    data = encoder.encode(0, values, 0)
    assert data != plain.encode(0, values, 0)
    found = [torch.empty_like(values[0]) for _ in range(2)]
    encoder.decode_into(0, data, found[:1], 0)
    plain.decode_into(0, data, found[1:], 0)
    assert torch.equal(*found)


def test_codecs_that_levels_need_a_table_for(both: ModelTable) -> None:
    available = available_levels(both)
    assert table_codecs(available) == ("transform", "delta")
    assert table_codecs(reversed(available)) == ("transform", "delta")
    assert table_codecs(default_levels(available_levels(both))) == ("transform",)
    assert table_codecs(select_levels(available, ["delta-0", "raw"])) == ("delta",)
    assert table_codecs([LOSSLESS, RAW]) == ()


def test_levels_are_selected_in_ladder_order(table: ModelTable) -> None:
    available = available_levels(table)
    assert names(select_levels(available, ["raw", "delta-1"])) == ["delta-1", "raw"]
    with pytest.raises(ValueError, match=r"'best'.*delta-0, delta-1, lossless, raw"):
        select_levels(available, ["raw", "best"])
    with pytest.raises(ValueError, match="none given"):
        select_levels(available, [])


def test_codec_of_each_level(table: ModelTable) -> None:
    kinds = [type(codec_for(level, LAYOUT, table)) for level in available_levels(table)]
    assert kinds == [DeltaCodec, DeltaCodec, LosslessCodec, RawCodec]
    assert isinstance(codec_for(RAW, LAYOUT, None), RawCodec)
    assert isinstance(codec_for(LOSSLESS, LAYOUT, None), LosslessCodec)


def test_finer_level_has_a_finer_bin(table: ModelTable) -> None:
    values = torch.randn(1, 40, 4, generator=torch.Generator().manual_seed(1))
    errors = []
    for level in lossy_levels(table, "delta"):
        codec = codec_for(level, LAYOUT, table)
        decoded = torch.empty_like(values)
        codec.decode_into(0, codec.encode(0, [values], 0), [decoded], 0)
        errors.append(float((decoded - values).std()))
    assert errors[1] < errors[0] / 2


def test_lossy_level_needs_its_table(table: ModelTable) -> None:
    with pytest.raises(TableMismatch, match="'delta-0' needs the model's table"):
        codec_for(lossy_levels(table, "delta")[0], LAYOUT, None)


def test_level_needs_a_table_with_its_codec(table: ModelTable, both: ModelTable) -> None:
    level = lossy_levels(both, "transform")[0]
    with pytest.raises(TableMismatch, match=r"'transform-0' needs .* the given one holds delta"):
        codec_for(level, LAYOUT, table)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"level": 2, "factor": 1.0},
        {"level": -1, "factor": 0.25},
        {"level": 0, "factor": 0.25},
        {"level": 0.0, "factor": 1.0},
        {"level": "0", "factor": 1.0},
        {"level": 0},
        {"level": True, "factor": 0.25},
        {"level": 0, "step": 1.0},
        {"level": 0, "factor": 1.0, "more": 1},
    ],
)
def test_parameters_that_do_not_fit_the_table_are_refused(
    table: ModelTable, params: dict[str, int | float | str | bool]
) -> None:
    level = LevelRecord(name="delta-0", codec="delta", params=params, exact=False)
    with pytest.raises(FormatError, match="do not fit"):
        codec_for(level, LAYOUT, table)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"level": 3, "step": 0.9 / 27},
        {"level": 1, "step": 0.9},
        {"level": 0, "factor": 0.9},
        {"level": False, "step": 0.9},
        {"level": 0, "step": 0.9, "other": "flat"},
        {"importance": "flat"},
    ],
)
def test_parameters_of_transform_that_do_not_fit_the_table_are_refused(
    both: ModelTable, params: dict[str, int | float | str | bool]
) -> None:
    level = LevelRecord(name="transform-0", codec="transform", params=params, exact=False)
    with pytest.raises(FormatError, match="do not fit the table's steps"):
        codec_for(level, LAYOUT, both)


def test_unknown_codec_is_refused(table: ModelTable) -> None:
    level = LevelRecord(name="new", codec="transform-9", exact=False)
    with pytest.raises(FormatError, match=r"transform-9.*upgrade"):
        codec_for(level, LAYOUT, table)


def test_a_layer_is_encoded_at_every_level_at_once(both: ModelTable) -> None:
    """Each segment as its codec makes it alone, in the order of the levels."""
    values = torch.randn(1, 20, 4, generator=torch.Generator().manual_seed(1))
    levels = available_levels(both)
    codecs = [codec_for(level, LAYOUT, both) for level in (*levels[2:], *levels[:2])]
    found = encode_levels(codecs, 0, lambda layer: [values], 3)
    assert found == [codec.encode(0, [values], 3) for codec in codecs]


def test_a_layer_in_the_segment_of_another_is_encoded_once(
    random_transform_tables: Callable[..., TransformTables],
) -> None:
    layout = KVLayout(dtype="float32", ropes={}, layers=LAYOUT.layers * 2)
    tables = random_transform_tables(layout)
    codecs = [TransformCodec(layout, tables, 0), RawCodec(layout)]
    values = [torch.full((1, 5, 4), float(layer)) for layer in range(2)]
    (group, first), (nothing, second) = (
        encode_levels(codecs, layer, lambda layer: [values[layer]], 3) for layer in range(2)
    )
    assert group == codecs[0].encode(0, values, 3)
    assert nothing == b""
    assert first == codecs[1].encode(0, [values[0]], 3) != second
