"""cache.json: what it accepts, and what it refuses without reading further."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.artifact import Identity, LevelRecord, Manifest, StatesRecord
from hf_cachegen.artifact.manifest import MAX_MANIFEST_BYTES
from hf_cachegen.errors import FormatError

Document = dict[str, Any]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory, save: Callable[..., Manifest]) -> Manifest:
    return save(tmp_path_factory.mktemp("artifact"), range(20))


def test_bytes_round_trip_and_are_canonical(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    assert Manifest.parse(data) == manifest
    assert Manifest.parse(data).to_bytes() == data
    pretty = json.dumps(json.loads(data), indent=2, sort_keys=False).encode()
    assert Manifest.parse(pretty).to_bytes() == data


def swap_chunks(document: Document) -> None:
    document["chunks"][:2] = document["chunks"][1::-1]


def drop_chunk(document: Document) -> None:
    del document["chunks"][1]


def drop_last_chunk(document: Document) -> None:
    del document["chunks"][-1]


def repeat_chunk(document: Document) -> None:
    document["chunks"].append(document["chunks"][-1])


def repeat_name(document: Document) -> None:
    document["chunks"][1]["name"] = document["chunks"][0]["name"]


def setter(*path: str | int, value: object) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        node: Any = document
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    change.__name__ = ".".join(map(str, path)) + "=" + str(value)[:20]
    return change


def states_of(size_bytes: float) -> Document:
    return {"size_bytes": size_bytes, "sha256": "ab" * 32, "source": "exact"}


DAMAGES = [
    (swap_chunks, "follow each other"),
    (drop_chunk, "follow each other"),
    (drop_last_chunk, "follow each other"),
    (repeat_chunk, "found one twice"),
    (repeat_name, "found one twice"),
    (setter("chunks", 1, "start", value=9), "follow each other"),
    (setter("chunks", 1, "end", value=15), "follow each other"),
    (setter("tokens", "n", value=21), "follow each other"),
    (setter("chunk_tokens", value=7), "follow each other"),
    (setter("chunks", value=[]), "follow each other from 0 to 20"),
    (setter("chunks", 0, "name", value="../../etc/passwd"), "chunks.0.name"),
    (setter("chunks", 0, "name", value="A" * 32), "chunks.0.name"),
    (setter("chunks", 0, "size_bytes", value=1), "and 1 bytes"),
    (setter("chunks", 0, "level_bytes", value=[1]), "found 1 levels"),
    (setter("chunks", 0, "level_bytes", value=[1 << 40, 1]), "levels and"),
    (setter("chunks", 0, "skipped", value=[[0, 1]]), "can see are missing"),
    (setter("chunks", 2, "skipped", value=[[1, 1]]), "can see are missing"),
    (setter("chunks", 0, "skipped", value=[[1, 9]]), "can see are missing"),
    (setter("chunks", 0, "skipped", value=[[1, 1], [1, 1]]), "once, in order"),
    (setter("chunks", 0, "skipped", value=[[1, 0]]), "once, in order"),
    (setter("chunks", 0, "skipped", value=[[7, 1]]), "can see are missing"),
    (setter("levels", 1, "name", value="low"), "different names"),
    (setter("levels", 1, "codec", value="__import__('os')"), "levels.1.codec"),
    (setter("levels", 0, "params", "step", value=None), "levels.0.params"),
    (setter("levels", value=[]), "at least 1"),
    (setter("levels", 0, "refines", value="raw"), "low refines raw: expected that among"),
    (setter("levels", 0, "refines", value="low"), "low refines low: expected that among"),
    (setter("levels", 1, "refines", value="other"), "raw refines other: expected that among"),
    (setter("levels", 1, "refines", value=0), "levels.1.refines"),
    (setter("tokens", "n", value=0), "tokens.n"),
    (setter("tokens", "n", value=1 << 60), "tokens.n"),
    (setter("tokens", "n", value=20.0), "tokens.n"),
    (setter("tokens", "n", value="20"), "tokens.n"),
    (setter("tokens", "sha256", value="00"), "tokens.sha256"),
    (setter("chunk_tokens", value=1 << 40), "chunk_tokens"),
    (setter("identity", "layout", "dtype", value="int8"), "identity.layout.dtype"),
    (setter("identity", "layout", "layers", value=[]), "states and no chunks"),
    (setter("states", value={}), "states.size_bytes"),
    (setter("states", value=states_of(0)), "states.size_bytes"),
    (setter("states", value=states_of(5 << 30)), "states.size_bytes"),
    (setter("states", value=states_of(1.0)), "states.size_bytes"),
    (setter("states", value={**states_of(1), "sha256": "../" * 16}), "states.sha256"),
    (setter("states", value={**states_of(1), "path": "x"}), "states.path"),
    (setter("identity", "weights", value="not hex"), "identity.weights"),
    (setter("extra", value=1), "extra"),
    (setter("format", value="other"), "format"),
    (setter("version", value="1"), "version"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=lambda x: getattr(x, "__name__", None))
def test_damaged_document_is_refused(
    manifest: Manifest, damage: Callable[[Document], None], message: str
) -> None:
    document = json.loads(manifest.to_bytes())
    damage(document)
    with pytest.raises(FormatError, match=message):
        Manifest.parse(json.dumps(document).encode())


def test_level_far_beyond_the_uncompressed_size_is_refused(manifest: Manifest) -> None:
    document = json.loads(manifest.to_bytes())
    chunk = document["chunks"][0]
    chunk["level_bytes"][0] += 1 << 40
    chunk["size_bytes"] += 1 << 40
    with pytest.raises(FormatError, match="bytes in a level"):
        Manifest.parse(json.dumps(document).encode())


def test_newer_version_says_upgrade(manifest: Manifest) -> None:
    document = json.loads(manifest.to_bytes()) | {"version": 2, "field_of_version_2": 1}
    with pytest.raises(FormatError, match=r"version 2 is unknown.*upgrade hf-cachegen"):
        Manifest.parse(json.dumps(document).encode())


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
        b'{"format":"hf-cachegen","version":' + b"9" * 5_000_000 + b"}",
        b'{"format":"hf-cachegen","version":1e999}',
        b'{"format":"hf-cachegen","version":NaN}',
        b" " * (MAX_MANIFEST_BYTES + 1),
    ],
    ids=lambda data: f"{data[:12]!r}x{len(data)}",
)
def test_hostile_json_is_refused_quickly(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"cache\.json"):
        Manifest.parse(data)


@given(st.data())
def test_mutated_bytes_raise_only_format_error(manifest: Manifest, data: st.DataObject) -> None:
    document = bytearray(manifest.to_bytes())
    start = data.draw(st.integers(0, len(document)))
    stop = data.draw(st.integers(start, min(start + 8, len(document))))
    document[start:stop] = data.draw(st.binary(max_size=8))
    try:
        found = Manifest.parse(bytes(document))
    except FormatError:
        return
    assert Manifest.parse(found.to_bytes()) == found


def test_first_token_of_a_layer(manifest: Manifest) -> None:
    # 20 tokens, window 5: the sliding layer holds tokens 15 to 19.
    assert [chunk.skipped for chunk in manifest.chunks] == [((1, 8),), ((1, 7),), ()]
    assert [chunk.first_token(1) for chunk in manifest.chunks] == [8, 15, 16]
    assert [chunk.first_token(0) for chunk in manifest.chunks] == [0, 8, 16]


LADDER = {  # name: what it refines
    "base": None,
    "finer": "base",
    "other": None,
    "finest": "finer",
    "beside": "base",
    "exact": None,
}


@pytest.fixture(scope="module")
def nested(
    tmp_path_factory: pytest.TempPathFactory, save: Callable[..., Manifest], identity: Identity
) -> Manifest:
    """Two refinements of one level among others."""
    levels = [
        LevelRecord(name=name, codec="raw", exact=name == "exact", refines=refines)
        for name, refines in LADDER.items()
    ]
    return save(tmp_path_factory.mktemp("nested"), range(20), levels=levels)


def test_chain_of_a_level_is_what_it_refines_then_itself(nested: Manifest) -> None:
    assert Manifest.parse(nested.to_bytes()) == nested
    chains = [nested.chain(level) for level in range(len(LADDER))]
    assert chains == [(0,), (0, 1), (2,), (0, 1, 3), (0, 4), (5,)]


def test_read_bytes_are_those_of_the_whole_chain(nested: Manifest) -> None:
    for chunk, record in enumerate(nested.chunks):
        own = record.level_bytes
        assert nested.read_bytes(chunk) == (
            own[0],
            own[0] + own[1],
            own[2],
            own[0] + own[1] + own[3],
            own[0] + own[4],
            own[5],
        )


def test_levels_that_stand_alone_are_read_alone(manifest: Manifest) -> None:
    assert [manifest.chain(level) for level in range(2)] == [(0,), (1,)]
    assert manifest.read_bytes(1) == manifest.chunks[1].level_bytes


def test_a_chain_may_be_as_long_as_the_ladder(
    tmp_path_factory: pytest.TempPathFactory, save: Callable[..., Manifest]
) -> None:
    levels = [
        LevelRecord(name=f"{i}", codec="raw", exact=False, refines=f"{i - 1}" if i else None)
        for i in range(64)
    ]
    manifest = save(tmp_path_factory.mktemp("long"), range(3), levels=levels)
    assert manifest.chain(63) == tuple(range(64))
    assert manifest.read_bytes(0)[63] == sum(manifest.chunks[0].level_bytes)


def test_document_without_states_does_not_name_them(manifest: Manifest) -> None:
    assert "states" not in json.loads(manifest.to_bytes())
    assert manifest.files == manifest.chunks


def test_states_are_a_file_beside_the_chunks(manifest: Manifest) -> None:
    states = StatesRecord(size_bytes=9, sha256="ab" * 32)
    fields = {**dict(manifest), "states": states}
    found = Manifest.parse(Manifest(**fields).to_bytes())
    assert found.states == states
    assert found.files == (*manifest.chunks, states)
    assert states.path == f"states-{'ab' * 16}.safetensors"


def test_layout_without_layers_has_states_and_no_chunks(manifest: Manifest) -> None:
    layout = manifest.identity.layout.model_copy(update={"layers": ()})
    identity = manifest.identity.model_copy(update={"layout": layout})
    states = StatesRecord(size_bytes=9, sha256="ab" * 32)
    fields = {**dict(manifest), "identity": identity, "chunks": (), "states": states}
    found = Manifest.parse(Manifest(**fields).to_bytes())
    assert found.n_layers == 0
    assert found.files == (states,)
    for wrong in ({"states": None}, {"chunks": manifest.chunks}):
        with pytest.raises(ValueError, match="states and no chunks"):
            Manifest(**{**fields, **wrong})
