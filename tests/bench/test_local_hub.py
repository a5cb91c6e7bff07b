"""The local Hub serves the real huggingface_hub and transformers as the Hub does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hf_cachegen.bench.local_hub import LocalHub

BINARY = np.random.default_rng(0).bytes(200_000)
REPO = "org/context"


@pytest.fixture(autouse=True)
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The constants are read from the environment at import, which another test may have caused.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHub]:
    with LocalHub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def api(hub: LocalHub) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=hub.token)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    (root / "chunks").mkdir(parents=True)
    (root / "cache.json").write_text("{}")
    (root / "README.md").write_text("---\ntags: [kv-cache]\n---\nA cache.\n")
    (root / "chunks" / "a.kv").write_bytes(BINARY)
    (root / "chunks" / "b.kv").write_bytes(BINARY[::-1])
    return root


def test_repositories_are_created_once(api: HfApi) -> None:
    assert api.create_repo(REPO).repo_id == REPO
    assert api.create_repo(REPO, exist_ok=True).repo_id == REPO
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(REPO)
    name = api.whoami()["name"]
    assert api.create_repo("mine").repo_id == f"{name}/mine"
    assert api.repo_exists(REPO)
    api.delete_repo(REPO)
    assert not api.repo_exists(REPO)


def test_a_folder_comes_back_as_it_was_pushed(
    hub: LocalHub, api: HfApi, folder: Path, tmp_path: Path
) -> None:
    api.create_repo(REPO)
    commit = api.upload_folder(repo_id=REPO, folder_path=folder)
    assert api.list_repo_files(REPO) == ["README.md", "cache.json", "chunks/a.kv", "chunks/b.kv"]
    info = api.model_info(REPO, files_metadata=True)
    assert info.sha == commit.oid
    lfs = {s.rfilename: s.lfs.size for s in info.siblings or [] if s.lfs}
    assert lfs == {"chunks/a.kv": 200_000, "chunks/b.kv": 200_000}
    copy = Path(snapshot_download(REPO, endpoint=hub.endpoint, local_dir=tmp_path / "copy"))
    for file in ("README.md", "cache.json", "chunks/a.kv", "chunks/b.kv"):
        assert (copy / file).read_bytes() == (folder / file).read_bytes()
    # A second push has nothing to say: the client finds every file unchanged.
    assert api.upload_folder(repo_id=REPO, folder_path=folder).oid == commit.oid


def test_trees_by_level(api: HfApi, folder: Path) -> None:
    api.create_repo(REPO)
    api.upload_folder(repo_id=REPO, folder_path=folder)
    assert {entry.path for entry in api.list_repo_tree(REPO)} == {
        "README.md",
        "cache.json",
        "chunks",
    }
    assert [e.path for e in api.list_repo_tree(REPO, "chunks")] == ["chunks/a.kv", "chunks/b.kv"]


def test_commits_keep_their_snapshots(hub: LocalHub, api: HfApi, folder: Path) -> None:
    api.create_repo(REPO)
    first = api.upload_folder(repo_id=REPO, folder_path=folder).oid
    operations = [
        CommitOperationAdd("cache.json", b'{"turn": 2}'),
        CommitOperationAdd("chunks/c.kv", BINARY[:1000]),
        CommitOperationDelete("chunks/a.kv"),
    ]
    second = api.create_commit(REPO, operations, commit_message="turn 2", parent_commit=first).oid
    api.delete_folder("chunks", REPO)
    assert api.list_repo_files(REPO) == ["README.md", "cache.json"]
    assert "chunks/c.kv" in api.list_repo_files(REPO, revision=second)
    assert "chunks/a.kv" not in api.list_repo_files(REPO, revision=second)
    old = hf_hub_download(REPO, "cache.json", revision=first, endpoint=hub.endpoint)
    assert Path(old).read_text() == "{}"


def test_a_commit_on_a_parent_that_was_overtaken_is_refused(api: HfApi) -> None:
    api.create_repo(REPO)
    parent = api.model_info(REPO).sha
    api.upload_file(path_or_fileobj=b"1", path_in_repo="a", repo_id=REPO)
    operations = [CommitOperationAdd("a", b"2")]
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(REPO, operations, commit_message="late", parent_commit=parent)


def test_branches_and_tags(api: HfApi) -> None:
    api.create_repo(REPO)
    api.create_tag(REPO, tag="v1")
    api.create_branch(REPO, branch="draft")
    api.create_branch(REPO, branch="draft", exist_ok=True)
    api.upload_file(path_or_fileobj=b"1", path_in_repo="a", repo_id=REPO, revision="draft")
    refs = api.list_repo_refs(REPO)
    assert {branch.name for branch in refs.branches} == {"main", "draft"}
    assert [tag.name for tag in refs.tags] == ["v1"]
    assert api.list_repo_files(REPO, revision="draft") == ["a"]
    assert api.list_repo_files(REPO, revision="v1") == api.list_repo_files(REPO) == []


def test_errors_have_the_hubs_names(hub: LocalHub, api: HfApi) -> None:
    api.create_repo(REPO)
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(REPO, "missing", endpoint=hub.endpoint)
    with pytest.raises(RevisionNotFoundError):
        api.model_info(REPO, revision="v9")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/nowhere")
    with pytest.raises(BadRequestError, match="pull requests"):
        api.upload_file(path_or_fileobj=b"1", path_in_repo="a", repo_id=REPO, create_pr=True)


def test_who_may_do_what(hub: LocalHub, api: HfApi) -> None:
    api.create_repo(REPO)
    api.create_repo("org/private", private=True)
    anyone = HfApi(endpoint=hub.endpoint, token=False)
    wrong = HfApi(endpoint=hub.endpoint, token="hf_wrong")
    assert api.model_info("org/private").private
    assert anyone.list_repo_files(REPO) == []
    with pytest.raises(RepositoryNotFoundError):
        anyone.model_info("org/private")
    with pytest.raises(HfHubHTTPError, match="401"):
        wrong.model_info(REPO)
    with pytest.raises(HfHubHTTPError, match="401"):
        anyone.upload_file(path_or_fileobj=b"1", path_in_repo="a", repo_id=REPO)
    with pytest.raises(HfHubHTTPError, match="401"):
        anyone.create_repo("org/other")
    assert api.list_repo_files(REPO) == []


def test_the_next_hub_on_the_folder_finds_everything(tmp_path: Path, folder: Path) -> None:
    with LocalHub(tmp_path / "kept") as first:
        api = HfApi(endpoint=first.endpoint, token=first.token)
        api.create_repo(REPO)
        sha = api.upload_folder(repo_id=REPO, folder_path=folder).oid
    with LocalHub(tmp_path / "kept") as second:
        assert HfApi(endpoint=second.endpoint, token=False).model_info(REPO).sha == sha
        file = hf_hub_download(REPO, "chunks/a.kv", endpoint=second.endpoint)
        assert Path(file).read_bytes() == BINARY


def test_downloads_share_the_rate(tmp_path: Path, folder: Path) -> None:
    with LocalHub(tmp_path / "slow", rate_bytes_per_s=1e6) as hub:
        api = HfApi(endpoint=hub.endpoint, token=hub.token)
        api.create_repo(REPO)
        api.upload_folder(repo_id=REPO, folder_path=folder)
        started_s = time.perf_counter()
        snapshot_download(REPO, endpoint=hub.endpoint)
        assert time.perf_counter() - started_s >= 0.4  # 400 kB at 1 MB/s, over two connections


def test_leaving_ends_all_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with LocalHub(tmp_path / "hub") as hub:
        HfApi(endpoint=hub.endpoint, token=hub.token).create_repo(REPO)
    assert set(threading.enumerate()) <= before


def run_client(hub: LocalHub, home: Path, script: str) -> str:
    """Output of a process of its own: HF_ENDPOINT is read at import."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **hub.env, "HF_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cards_are_pushed(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    api.create_repo(REPO)
    script = (
        "from huggingface_hub import ModelCard\n"
        "card = ModelCard('---\\ntags:\\n- kv-cache\\n---\\n# A cache\\n')\n"
        f"card.push_to_hub('{REPO}')\n"
        f"print(ModelCard.load('{REPO}').data.tags)\n"
    )
    assert run_client(hub, tmp_path / "home", script).strip() == "['kv-cache']"


def test_transformers_pushes_and_loads(hub: LocalHub, tmp_path: Path) -> None:
    script = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1)
model = LlamaForCausalLM(config)
model.push_to_hub("org/tiny")
loaded = AutoModelForCausalLM.from_pretrained("org/tiny")
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
print("same")
"""
    assert run_client(hub, tmp_path / "home", script).strip().endswith("same")
    assert any(record.sent_bytes > 1000 for record in hub.storage.requests)
