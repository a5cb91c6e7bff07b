"""The shaped link keeps its rate, does the faults it promises, and leaves nothing behind."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hf_cachegen.bench import loopback
from hf_cachegen.bench.link import (
    Busy,
    Gone,
    IgnoreRange,
    LinkServer,
    Reset,
    ShortBody,
    Stall,
    WrongByte,
    WrongRange,
)
from hf_cachegen.bench.loopback import Link

CONTENT = bytes(range(256)) * 40_000


@pytest.fixture
def served(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a file.bin").write_bytes(CONTENT)
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path


def connect(server: LinkServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)


def get(
    server: LinkServer, wanted: str | None = None, path: str = "/file", method: str = "GET"
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = connect(server)
    try:
        connection.request(method, path, headers={} if wanted is None else {"Range": wanted})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("wanted", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-199", 100, 200),
        ("bytes=10239990-", 10_239_990, 10_240_000),
        ("bytes=-7", 10_239_993, 10_240_000),
        ("bytes=10239999-99999999", 10_239_999, 10_240_000),
    ],
)
def test_ranges(served: Path, wanted: str, start: int, stop: int) -> None:
    with LinkServer(served) as server:
        response, body = get(server, wanted)
        assert response.status == 206
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/10240000"
        assert body == CONTENT[start:stop]
        record = server.requests[0]
        assert (record.path, record.start, record.stop) == ("file", start, stop)
        assert record.sent_bytes == stop - start


@pytest.mark.parametrize("wanted", ["bytes=10240000-", "bytes=5-4", "bytes=-", "lines=1-2"])
def test_ranges_that_are_not_there(served: Path, wanted: str) -> None:
    with LinkServer(served) as server:
        response, body = get(server, wanted)
        assert response.status == 416
        assert response.headers["Content-Range"] == "bytes */10240000"
        assert body == b""


def test_whole_files_heads_and_missing_files(served: Path) -> None:
    with LinkServer(served) as server:
        assert get(server, path="/sub/a%20file.bin")[1] == CONTENT
        head, body = get(server, method="HEAD")
        assert (head.headers["Content-Length"], body) == ("10240000", b"")
        for path in ("/missing", "/sub", "/%2e%2e/secret", "/"):
            assert get(server, path=path)[0].status == 404


@pytest.mark.parametrize("rate", [125e3, 1.25e6, 12.5e6, 125e6])
def test_rate_is_exact(served: Path, rate: float, lies_between: Any) -> None:
    """From 1 Mbit/s to 1 Gbit/s."""
    size = int(min(0.4 * rate, len(CONTENT)))
    with LinkServer(served, rate_bytes_per_s=rate) as server:
        connection = connect(server)

        def measure() -> float:
            started_s = time.perf_counter()
            connection.request("GET", "/file", headers={"Range": f"bytes=0-{size - 1}"})
            response = connection.getresponse()
            while response.readinto(bytearray(1 << 16)):
                pass
            return time.perf_counter() - started_s

        assert lies_between(measure, 0.97 * size / rate, 1.03 * size / rate)
        connection.close()


def test_connections_share_the_link(served: Path, lies_between: Any, seconds_at_once: Any) -> None:
    with LinkServer(served, rate_bytes_per_s=4e6) as server:
        measure = partial(seconds_at_once, partial(get, server, "bytes=0-399999"), 4)
        assert lies_between(measure, 0.35, 0.52)


def test_rate_follows_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(loopback.time, "perf_counter", lambda: now_s)
    link = Link([(0.0, 1000.0), (1.0, 0.0), (2.0, 500.0)])
    # 1000 bytes in the first second, none in the next, then 500 in a second.
    assert link.book(1500, ongoing=False) == pytest.approx(3.0)
    assert link.book(500, ongoing=True) == pytest.approx(4.0)
    now_s += 5
    link.restart()
    assert link.book(500, ongoing=False) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "trace",
    [[], [(1.0, 5.0)], [(0.0, 5.0), (2.0, 0.0)], [(0.0, -1.0), (1.0, 2.0)], [(0.0, 1), (0.0, 2)]],
)
def test_traces_that_make_no_sense(trace: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="expected a trace"):
        Link(trace)


def test_latency_comes_before_each_answer(served: Path) -> None:
    with LinkServer(served, latency_s=0.1) as server:
        started_s = time.perf_counter()
        get(server, "bytes=0-0")
        get(server, method="HEAD")
        assert time.perf_counter() - started_s >= 0.2


def test_faults_hit_the_request_they_name(served: Path) -> None:
    faults = [
        Stall(0, at_byte=100, duration_s=0.2),
        Reset(1, at_byte=100),
        ShortBody(2, at_byte=100),
        WrongByte(3, at_byte=100),
        Busy(4, status=429, retry_after_s=7),
        IgnoreRange(5),
        WrongRange(6),
    ]
    wanted = "bytes=1000-1999"
    right = CONTENT[1000:2000]
    with LinkServer(served, faults=faults) as server:
        started_s = time.perf_counter()
        assert get(server, wanted)[1] == right
        assert time.perf_counter() - started_s >= 0.2
        with pytest.raises(ConnectionResetError):
            get(server, wanted)
        with pytest.raises(http.client.IncompleteRead) as short:
            get(server, wanted)
        assert short.value.partial == right[:100]
        wrong = get(server, wanted)[1]
        assert [i for i in range(1000) if wrong[i] != right[i]] == [100]
        busy, _ = get(server, wanted)
        assert (busy.status, busy.headers["Retry-After"]) == (429, "7")
        whole, body = get(server, wanted)
        assert (whole.status, body) == (200, CONTENT)
        shifted, _ = get(server, wanted)
        assert shifted.headers["Content-Range"] == "bytes 1001-2000/10240000"
        assert get(server, wanted)[1] == right
        assert [record.status for record in server.requests[:2]] == [206, 206]
        assert server.requests[2].sent_bytes == 100


def test_server_that_is_gone_stays_so(served: Path) -> None:
    with LinkServer(served, faults=[Gone(1, at_byte=100)]) as server:
        assert get(server, "bytes=0-999")[1] == CONTENT[:1000]
        for _ in range(3):
            with pytest.raises(ConnectionResetError):
                get(server, "bytes=0-999")
        assert [record.sent_bytes for record in server.requests] == [1000, 100, 0, 0]


def test_leaving_ends_threads_and_sockets(served: Path) -> None:
    before = set(threading.enumerate())
    with LinkServer(served, faults=[Stall(1, 10, 60.0)], rate_bytes_per_s=1e5) as server:
        idle, stalled, paced = connect(server), connect(server), connect(server)
        idle.request("GET", "/file", headers={"Range": "bytes=0-9"})
        assert idle.getresponse().read() == CONTENT[:10]
        stalled.request("GET", "/file")
        stalled.getresponse()
        paced.request("GET", "/file")
        paced.getresponse()
        address = urlsplit(server.url)
        started_s = time.perf_counter()
    assert time.perf_counter() - started_s < 30  # and both transfers take longer
    assert set(threading.enumerate()) <= before
    for connection in (idle, stalled, paced):
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port), timeout=1)
