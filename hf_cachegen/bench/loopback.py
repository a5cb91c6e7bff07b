"""A threaded HTTP server on this machine whose bodies share one link of known speed.

The link is a serial resource, as the slowest hop of a real path is: each quantum of a body books
the next free interval of it, and its thread sleeps until that interval has passed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self
from urllib.parse import unquote, urlsplit

QUANTUM_S = 0.002
CATCH_UP_S = 0.1
"""How far a late sender may catch up: sleeps overshoot, and the rate must hold on average."""

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Shaper(StrEnum):
    """Who keeps the rate of a link."""

    bucket = "bucket"
    """The server itself, with the pauses between its writes: exact, and anywhere."""
    tc = "tc"
    """The kernel, between two network namespaces: as real as a link can be on one machine."""


def check_trace(trace: Sequence[tuple[float, float]] | None) -> None:
    """Return if a trace is one that :class:`Link` can follow.

    Raises
    ------
    ValueError
        It is not.
    """
    if trace is None:
        return
    times = [t_s for t_s, _ in trace]
    rates = [rate for _, rate in trace]
    ordered = all(a < b for a, b in itertools.pairwise(times))
    finite = all(math.isfinite(t_s) and 0 <= rate < math.inf for t_s, rate in trace)
    if not times or times[0] != 0 or not ordered or not finite or rates[-1] == 0:
        raise ValueError(
            "expected a trace [(0, rate), (t_s, rate), ...] with rising times, finite rates that "
            f"are not negative and a last one above 0, got {trace!r}"
        )


class Link:
    """A shared link whose rate follows a piecewise-constant trace.

    Parameters
    ----------
    trace
        ``(t_s, rate_bytes_per_s)`` from t = 0 on, in order of time; the last rate, which must
        not be 0, holds for ever. None is a link without a limit.

    Attributes
    ----------
    host
        Address of the server's end, once it listens.
    """

    host = "127.0.0.1"

    def __init__(self, trace: Sequence[tuple[float, float]] | None) -> None:
        check_trace(trace)
        self._trace = trace
        self._lock = threading.Lock()
        self._origin_s = time.perf_counter()
        self._free_s = 0.0

    def listen(self) -> socket.socket:
        """A new socket that listens at the server's end."""
        return socket.create_server((self.host, 0))

    def close(self) -> None:
        """End what :meth:`listen` has begun, after the socket is closed."""

    def restart(self) -> None:
        """Begin the trace now."""
        with self._lock:
            self._origin_s = time.perf_counter()
            self._free_s = 0.0

    def quantum_bytes(self) -> int:
        """Bytes to send in one go: about :data:`QUANTUM_S` of the present rate."""
        rate = self._rate_at(time.perf_counter() - self._origin_s)
        return int(min(max(rate * QUANTUM_S, 1 << 10), 1 << 16))

    def book(self, size_bytes: int, ongoing: bool) -> float:
        """Book the next free interval for ``size_bytes``; return the seconds until its end.

        An ``ongoing`` body may book the time it has just overslept, a new one begins now.
        """
        if self._trace is None:
            return 0.0
        with self._lock:
            now_s = time.perf_counter() - self._origin_s
            earliest_s = max(0.0, now_s - CATCH_UP_S) if ongoing else now_s
            self._free_s = self._finish(max(self._free_s, earliest_s), size_bytes)
            return self._free_s - now_s

    def _rate_at(self, t_s: float) -> float:
        if self._trace is None:
            return float("inf")
        return next(rate for start_s, rate in reversed(self._trace) if start_s <= max(t_s, 0))

    def _finish(self, t_s: float, size_bytes: float) -> float:
        """When a transfer of ``size_bytes`` that starts at ``t_s`` ends."""
        while True:
            rate = self._rate_at(t_s)
            until_s = min((s for s, _ in self._trace or () if s > t_s), default=float("inf"))
            if rate and t_s + size_bytes / rate <= until_s:
                return t_s + size_bytes / rate
            size_bytes -= rate * (until_s - t_s)
            t_s = until_s


class LoopbackServer:
    """A threaded HTTP/1.1 server on this machine; leaving the context ends all its threads.

    Parameters
    ----------
    handler
        Answers the requests; finds this object as ``self.server.owner``.
    link
        What the bodies of files travel over, and where the server is.

    Attributes
    ----------
    requests
        A :class:`RequestRecord` for each request so far, in order of arrival.
    """

    def __init__(self, handler: type[RangeHandler], link: Link) -> None:
        self.link = link
        self.requests: list[RequestRecord] = []
        self.stopping = threading.Event()
        self._handler = handler
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        """``http://host:port``, by default on 127.0.0.1; ValueError outside of the context."""
        if self._server is None:
            raise ValueError("expected `with` around the server before its url is asked for")
        return f"http://{self.link.host}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        listener = self.link.listen()
        try:
            self.link.restart()
        except BaseException:
            listener.close()
            self.link.close()
            raise
        self._server = _Server(self, self._handler, listener)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.disconnect()
        self._server.server_close()
        self.link.close()


@dataclass
class RequestRecord:
    """One request: the bytes of the file it is about (``[start, stop)``), and those sent."""

    method: str
    path: str
    status: int = 0
    start: int = 0
    stop: int = 0
    sent_bytes: int = 0


@dataclass
class RangeAnswer:
    """What a server says to a request for bytes: ``[start, stop)`` of the file is the body."""

    status: HTTPStatus
    start: int
    stop: int
    fields: dict[str, str]


def answer_range(size: int, wanted: str | None) -> RangeAnswer:
    """The answer to the Range header ``wanted`` (None: no header) for a file of ``size`` bytes."""
    if wanted is None:
        return RangeAnswer(HTTPStatus.OK, 0, size, {})
    start, stop = _parse_range(wanted, size)
    if start >= stop:
        fields = {"Content-Range": f"bytes */{size}"}
        return RangeAnswer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, 0, fields)
    fields = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    return RangeAnswer(HTTPStatus.PARTIAL_CONTENT, start, stop, fields)


class RangeHandler(BaseHTTPRequestHandler):
    """Base of the handlers: HTTP/1.1, bodies paced by the link, quiet about requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    record: RequestRecord

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        if parsed:
            path = unquote(urlsplit(self.path).path).lstrip("/")
            self.record = RequestRecord(self.command, path)
            self.server.owner.requests.append(self.record)
        return parsed

    def send_file(self, file: Path, fields: dict[str, str]) -> None:
        """Answer GET or HEAD with a file, or with the range of it that the request names."""
        self.send_answer(file, answer_range(file.stat().st_size, self.headers.get("Range")), fields)

    def send_answer(self, file: Path, answer: RangeAnswer, fields: dict[str, str]) -> None:
        """Send the head and, but to HEAD, the body of an answer."""
        self.record.start, self.record.stop = answer.start, answer.stop
        size = answer.stop - answer.start
        self.send_head(answer.status, {**fields, **answer.fields, "Content-Length": str(size)})
        if self.command != "HEAD":
            with file.open("rb") as body:
                body.seek(answer.start)
                self.send_body(body, size)

    def send_head(self, status: int, fields: dict[str, str]) -> None:
        """Send the status line and the header fields."""
        self.record.status = int(status)
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()

    def send_body(self, body: BinaryIO, size: int) -> None:
        """Send the next ``size`` bytes at the pace of the link."""
        link = self.server.owner.link
        while size > 0:
            piece = body.read(min(size, link.quantum_bytes()))
            self.pause(link.book(len(piece), ongoing=self.record.sent_bytes > 0))
            self.send_piece(piece)
            size -= len(piece)

    def send_piece(self, piece: bytes) -> None:
        """Send bytes of a body at once."""
        self.record.sent_bytes += len(piece)  # first, so that who has the bytes finds them counted
        self.wfile.write(piece)

    def pause(self, seconds: float) -> None:
        """Sleep, unless the server is being left: then end the connection."""
        if seconds > 0 and self.server.owner.stopping.wait(seconds):
            raise ConnectionAbortedError("the server is being left")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: what was asked for is kept as data, where it matters."""


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close joins them

    def __init__(
        self, owner: LoopbackServer, handler: type[RangeHandler], listener: socket.socket
    ) -> None:
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()  # its own, which is not bound
        self.socket = listener
        self.owner = owner
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def disconnect(self) -> None:
        """End the connections that are kept alive, and with them the threads that wait on them."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay quiet about clients that go away; any other error is a bug to be seen."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _parse_range(header: str, size: int) -> tuple[int, int]:
    """First byte and end of a ``Range: bytes=...`` header; an empty range if it asks for none."""
    match = _RANGE.fullmatch(header)
    if match is None or match[0] == "bytes=-":
        return 0, 0
    if not match[1]:
        return max(0, size - int(match[2])), size
    last = int(match[2]) if match[2] else size - 1
    return int(match[1]), min(last + 1, size)
