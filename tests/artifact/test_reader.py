"""Opening and verifying an artefact, whatever its files have become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_cachegen.artifact import Artifact, ArtifactWriter, Identity, LevelRecord, Manifest
from hf_cachegen.errors import CacheGenError, FormatError, StoreError, StoreNotFound
from hf_cachegen.stores.local import LocalStore

Save = Callable[..., Manifest]
GOLDEN = Path(__file__).parents[1] / "golden" / "artifact_v1"


@pytest.fixture
def folder(tmp_path: Path, save: Save) -> Path:
    save(tmp_path, range(20))
    return tmp_path


def test_open_reads_no_chunk_and_an_index_is_read_once(folder: Path, recording_store: Any) -> None:
    store = recording_store(folder)
    artifact = Artifact.open(store)
    assert store.paths == ["cache.json", artifact.manifest.tokens.path]
    assert artifact.token_ids.dtype == np.int32
    assert artifact.token_ids.tolist() == list(range(20))
    assert not artifact.token_ids.flags.writeable
    store.reads.clear()
    assert artifact.index(1) is artifact.index(1)
    size = artifact.index(1).offsets[0]
    assert store.reads == [(artifact.manifest.chunks[1].path, 0, size)]


def test_token_ids_can_be_read_when_they_are_asked_for(folder: Path, recording_store: Any) -> None:
    store = recording_store(folder)
    artifact = Artifact.open(store, tokens=False)
    assert store.paths == ["cache.json"]
    assert artifact.token_ids.tolist() == list(range(20))
    assert artifact.token_ids is artifact.token_ids
    assert store.paths == ["cache.json", artifact.manifest.tokens.path]


def test_segments_are_where_the_index_says(folder: Path) -> None:
    store = LocalStore(folder)
    artifact = Artifact.open(store)
    record = artifact.manifest.chunks[2]
    offset, size = artifact.index(2).segment(1, 2)
    data = store.read(record.path, offset, size, max_bytes=size)
    assert data == f"{record.name}-1-2".encode() * 2
    artifact.index(2).check(1, 2, data)


def test_verify_reads_every_byte(folder: Path) -> None:
    progress: list[int] = []
    report = Artifact.open(LocalStore(folder)).verify(progress.append)
    total = sum(path.stat().st_size for path in folder.glob("chunks/*.kv"))
    assert (report.n_chunks, report.n_segments, report.size_bytes) == (3, 18, total)
    assert sum(progress) == total


def test_chunk_without_bytes_is_its_index(
    tmp_path: Path, identity: Identity, levels: tuple[LevelRecord, ...]
) -> None:
    with ArtifactWriter(tmp_path, identity, levels, 8, range(8)) as writer:
        writer.add_chunk(writer.missing_chunks()[0], [[b""] * 3] * 2)
        writer.commit()
    artifact = Artifact.open(LocalStore(tmp_path))
    artifact.verify()
    path = tmp_path / artifact.manifest.chunks[0].path
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(StoreError):
        artifact.verify()


def test_verify_names_file_and_segment(folder: Path) -> None:
    artifact = Artifact.open(LocalStore(folder))
    record = artifact.manifest.chunks[1]
    offset, _ = artifact.index(1).segment(1, 2)
    path = folder / record.path
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=rf"{record.name}.*level 1, layer 2\): checksum"):
        artifact.verify()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_any_change_of_a_chunk_file_is_noticed(folder: Path, data: st.DataObject) -> None:
    path = sorted(folder.glob("chunks/*.kv"))[data.draw(st.integers(0, 2))]
    original = path.read_bytes()
    start = data.draw(st.integers(0, len(original)))
    stop = data.draw(st.integers(start, min(len(original), start + 20)))
    changed = original[:start] + data.draw(st.binary(max_size=20)) + original[stop:]
    path.write_bytes(changed)
    try:
        if changed != original:
            with pytest.raises(CacheGenError):
                Artifact.open(LocalStore(folder)).verify()
    finally:
        path.write_bytes(original)


def test_missing_files_are_named(folder: Path) -> None:
    artifact = Artifact.open(LocalStore(folder))
    (folder / artifact.manifest.chunks[2].path).unlink()
    with pytest.raises(StoreNotFound, match=artifact.manifest.chunks[2].name):
        artifact.verify()
    (folder / artifact.manifest.tokens.path).unlink()
    with pytest.raises(StoreNotFound, match="tokens-"):
        Artifact.open(LocalStore(folder))
    (folder / "cache.json").unlink()
    with pytest.raises(StoreNotFound, match=r"cache\.json"):
        Artifact.open(LocalStore(folder))


def test_chunk_of_another_save_is_refused(tmp_path: Path, folder: Path) -> None:
    manifest = Artifact.open(LocalStore(folder)).manifest
    with ArtifactWriter(
        tmp_path / "other", manifest.identity, manifest.levels, 8, range(20)
    ) as writer:
        for plan in writer.missing_chunks():
            writer.add_chunk(plan, [[b"other"] * 3] * 2)
        writer.commit()
    path = manifest.chunks[0].path
    (folder / path).write_bytes((tmp_path / "other" / path).read_bytes())
    with pytest.raises(FormatError, match="from another save"):
        Artifact.open(LocalStore(folder)).index(0)


TOKENS = np.arange(20, dtype=np.int32)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (safetensors.numpy.save({"input_ids": TOKENS + 1}), "SHA-256"),
        (safetensors.numpy.save({"input_ids": TOKENS[:-1]}), "expected the tensors"),
        (safetensors.numpy.save({"input_ids": TOKENS.reshape(4, 5)}), "expected the tensors"),
        (safetensors.numpy.save({"input_ids": TOKENS.astype(np.float32)}), "expected the tensors"),
        (safetensors.numpy.save({"other": TOKENS}), "expected the tensors"),
        (safetensors.numpy.save({"input_ids": TOKENS, "more": TOKENS}), "expected the tensors"),
    ],
)
def test_damaged_tokens_are_refused(folder: Path, data: bytes, message: str) -> None:
    (path,) = folder.glob("tokens-*.safetensors")
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message):
        Artifact.open(LocalStore(folder))


def test_oversized_files_are_refused_unread(folder: Path) -> None:
    (path,) = folder.glob("tokens-*.safetensors")
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="at most"):
        Artifact.open(LocalStore(folder))
    with (folder / "cache.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="at most"):
        Artifact.open(LocalStore(folder))


STATES = bytes(range(200))


@pytest.fixture
def stateful(tmp_path: Path, save: Save) -> Path:
    save(tmp_path, range(20), STATES)
    return tmp_path


def test_states_are_read_when_they_are_asked_for(stateful: Path, recording_store: Any) -> None:
    store = recording_store(stateful)
    artifact = Artifact.open(store)
    assert store.paths == ["cache.json", artifact.manifest.tokens.path]
    assert artifact.read_states() == STATES
    report = artifact.verify()
    assert report.size_bytes == sum(chunk.size_bytes for chunk in artifact.manifest.chunks) + 200


def test_there_may_be_no_states(folder: Path) -> None:
    with pytest.raises(ValueError, match="an artefact with states"):
        Artifact.open(LocalStore(folder)).read_states()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.data())
def test_any_change_of_the_states_is_noticed(stateful: Path, data: st.DataObject) -> None:
    (path,) = stateful.glob("states-*.safetensors")
    start = data.draw(st.integers(0, len(STATES)))
    stop = data.draw(st.integers(start, min(len(STATES), start + 20)))
    changed = STATES[:start] + data.draw(st.binary(max_size=20)) + STATES[stop:]
    path.write_bytes(changed)
    artifact = Artifact.open(LocalStore(stateful))
    try:
        for read in (artifact.read_states, artifact.verify):
            if changed != STATES:
                with pytest.raises(CacheGenError, match="states-"):
                    read()
    finally:
        path.write_bytes(STATES)


def test_missing_states_are_named(stateful: Path) -> None:
    artifact = Artifact.open(LocalStore(stateful))
    (stateful / artifact.manifest.states.path).unlink()
    with pytest.raises(StoreNotFound, match="states-"):
        artifact.verify()


def test_golden_artefact_still_opens() -> None:
    artifact = Artifact.open(LocalStore(GOLDEN))
    artifact.verify()
    assert artifact.token_ids.tolist() == list(range(20))
    assert artifact.manifest.to_bytes() == (GOLDEN / "cache.json").read_bytes()


def test_golden_artefact_is_what_a_save_writes(tmp_path: Path, save: Save) -> None:
    found = save(tmp_path, range(20))
    expected = Manifest.parse((GOLDEN / "cache.json").read_bytes())
    assert found.model_copy(update={"library_version": expected.library_version}) == expected
    for path in (expected.tokens.path, *(chunk.path for chunk in expected.chunks)):
        assert (tmp_path / path).read_bytes() == (GOLDEN / path).read_bytes()
