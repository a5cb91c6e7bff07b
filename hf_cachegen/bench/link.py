"""A file server behind a link of known speed, with faults on demand."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from hf_cachegen.bench.kernel_link import KernelLink
from hf_cachegen.bench.loopback import (
    Link,
    LoopbackServer,
    RangeHandler,
    Shaper,
    answer_range,
    check_trace,
)
from hf_cachegen.stores.base import check_path


@dataclass(frozen=True)
class Fault:
    """What goes wrong with the ``request``-th GET, counted from 0; None is every one."""

    request: int | None


@dataclass(frozen=True)
class BodyFault(Fault):
    """It goes wrong after ``at_byte`` bytes of the body."""

    at_byte: int


@dataclass(frozen=True)
class Stall(BodyFault):
    """The body pauses for ``duration_s``."""

    duration_s: float


@dataclass(frozen=True)
class Reset(BodyFault):
    """The connection is reset (RST)."""


@dataclass(frozen=True)
class Gone(BodyFault):
    """The connection is reset, and so is every one from then on: the server is gone."""


@dataclass(frozen=True)
class ShortBody(BodyFault):
    """The connection is closed in good order before the announced end."""


@dataclass(frozen=True)
class WrongByte(BodyFault):
    """Byte ``at_byte`` of the body is inverted."""


@dataclass(frozen=True)
class Busy(Fault):
    """The answer is ``status`` (429, 503, ...), with a Retry-After if one is given."""

    status: int = 503
    retry_after_s: int | None = None


@dataclass(frozen=True)
class IgnoreRange(Fault):
    """The answer is the whole file with status 200."""


@dataclass(frozen=True)
class WrongRange(Fault):
    """Content-Range names bytes that lie ``shift`` further on than those asked for."""

    shift: int = 1


def read_trace(path: Path) -> list[tuple[float, float]]:
    """A trace for :class:`Link` from a text file.

    Parameters
    ----------
    path
        Lines of ``<seconds> <Mbit/s>``, the first at 0 seconds; ``#`` begins a comment.

    Raises
    ------
    ValueError
        A line is something else, or the trace makes no sense.
    """
    trace = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.partition("#")[0].split()
        try:
            if fields:
                at_s, mbps = map(float, fields)
                trace.append((at_s, mbps * 1e6 / 8))
        except ValueError:
            raise ValueError(
                f"{path}, line {number}: expected '<seconds> <Mbit/s>', found {line!r}"
            ) from None
    check_trace(trace)
    return trace


class LinkServer(LoopbackServer):
    """Serve a folder over a shaped link.

    Parameters
    ----------
    folder
        Files to serve, with range requests.
    rate_bytes_per_s
        A constant rate of the link; 1 Gbit/s is 125e6. None is without a limit.
    trace
        A changing rate instead, as :class:`Link` takes it; t = 0 is the entry of the context, or
        the last call of ``link.restart()``.
    latency_s
        A round trip of the link: the wait before each answer, or with ``tc`` of each packet.
    faults
        What goes wrong, each once at the request it names.
    shaper
        Who keeps the rate. With ``tc``, entering the context raises OSError where
        :func:`~hf_cachegen.bench.kernel_link.check_kernel_links` does.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rate_bytes_per_s: float | None = None,
        trace: Sequence[tuple[float, float]] | None = None,
        latency_s: float = 0.0,
        faults: Iterable[Fault] = (),
        shaper: Shaper = Shaper.bucket,
    ) -> None:
        if rate_bytes_per_s is not None and trace is not None:
            raise ValueError("expected rate_bytes_per_s or trace, got both")
        if rate_bytes_per_s is not None:
            trace = [(0.0, rate_bytes_per_s)]
        by_kernel = shaper is Shaper.tc
        link = KernelLink(trace, latency_s) if by_kernel else Link(trace)
        super().__init__(_FileHandler, link)
        self.folder = Path(folder)
        self.answers_after_s = 0.0 if by_kernel else latency_s
        self.faults = tuple(faults)
        self.is_gone = False
        self._count = 0
        self._lock = threading.Lock()

    def next_faults(self) -> list[Fault]:
        """Count a GET and return what is to go wrong with it."""
        with self._lock:
            number, self._count = self._count, self._count + 1
        return [fault for fault in self.faults if fault.request in (None, number)]


class _FileHandler(RangeHandler):
    _faults: Sequence[Fault] = ()

    def do_GET(self) -> None:  # noqa: N802 - as http.server names it
        owner = self.server.owner
        assert isinstance(owner, LinkServer)
        if owner.is_gone:
            self._reset()
            return
        self._faults = owner.next_faults() if self.command == "GET" else ()
        self.pause(owner.answers_after_s)
        file = _file_below(owner.folder, self.record.path)
        busy = next((fault for fault in self._faults if isinstance(fault, Busy)), None)
        if busy is not None:
            after = {} if busy.retry_after_s is None else {"Retry-After": str(busy.retry_after_s)}
            self.send_head(busy.status, {"Content-Length": "0", **after})
        elif file is None:
            self.send_head(HTTPStatus.NOT_FOUND, {"Content-Length": "0"})
        else:
            self._serve(file)

    do_HEAD = do_GET  # noqa: N815

    def _serve(self, file: Path) -> None:
        stat = file.stat()
        ignored = any(isinstance(fault, IgnoreRange) for fault in self._faults)
        answer = answer_range(stat.st_size, None if ignored else self.headers.get("Range"))
        for fault in self._faults:
            if isinstance(fault, WrongRange):
                first, last = answer.start + fault.shift, answer.stop - 1 + fault.shift
                answer.fields["Content-Range"] = f"bytes {first}-{last}/{stat.st_size}"
        etag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
        self.send_answer(file, answer, {"Accept-Ranges": "bytes", "ETag": etag})

    def send_body(self, body: BinaryIO, size: int) -> None:
        events = [fault for fault in self._faults if isinstance(fault, BodyFault)]
        for event in sorted(events, key=lambda event: event.at_byte):
            if event.at_byte >= size:
                break
            super().send_body(body, event.at_byte - self.record.sent_bytes)
            match event:
                case Stall():
                    self.pause(event.duration_s)
                case WrongByte():
                    self.send_piece(bytes(255 - byte for byte in body.read(1)))
                case ShortBody():
                    self.close_connection = True
                    return
                case Reset() | Gone():
                    owner = self.server.owner
                    assert isinstance(owner, LinkServer)
                    owner.is_gone |= isinstance(event, Gone)
                    self._reset()
                    return
        super().send_body(body, size - self.record.sent_bytes)

    def _reset(self) -> None:
        """Close with RST: a linger time of zero, and before anyone sends a FIN."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        os.close(self.connection.detach())


def _file_below(folder: Path, path: str) -> Path | None:
    try:
        file = folder / check_path(path)
    except ValueError:
        return None
    return file if file.is_file() else None
