"""Who a cache belongs to, and how a mismatch is told."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hf_cachegen.artifact import EMBEDDED, Identity, TableRef, check_identity, compare_identity
from hf_cachegen.errors import ModelMismatch, TableMismatch
from hf_cachegen.layout import LayerSpec, RopeSpec


def with_layer(identity: Identity, position: int, **changes: object) -> Identity:
    layers = list(identity.layout.layers)
    layers[position] = layers[position].model_copy(update=changes)
    return with_layout(identity, layers=tuple(layers))


def with_layout(identity: Identity, **changes: object) -> Identity:
    return identity.model_copy(update={"layout": identity.layout.model_copy(update=changes)})


def table(**changes: Any) -> TableRef:
    fields = {"name": "t", "codecs": {"delta": "12" * 16}, "location": EMBEDDED}
    return TableRef(**{**fields, **changes})


def test_equal_identities_pass(identity: Identity) -> None:
    assert compare_identity(identity, identity.model_copy(deep=True)) == []
    check_identity(identity, identity.model_copy(deep=True))


def test_digest_survives_json(identity: Identity) -> None:
    again = Identity.model_validate_json(identity.model_dump_json())
    assert again == identity
    assert again.digest == identity.digest


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"weights": "ff" * 16}, "weights"),
        ({"config": "ff" * 16}, "config"),
        ({"architecture": "GPT2LMHeadModel"}, "architecture"),
    ],
)
def test_every_field_of_the_model_counts(
    identity: Identity, changes: dict[str, str], field: str
) -> None:
    other = identity.model_copy(update=changes)
    assert other.digest != identity.digest
    with pytest.raises(ModelMismatch, match=field) as error:
        check_identity(identity, other)
    assert repr(getattr(identity, field)) in str(error.value)
    assert repr(changes[field]) in str(error.value)
    assert "org/model at revision 0123abc" in str(error.value)


def test_layout_differences_name_the_field(identity: Identity) -> None:
    layer = identity.layout.layers[1]
    dim = layer.tensors[0].model_copy(update={"dim": 16})
    cases = [
        (with_layer(identity, 1, window=9), "layout.layers[1].window", 5, 9),
        (with_layout(identity, dtype="float16"), "layout.dtype", "bfloat16", "float16"),
        (
            with_layer(identity, 1, tensors=(dim, layer.tensors[1])),
            "layout.layers[1].tensors[0].dim",
            4,
            16,
        ),
    ]
    for other, field, expected, found in cases:
        assert compare_identity(identity, other) == [(field, expected, found)]
        with pytest.raises(ModelMismatch) as error:
            check_identity(identity, other)
        assert f"{field}: expected {expected!r}, found {found!r}" in str(error.value)


def test_layer_counts_are_compared_as_one(identity: Identity) -> None:
    fewer: tuple[LayerSpec, ...] = identity.layout.layers[:2]
    with pytest.raises(
        ModelMismatch, match=r"layout\.layers: expected 3 entries, found 2 entries\n"
    ):
        check_identity(identity, with_layout(identity, layers=fewer))


def test_rope_frequencies_are_summarised(identity: Identity) -> None:
    rope = identity.layout.ropes["default"]
    other = RopeSpec(inv_freq=(1.0, 0.02), attention_scaling=1.0, pairing=rope.pairing)
    with pytest.raises(ModelMismatch) as error:
        check_identity(identity, with_layout(identity, ropes={"default": other}))
    assert (
        "layout.ropes.default.inv_freq: expected 0.01 at [1], found 0.02 (1 of 2 values differ)"
        in str(error.value)
    )


def test_many_differences_are_cut(identity: Identity) -> None:
    base = identity.layout.layers[0]
    expected = with_layout(identity, layers=(base,) * 40)
    sliding = base.model_copy(update={"window": 3})
    with pytest.raises(ModelMismatch, match=r"and 28 more fields"):
        check_identity(expected, with_layout(identity, layers=(sliding,) * 40))


def test_provenance_is_told_but_does_not_refuse(identity: Identity) -> None:
    copy = identity.model_copy(update={"model_id": "local-copy", "revision": None})
    check_identity(copy, identity)
    assert copy.digest == identity.digest
    assert [difference.field for difference in compare_identity(copy, identity)] == [
        "model_id",
        "revision",
    ]
    with pytest.raises(ModelMismatch, match=r"model_id: expected 'local-copy'.*(\n.*)*weights"):
        check_identity(copy.model_copy(update={"weights": "ff" * 16}), identity)


def test_another_table_is_a_table_mismatch(identity: Identity) -> None:
    one = identity.model_copy(update={"table": table()})
    two = identity.model_copy(update={"table": table(codecs={"delta": "34" * 16})})
    with pytest.raises(TableMismatch, match=r"table\.codecs\.delta"):
        check_identity(one, two)
    with pytest.raises(TableMismatch, match="expected None"):
        check_identity(identity, one)
    check_identity(one, identity.model_copy(update={"table": table(location="org/tables")}))
    with pytest.raises(ModelMismatch, match=r"table\.codecs\.delta"):
        check_identity(one, two.model_copy(update={"weights": "ff" * 16}))


@pytest.mark.parametrize("location", ["", "..", "../x", "/x", "a/b/c", "a//b", "https://x"])
def test_table_location_cannot_leave_the_hub(location: str) -> None:
    with pytest.raises(ValidationError):
        table(location=location)


@pytest.mark.parametrize(
    "codecs",
    [
        {},
        {"../delta": "12" * 16},
        {"": "12" * 16},
        {"delta/x": "12" * 16},
        {"delta": "../" + "12" * 16},
        {"delta": "12"},
        {"delta": None},
        {f"codec-{number}": "12" * 16 for number in range(17)},
    ],
)
def test_table_names_its_codecs_by_digests(codecs: Any) -> None:
    with pytest.raises(ValidationError, match="codecs"):
        table(codecs=codecs)


def test_embedded_tables_of_different_codecs_have_different_folders() -> None:
    one, two = ("12" * 16, "34" * 16)
    maps = [{"delta": one}, {"delta": two}, {"transform": one}, {"delta": one, "transform": two}]
    assert len({table(codecs=codecs).folder for codecs in maps}) == 4
    turned = dict(reversed(maps[-1].items()))
    assert table(codecs=turned).folder == table(codecs=maps[-1]).folder
    assert table(name="u", location="org/tables").folder == table().folder
