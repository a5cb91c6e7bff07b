"""``fetch`` that is interrupted, by a server that dies or by a kill, and run again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
import tenacity
from huggingface_hub import HfApi

from hf_cachegen.bench.link import Fault, Gone, LinkServer, Stall
from hf_cachegen.stores import client


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Who asks a server that is gone again does not wait before."""
    monkeypatch.setattr(client, "_BACKOFF", tenacity.wait_none())


def files_of(folder: Path) -> dict[str, bytes]:
    """All files but the lock."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def data_files(encoded: Path) -> list[str]:
    """What is large of an artefact: its chunks and its table."""
    return [name for name in files_of(encoded) if name.endswith((".kv", "/delta.safetensors"))]


class DyingServer(LinkServer):
    """Dies in the middle of the first answer that carries a file, once that half has arrived."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        self._name, self._size = name, (folder / name).stat().st_size

    def next_faults(self) -> list[Fault]:
        asked = [record for record in self.requests if record.path == self._name]
        half = self._size // 2
        return [Stall(None, half, duration_s=0.1), Gone(None, half)] if len(asked) == 1 else []


def test_fetch_goes_on_in_the_middle_of_any_file(run, refuse, encoded, tmp_path):
    names = data_files(encoded)
    assert len(names) > 2
    for number, name in enumerate(names):
        out, size = tmp_path / str(number), (encoded / name).stat().st_size
        with DyingServer(encoded, name) as server:
            message = refuse("fetch", server.url, "-o", out)
            assert "run the same command again" in message
            kept = int(re.search(rf"(\d+) of {size} bytes are kept", message)[1])
            assert not (out / "cache.json").exists()
            assert not (out / name).exists()
            server.is_gone = False
            run("fetch", server.url, "-o", out)
            sent = sum(record.sent_bytes for record in server.requests if record.path == name)
            begun = [record.start for record in server.requests if record.path == name]
        assert files_of(out) == files_of(encoded)
        assert kept <= size // 2  # all of it, if the client was not too busy to take it
        assert begun[-1] == kept
        assert sent == size // 2 + size - kept


def test_message_says_how_much_is_there(refuse, encoded, tmp_path):
    sizes = {name: len(data) for name, data in files_of(encoded).items() if name.endswith(".kv")}
    total = sum(sizes.values())
    with DyingServer(encoded, max(sizes)) as server:
        message = refuse("fetch", server.url, "-o", tmp_path / "out")
    there = sum(
        path.stat().st_size for path in (tmp_path / "out" / "chunks").iterdir() if path.is_file()
    )
    assert f"{there / 1e6:.2f} MB of {total / 1e6:.2f} MB are there" in message


def test_table_alone_goes_on(run, refuse, encoded, tmp_path):
    (folder,) = (encoded / "table").iterdir()
    name, out = "delta.safetensors", tmp_path / "table"
    size = (folder / name).stat().st_size
    with DyingServer(folder, name) as server:
        message = refuse("fetch", server.url, "-o", out)
        assert "run the same command again" in message
        assert "neither" not in message
        assert "found neither" in refuse("info", f"{out}.part")  # it is not seen as a table
        server.is_gone = False
        run("fetch", server.url, "-o", out)
        begun = [record.start for record in server.requests if record.path == name]
        assert begun[-1] == size // 2
        assert files_of(out) == files_of(folder)
        assert os.listdir(tmp_path) == ["table"]
        server.requests.clear()
        run("fetch", server.url, "-o", out)
        assert {record.path for record in server.requests} == {"cache.json", "table.json"}


def test_process_that_is_killed(run, encoded, tmp_path):
    out = tmp_path / "out"
    largest = max(data_files(encoded), key=lambda name: (encoded / name).stat().st_size)
    size = (encoded / largest).stat().st_size

    def arrived_bytes():
        try:
            return sum(path.stat().st_size for path in out.rglob("*.kv*"))
        except FileNotFoundError:  # one was complete just now, and has another name
            return 0

    with LinkServer(encoded, rate_bytes_per_s=size / 4) as server:
        command = [sys.executable, "-m", "hf_cachegen", "fetch", server.url, "-o", str(out)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            while arrived_bytes() <= size / 4:
                assert process.poll() is None
                server.stopping.wait(0.02)
            process.kill()
    arrived = arrived_bytes()
    with LinkServer(encoded) as server:
        run("fetch", server.url, "-o", out)
        sent = sum(r.sent_bytes for r in server.requests if r.path.endswith(".kv"))
    total = sum((encoded / name).stat().st_size for name in files_of(encoded) if ".kv" in name)
    assert sent == total - arrived
    assert files_of(out) == files_of(encoded)


@pytest.fixture
def left_behind(run, encoded, tmp_path):
    """A cache with what interrupted fetches and saves of other versions have left in its folder."""
    folder = tmp_path / "left"
    run("fetch", encoded, "-o", folder)
    digest = "12" * 16
    for name in (
        f"chunks/{digest}.kv.part",
        f"states-{digest}.safetensors.part",
        f"table/{digest}.part/delta.safetensors.part",
        f"table/{digest}.part/.lock",
        "table/.new-abc/new/delta.safetensors",
        f"table/{digest}/table.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    (folder / "README.md").write_text("mine")
    (folder / "notes.part").write_text("mine")
    return folder


def test_remains_are_removed(run, encoded, left_behind):
    run("fetch", encoded, "-o", left_behind)
    own = {"README.md", "notes.part"}
    assert files_of(left_behind).keys() - own == files_of(encoded).keys()
    assert own <= files_of(left_behind).keys()


def test_remains_are_not_pushed(run, hub, encoded, left_behind):
    run("push", left_behind, "me/kv", "--endpoint", hub.endpoint, "--token", hub.token)
    pushed = set(HfApi(endpoint=hub.endpoint, token=hub.token).list_repo_files("me/kv"))
    stray = {f"table/{'12' * 16}/table.json", "README.md", ".gitattributes"}
    assert pushed - stray == files_of(encoded).keys()


def test_two_at_once(run, refuse, encoded, tmp_path):
    out = tmp_path / "out"
    run("fetch", encoded, "-o", out)
    before = files_of(out)
    with filelock.FileLock(out / ".lock"):
        message = refuse("fetch", encoded, "-o", out)
    assert "another save or fetch is writing" in message
    assert "again" not in message
    assert files_of(out) == before


def test_two_at_once_of_a_table(run, refuse, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_cachegen.tables.download.LOCK_WAIT_S", 0.2)
    (folder,) = (encoded / "table").iterdir()
    out = tmp_path / "table"
    held = tmp_path / "table.part"
    held.mkdir()
    with filelock.FileLock(held / ".lock"):
        message = refuse("fetch", folder, "-o", out)
    assert "another process is at it" in message
    assert "again" not in message
    run("fetch", folder, "-o", out)
    assert files_of(out) == files_of(folder)


@pytest.mark.parametrize("kind", ["cache", "table"])
def test_places_that_cannot_be_written_to(refuse, encoded, tmp_path, kind):
    (tmp_path / "file").write_text("mine")
    (table,) = (encoded / "table").iterdir()
    with LinkServer(encoded if kind == "cache" else table) as server:
        for place in (tmp_path / "file", tmp_path / "file" / "new", tmp_path / ("a" * 300)):
            message = refuse("fetch", server.url, "-o", place)
            assert f"cannot write to {place}" in message
            assert "again" not in message
        assert not server.requests
    assert files_of(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("name", ["chunk", "table"])
def test_size_in_a_record_that_cannot_be_right(refuse, encoded, tmp_path, name):
    """What the server has is all there is; no further attempt is proposed."""
    source = tmp_path / "source"
    shutil.copytree(encoded, source)
    path = source / "cache.json" if name == "chunk" else next(source.rglob("table.json"))
    record = json.loads(path.read_text())
    sized = record["chunks"][0] if name == "chunk" else record["codecs"][0]["arrays"]
    size = sized["size_bytes"] + 1000 if name == "chunk" else 4 << 30
    if name == "chunk":  # whose sizes have to agree
        sized["level_bytes"][-1] += 1000
    sized["size_bytes"] = size
    path.write_text(json.dumps(record))
    served, out = source if name == "chunk" else path.parent, tmp_path / "out"
    with LinkServer(served) as server:
        message = refuse("fetch", server.url, "-o", out)
    assert f"where byte {size} was expected" in message
    assert "nothing of it is kept" in message
    assert "same command" not in message
    assert not [path for path in tmp_path.rglob("*.part") if path.is_file()]


def test_file_that_is_missing_is_not_asked_for_again(refuse, encoded, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(encoded, source)
    names = [name for name in data_files(source) if name.endswith(".kv")]
    (source / names[-1]).unlink()
    with LinkServer(source) as server:
        message = refuse("fetch", server.url, "-o", tmp_path / "out")
    assert names[-1] in message
    assert "again" not in message


def test_fetch_refuses_a_folder_without_a_name(refuse, encoded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "expected the name of a folder" in refuse("fetch", encoded, "-o", "")
    assert not list(tmp_path.iterdir())
