"""Commands on caches with recurrent states: their file is told, checked, copied and replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedModel

from hf_cachegen import save_cache
from hf_cachegen.artifact import Artifact
from hf_cachegen.bench.link import LinkServer
from hf_cachegen.stores import LocalStore

Run = Callable[..., str]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        block_multiple_of=16,
    )
    return Lfm2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def caches(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A context of 60 tokens, and one of 90 that begins with it."""
    ids = torch.randint(3, 300, (90,), generator=torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("states")
    for n_tokens in (60, 90):
        target = folder / str(n_tokens)
        save_cache(
            model, None, ids[:n_tokens], target, tables=None, chunk_tokens=30, progress=False
        )
    return folder / "60", folder / "90"


def states_of(folder: Path) -> Path:
    (path,) = folder.glob("states-*.safetensors")
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_info_counts_the_states(run: Run, caches: tuple[Path, Path]) -> None:
    _, folder = caches
    facts = json.loads(run("info", folder, "--json"))
    size = states_of(folder).stat().st_size
    assert facts["states_bytes"] == size
    assert facts["layers"] == 1
    assert facts["raw_bytes"] == 90 * 2 * 16 * 4 + size
    chunks = sum(path.stat().st_size for path in folder.glob("chunks/*.kv"))
    assert facts["size_bytes"] == chunks + size
    assert "exact, with any level" in run("info", folder)


def test_verify_reads_the_states(run: Run, refuse: Run, caches: tuple[Path, Path], tmp_path: Path):
    folder = tmp_path / "damaged"
    shutil.copytree(caches[1], folder)
    assert "segments and the states" in run("verify", folder)
    path = states_of(folder)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert path.name in refuse("verify", folder)
    assert path.name in refuse("fetch", folder, "-o", tmp_path / "copy")
    assert not list((tmp_path / "copy").glob("states-*"))


def test_fetch_replaces_the_states_of_an_older_version(
    run: Run, caches: tuple[Path, Path], tmp_path: Path
) -> None:
    short, long = caches
    out = tmp_path / "copy"
    run("fetch", short, "-o", out)
    assert files_of(out) == files_of(short)
    with LinkServer(long) as server:
        run("fetch", server.url, "-o", out)
        assert files_of(out) == files_of(long)
        server.requests.clear()
        run("fetch", server.url, "-o", out)
        requested = {record.path for record in server.requests}
    assert not {path for path in requested if path.startswith("states-")}
    cache = Artifact.open(LocalStore(out))
    assert cache.read_states() == Artifact.open(LocalStore(long)).read_states()


def test_plan_counts_the_states(run: Run, model: PreTrainedModel, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    arguments = ("plan", tmp_path / "config.json", "--context", 90, "--link-gbps", 1)
    found = json.loads(run(*arguments, "--dtype", "float32", "--json"))
    assert found["states_bytes"] == 32 * 3 * 4
    assert found["raw_bytes"] == 90 * 2 * 16 * 4 + found["states_bytes"]
    assert "of them, however long the context" in run(*arguments)
