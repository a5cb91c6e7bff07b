"""Hub stores through the real huggingface_hub client, against a local Hub."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub import HfApi

from hf_cachegen.bench.local_hub import LocalHub
from hf_cachegen.errors import StoreError, StoreNotFound
from hf_cachegen.stores import HubStore, LocalStore, open_store

CHUNK = "chunks/00.kv"


def api_of(hub: LocalHub) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=hub.token)


def test_small_files_are_cached_and_ranges_are_not(hub: LocalHub, chunk: bytes) -> None:
    with open_store("me/context", endpoint=hub.endpoint) as store:
        assert store.read("cache.json", max_bytes=100) == b'{"version": 1}'
        hub.requests.clear()
        hub.storage.requests.clear()
        assert store.read("cache.json", max_bytes=100) == b'{"version": 1}'
        assert store.read("cache.json", 2, 7, max_bytes=7) == b"version"
        assert hub.requests == []
        assert b"".join(store.stream(CHUNK, 1000, 2000)) == chunk[1000:3000]
        assert [record.sent_bytes for record in hub.storage.requests] == [2000]
    with open_store("me/context", local_files_only=True) as offline:
        assert offline.exists("cache.json")
        assert not offline.exists(CHUNK)


def test_existence(hub: LocalHub) -> None:
    with HubStore("me/context", endpoint=hub.endpoint) as store:
        assert store.exists("cache.json")
        assert store.exists(CHUNK)
        assert not store.exists("missing")
        with pytest.raises(StoreNotFound, match=r"has no missing"):
            store.read("missing", max_bytes=1)
        with pytest.raises(StoreNotFound):
            store.read("missing", 0, 1, max_bytes=1)
        with pytest.raises(ValueError, match="relative POSIX path"):
            store.read("../x", max_bytes=1)


def test_a_large_file_is_refused_before_it_is_fetched(hub: LocalHub) -> None:
    with HubStore("me/context", endpoint=hub.endpoint) as store:
        hub.storage.requests.clear()
        with pytest.raises(StoreError, match="300000 bytes where at most 1000"):
            store.read(CHUNK, max_bytes=1000)
        assert hub.storage.requests == []


def test_the_rest_of_a_file_is_bounded_by_its_own_size(hub: LocalHub, chunk: bytes) -> None:
    with HubStore("me/context", endpoint=hub.endpoint) as store:
        offset = len(chunk) - 1000
        with pytest.raises(StoreError, match="where at most"):
            store.read(CHUNK, offset, max_bytes=999)
        assert store.read(CHUNK, offset, max_bytes=1000) == chunk[offset:]


def test_a_store_stays_at_its_commit(hub: LocalHub, chunk: bytes) -> None:
    api = api_of(hub)
    store = HubStore("me/context", endpoint=hub.endpoint)
    first = store.commit
    api.upload_file(path_or_fileobj=b"new", path_in_repo="cache.json", repo_id="me/context")
    api.delete_file(CHUNK, "me/context")
    assert store.read("cache.json", max_bytes=100) == b'{"version": 1}'
    assert b"".join(store.stream(CHUNK, 0, 10)) == chunk[:10]
    newer = HubStore("me/context", endpoint=hub.endpoint)
    assert newer.commit != first
    assert newer.read("cache.json", max_bytes=100) == b"new"
    assert not newer.exists(CHUNK)
    pinned = open_store(f"hf://me/context@{first}", endpoint=hub.endpoint)
    assert pinned.read("cache.json", max_bytes=100) == b'{"version": 1}'


def test_branches_tags_and_unknown_revisions(hub: LocalHub) -> None:
    api = api_of(hub)
    api.create_tag("me/context", tag="v1")
    api.create_branch("me/context", branch="draft")
    api.upload_file(
        path_or_fileobj=b"draft", path_in_repo="cache.json", repo_id="me/context", revision="draft"
    )
    at = {
        revision: open_store(f"me/context@{revision}", endpoint=hub.endpoint)
        for revision in ("main", "v1", "draft")
    }
    assert at["main"].read("cache.json", max_bytes=99) == b'{"version": 1}'
    assert at["v1"].read("cache.json", max_bytes=99) == b'{"version": 1}'
    assert at["draft"].read("cache.json", max_bytes=99) == b"draft"
    with pytest.raises(StoreNotFound, match="v9"):
        HubStore("me/context", revision="v9", endpoint=hub.endpoint)


def test_private_repositories_need_the_token(hub: LocalHub, folder: Path) -> None:
    api = api_of(hub)
    api.create_repo("me/private", private=True)
    api.upload_folder(repo_id="me/private", folder_path=folder)
    with HubStore("me/private", endpoint=hub.endpoint, token=hub.token) as store:
        # The storage host refuses requests with a token, so this also shows that none goes there.
        assert len(store.read(CHUNK, 0, 100, max_bytes=100)) == 100
        commit = store.commit
    with pytest.raises(StoreNotFound, match="private pass token"):
        HubStore("me/private", endpoint=hub.endpoint, token=False)
    with pytest.raises(StoreError, match="401"):
        HubStore("me/private", endpoint=hub.endpoint, token="hf_wrong")
    with HubStore("me/private", endpoint=hub.endpoint, token=False, revision=commit) as store:
        with pytest.raises(StoreError, match="pass a token"):
            store.read(CHUNK, 0, 100, max_bytes=100)
        with pytest.raises(StoreNotFound, match="private pass token"):
            store.exists("cache.json.other")
    with pytest.raises(StoreNotFound, match="me/nowhere"):
        HubStore("me/nowhere", endpoint=hub.endpoint, token=hub.token)


def test_download_is_for_work_without_a_network(hub: LocalHub, chunk: bytes) -> None:
    with HubStore("me/context", endpoint=hub.endpoint) as store:
        folder = store.download(progress=False)
        hub.storage.requests.clear()
        assert store.read(CHUNK, 5, 10, max_bytes=10) == chunk[5:15]
        assert hub.storage.requests == []
    with HubStore("me/context", local_files_only=True) as offline:
        assert offline.commit == store.commit
        assert offline.read(CHUNK, max_bytes=300_000) == chunk
        assert offline.read(CHUNK, 5, 10, max_bytes=10) == chunk[5:15]
    assert LocalStore(folder).read(CHUNK, max_bytes=300_000) == chunk


def test_offline_without_the_files_says_what_to_run(hub: LocalHub) -> None:
    with pytest.raises(StoreError, match="hf-cachegen fetch me/context"):
        HubStore("me/context", local_files_only=True)
    HubStore("me/context", endpoint=hub.endpoint).close()
    with HubStore("me/context", local_files_only=True) as store:
        for size in (None, 10):
            with pytest.raises(StoreError, match="hf-cachegen fetch me/context"):
                store.read(CHUNK, 0, size, max_bytes=300_000)


def test_offline_mode_of_the_environment(hub: LocalHub, tmp_path: Path) -> None:
    HubStore("me/context", endpoint=hub.endpoint).download(progress=False)
    hub.requests.clear()
    script = (
        "from hf_cachegen.stores import open_store\n"
        f"print(len(open_store('me/context').read('{CHUNK}', max_bytes=10**6)))\n"
        "try: open_store('me/other')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    cache = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **hub.env, **cache},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    size, refusal = done.stdout.splitlines()
    assert size == "300000"
    assert refusal.startswith("StoreError")
    assert "fetch me/other" in refusal
    assert hub.requests == []


def test_a_hub_that_is_away_falls_back_on_the_cache(hub: LocalHub, chunk: bytes) -> None:
    HubStore("me/context", endpoint=hub.endpoint).download(progress=False)
    with HubStore("me/context", endpoint="http://127.0.0.1:9") as store:
        assert store.read(CHUNK, max_bytes=300_000) == chunk
    with pytest.raises(StoreError, match="cannot be reached"):
        HubStore("me/other", endpoint="http://127.0.0.1:9")


def test_a_hub_that_stalls_does_not_hang(hub: LocalHub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started_s = time.monotonic()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreError, match="cannot be reached"):
            HubStore("me/other", endpoint=endpoint, timeout_s=0.3)
        assert time.monotonic() - started_s < 60  # without a timeout it would never end


def test_subfolders_and_datasets(hub: LocalHub, folder: Path, chunk: bytes) -> None:
    api = api_of(hub)
    api.create_repo("me/caches", repo_type="dataset")
    api.upload_folder(
        repo_id="me/caches", repo_type="dataset", folder_path=folder, path_in_repo="one"
    )
    options = {"endpoint": hub.endpoint, "repo_type": "dataset", "subfolder": "one"}
    with open_store("me/caches", **options) as store:
        assert store.read("cache.json", max_bytes=100) == b'{"version": 1}'
        assert store.read(CHUNK, 7, 9, max_bytes=9) == chunk[7:16]
        assert isinstance(store, HubStore)
        assert (store.download(progress=False) / CHUNK).read_bytes() == chunk
    with pytest.raises(ValueError, match="relative POSIX path"):
        HubStore("me/caches", subfolder="../x", endpoint=hub.endpoint)


def test_malformed_names_are_the_callers_mistake(hub: LocalHub) -> None:
    with pytest.raises(ValueError, match="name"):
        HubStore("me/--name--", endpoint=hub.endpoint)


def test_a_hub_that_is_away_is_named_with_the_repository(hub: LocalHub, tmp_path: Path) -> None:
    endpoint = "http://127.0.0.1:9"
    words = ("hf://me/context", f"Hub at {endpoint} cannot", "refused", "HF_ENDPOINT", "fetch me/c")
    said = ".*".join(words)
    with pytest.raises(StoreError, match=f"revision main of {said}"):
        HubStore("me/context", endpoint=endpoint, cache_dir=tmp_path / "nothing")
    HubStore("me/context", endpoint=hub.endpoint).close()  # so that its commit is known
    with HubStore("me/context", endpoint=endpoint) as store:
        with pytest.raises(StoreError, match=f"cache.json of {said}"):
            store.read("cache.json", max_bytes=100)
        with pytest.raises(StoreError, match=f"cache.json of {said}"):
            store.exists("cache.json")


def test_the_hub_of_the_environment_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = "http://127.0.0.1:9"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    with pytest.raises(StoreError, match=f"the Hub at {endpoint} cannot be reached"):
        HubStore("me/context", cache_dir=tmp_path)


def test_a_cache_that_cannot_be_written_to_is_not_the_hubs_fault(
    hub: LocalHub, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"(?s)Hugging Face cache: .*file.*another cache") as told:
        HubStore("me/context", endpoint=hub.endpoint, cache_dir=tmp_path / "file").read(
            "cache.json", max_bytes=100
        )
    assert "cannot be reached" not in str(told.value)


def test_a_saved_token_that_is_missing_is_asked_for(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    with pytest.raises(StoreError, match=r"(?i)token") as told:
        HubStore("me/context", endpoint=hub.endpoint, token=True)
    assert "cannot be reached" not in str(told.value)
