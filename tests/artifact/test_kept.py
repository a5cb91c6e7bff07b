"""Which tokens are kept: as a file, in ``cache.json`` and in the names of chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from hf_cachegen.artifact import Artifact, Identity, KeptRecord, LevelRecord, Manifest, chunk_names
from hf_cachegen.artifact.kept import pack_kept, unpack_kept
from hf_cachegen.artifact.prefixes import begin, open_longest_prefix
from hf_cachegen.errors import CacheGenError, FormatError, IdentityError, StoreNotFound
from hf_cachegen.stores.local import LocalStore

Save = Callable[..., Manifest]
Mask = NDArray[np.bool_]

CHUNK_TOKENS = 8
N_TOKENS = 50


def some(n_layers: int = 1, n_heads: int = 1, kept: int = 20, seed: int = 0) -> Mask:
    """Which of 50 tokens are kept, bool ``[n_layers, n_heads, 50]``."""
    rng = np.random.default_rng(seed)
    order = rng.permuted(
        np.broadcast_to(np.arange(N_TOKENS), (n_layers, n_heads, N_TOKENS)), axis=-1
    )
    return order < kept


@pytest.fixture(scope="module")
def full(identity: Identity) -> Identity:
    """The same model without its sliding layer."""
    layers = identity.layout.layers
    layout = identity.layout.model_copy(update={"layers": (layers[0], layers[2], layers[0])})
    return identity.model_copy(update={"layout": layout})


@pytest.fixture
def pruned(tmp_path: Path, save: Save, full: Identity) -> Path:
    save(tmp_path, range(N_TOKENS), identity=full, kept=some())
    return tmp_path


@given(arrays.arrays(bool, st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 30))))
def test_file_gives_back_what_is_kept(mask: Mask) -> None:
    mask = np.sort(mask, axis=-1)
    mask[:] = mask[0, 0]  # as many everywhere
    found = unpack_kept(pack_kept(mask), int(mask[0, 0].sum()), mask.shape[-1])
    assert found.dtype == bool
    assert np.array_equal(found, mask)


def test_a_bit_is_a_token() -> None:
    tensors = safetensors.numpy.load(pack_kept(some(3, 2)))
    assert {name: (array.dtype, array.shape) for name, array in tensors.items()} == {
        "kept": (np.uint8, (3, 2, 7))
    }
    for layer, head, token in np.ndindex(3, 2, N_TOKENS):
        bit = tensors["kept"][layer, head, token // 8] >> (token % 8) & 1
        assert bit == some(3, 2)[layer, head, token]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "found {}"),
        ({"other": np.zeros((1, 1, 7), np.uint8)}, "found {'other'"),
        ({"kept": np.zeros((1, 1, 7), np.uint8), "more": np.zeros(1)}, "'more'"),
        ({"kept": np.zeros((1, 1, 7), np.int8)}, "int8"),
        ({"kept": np.zeros((1, 7), np.uint8)}, r"\(1, 7\)"),
        ({"kept": np.zeros((1, 1, 6), np.uint8)}, r"\(1, 1, 6\)"),
        ({"kept": np.zeros((0, 1, 7), np.uint8)}, r"\(0, 1, 7\)"),
        ({"kept": np.zeros((1, 1, 7), np.uint8)}, "found 0 to 0"),
        ({"kept": np.full((2, 1, 7), 255, np.uint8)}, "found 50 to 50"),
        ({"kept": np.packbits(some(kept=19), -1, "little")}, "found 19 to 19"),
        ({"kept": np.packbits(some(kept=20), -1, "little") | 128}, "expected 20 of 50"),
    ],
)
def test_other_files_are_refused(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        unpack_kept(safetensors.numpy.save(tensors), 20, N_TOKENS)


@given(st.binary(max_size=40))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="kept tokens"):
        unpack_kept(data, 20, N_TOKENS)


@pytest.mark.parametrize(("n_layers", "n_heads"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_chunks_cover_the_tokens_that_are_kept(
    tmp_path: Path, save: Save, full: Identity, n_layers: int, n_heads: int
) -> None:
    kept = some(n_layers, n_heads)
    manifest = save(tmp_path, range(N_TOKENS), identity=full, kept=kept)
    assert manifest.tokens.n == N_TOKENS
    assert manifest.n_cached == manifest.kept.n == 20
    assert [(c.start, c.end, c.skipped) for c in manifest.chunks] == [
        (0, 8, ()), (8, 16, ()), (16, 20, ()),
    ]  # fmt: skip
    assert manifest.files == (*manifest.chunks, manifest.kept)
    artifact = Artifact.open(LocalStore(tmp_path))
    assert artifact.manifest == Manifest.parse(manifest.to_bytes()) == manifest
    assert np.array_equal(artifact.read_kept(), kept)
    read: list[int] = []
    report = artifact.verify(read.append)
    assert report.size_bytes == sum(read) == sum(file.size_bytes for file in manifest.files)
    on_disk = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.suffix in (".kv",))
    assert report.size_bytes == on_disk + (tmp_path / manifest.kept.path).stat().st_size


def test_document_with_every_token_does_not_name_them(tmp_path: Path, save: Save) -> None:
    manifest = save(tmp_path, range(20))
    assert "kept" not in json.loads(manifest.to_bytes())
    assert manifest.n_cached == 20
    assert Artifact.open(LocalStore(tmp_path)).read_kept() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept": {"n": 51}}, "at most 50 tokens to be kept, found 51"),
        ({"kept": {"n": 19}}, "from 0 to 19"),
        ({"kept": {"n": 0}}, "kept.n"),
        ({"kept": {"size_bytes": 0}}, "kept.size_bytes"),
        ({"kept": {"size_bytes": 1 << 40}}, "kept.size_bytes"),
        ({"kept": {"sha256": "../"}}, "kept.sha256"),
        ({"kept": {"path": "x"}}, "kept.path"),
        ({"tokens": {"n": 19}}, "at most 19 tokens to be kept"),
        ({"states": {"size_bytes": 1, "sha256": "ab" * 32, "source": "exact"}}, "full attention"),
    ],
)
def test_wrong_documents_are_refused(pruned: Path, change: dict[str, Any], message: str) -> None:
    document = json.loads((pruned / "cache.json").read_bytes())
    for field, values in change.items():
        document[field] = {**document.get(field, {}), **values}
    with pytest.raises(FormatError, match=message):
        Manifest.parse(json.dumps(document).encode())


def test_windows_keep_what_they_keep(tmp_path: Path, save: Save) -> None:
    with pytest.raises(ValueError, match="full attention alone"):
        save(tmp_path, range(N_TOKENS), kept=some())
    assert not (tmp_path / "cache.json").exists()


def test_as_many_are_kept_everywhere(tmp_path: Path, save: Save, full: Identity) -> None:
    kept = np.concatenate((some(kept=20), some(kept=19), some(kept=20)))
    with pytest.raises(ValueError, match="got 19 to 20"):
        save(tmp_path, range(N_TOKENS), identity=full, kept=kept)


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (1, 3), (3, 4)])
def test_layers_and_heads_are_those_of_the_layout(
    tmp_path: Path, save: Save, full: Identity, shape: tuple[int, int]
) -> None:
    save(tmp_path, range(N_TOKENS), identity=full, kept=some(*shape))
    artifact = Artifact.open(LocalStore(tmp_path))
    with pytest.raises(FormatError, match=f"found {shape[0]} and {shape[1]}"):
        artifact.read_kept()


def test_everything_that_decides_the_bytes_is_in_the_name(
    full: Identity, levels: tuple[LevelRecord, ...]
) -> None:
    def names(tokens: int, kept: KeptRecord | None, skipped: Any = ((),) * 3) -> list[str]:
        ids = np.arange(tokens, dtype=np.int32)
        return chunk_names(full, levels, CHUNK_TOKENS, ids, skipped, kept)

    one = KeptRecord(n=20, size_bytes=9, sha256="ab" * 32)
    other = KeptRecord(n=20, size_bytes=9, sha256="cd" * 32)
    found = [
        *names(N_TOKENS, one),
        *names(N_TOKENS, other),
        *names(N_TOKENS + 1, one),
        *names(20, None),
    ]
    found += names(N_TOKENS, one, (((0, 1),), (), ()))[:1]
    assert len(set(found)) == len(found) == 13
    assert names(N_TOKENS, one) == names(N_TOKENS, one)


def test_an_artefact_is_extended_only_if_it_keeps_the_same(
    pruned: Path, save: Save, full: Identity
) -> None:
    first = Artifact.open(LocalStore(pruned)).manifest
    before = {path: path.stat().st_mtime_ns for path in pruned.glob("chunks/*.kv")}
    assert save(pruned, range(N_TOKENS), identity=full, kept=some()) == first
    assert before == {path: path.stat().st_mtime_ns for path in pruned.glob("chunks/*.kv")}
    for kept in (None, some(seed=1)):
        with pytest.raises(IdentityError, match="kept"):
            save(pruned, range(N_TOKENS), identity=full, kept=kept)
        again = save(pruned, range(N_TOKENS), identity=full, kept=kept, overwrite=True)
        assert not {c.name for c in again.chunks} & {c.name for c in first.chunks}
        assert len(list(pruned.glob("kept-*"))) == (kept is not None)
        save(pruned, range(N_TOKENS), identity=full, kept=some(), overwrite=True)


def test_an_artefact_with_every_token_does_not_become_a_pruned_one(
    tmp_path: Path, save: Save, full: Identity
) -> None:
    save(tmp_path, range(N_TOKENS), identity=full)
    with pytest.raises(IdentityError, match="kept"):
        save(tmp_path, range(N_TOKENS), identity=full, kept=some())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.data())
def test_any_change_of_the_file_is_noticed(pruned: Path, data: st.DataObject) -> None:
    (path,) = pruned.glob("kept-*.safetensors")
    before = path.read_bytes()
    start = data.draw(st.integers(0, len(before)))
    stop = data.draw(st.integers(start, min(len(before), start + 20)))
    changed = before[:start] + data.draw(st.binary(max_size=20)) + before[stop:]
    path.write_bytes(changed)
    artifact = Artifact.open(LocalStore(pruned))
    try:
        for read in (artifact.read_kept, artifact.verify):
            if changed != before:
                with pytest.raises(CacheGenError, match="kept-"):
                    read()
    finally:
        path.write_bytes(before)


def test_missing_file_is_named(pruned: Path) -> None:
    next(pruned.glob("kept-*")).unlink()
    with pytest.raises(StoreNotFound, match="kept-"):
        Artifact.open(LocalStore(pruned)).verify()


def test_only_all_of_it_begins_a_prompt(
    tmp_path: Path, save: Save, full: Identity, pruned: Path
) -> None:
    manifest = Artifact.open(LocalStore(pruned)).manifest
    ids = np.arange(N_TOKENS + 4, dtype=np.int32)
    assert begin(manifest, ids[:N_TOKENS]) == manifest
    assert begin(manifest, ids[: N_TOKENS - 1]) is None
    assert open_longest_prefix(pruned, ids[:N_TOKENS]) is None
    found = open_longest_prefix(pruned, ids)
    assert found is not None
    assert found.manifest == manifest
    whole = save(tmp_path / "zz", range(N_TOKENS), identity=full)
    found = open_longest_prefix(tmp_path, ids)
    assert found is not None
    assert found.manifest == whole
