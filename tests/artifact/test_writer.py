"""Saving: only new files are written, and an interruption at any step loses nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from hf_cachegen.artifact import (
    EMBEDDED,
    Artifact,
    ArtifactWriter,
    Identity,
    LevelRecord,
    Manifest,
    TableRef,
)
from hf_cachegen.errors import FormatError, IdentityError, StoreError, StoreNotFound
from hf_cachegen.stores.local import LocalStore

Save = Callable[..., Manifest]
Levels = tuple[LevelRecord, ...]
Open = Callable[..., ArtifactWriter]


class Crash(BaseException):
    """The machine stops here."""


@contextmanager
def crash_at(step: int) -> Iterator[list[str]]:
    """Stop at the ``step``-th call that makes something durable, and let no later one happen.

    A file whose flush is interrupted loses its second half, as after a power cut.
    """
    calls: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) <= step:
                return real(*args, **kwargs)
            if name == "fsync" and len(calls) == step + 1 and os.path.isfile(f"/dev/fd/{args[0]}"):
                os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
            raise Crash

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield calls


def verified(folder: Path) -> Manifest:
    artifact = Artifact.open(LocalStore(folder))
    artifact.verify()
    return artifact.manifest


def files(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in paths} - {".lock"}


def expected_files(manifest: Manifest) -> set[str]:
    return {"cache.json", manifest.tokens.path, *(record.path for record in manifest.files)}


@pytest.fixture
def open_writer(identity: Identity, levels: Levels) -> Open:
    def open_writer(
        folder: Path, token_ids: ArrayLike = range(20), **changes: Any
    ) -> ArtifactWriter:
        arguments = {"identity": identity, "levels": levels, "chunk_tokens": 8, **changes}
        return ArtifactWriter(folder, token_ids=token_ids, **arguments)

    return open_writer


@pytest.fixture
def full_identity(identity: Identity) -> Identity:
    """The model without its sliding layer, so that every full chunk can be shared."""
    full = (identity.layout.layers[0],) * 3
    layout = identity.layout.model_copy(update={"layers": full})
    return identity.model_copy(update={"layout": layout})


def test_saved_artefact_is_complete(tmp_path: Path, save: Save) -> None:
    manifest = save(tmp_path, range(20))
    assert verified(tmp_path) == manifest
    assert files(tmp_path) == expected_files(manifest)
    assert [(chunk.start, chunk.end) for chunk in manifest.chunks] == [(0, 8), (8, 16), (16, 20)]


@pytest.mark.parametrize("sliding", [False, True])
def test_second_turn_writes_only_new_chunks(
    tmp_path: Path, save: Save, identity: Identity, full_identity: Identity, sliding: bool
) -> None:
    model = identity if sliding else full_identity
    first = save(tmp_path, range(20), identity=model)
    before = {chunk.path: (tmp_path / chunk.path).stat() for chunk in first.chunks}
    second = save(tmp_path, range(34), identity=model)
    assert verified(tmp_path) == second
    assert second.chunks[:2] == first.chunks[:2]
    for chunk in second.chunks[:2]:
        after = (tmp_path / chunk.path).stat()
        old = before[chunk.path]
        assert (after.st_ino, after.st_mtime_ns) == (old.st_ino, old.st_mtime_ns)
    assert files(tmp_path) == expected_files(second)


def test_second_turn_replaces_the_states(tmp_path: Path, save: Save) -> None:
    first = save(tmp_path, range(20), b"after 20")
    second = save(tmp_path, range(34), b"after 34")
    assert second.chunks[:2] == first.chunks[:2]
    assert Artifact.open(LocalStore(tmp_path)).read_states() == b"after 34"
    assert files(tmp_path) == expected_files(second)
    assert first.states is not None
    assert first.states.path not in files(tmp_path)


def test_artefact_of_states_alone(tmp_path: Path, identity: Identity, open_writer: Open) -> None:
    layout = identity.layout.model_copy(update={"layers": ()})
    alone = identity.model_copy(update={"layout": layout})
    for length in (20, 34):
        with open_writer(tmp_path, range(length), identity=alone) as writer:
            assert writer.missing_chunks() == []
            manifest = writer.commit(str(length).encode(), "low")
        assert verified(tmp_path) == manifest
        assert files(tmp_path) == expected_files(manifest)
        assert manifest.states is not None
        assert manifest.states.source == "low"
    with (
        open_writer(tmp_path, range(40), identity=alone) as writer,
        pytest.raises(ValueError, match="states and no chunks"),
    ):
        writer.commit()
    with (
        open_writer(tmp_path, range(40), identity=alone) as writer,
        pytest.raises(ValueError, match="expected states of 1 to"),
    ):
        writer.commit(b"")
    assert verified(tmp_path) == manifest


def test_chunk_that_holds_more_of_a_sliding_layer_is_reused(
    tmp_path: Path, save: Save, open_writer: Open
) -> None:
    # 18 tokens, window 5: tokens 13 to 17 are held, so the second chunk skips 5 of its 8 tokens.
    # With 34 tokens it could skip all 8.
    first = save(tmp_path, range(18))
    assert first.chunks[1].skipped == ((1, 5),)
    with open_writer(tmp_path, range(34)) as writer:
        assert [plan.position for plan in writer.missing_chunks()] == [2, 3, 4]
    # A shorter document needs tokens that the chunk skipped.
    with open_writer(tmp_path, range(16), overwrite=True) as writer:
        assert [(plan.position, plan.skipped) for plan in writer.missing_chunks()] == [
            (1, ((1, 3),))
        ]


def test_same_document_needs_no_chunk(tmp_path: Path, save: Save, open_writer: Open) -> None:
    first = save(tmp_path, range(20))
    with open_writer(tmp_path) as writer:
        assert writer.missing_chunks() == []
        assert writer.commit() == first


def test_other_document_shares_the_common_prefix_only(tmp_path: Path, save: Save) -> None:
    first = save(tmp_path, range(20))
    second = save(tmp_path, [*range(9), *range(100, 120)], overwrite=True)
    assert second.chunks[0] == first.chunks[0]
    assert not {chunk.name for chunk in second.chunks[1:]} & {chunk.name for chunk in first.chunks}
    assert files(tmp_path) == expected_files(second)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    ],
    ids=["missing", "truncated", "zeroed"],
)
def test_damaged_chunk_is_written_again(
    tmp_path: Path, save: Save, open_writer: Open, damage: Callable[[Path], object]
) -> None:
    first = save(tmp_path, range(20))
    damage(tmp_path / first.chunks[1].path)
    with open_writer(tmp_path) as writer:
        assert [plan.position for plan in writer.missing_chunks()] == [1]
    save(tmp_path, range(20))
    assert verified(tmp_path) == first


def test_source_of_a_kept_chunk_is_kept(tmp_path: Path, save: Save, open_writer: Open) -> None:
    save(tmp_path, range(16))
    with open_writer(tmp_path, range(24)) as writer:
        (plan,) = writer.missing_chunks()
        writer.add_chunk(plan, [[b"x"] * 3] * 2, source="low")
        manifest = writer.commit()
    assert [chunk.source for chunk in manifest.chunks] == ["exact", "exact", "low"]


def test_folder_of_something_else_is_refused(
    tmp_path: Path, identity: Identity, levels: Levels, save: Save
) -> None:
    first = save(tmp_path, range(20))
    changes: list[tuple[dict[str, object], str]] = [
        ({"identity": identity.model_copy(update={"weights": "ff" * 16})}, "weights: expected 'ff"),
        ({"levels": levels[1:]}, r"levels: expected \['raw'\], found \['low', 'raw'\]"),
        (
            {"levels": (levels[0].model_copy(update={"name": "x"}), levels[1])},
            r"levels: expected \['x', 'raw'\], found \['low', 'raw'\]",
        ),
        (
            {"levels": (levels[0].model_copy(update={"params": {"bits": 4}}), levels[1])},
            r"levels\['low'\]\.params\.bits: expected 4, found 3",
        ),
        ({"chunk_tokens": 9}, "chunk_tokens: expected 9, found 8"),
    ]
    for change, message in changes:
        with pytest.raises(IdentityError, match=message) as error:
            save(tmp_path, range(20), **change)
        assert "choose another folder, or pass overwrite=True" in str(error.value)
        assert verified(tmp_path) == first
    for change, _ in changes:
        second = save(tmp_path, range(20), overwrite=True, **change)
        assert verified(tmp_path) == second
        assert files(tmp_path) == expected_files(second)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (range(19), "start with its 20, found 19 that end at position 19"),
        ([0], "start with its 20, found 1 that end at position 1"),
        (range(100, 120), "start with its 20, found 20 that differ at position 0"),
        ([*range(19), 100], "start with its 20, found 20 that differ at position 19"),
        ([*range(9), *range(100, 130)], "start with its 20, found 39 that differ at position 9"),
    ],
    ids=["shorter", "one token", "other", "other end", "longer"],
)
def test_document_that_does_not_continue_is_refused(
    tmp_path: Path, save: Save, token_ids: ArrayLike, message: str
) -> None:
    first = save(tmp_path, range(20))
    with pytest.raises(IdentityError, match=message) as error:
        save(tmp_path, token_ids)
    assert "choose another folder, or pass overwrite=True" in str(error.value)
    assert verified(tmp_path) == first
    assert files(tmp_path) == expected_files(first)
    second = save(tmp_path, token_ids, overwrite=True)
    assert verified(tmp_path) == second
    assert files(tmp_path) == expected_files(second)


def test_provenance_does_not_refuse(tmp_path: Path, identity: Identity, save: Save) -> None:
    first = save(tmp_path, range(20))
    copy = identity.model_copy(update={"model_id": "local-copy", "revision": None})
    second = save(tmp_path, range(20), identity=copy)
    assert second.chunks == first.chunks
    assert second.identity.model_id == "local-copy"


def test_unreadable_manifest_is_replaced_only_when_asked(tmp_path: Path, save: Save) -> None:
    save(tmp_path, range(20))
    (tmp_path / "cache.json").write_bytes(b"{")
    with pytest.raises(FormatError, match="overwrite=True"):
        save(tmp_path, range(20))
    assert save(tmp_path, range(20), overwrite=True) == verified(tmp_path)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda path: path.write_bytes(b"half"), FormatError),
        (lambda path: path.write_bytes(path.read_bytes()[:-4] + b"\xff" * 4), FormatError),
        (lambda path: path.unlink(), StoreNotFound),
    ],
    ids=["no safetensors", "other ids", "missing"],
)
def test_unreadable_tokens_are_replaced_only_when_asked(
    tmp_path: Path, save: Save, damage: Callable[[Path], object], error: type[Exception]
) -> None:
    first = save(tmp_path, range(20))
    damage(tmp_path / first.tokens.path)
    with pytest.raises(error, match=r"tokens-.*overwrite=True"):
        save(tmp_path, range(20))
    assert save(tmp_path, range(20), overwrite=True) == verified(tmp_path) == first


def test_files_of_others_are_left_alone(tmp_path: Path, save: Save) -> None:
    others = ["README.md", "chunks/notes.txt", "table/mine/x.json", ".hidden"]
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    manifest = save(tmp_path, range(20))
    assert files(tmp_path) == expected_files(manifest) | set(others)


def test_leftovers_of_an_interrupted_save_are_removed(tmp_path: Path, save: Save) -> None:
    save(tmp_path, range(20))
    stale = [".cache.json.tmp", f"chunks/{'0' * 32}.kv", f"chunks/.{'0' * 32}.kv.tmp"]
    for name in (*stale, "table/.new-1a/new/table.json", f"table/{'0' * 32}/table.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    manifest = save(tmp_path, range(24))
    assert files(tmp_path) == expected_files(manifest)


def test_embedded_table_is_replaced_with_the_artefact(
    tmp_path: Path, identity: Identity, save: Save
) -> None:
    tables = [TableRef(name="t", codecs={"delta": d * 32}, location=EMBEDDED) for d in "12"]
    models = [identity.model_copy(update={"table": table}) for table in tables]
    with pytest.raises(ValueError, match="embedded table"):
        save(tmp_path, range(20), identity=models[0])
    for table, model in zip(tables, models, strict=True):
        (tmp_path / table.folder).mkdir(parents=True)
        (tmp_path / table.folder / "table.json").write_text("{}")
        manifest = save(tmp_path, range(20), identity=model, overwrite=True)
        assert files(tmp_path) == expected_files(manifest) | {f"{table.folder}/table.json"}


def test_two_writers_cannot_hold_one_folder(tmp_path: Path, open_writer: Open) -> None:
    with open_writer(tmp_path), pytest.raises(StoreError, match="another save is writing"):
        open_writer(tmp_path)
    with open_writer(tmp_path):
        pass


def test_refused_folder_is_released(tmp_path: Path, save: Save, open_writer: Open) -> None:
    save(tmp_path, range(20))
    for _ in range(2):
        with pytest.raises(IdentityError):
            open_writer(tmp_path, chunk_tokens=9)
    open_writer(tmp_path).close()


def test_callers_mistakes(tmp_path: Path, open_writer: Open, levels: Levels) -> None:
    for tokens in ([], [[1, 2]], [0.5], [-1], [1 << 31], ["a"]):
        with pytest.raises(ValueError, match="token ids"):
            open_writer(tmp_path, tokens)
    for bad in ((), (levels[0], levels[0])):
        with pytest.raises(ValueError, match="different names"):
            open_writer(tmp_path, levels=bad)
    assert not files(tmp_path)
    segments = [[b""] * 3] * 2
    with open_writer(tmp_path, np.arange(20, dtype=np.int64)) as writer:
        plan = writer.missing_chunks()[0]
        with pytest.raises(ValueError, match="2 levels with 3 layers"):
            writer.add_chunk(plan, segments[:1])
        writer.add_chunk(plan, segments)
        with pytest.raises(ValueError, match="missing_chunks"):
            writer.add_chunk(plan, segments)
        with pytest.raises(ValueError, match=r"2 are missing, the first with tokens 8 to 16"):
            writer.commit()
    with pytest.raises(ValueError, match="open writer"):
        writer.commit()


def test_folder_that_cannot_be_made(tmp_path: Path, open_writer: Open) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        open_writer(tmp_path / "file" / "folder")


@pytest.fixture(
    params=[
        *("first save", "longer", "shorter", "other tokens", "other model", "other levels"),
        "other states",
    ]
)
def interrupted(
    request: pytest.FixtureRequest, identity: Identity, levels: Levels
) -> tuple[bool, dict[str, object]]:
    """Whether an artefact is there before, and the arguments of the interrupted save."""
    other = identity.model_copy(update={"weights": "ff" * 16})
    cases: dict[str, tuple[bool, dict[str, object]]] = {
        "first save": (False, {"token_ids": range(20)}),
        "longer": (True, {"token_ids": range(34)}),
        "shorter": (True, {"token_ids": range(9), "overwrite": True}),
        "other tokens": (True, {"token_ids": range(100, 120), "overwrite": True}),
        "other model": (True, {"token_ids": range(20), "identity": other, "overwrite": True}),
        "other levels": (
            True,
            {"token_ids": range(20), "levels": levels[::-1], "overwrite": True},
        ),
        "other states": (True, {"token_ids": range(34), "states": b"after 34"}),
    }
    return cases[request.param]


def test_crash_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, save: Save, interrupted: tuple[bool, dict[str, object]]
) -> None:
    exists, arguments = interrupted
    states = b"after 20" if "states" in arguments else None
    old = save(tmp_path / "old", range(20), states) if exists else None
    if exists:  # what is kept of the old artefact is part of the new one
        shutil.copytree(tmp_path / "old", tmp_path / "new")
    new = save(tmp_path / "new", **arguments)
    seen = set()
    for step in range(100):
        folder = tmp_path / f"crash-{step}"
        if exists:
            shutil.copytree(tmp_path / "old", folder)
        try:
            with crash_at(step):
                save(folder, **arguments)
            break
        except Crash:
            pass
        if old is None and not (folder / "cache.json").exists():
            with pytest.raises(StoreNotFound):
                verified(folder)
            seen.add("nothing")
        else:
            found = verified(folder)
            assert found in (old, new)
            seen.add("new" if found == new else "old")
        assert save(folder, **arguments) == new
        assert verified(folder) == new
        assert files(folder) == expected_files(new)
    else:
        pytest.fail("the save never finished")
    assert step > 9  # at least three files, each flushed, renamed and flushed in its folder
    assert seen == {"old" if exists else "nothing", "new"}


KILLED_SAVE = """
import os, signal, sys
from pathlib import Path
from hf_cachegen.artifact import ArtifactWriter, Manifest

folder, step = Path(sys.argv[1]), int(sys.argv[2])
old = Manifest.parse((folder / "cache.json").read_bytes())
calls = 0

def wrap(real):
    def call(*args):
        global calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    return call

os.fsync, os.replace = wrap(os.fsync), wrap(os.replace)
with ArtifactWriter(folder, old.identity, old.levels, old.chunk_tokens, range(34)) as writer:
    for plan in writer.missing_chunks():
        writer.add_chunk(plan, [[plan.name.encode()] * 3] * 2)
    writer.commit()
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX")
@pytest.mark.parametrize(("step", "survivor"), [(2, "old"), (13, "old"), (15, "new")])
def test_killed_process_leaves_a_loadable_artefact(
    tmp_path: Path, save: Save, open_writer: Open, step: int, survivor: str
) -> None:
    # Three chunks, the tokens and cache.json, each fsync, replace, fsync: cache.json is 13 to 15.
    old = save(tmp_path, range(20))
    run = subprocess.run(
        [sys.executable, "-c", KILLED_SAVE, str(tmp_path), str(step)], timeout=60, check=False
    )
    assert run.returncode == -signal.SIGKILL
    found = verified(tmp_path)
    assert (found == old) == (survivor == "old")
    assert found.tokens.n == (20 if survivor == "old" else 34)
    with open_writer(tmp_path, range(34)) as writer:  # the killed writer's lock is gone
        assert len(writer.missing_chunks()) == (3 if survivor == "old" else 0)
