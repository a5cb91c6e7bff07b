"""What counts as saved already: all that another save would write, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, MambaConfig

from hf_cachegen import ModelTable, save_cache
from hf_cachegen.errors import FormatError, StoreNotFound
from hf_cachegen.hf.saved import find_saved

IDS = torch.arange(10, 80)
SAVED: dict[str, dict[str, Any]] = {
    "auto": {},
    "auto, by name": {"levels": ["delta-1"]},
    "auto, exact": {"levels": ["lossless"]},
    "no table": {"tables": None},
    "chunks": {"chunk_tokens": 20},
    "model": {"model_id": "me/model"},
    "table": {"tables": "{table}"},
    "table, recent": {"tables": "{table}", "importance": "recent"},
    "table, some levels": {"tables": "{table}", "levels": ["transform-1", "raw"]},
}


@pytest.fixture(scope="module")
def table_folder(
    tiny_model: Any, transform_table: Callable[..., ModelTable], tmp_path_factory: Any
) -> Path:
    """A model table on disk."""
    return transform_table(tiny_model).save(tmp_path_factory.mktemp("tables") / "table")


@pytest.fixture(scope="module")
def settings(table_folder: Path) -> Callable[[str], dict[str, Any]]:
    """``settings(name)``: keywords of :data:`SAVED`."""

    def settings(name: str) -> dict[str, Any]:
        given = dict(SAVED[name])
        if given.get("tables") == "{table}":
            given["tables"] = table_folder
        return given

    return settings


@pytest.fixture(scope="module")
def saved(
    tiny_model: Any, settings: Callable[[str], dict[str, Any]], tmp_path_factory: Any
) -> Callable[[str], Path]:
    """``saved(name)``: the folder of a save with those settings."""
    folders: dict[str, Path] = {}

    def saved(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("saved") / "kv"
            save_cache(tiny_model, None, IDS, folders[name], progress=False, **settings(name))
        return folders[name]

    return saved


@pytest.mark.parametrize("asked", SAVED)
@pytest.mark.parametrize("name", SAVED)
def test_it_is_found_by_its_own_settings_alone(
    name: str, asked: str, saved: Any, settings: Any, tiny_model: Any
) -> None:
    folder = saved(name)
    found = find_saved(folder, tiny_model, IDS, **settings(asked))
    # What a save with these settings writes is the reference.
    same = (saved(asked) / "cache.json").read_bytes() == (folder / "cache.json").read_bytes()
    assert (found is not None) == same
    if found is not None:
        assert found.to_bytes() == (folder / "cache.json").read_bytes()


def test_other_contexts_and_models_are_something_else(
    saved: Any, tiny_model: Any, tiny_gemma: Any
) -> None:
    folder = saved("auto")
    assert find_saved(folder, tiny_model, IDS) is not None
    assert find_saved(folder, tiny_model, IDS[:-1]) is None
    assert find_saved(folder, tiny_model, torch.cat((IDS[:-1], IDS[:1]))) is None
    assert find_saved(folder, tiny_gemma, IDS) is None


@pytest.mark.parametrize("damage", ["cache.json", "tokens", "chunk", "length", "table", "folder"])
def test_what_is_damaged_is_not_there(
    damage: str, saved: Any, tiny_model: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    shutil.copytree(saved("auto"), folder)
    chunk = next(folder.glob("chunks/*.kv"))
    if damage == "cache.json":
        (folder / "cache.json").write_bytes(b"{}")
    elif damage == "tokens":
        next(folder.glob("tokens-*")).unlink()
    elif damage == "chunk":
        chunk.unlink()
    elif damage == "length":
        chunk.write_bytes(chunk.read_bytes()[:-1])
    elif damage == "table":
        shutil.rmtree(folder / "table")
    else:
        shutil.rmtree(folder)
    assert find_saved(folder, tiny_model, IDS) is None
    if folder.exists():
        save_cache(tiny_model, None, IDS, folder, overwrite=True, progress=False)
        assert find_saved(folder, tiny_model, IDS) is not None


WITH_LAYERS = Lfm2Config(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    layer_types=["conv", "full_attention"],
)
ALONE = MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)


@pytest.mark.parametrize(
    "config", [WITH_LAYERS, pytest.param(ALONE, marks=pytest.mark.since("5.24"))]
)
def test_states_belong_to_it(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    save_cache(model, None, IDS, tmp_path, progress=False)
    assert find_saved(tmp_path, model, IDS) is not None
    assert find_saved(tmp_path, model, IDS[:-1]) is None
    next(tmp_path.glob("states-*")).unlink()
    assert find_saved(tmp_path, model, IDS) is None


def test_settings_that_are_wrong_are_refused(saved: Any, tiny_model: Any, tmp_path: Path) -> None:
    for name in ("auto", "no table"):
        with pytest.raises(ValueError, match="unknown level"):
            find_saved(saved(name), tiny_model, IDS, tables=None, levels=["delta-1"])
    with pytest.raises((StoreNotFound, FormatError)):
        find_saved(saved("auto"), tiny_model, IDS, tables=tmp_path)
