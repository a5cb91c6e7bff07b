"""Model tables on a disk: whole, damaged, of something else."""

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
from hf_cachegen.errors import FormatError, StoreNotFound, TableMismatch
from hf_cachegen.layout import KVLayout, LayerSpec, RopeSpec, TensorSpec
from hf_cachegen.stores import LocalStore
from hf_cachegen.tables import ARRAYS_NAME, CARD_NAME, RECORD_NAME, ModelTable

ROPE = RopeSpec(inv_freq=(1.0, 0.1), attention_scaling=1.0, pairing="half")
TENSORS = (
    TensorSpec(name="keys", heads=2, dim=4, rope="default"),
    TensorSpec(name="values", heads=2, dim=4),
)
LAYER = LayerSpec(kind="full_attention", tensors=TENSORS)
LAYOUT = KVLayout(dtype="float32", ropes={"default": ROPE}, layers=(LAYER, LAYER))

Arrays = dict[str, NDArray[Any]]


def make(seed: int = 0, config: DeltaConfig | None = None) -> ModelTable:
    """A table of two layers, profiled on noise."""
    profiler = DeltaProfiler(LAYOUT, config or DeltaConfig(factors=(1.0, 0.5)))
    generator = torch.Generator().manual_seed(seed)
    layers = [[torch.randn(2, 60, 4, generator=generator) for _ in TENSORS] for _ in range(2)]
    for observe in (profiler.observe_moments, profiler.observe_counts):
        for index, tensors in enumerate(layers):
            observe(index, tensors, 0)
    return ModelTable.build(
        profiler.finish(), model_id="me/it", config="ab" * 16, layout=LAYOUT, data=(("noise", 60),)
    )


@pytest.fixture(scope="module")
def table() -> ModelTable:
    return make()


@pytest.fixture
def folder(table: ModelTable, tmp_path: Path) -> Path:
    return table.save(tmp_path / "table", card="# A card")


def load(folder: Path, *inside: str) -> ModelTable:
    return ModelTable.load(LocalStore(folder), *inside)


def rewrite(folder: Path, arrays: Arrays) -> None:
    """Replace the arrays of a saved table, digest included."""
    layout_table = load(folder)
    payload = safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in arrays.items()})
    (folder / ARRAYS_NAME).write_bytes(payload)
    record = json.loads(layout_table.record.model_dump_json())
    record["arrays"] = hashlib.blake2b(payload, digest_size=16).hexdigest()
    (folder / RECORD_NAME).write_text(json.dumps(record))


@pytest.mark.parametrize("group", [0, 10])
@pytest.mark.parametrize("tables", ["channel", "tensor"])
def test_saved_table_is_loaded_as_it_was(group: int, tables: Any, tmp_path: Path) -> None:
    table = make(config=DeltaConfig(group=group, tables=tables, factors=(1.0, 0.5)))
    found = load(table.save(tmp_path / "table"))
    assert found.record == table.record
    assert found.digest == table.digest
    assert found.payload == table.payload
    arrays, expected = found.tables.to_arrays(), table.tables.to_arrays()
    assert arrays.keys() == expected.keys()
    assert all(np.array_equal(arrays[name], expected[name]) for name in arrays)
    sizes = [path.stat().st_size for path in (tmp_path / "table").iterdir()]
    assert table.size_bytes == sum(sizes)


def test_table_inside_another_folder(folder: Path, table: ModelTable) -> None:
    assert load(folder.parent, "table").digest == table.digest
    with pytest.raises(StoreNotFound, match=r"other/table\.json"):
        load(folder.parent, "other")


def test_digest_is_of_what_decoding_depends_on(table: ModelTable) -> None:
    def digest(**changes: Any) -> str:
        record = table.record.model_copy(update=changes)
        return ModelTable(record, table.tables, table.payload).digest

    assert digest(model_id="you/that", data=(("x", 1),), library_version="9") == table.digest
    others = {
        digest(arrays="0" * 32),
        digest(params=DeltaConfig(factors=(1.0, 0.4))),
        digest(layout=LAYOUT.model_copy(update={"dtype": "bfloat16"})),
        make(seed=1).digest,
    }
    assert len(others | {table.digest}) == 5


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


ARRAYS = tuple(make().tables.to_arrays())
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
    rewrite(folder, damage(table.tables.to_arrays()))
    with pytest.raises(FormatError):
        load(folder)


def test_arrays_are_checked_against_the_layout(table: ModelTable) -> None:
    other = LAYOUT.model_copy(update={"layers": (LAYER,)})
    with pytest.raises(FormatError, match=r"expected float32 \[16\]"):
        DeltaTables.from_arrays(table.record.params, table.tables.to_arrays(), other)


@pytest.mark.parametrize("name", [RECORD_NAME, ARRAYS_NAME])
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
    (folder / name).unlink()
    with pytest.raises(StoreNotFound, match=name):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 2), ("format", "other"), ("codec", "newer"), ("more", 1), ("arrays", "short")],
)
def test_record_of_another_kind_is_refused(folder: Path, field: str, value: Any) -> None:
    record = json.loads((folder / RECORD_NAME).read_text())
    (folder / RECORD_NAME).write_text(json.dumps({**record, field: value}))
    with pytest.raises(FormatError, match=f"table.json.*{field}"):
        load(folder)


def test_arrays_of_another_table_are_refused(folder: Path) -> None:
    (folder / ARRAYS_NAME).write_bytes(make(seed=1).payload)
    with pytest.raises(FormatError, match="damaged or of another table"):
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
    before = (folder / ARRAYS_NAME).stat()
    table.save(folder, card="# Another card")
    assert (folder / ARRAYS_NAME).stat() == before
    assert (folder / CARD_NAME).read_text() == "# Another card"


def test_table_replaces_another_or_a_damaged_one(folder: Path, table: ModelTable) -> None:
    other = make(seed=1)
    other.save(folder)
    assert load(folder).digest == other.digest
    (folder / ARRAYS_NAME).write_bytes(b"damaged")
    other.save(folder)
    assert load(folder).digest == other.digest
    (folder / RECORD_NAME).unlink()
    table.save(folder)
    assert load(folder).digest == table.digest
    assert [path.name for path in folder.parent.iterdir()] == ["table"]


def test_folder_of_other_files_is_not_touched(table: ModelTable, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds other files"):
        table.save(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert load(table.save(tmp_path / "empty")).digest == table.digest


@pytest.mark.parametrize("damaged", [False, True])
def test_several_may_save_the_same_table_at_once(
    table: ModelTable, tmp_path: Path, damaged: bool
) -> None:
    target = tmp_path / "tables" / table.digest
    if damaged:
        table.save(target)
        (target / ARRAYS_NAME).write_bytes(b"damaged")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: table.save(target), range(32)))
    assert load(target).digest == table.digest
    assert [path.name for path in target.parent.iterdir()] == [table.digest]
