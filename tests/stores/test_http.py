"""HTTP stores against real servers: healthy ones, failing ones and lying ones."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_cachegen.bench.link import (
    Busy,
    Fault,
    IgnoreRange,
    LinkServer,
    Reset,
    ShortBody,
    Stall,
    WrongRange,
)
from hf_cachegen.bench.loopback import Link, LoopbackServer, RangeHandler
from hf_cachegen.errors import StoreError, StoreNotFound
from hf_cachegen.stores import HttpStore, client

CHUNK = "chunks/00.kv"
ENDS_WITHIN_S = 30.0
"""For what ends at once on an idle machine. What it must not wait for takes longer."""


@contextmanager
def answering(answer: Callable[[RangeHandler], None]) -> Iterator[LoopbackServer]:
    """A server that answers every GET and HEAD with ``answer``."""
    handler = type("Handler", (RangeHandler,), {"do_GET": answer, "do_HEAD": answer})
    with LoopbackServer(handler, Link(None)) as server:
        yield server


def ranges(server: LoopbackServer) -> list[tuple[int, int]]:
    return [(record.start, record.stop) for record in server.requests]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_reads_are_slices(served: LinkServer, chunk: bytes, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, len(chunk)))
    size = data.draw(st.integers(0, len(chunk) - offset))
    with HttpStore(served.url) as store:
        assert store.read(CHUNK, offset, size, max_bytes=size) == chunk[offset : offset + size]


@pytest.fixture
def served(folder: Path) -> Iterator[LinkServer]:
    with LinkServer(folder) as server:
        yield server


def test_whole_files_open_ranges_and_existence(served: LinkServer, chunk: bytes) -> None:
    with HttpStore(served.url + "/") as store:
        assert store.read("cache.json", max_bytes=100) == b'{"version": 1}'
        assert store.read(CHUNK, 299_990, max_bytes=10) == chunk[-10:]
        assert store.read(CHUNK, 300_000, max_bytes=10) == b""
        assert store.read("empty", max_bytes=0) == b""
        assert store.exists(CHUNK)
        assert store.exists("empty")
        assert not store.exists("missing")
    assert served.requests[0].sent_bytes == len(b'{"version": 1}')


def test_limits_and_missing_bytes(served: LinkServer) -> None:
    with HttpStore(served.url) as store:
        with pytest.raises(StoreError, match="300000 bytes where at most 1000"):
            store.read(CHUNK, max_bytes=1000)
        with pytest.raises(StoreError, match="truncated"):
            list(store.stream(CHUNK, 299_999, 2))
        with pytest.raises(StoreError, match="truncated"):
            list(store.stream(CHUNK, 300_001, 2))
        with pytest.raises(StoreNotFound, match="status 404"):
            list(store.stream("missing", 0, 2))
        with pytest.raises(ValueError, match="relative POSIX path"):
            store.read("../x", max_bytes=1)
    # None of these is worth a second attempt.
    assert len(served.requests) == 4


@pytest.mark.parametrize(
    "fault",
    [
        Reset(0, at_byte=100_000),
        ShortBody(0, at_byte=100_000),
        Stall(0, at_byte=100_000, duration_s=60.0),
    ],
)
def test_broken_transfers_resume_where_they_broke(folder: Path, chunk: bytes, fault: Fault) -> None:
    with (
        LinkServer(folder, faults=[fault]) as server,
        HttpStore(server.url, timeout_s=3.0) as store,
    ):
        assert b"".join(store.stream(CHUNK, 5, 250_000)) == chunk[5:250_005]
        assert b"".join(store.stream(CHUNK, 0, 10)) == chunk[:10]
    first, second, _ = ranges(server)
    assert first == (5, 250_005)
    assert second[0] > 5
    assert second[1] == 250_005


def test_a_whole_file_resumes_too(folder: Path, chunk: bytes) -> None:
    faults = [ShortBody(0, 1000), Reset(1, 1000), Reset(2, 0)]
    with LinkServer(folder, faults=faults) as server, HttpStore(server.url) as store:
        assert store.read(CHUNK, max_bytes=300_000) == chunk


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(folder: Path, chunk: bytes, status: int) -> None:
    busy = Busy(0, status=status, retry_after_s=1)
    with LinkServer(folder, faults=[busy]) as server, HttpStore(server.url) as store:
        started_s = time.monotonic()
        assert b"".join(store.stream(CHUNK, 0, 100)) == chunk[:100]
        assert 1.0 <= time.monotonic() - started_s < ENDS_WITHIN_S


def test_a_long_retry_after_is_an_error_at_once(folder: Path) -> None:
    busy = Busy(None, retry_after_s=3600)
    with LinkServer(folder, faults=[busy]) as server, HttpStore(server.url) as store:
        with pytest.raises(StoreError, match="come back in 3600 s"):
            store.read(CHUNK, max_bytes=10**6)
        assert len(server.requests) == 1


def test_attempts_are_bounded(folder: Path) -> None:
    faults = [Reset(None, at_byte=0)]
    with LinkServer(folder, faults=faults) as server, HttpStore(server.url, retries=2) as store:
        with pytest.raises(StoreError, match=r"gave up .* after 3 attempts"):
            list(store.stream(CHUNK, 0, 100))
        assert len(server.requests) == 3


def test_nobody_listens() -> None:
    with (
        HttpStore("http://127.0.0.1:9", retries=1) as store,
        pytest.raises(StoreError, match="2 at"),
    ):
        store.read(CHUNK, max_bytes=1)


@pytest.fixture
def impatient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a server that is silent for half a second for one that stands still."""
    monkeypatch.setattr(client, "MIN_SILENCE_S", 0.5)


def test_a_stalled_connection_is_given_up_long_before_the_timeout(
    folder: Path, chunk: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server has answered before: another connection may well get through."""
    monkeypatch.setattr(client, "MIN_SILENCE_S", 2.0)
    monkeypatch.setattr(client, "SILENCE_GROWTH", 1.0)
    faults = [Stall(1, at_byte=100_000, duration_s=600.0), Stall(2, at_byte=0, duration_s=600.0)]
    with LinkServer(folder, faults=faults) as server, HttpStore(server.url, timeout_s=500) as store:
        assert store.read("cache.json", max_bytes=100) == b'{"version": 1}'
        started_s = time.monotonic()
        assert b"".join(store.stream(CHUNK, 0, 300_000)) == chunk
        assert time.monotonic() - started_s < 100
    assert [range_[0] for range_ in ranges(server)[2:]] == [100_000, 100_000]


@pytest.mark.usefixtures("impatient_clients")
def test_a_slow_server_is_not_asked_twice(folder: Path, chunk: bytes) -> None:
    with LinkServer(folder, latency_s=1.0) as server, HttpStore(server.url) as store:
        for _ in range(2):
            assert b"".join(store.stream(CHUNK, 0, 300_000)) == chunk
    assert len(server.requests) == 2


@pytest.mark.usefixtures("impatient_clients")
def test_a_server_that_becomes_slow_is_waited_for(folder: Path, chunk: bytes) -> None:
    with LinkServer(folder) as server, HttpStore(server.url) as store:
        assert store.read(CHUNK, max_bytes=300_000) == chunk
        server.answers_after_s = 1.0
        assert store.read(CHUNK, max_bytes=300_000) == chunk
        # However often it asked, it has learnt by now how long an answer takes.
        server.requests.clear()
        assert store.read(CHUNK, max_bytes=300_000) == chunk
        assert len(server.requests) == 1


@pytest.mark.usefixtures("impatient_clients")
def test_the_only_attempt_waits_for_the_timeout(folder: Path, chunk: bytes) -> None:
    with LinkServer(folder) as server, HttpStore(server.url, retries=0) as store:
        assert store.read(CHUNK, max_bytes=300_000) == chunk
        server.answers_after_s = 1.0
        assert store.read(CHUNK, max_bytes=300_000) == chunk


def test_a_drip_is_a_stall(folder: Path) -> None:
    """A piece comes every second, so that no silence is as long as the timeout."""
    with (
        LinkServer(folder, rate_bytes_per_s=1000) as server,
        HttpStore(server.url, timeout_s=3.0, retries=0) as store,
        pytest.raises(StoreError, match="less than 8192 bytes/s"),
    ):
        list(store.stream(CHUNK, 0, 5000))


def test_a_server_without_ranges(folder: Path, chunk: bytes) -> None:
    faults = [IgnoreRange(None), ShortBody(0, at_byte=150_000)]
    with LinkServer(folder, faults=faults) as server, HttpStore(server.url) as store:
        assert b"".join(store.stream(CHUNK, 100_000, 100_000)) == chunk[100_000:200_000]
        assert store.read(CHUNK, 299_990, max_bytes=10) == chunk[-10:]
        assert len(server.requests) == 3


@pytest.mark.parametrize("shift", [-1, 1, 1000])
def test_a_wrong_content_range_is_refused(folder: Path, shift: int) -> None:
    faults: Sequence[Fault] = [WrongRange(None, shift=shift)]
    with LinkServer(folder, faults=faults) as server, HttpStore(server.url) as store:
        with pytest.raises(StoreError, match="Content-Range"):
            list(store.stream(CHUNK, 10, 100))
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "header",
    [None, "", "bytes 10-109", "bytes 10-109/" + "9" * 5000, "bytes 10-9/300", "bytes */9"],
)
def test_a_part_that_does_not_say_where_it_lies_is_refused(header: str | None) -> None:
    def answer(handler: RangeHandler) -> None:
        fields = {} if header is None else {"Content-Range": header}
        handler.send_head(206, {**fields, "Content-Length": "100"})
        handler.wfile.write(bytes(100))

    with (
        answering(answer) as server,
        HttpStore(server.url) as store,
        pytest.raises(StoreError, match="Content-Range"),
    ):
        list(store.stream("f", 10, 100))


def test_a_shorter_part_than_asked_for_is_completed(chunk: bytes) -> None:
    def answer(handler: RangeHandler) -> None:
        first = int(handler.headers["Range"].split("=")[1].split("-")[0])
        part = chunk[first : min(first + 400, 1000)]
        fields = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(chunk)}"}
        handler.send_head(206, {**fields, "Content-Length": str(len(part))})
        handler.wfile.write(part)

    with answering(answer) as server, HttpStore(server.url) as store:
        assert b"".join(store.stream("f", 0, 1000)) == chunk[:1000]
        assert len(server.requests) == 3


def test_a_body_without_a_length_is_bounded() -> None:
    def answer(handler: RangeHandler) -> None:
        handler.close_connection = True
        handler.send_head(200, {"Connection": "close"})
        while True:
            handler.wfile.write(bytes(1 << 16))

    with answering(answer) as server, HttpStore(server.url) as store:
        with pytest.raises(StoreError, match="more than the 1000000 bytes"):
            store.read("f", max_bytes=1_000_000)
        assert b"".join(store.stream("f", 10, 100)) == bytes(100)


def test_a_file_that_changes_is_not_mixed(folder: Path, chunk: bytes) -> None:
    faults = [ShortBody(0, at_byte=10)]
    with LinkServer(folder, faults=faults) as server, HttpStore(server.url) as store:
        pieces = store.stream(CHUNK, 0, 1000)
        received = next(pieces)
        (folder / CHUNK).write_bytes(bytes(len(chunk) + 1))
        with pytest.raises(StoreError, match="changed while it was read"):
            list(pieces)
        assert received == chunk[: len(received)]


def test_a_plain_server_that_knows_neither_ranges_nor_etags(folder: Path, chunk: bytes) -> None:
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    handler = functools.partial(quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            with HttpStore(f"http://127.0.0.1:{server.server_address[1]}") as store:
                assert store.read(CHUNK, 1000, 500, max_bytes=500) == chunk[1000:1500]
                assert store.read(CHUNK, max_bytes=300_000) == chunk
                assert store.exists(CHUNK)
                assert not store.exists("missing")
        finally:
            server.shutdown()
            thread.join()


def test_a_compressed_body_is_refused() -> None:
    def answer(handler: RangeHandler) -> None:
        assert handler.headers["Accept-Encoding"] == "identity"
        handler.send_head(200, {"Content-Encoding": "gzip", "Content-Length": "0"})

    with (
        answering(answer) as server,
        HttpStore(server.url) as store,
        pytest.raises(StoreError, match="Content-Encoding gzip"),
    ):
        store.read("f", max_bytes=10)


@pytest.mark.parametrize("status", [401, 403])
def test_refused_access_asks_for_a_token(status: int) -> None:
    def answer(handler: RangeHandler) -> None:
        allowed = handler.headers.get("Authorization") == "Bearer secret"
        handler.send_head(200 if allowed else status, {"Content-Length": "0"})

    with answering(answer) as server:
        with HttpStore(server.url) as store:
            with pytest.raises(StoreError, match="pass a token"):
                store.read("f", max_bytes=10)
            with pytest.raises(StoreError, match="pass a token"):
                store.exists("f")
        with HttpStore(server.url, token="secret") as store:
            assert store.read("f", max_bytes=10) == b""


def test_credentials_stay_with_their_host(folder: Path) -> None:
    seen: list[str | None] = []

    def store_host(handler: RangeHandler) -> None:
        seen.extend([handler.headers.get("Authorization"), handler.headers.get("X-Key")])
        handler.send_file(folder / "cache.json", {})

    with answering(store_host) as storage:

        def redirect(handler: RangeHandler) -> None:
            seen.extend([handler.headers.get("Authorization"), handler.headers.get("X-Key")])
            place = {"Location": f"{storage.url}/blob"} if "second" in handler.path else {}
            fields = {"Location": "/second", **place, "Content-Length": "0"}
            handler.send_head(302, fields)

        with (
            answering(redirect) as server,
            HttpStore(server.url, token="secret", headers={"X-Key": "key"}) as store,
        ):
            assert store.read("f", 1, 3, max_bytes=3) == b'"ve'
    assert seen == ["Bearer secret", "key", "Bearer secret", "key", None, None]


def test_redirects_are_bounded() -> None:
    def answer(handler: RangeHandler) -> None:
        handler.send_head(302, {"Location": handler.path, "Content-Length": "0"})

    with answering(answer) as server, HttpStore(server.url) as store:
        with pytest.raises(StoreError, match="redirects more than"):
            store.read("f", max_bytes=1)
        assert len(server.requests) == 6


def test_heads_that_are_not_supported() -> None:
    def answer(handler: RangeHandler) -> None:
        status = 405 if handler.command == "HEAD" else 404 if "missing" in handler.path else 200
        handler.send_head(status, {"Content-Length": "0"})

    with answering(answer) as server, HttpStore(server.url) as store:
        assert store.exists("f")
        assert not store.exists("missing")


def test_signed_urls_keep_their_query_and_show_no_secret(folder: Path) -> None:
    paths: list[str] = []

    def answer(handler: RangeHandler) -> None:
        paths.append(handler.path)
        handler.send_head(404, {"Content-Length": "0"})

    with answering(answer) as server:
        url = server.url.replace("//", "//user:password@") + "/a%20b?sig=secret"
        with HttpStore(url) as store:
            with pytest.raises(StoreNotFound) as error:
                store.read("c d/e", max_bytes=1)
            for text in (store.location, repr(store), str(error.value)):
                assert "secret" not in text
                assert "password" not in text
    assert paths == ["/a%20b/c%20d/e?sig=secret"]


def test_closing_the_generator_closes_the_connection(folder: Path) -> None:
    """Of a transfer that takes minutes: the server cannot go on with it."""
    with LinkServer(folder, rate_bytes_per_s=2000) as server, HttpStore(server.url) as store:
        others = set(threading.enumerate())
        pieces = store.stream(CHUNK, 0, 300_000)
        next(pieces)
        (serving,) = set(threading.enumerate()) - others
        pieces.close()
        serving.join(ENDS_WITHIN_S)
        assert not serving.is_alive()
        assert server.requests[0].sent_bytes < 300_000


@pytest.mark.parametrize(
    "faults", [[Stall(None, 10, 60.0)], [Busy(None, retry_after_s=59)]], ids=["stalled", "waiting"]
)
def test_closing_the_store_ends_reads_of_other_threads(folder: Path, faults: list[Fault]) -> None:
    errors: list[BaseException] = []
    with LinkServer(folder, faults=faults) as server:
        store = HttpStore(server.url, timeout_s=20.0)

        def read() -> None:
            try:
                list(store.stream(CHUNK, 0, 300_000))
            except StoreError as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        while not server.requests:
            time.sleep(0.01)
        time.sleep(0.2)  # for the answer
        store.close()
        reader.join(ENDS_WITHIN_S)
        assert not reader.is_alive()
        assert "closed" in str(errors[0])
        with pytest.raises(StoreError, match="closed"):
            store.read(CHUNK, max_bytes=1)
        with pytest.raises(StoreError, match="closed"):
            store.exists(CHUNK)


def test_many_threads_share_one_store(served: LinkServer, chunk: bytes) -> None:
    results: dict[int, bytes] = {}
    with HttpStore(served.url) as store:

        def read(index: int) -> None:
            results[index] = store.read(CHUNK, index * 1000, 1000, max_bytes=1000)

        threads = [threading.Thread(target=read, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(results[i] == chunk[i * 1000 : i * 1000 + 1000] for i in range(8))


@pytest.mark.parametrize("url", ["ftp://host/x", "http://", "host/x", ""])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL"):
        HttpStore(url)
