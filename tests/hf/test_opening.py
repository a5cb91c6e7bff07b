"""What happens between the request for a cache and its first segment: round trips and overlap."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from hf_cachegen import CompressedStreamingCache, FormatError, StoreError
from hf_cachegen.artifact import Artifact
from hf_cachegen.bench.link import LinkServer, WrongByte
from hf_cachegen.errors import StoreNotFound
from hf_cachegen.stores import HttpStore, LocalStore
from hf_cachegen.streaming.controller import FixedLevel

COARSEST = "delta-0"


def test_the_first_segment_takes_two_round_trips(published: Any) -> None:
    """One for the manifest and one for the index with the segments; only the ids go beside it."""
    with LinkServer(published.folder) as server:
        cache = CompressedStreamingCache.from_pretrained(
            server.url, model=published.model, level=COARSEST, tables=published.load().table()
        )
        cache.wait()
        cache.close()
        requests = list(server.requests)
    manifest = cache.artifact.manifest
    assert requests[0].path == "cache.json"
    beside_the_ids = [request for request in requests if request.path != manifest.tokens.path]
    assert len(requests) == len(beside_the_ids) + 1
    first = beside_the_ids[1]
    assert first.path == manifest.chunks[0].path
    assert first.start == 0
    if all(chunk.skipped == () for chunk in manifest.chunks):
        assert first.stop == cache.artifact.index_bytes + manifest.chunks[0].level_bytes[0]
        assert len(requests) == 2 + len(manifest.chunks)


class Patient(LocalStore):
    """Gives the token ids once a chunk was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.chunk_asked_for = threading.Event()

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        if path.startswith("chunks/"):
            self.chunk_asked_for.set()
        elif path.startswith("tokens-") and not self.chunk_asked_for.wait(timeout=20):
            raise StoreError("the first chunk waits for the token ids")
        yield from super()._pieces(path, offset, size, max_bytes)


def test_the_first_chunk_does_not_wait_for_the_token_ids(llama: Any) -> None:
    artifact = Artifact.open(Patient(llama.folder), tokens=False)
    cache = CompressedStreamingCache(artifact, llama.model, FixedLevel(0))
    cache.wait()
    assert cache.token_ids.equal(llama.ids)


@pytest.mark.parametrize("remove", [False, True])
def test_token_ids_that_cannot_be_used_end_the_stream(
    llama: Any, tmp_path: Any, threads_end: Any, remove: bool
) -> None:
    for path in llama.folder.rglob("*"):
        if path.is_file():
            target = tmp_path / path.relative_to(llama.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (tokens,) = tmp_path.glob("tokens-*")
    if remove:
        tokens.unlink()
    else:
        tokens.write_bytes(tokens.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(StoreNotFound if remove else FormatError, match="tokens-"):
        CompressedStreamingCache.from_pretrained(tmp_path, model=llama.model, level=COARSEST)
    assert threads_end()


@pytest.mark.parametrize("at_byte", [0, 30, 247, 248, 1000])
def test_a_wrong_byte_in_the_first_transfer_is_made_good(llama: Any, at_byte: int) -> None:
    """In the index or in a segment: what is damaged is asked for once more."""
    artifact = Artifact.open(LocalStore(llama.folder))
    assert artifact.index_bytes == 248
    expected = llama.load(COARSEST)
    with (
        LinkServer(llama.folder, faults=[WrongByte(2, at_byte)]) as server,
        HttpStore(server.url) as store,
    ):
        cache = llama.stream(store, level=0)
        cache.wait()
        for ours, theirs in zip(cache, expected, strict=True):
            assert all(a.equal(b) for a, b in zip(ours[:2], theirs[:2], strict=True))
        cache.close()
