"""Model tables on a disk: whole, in part, damaged, of something else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from numpy.typing import NDArray

from hf_cachegen.codec.delta import DeltaConfig, DeltaTables
from hf_cachegen.codec.delta_profile import DeltaProfiler
from hf_cachegen.codec.transform_tables import TransformConfig, TransformTables
from hf_cachegen.errors import FormatError, StoreError, StoreNotFound, TableMismatch
from hf_cachegen.layout import KVLayout, LayerSpec, RopeSpec, TensorSpec
from hf_cachegen.stores import LocalStore
from hf_cachegen.tables import CARD_NAME, RECORD_NAME, ModelTable, TableRecord

ROPE = RopeSpec(inv_freq=(1.0, 0.1), attention_scaling=1.0, pairing="half")
TENSORS = (
    TensorSpec(name="keys", heads=2, dim=4, rope="default"),
    TensorSpec(name="values", heads=2, dim=4),
)
LAYER = LayerSpec(kind="full_attention", tensors=TENSORS)
LAYOUT = KVLayout(dtype="float32", ropes={"default": ROPE}, layers=(LAYER, LAYER))

DELTA, TRANSFORM = "delta.safetensors", "transform.safetensors"
FILES = (RECORD_NAME, DELTA, TRANSFORM)

Arrays = dict[str, NDArray[Any]]


def delta_tables(seed: int = 0, config: DeltaConfig | None = None) -> DeltaTables:
    """Of two layers, profiled on noise."""
    profiler = DeltaProfiler(LAYOUT, config or DeltaConfig(factors=(1.0, 0.5)))
    generator = torch.Generator().manual_seed(seed)
    layers = [[torch.randn(2, 60, 4, generator=generator) for _ in TENSORS] for _ in range(2)]
    for observe in (profiler.observe_moments, profiler.observe_counts):
        for index, tensors in enumerate(layers):
            observe(index, tensors, 0)
    return profiler.finish()


def build(*tables: DeltaTables | TransformTables, **changes: Any) -> ModelTable:
    fields = {"model_id": "me/it", "config": "ab" * 16, "layout": LAYOUT, "data": (("noise", 60),)}
    return ModelTable.build(*tables, **{**fields, **changes})


@pytest.fixture(scope="module")
def transform(random_transform_tables: Callable[..., TransformTables]) -> TransformTables:
    return random_transform_tables(LAYOUT)


@pytest.fixture(scope="module")
def table(transform: TransformTables) -> ModelTable:
    """Of both codecs."""
    return build(transform, delta_tables())


@pytest.fixture(scope="module")
def other(random_transform_tables: Callable[..., TransformTables]) -> ModelTable:
    """Of both codecs, with other values in every file."""
    return build(random_transform_tables(LAYOUT, seed=1), delta_tables(seed=1))


@pytest.fixture
def folder(table: ModelTable, tmp_path: Path) -> Path:
    return table.save(tmp_path / "table", card="# A card")


def load(folder: Path, *part: Any, **options: Any) -> ModelTable:
    return ModelTable.load(LocalStore(folder), *part, **options)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def same_arrays(one: Arrays, two: Arrays) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def rewrite(folder: Path, codec: str, arrays: Arrays) -> None:
    """Replace the arrays in one file of a saved table, and what ``table.json`` says of it."""
    payload = safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in arrays.items()})
    (folder / f"{codec}.safetensors").write_bytes(payload)
    record = json.loads((folder / RECORD_NAME).read_text())
    entry = next(entry for entry in record["codecs"] if entry["codec"] == codec)
    digest = hashlib.blake2b(payload, digest_size=16).hexdigest()
    entry["arrays"] = {"digest": digest, "size_bytes": len(payload)}
    (folder / RECORD_NAME).write_text(json.dumps(record))


@pytest.mark.parametrize("group", [0, 10])
@pytest.mark.parametrize("tables", ["channel", "tensor"])
def test_saved_delta_table_is_loaded_as_it_was(group: int, tables: Any, tmp_path: Path) -> None:
    config = DeltaConfig(group=group, tables=tables, factors=(1.0, 0.5))
    table = build(delta_tables(config=config))
    found = load(table.save(tmp_path / "table"))
    assert found.record == table.record
    assert found.payloads == table.payloads
    assert same_arrays(found.tables["delta"].to_arrays(), table.tables["delta"].to_arrays())
    assert names_in(tmp_path / "table") == {RECORD_NAME, DELTA}


def test_saved_table_of_two_codecs_is_loaded_as_it_was(folder: Path, table: ModelTable) -> None:
    found = load(folder)
    assert found.record == table.record
    assert found.payloads == table.payloads
    for codec in ("transform", "delta"):
        one, two = found.tables[codec], table.tables[codec]
        assert one.config == two.config
        assert same_arrays(one.to_arrays(), two.to_arrays())
    assert names_in(folder) == {*FILES, CARD_NAME}
    assert table.size_bytes() == sum((folder / name).stat().st_size for name in FILES)


@pytest.mark.parametrize(
    ("codecs", "files"),
    [
        (None, [TRANSFORM, DELTA]),
        (["delta"], [DELTA]),
        (["transform"], [TRANSFORM]),
        (["delta", "transform"], [TRANSFORM, DELTA]),
    ],
)
def test_part_reads_and_writes_its_own_files_only(
    folder: Path,
    table: ModelTable,
    codecs: list[str] | None,
    files: list[str],
    tmp_path: Path,
    recording_store: Any,
) -> None:
    store = recording_store(folder)
    found = ModelTable.load(store, codecs=codecs)
    assert store.paths == [RECORD_NAME, *files]
    assert list(found.payloads) == files
    assert {name for name in table.tables if f"{name}.safetensors" in files} == set(found.tables)
    # The part is a table in its own right, the same as one that is saved in part.
    copies = [found.save(tmp_path / "a"), table.save(tmp_path / "b", codecs=codecs)]
    for copy in copies:
        assert names_in(copy) == {RECORD_NAME, *files}
        assert load(copy).record == found.record
        assert found.size_bytes() == sum(path.stat().st_size for path in copy.iterdir())


def test_record_alone_is_read_for_what_it_says(
    folder: Path, table: ModelTable, recording_store: Any
) -> None:
    store = recording_store(folder)
    assert TableRecord.read(store) == table.record
    assert store.paths == [RECORD_NAME]


def test_files_that_are_not_needed_may_be_missing(folder: Path, table: ModelTable) -> None:
    (folder / TRANSFORM).unlink()
    with pytest.raises(StoreNotFound, match=TRANSFORM):
        load(folder)
    digest = table.record.digests["delta"]
    assert load(folder, codecs=["delta"]).record.digests == {"delta": digest}


def test_codec_that_the_table_lacks_is_named(folder: Path, tmp_path: Path) -> None:
    alone = load(folder, codecs=["delta"])
    with pytest.raises(TableMismatch, match=r"me/it holds delta; expected transform too"):
        load(alone.save(tmp_path / "alone"), codecs=["delta", "transform"])
    with pytest.raises(TableMismatch, match=r"holds delta; expected transform"):
        alone.save(tmp_path / "copy", codecs=["transform"])
    with pytest.raises(TableMismatch, match=r"holds transform, delta; expected \.\./delta too"):
        load(folder, codecs=["../delta"])
    with pytest.raises(ValueError, match="at least one codec"):
        load(folder, codecs=[])
    assert not (tmp_path / "copy").exists()


def test_table_inside_another_folder(folder: Path, table: ModelTable) -> None:
    assert load(folder.parent, "table").record == table.record
    with pytest.raises(StoreNotFound, match=r"other/table\.json"):
        load(folder.parent, "other")


def test_parts_are_joined_to_the_whole(folder: Path, table: ModelTable, tmp_path: Path) -> None:
    parts = [load(folder, codecs=[codec]) for codec in ("transform", "delta")]
    whole = ModelTable.join(parts)
    assert whole.record == table.record
    assert load(whole.save(tmp_path / "whole")).payloads == table.payloads
    with pytest.raises(ValueError, match="each codec once"):
        ModelTable.join([parts[0], whole])
    bf16 = LAYOUT.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(FormatError, match="several layouts"):
        ModelTable.join([parts[0], build(delta_tables(), layout=bf16)])


def test_representation_is_short(table: ModelTable) -> None:
    """Errors and debuggers ask for it, and a table has megabytes."""
    assert table.record.model_id in repr(table)
    assert len(repr(table)) < 2 * len(repr(table.record))


def test_digests_are_of_what_segments_depend_on(
    table: ModelTable, random_transform_tables: Callable[..., TransformTables]
) -> None:
    def transform_digest(seed: int = 0, fields: dict[str, Any] | None = None, **config: Any) -> str:
        tables = random_transform_tables(LAYOUT, seed, **config)
        return build(tables, **fields or {}).record.digests["transform"]

    digest = table.record.digests["transform"]
    assert transform_digest() == digest
    assert transform_digest(fields={"model_id": "you/that", "data": (("x", 1),)}) == digest
    changed = [
        transform_digest(seed=1),
        transform_digest(step=0.2),
        transform_digest(fields={"layout": LAYOUT.model_copy(update={"dtype": "bfloat16"})}),
    ]
    assert len({digest, *changed, *table.record.digests.values()}) == 5


def test_digest_of_a_codec_is_its_own(table: ModelTable, other: ModelTable) -> None:
    delta, digests = table.tables["delta"], table.record.digests
    for alone in (build(delta), build(delta, other.tables["transform"])):
        assert alone.record.digests["delta"] == digests["delta"]
    assert table.record.subset(["transform"]).digests == {"transform": digests["transform"]}


def test_digest_is_the_one_of_the_format(table: ModelTable) -> None:
    entry = next(entry for entry in table.record.codecs if entry.codec == "delta")
    document = {
        "codec": "delta",
        "params": entry.params.model_dump(mode="json"),
        "layout": LAYOUT.model_dump(mode="json"),
        "arrays": hashlib.blake2b(table.payloads[DELTA], digest_size=16).hexdigest(),
        "version": 2,
    }
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    expected = hashlib.blake2b(canonical, digest_size=16).hexdigest()
    assert table.record.digests["delta"] == expected


def _without(name: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {key: array for key, array in arrays.items() if key != name}


def _with(name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[..., Arrays]:
    return lambda arrays: {**arrays, name: change(arrays[name])}


def _first(value: float) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def change(array: NDArray[Any]) -> NDArray[Any]:
        changed = array.copy()
        changed[0] = value
        return changed

    return change


ARRAYS = tuple(delta_tables().to_arrays())
DAMAGES: dict[str, Callable[[Arrays], Arrays]] = {
    **{f"no {name}": _without(name) for name in ARRAYS},
    **{f"short {name}": _with(name, lambda a: a[:-1]) for name in ARRAYS},
    **{f"flat {name}": _with(name, lambda a: a[None]) for name in ARRAYS},
    **{f"{name} as int64": _with(name, lambda a: a.astype(np.int64)) for name in ARRAYS},
    **{
        f"{name} {value}": _with(name, _first(value))
        for name in ("mean", "anchor_step", "spread")
        for value in (np.nan, np.inf)
    },
    "step 0": _with("anchor_step", _first(0)),
    "spread below 0": _with("spread", _first(-1)),
    "frequencies that sum to less": _with("differences0.freqs", _first(0)),
    "frequencies that sum to more": _with("anchors.freqs", _first(4096)),
    "empty alphabet": _with("anchors.sizes", _first(0)),
    "superfluous array": lambda arrays: {**arrays, "more": np.zeros(1, np.float32)},
    "another level": lambda arrays: {**arrays, "differences2.lo": np.zeros(16, np.int16)},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_arrays_that_are_no_table_are_refused(
    folder: Path, table: ModelTable, damage: Callable[[Arrays], Arrays]
) -> None:
    rewrite(folder, "delta", damage(table.tables["delta"].to_arrays()))
    with pytest.raises(FormatError):
        load(folder)


def test_each_file_has_the_arrays_of_its_codec(folder: Path, table: ModelTable) -> None:
    right = table.tables["transform"].to_arrays()
    wrong = (
        {**right, "more": np.zeros(1, np.float32)},
        dict(list(right.items())[1:]),
        table.tables["delta"].to_arrays(),
    )
    for arrays in wrong:
        rewrite(folder, "transform", arrays)
        with pytest.raises(FormatError, match="table arrays: expected"):
            load(folder)
    assert "delta" in load(folder, codecs=["delta"]).tables


def test_arrays_are_checked_against_the_layout(table: ModelTable) -> None:
    other = LAYOUT.model_copy(update={"layers": (LAYER,)})
    delta = table.tables["delta"]
    with pytest.raises(FormatError, match=r"expected float32 \[16\]"):
        DeltaTables.from_arrays(delta.config, delta.to_arrays(), other)


@pytest.mark.parametrize("name", FILES)
def test_damaged_or_missing_file_is_refused(folder: Path, name: str) -> None:
    intact = (folder / name).read_bytes()
    for position in range(0, len(intact), len(intact) // 40):
        damaged = intact[:position] + bytes([intact[position] ^ 0xFF]) + intact[position + 1 :]
        (folder / name).write_bytes(damaged)
        with pytest.raises(FormatError, match=name):
            load(folder)
        (folder / name).write_bytes(intact[:position])
        with pytest.raises(FormatError, match=name):
            load(folder)
    if name != RECORD_NAME:
        (folder / name).write_bytes(intact + b"more")
        with pytest.raises(StoreError, match=f"{name} .* holds {len(intact) + 4} bytes"):
            load(folder)
    (folder / name).unlink()
    with pytest.raises(StoreNotFound, match=name):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 1),
        ("version", 3),
        ("format", "other"),
        ("more", 1),
        ("codecs", []),
        ("codecs", {}),
        ("layout", {}),
    ],
)
def test_record_of_another_kind_is_refused(folder: Path, field: str, value: Any) -> None:
    record = json.loads((folder / RECORD_NAME).read_text())
    (folder / RECORD_NAME).write_text(json.dumps({**record, field: value}))
    with pytest.raises(FormatError, match=f"table.json.*{field}"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": "newer"}, "codecs.0.*newer"),
        ({"codec": "../../etc/passwd"}, r"codecs.0.*expected tags: 'delta', 'transform'"),
        ({"codec": "delta"}, "codecs.0"),
        ({"codec": None}, "codecs.0"),
        ({"params": {"levels": 0}}, "levels"),
        ({"params": {"file": "x"}}, "file"),
        ({"arrays": {"digest": "../../etc/passwd", "size_bytes": 1}}, "digest"),
        ({"arrays": {"digest": "AB" * 16, "size_bytes": 1}}, "digest"),
        ({"arrays": {"digest": "ab" * 16, "size_bytes": -1}}, "size_bytes"),
        ({"arrays": {"digest": "ab" * 16, "size_bytes": 1 << 40}}, "size_bytes"),
        ({"arrays": {"digest": "ab" * 16, "size_bytes": 1, "name": "/etc/passwd"}}, "name"),
        ({"arrays": None}, "arrays"),
        ({"more": 1}, "more"),
    ],
)
def test_hostile_codec_in_a_record_is_refused(
    folder: Path, changes: dict[str, Any], message: str, recording_store: Any
) -> None:
    record = json.loads((folder / RECORD_NAME).read_text())
    record["codecs"][0] |= changes
    (folder / RECORD_NAME).write_text(json.dumps(record))
    store = recording_store(folder)
    with pytest.raises(FormatError, match=message):
        ModelTable.load(store)
    assert set(store.paths) == {RECORD_NAME}


def test_codec_that_is_there_twice_is_refused(folder: Path) -> None:
    record = json.loads((folder / RECORD_NAME).read_text())
    record["codecs"].append(record["codecs"][0])
    (folder / RECORD_NAME).write_text(json.dumps(record))
    with pytest.raises(FormatError, match="each codec once"):
        load(folder)


@pytest.mark.parametrize("name", FILES[1:])
def test_arrays_of_another_table_are_refused(folder: Path, other: ModelTable, name: str) -> None:
    (folder / name).write_bytes(other.payloads[name])
    with pytest.raises((FormatError, StoreError), match=name):
        load(folder)


def test_dtype_of_the_profile_does_not_matter_but_the_rope_does(table: ModelTable) -> None:
    table.check_layout(LAYOUT.model_copy(update={"dtype": "bfloat16"}))
    rope = ROPE.model_copy(update={"inv_freq": (1.0, 0.2)})
    for other in (
        LAYOUT.model_copy(update={"layers": (LAYER,)}),
        LAYOUT.model_copy(update={"ropes": {"default": rope}}),
    ):
        with pytest.raises(TableMismatch, match=r"me/it.*hf-cachegen profile"):
            table.check_layout(other)


def test_saving_again_keeps_the_files_and_replaces_the_card(
    folder: Path, table: ModelTable
) -> None:
    before = [(folder / name).stat() for name in FILES]
    table.save(folder, card="# Another card")
    assert [(folder / name).stat() for name in FILES] == before
    assert (folder / CARD_NAME).read_text() == "# Another card"


def test_table_replaces_another_or_a_damaged_one(
    folder: Path, table: ModelTable, other: ModelTable
) -> None:
    other.save(folder)
    assert load(folder).record == other.record
    (folder / DELTA).write_bytes(b"damaged")
    other.save(folder)
    assert load(folder).record == other.record
    (folder / RECORD_NAME).unlink()
    table.save(folder)
    assert load(folder).record == table.record
    assert [path.name for path in folder.parent.iterdir()] == ["table"]


def test_part_replaces_the_whole_and_the_whole_a_part(folder: Path, table: ModelTable) -> None:
    table.save(folder, codecs=["transform"])
    assert names_in(folder) == {RECORD_NAME, TRANSFORM}
    table.save(folder)
    assert names_in(folder) == set(FILES)


def test_folder_of_other_files_is_not_touched(table: ModelTable, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds other files"):
        table.save(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert load(table.save(tmp_path / "empty")).record == table.record


@pytest.mark.parametrize("damaged", [False, True])
def test_several_may_save_the_same_table_at_once(
    table: ModelTable, tmp_path: Path, damaged: bool
) -> None:
    target = tmp_path / "tables" / "one"
    if damaged:
        table.save(target)
        (target / DELTA).write_bytes(b"damaged")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: table.save(target), range(32)))
    assert load(target).record == table.record
    assert [path.name for path in target.parent.iterdir()] == ["one"]


def test_transform_config_is_part_of_the_record(table: ModelTable) -> None:
    (entry,) = table.record.subset(["transform"]).codecs
    assert entry.params == TransformConfig(group=2, step=0.5, levels=2)
