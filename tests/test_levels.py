"""The ladder of levels and the codecs behind it."""

from __future__ import annotations

import pytest
import torch

from hf_cachegen.artifact import LevelRecord
from hf_cachegen.codec.delta import DeltaCodec, DeltaConfig
from hf_cachegen.codec.delta_profile import DeltaProfiler
from hf_cachegen.codec.exact import LosslessCodec, RawCodec
from hf_cachegen.errors import FormatError, TableMismatch
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec
from hf_cachegen.levels import (
    LOSSLESS,
    RAW,
    available_levels,
    codec_for,
    default_levels,
    delta_levels,
    select_levels,
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


def names(levels: tuple[LevelRecord, ...]) -> list[str]:
    return [level.name for level in levels]


def test_ladder_goes_from_coarse_to_exact(table: ModelTable) -> None:
    assert names(available_levels(table)) == ["delta-0", "delta-1", "lossless", "raw"]
    assert names(default_levels(table)) == ["delta-0", "delta-1", "lossless"]
    assert names(available_levels(None)) == ["lossless", "raw"]
    assert names(default_levels(None)) == ["lossless"]
    assert [level.exact for level in available_levels(table)] == [False, False, True, True]


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
    for level in delta_levels(table):
        codec = codec_for(level, LAYOUT, table)
        decoded = torch.empty_like(values)
        codec.decode_into(0, codec.encode(0, [values], 0), [decoded], 0)
        errors.append(float((decoded - values).std()))
    assert errors[1] < errors[0] / 2


def test_lossy_level_needs_its_table(table: ModelTable) -> None:
    with pytest.raises(TableMismatch, match="'delta-0' needs the model's table"):
        codec_for(delta_levels(table)[0], LAYOUT, None)


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
    ],
)
def test_parameters_that_do_not_fit_the_table_are_refused(
    table: ModelTable, params: dict[str, int | float | str | bool]
) -> None:
    level = LevelRecord(name="delta-0", codec="delta", params=params, exact=False)
    with pytest.raises(FormatError, match="do not fit"):
        codec_for(level, LAYOUT, table)


def test_unknown_codec_is_refused(table: ModelTable) -> None:
    level = LevelRecord(name="new", codec="transform-9", exact=False)
    with pytest.raises(FormatError, match=r"transform-9.*upgrade"):
        codec_for(level, LAYOUT, table)
