from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import safetensors.numpy
import torch
from codec_samples import changed, put, without
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hf_cachegen.codec.transform import TransformCodec
from hf_cachegen.codec.transform_tables import (
    REFINEMENT,
    GroupTables,
    TransformConfig,
    TransformTables,
    group_specs,
    layer_groups,
)
from hf_cachegen.errors import FormatError
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec

KEYS = TensorSpec(name="keys", heads=2, dim=4)
VALUES = TensorSpec(name="values", heads=1, dim=3)


def layout_of(windows, tensors=((KEYS, VALUES), (VALUES,))):
    """A layer per window, with tensors by turns."""
    layers = [
        LayerSpec(
            kind="sliding_attention" if window else "full_attention",
            tensors=tensors[index % len(tensors)],
            window=window,
        )
        for index, window in enumerate(windows)
    ]
    return KVLayout(dtype="float32", ropes={}, layers=layers)


LAYOUT = layout_of([None, None, None, 8])


@pytest.fixture(scope="module")
def tables(random_transform_tables):
    """Groups of layers [0], [1, 2] and [3]."""
    return random_transform_tables(LAYOUT)


@given(
    st.lists(st.sampled_from([None, 8, 16]), min_size=1, max_size=40),
    st.integers(1, 64),
)
def test_groups_are_runs_of_layers_that_hold_the_same_tokens(windows, most):
    groups = layer_groups(layout_of(windows), most)
    assert [layer for group in groups for layer in group] == list(range(len(windows)))
    assert all(1 <= len(group) <= most for group in groups)
    assert all(len({windows[layer] for layer in group}) == 1 for group in groups)
    for before, after in pairwise(groups):
        if windows[before[-1]] == windows[after[0]]:
            assert abs(len(before) - len(after)) <= 1, "shared out evenly"


def test_no_more_groups_than_need_be():
    assert layer_groups(layout_of([None] * 30), 10) == [range(10), range(10, 20), range(20, 30)]
    assert layer_groups(layout_of([None] * 7), 3) == [range(2), range(2, 4), range(4, 7)]
    assert layer_groups(layout_of([8, 8, None, 8]), 5) == [range(2), range(2, 3), range(3, 4)]


def test_specs_of_a_group_are_those_of_its_layers_in_order():
    assert group_specs(LAYOUT, range(1, 3)) == [VALUES, KEYS, VALUES]


@given(
    st.floats(1e-6, 10), st.integers(0, 7), st.integers(-16, 16), st.sampled_from([int, np.int64])
)
def test_steps_are_thirds_and_scales_powers_of_the_root_of_two(step, level, exponent, kind):
    config = TransformConfig(step=step, levels=8)
    assert len(config.steps) == 8
    assert config.steps[0] == step
    assert config.steps[level] == pytest.approx(step / REFINEMENT**level)
    scale = config.scale(level, kind(exponent))
    assert scale == pytest.approx(config.steps[level] * 2 ** (exponent / 2))
    assert config.scale(level, kind(exponent + 2)) == 2 * scale, "exactly"
    assert type(scale) is float


@pytest.mark.parametrize(
    "params",
    [
        {"group": 0},
        {"group": 65},
        {"group": 2.0},
        {"step": 0.0},
        {"step": -1.0},
        {"step": math.inf},
        {"step": math.nan},
        {"levels": 0},
        {"levels": 9},
        {"ridge": 0.0},
        {"importance_power": -0.1},
        {"max_exponent": -1},
        {"max_exponent": 17},
        {"sinks": -1},
        {"sinks": 65},
        {"steps": (1.0,)},
    ],
)
def test_parameters_are_checked(params):
    with pytest.raises(ValidationError):
        TransformConfig(**params)


def through_a_file(tables):
    arrays = safetensors.numpy.load(safetensors.numpy.save(tables.to_arrays()))
    return TransformTables.from_arrays(tables.config, arrays, LAYOUT)


def test_tables_survive_a_file(tables):
    back = through_a_file(tables)
    assert back.config == tables.config
    found, expected = back.to_arrays(), tables.to_arrays()
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert found[key].dtype == array.dtype
        assert np.array_equal(found[key], array)


def test_tables_from_a_file_code_the_same_bytes(tables):
    specs = group_specs(LAYOUT, range(1, 3))
    values = [torch.randn(spec.heads, 9, spec.dim) for spec in specs]
    found = [
        [TransformCodec(LAYOUT, t, level).encode(1, values, 4) for level in range(2)]
        for t in (tables, through_a_file(tables))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("fine_rows", [0, 1, 7])
def test_any_number_of_rows_may_be_fine(tables, fine_rows):
    """As many as have a spread above the step: none, some or all."""
    arrays = tables.to_arrays()
    assert len(arrays["group1.basis"]) == 7
    arrays["group1.basis_low"] = np.ones_like(arrays["group1.basis"])[:fine_rows]
    back = TransformTables.from_arrays(tables.config, arrays, LAYOUT)
    assert np.array_equal(back.groups[1].basis_low, arrays["group1.basis_low"])


BASES = ("basis", "basis_low")


DAMAGES = [
    *(without(name) for name in ("thirds", "rates", "classes.lo")),
    *(without(f"group2.{name}") for name in GroupTables.__dataclass_fields__),
    lambda arrays: arrays.update(extra=np.zeros(1)),
    lambda arrays: arrays.update({"group3.mean": arrays["group2.mean"]}),
    *(
        changed(f"group1.{name}", change)
        for name in GroupTables.__dataclass_fields__
        if name != "basis_low"  # of which any number of rows may be there
        for change in (lambda a: a[:-1], lambda a: np.append(a, a[:1], axis=0))
    ),
    *(
        changed(f"group1.{name}", change)
        for name in GroupTables.__dataclass_fields__
        for change in (
            lambda a: a[None],
            lambda a: a.reshape(-1)[0].reshape(()),
            lambda a: a.astype(np.float64),
        )
    ),
    *(changed(f"group1.{name}", lambda a: np.ascontiguousarray(a.T)) for name in BASES),
    changed("group1.basis_low", lambda a: a[:, :-1]),
    changed("group1.basis_low", lambda a: np.concatenate((a, a, a))),
    *(
        changed(f"group1.{name}", put(value))
        for name in ("mean", "unwhitener", "importance", "recency")
        for value in (np.nan, np.inf, -np.inf)
    ),
    *(
        changed(f"group1.{name}", put(value))
        for name in ("coefficient_scale", "unwhitener_scale")
        for value in (np.nan, np.inf, 0, -1)
    ),
    *(changed("group1.unwhitener", put(value, 2)) for value in (0, -1)),  # on the diagonal
    *(changed("group1.sigma", put(value)) for value in (np.nan, np.inf, 1e9)),
    *(changed("group1.sigma", put(value, -1)) for value in (0, -1)),
    changed("group1.sigma", lambda a: a[::-1].copy()),
    changed("group1.sigma", lambda a: a[:0]),
    changed("thirds", put([4096, 0, 0])),
    changed("thirds", lambda a: a.reshape(-1)),
    changed("thirds", lambda a: a[:-1]),
    changed("thirds", put([0, 2048, 2048])),
    changed("rates", lambda a: a[:-1]),
    changed("rates", put(np.nan)),
    changed("classes.lo", lambda a: a[:-1]),
    changed("classes.sizes", put(0)),
    changed("classes.freqs", put(4095)),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tables_are_refused(tables, damage):
    arrays = tables.to_arrays()
    damage(arrays)
    with pytest.raises(FormatError):
        TransformTables.from_arrays(tables.config, arrays, LAYOUT)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        ({"group": 1}, LAYOUT),
        ({"group": 5}, LAYOUT),
        ({}, layout_of([None] * 4)),
        ({}, layout_of([None, None, 8])),
        ({}, layout_of([None, None, None, 8], ((VALUES,), (KEYS, VALUES)))),
    ],
)
def test_tables_of_other_parameters_or_layers_are_refused(tables, config, layout):
    with pytest.raises(FormatError):
        TransformTables.from_arrays(
            tables.config.model_copy(update=config), tables.to_arrays(), layout
        )


def test_messages_name_the_array_and_what_it_should_be(tables):
    arrays = tables.to_arrays()
    arrays["group1.mean"] = arrays["group1.mean"][:-1]
    with pytest.raises(FormatError, match=r"'group1.mean': expected float32 \[14\], .*\[13\]"):
        TransformTables.from_arrays(tables.config, arrays, LAYOUT)
    arrays = tables.to_arrays()
    arrays["group1.unwhitener"] = put(0, 2)(arrays["group1.unwhitener"].copy())
    with pytest.raises(FormatError, match=r"'group1.unwhitener': expected diagonals above 0"):
        TransformTables.from_arrays(tables.config, arrays, LAYOUT)
