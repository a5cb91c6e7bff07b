"""Bounded, resumable reads of byte ranges over HTTP."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import tenacity

from hf_cachegen.errors import StoreError, StoreUnreachable
from hf_cachegen.stores.transfer import Transfer, TransientError, check_status, httpx, public_url

TIMEOUT_S = 10.0
RETRIES = 5
MAX_REDIRECTS = 5

RECENT_ANSWERS = 16
MIN_SILENCE_S = 0.3
SILENCE_RATIO = 4.0
"""A server that has answered so far is silent if it is so for this many times as long, and for
:data:`MIN_SILENCE_S`."""

SILENCE_GROWTH = 4.0
"""Each attempt waits so many times as long as the one before, should the server be slow today."""

_BACKOFF = tenacity.wait_exponential(multiplier=0.1, max=5.0) + tenacity.wait_random(0.0, 0.1)


class RangeClient:
    """Ranged GETs over one pool of connections; safe to use from several threads.

    Parameters
    ----------
    headers
        Sent to the host of a request, dropped when it redirects to another one.
    timeout_s, retries
        As :class:`~hf_cachegen.stores.HttpStore`.

    Notes
    -----
    Often it is one connection that stalls and not the server. So a read is asked for again on
    another one long before ``timeout_s`` if it is silent for much longer than the server's answers
    have taken so far. Only its last attempt waits for ``timeout_s`` in any case.
    """

    def __init__(self, headers: Mapping[str, str], timeout_s: float, retries: int) -> None:
        if timeout_s <= 0 or retries < 0:
            raise ValueError(f"expected timeout_s > 0, retries >= 0, got {timeout_s}, {retries}")
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._retries = retries
        self._client = httpx.Client(verify=_tls())
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._answers_s: deque[float] = deque(maxlen=RECENT_ANSWERS)
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def latency_s(self) -> float:
        """The longest that the server's latest answers have taken; 0 before the first."""
        with self._lock:
            return max(self._answers_s, default=0.0)

    def pieces(
        self, url: httpx.URL, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        """Yield bytes of a file as :meth:`Store.stream` does; see there."""
        if size == 0:
            return
        patience_s = self._timeout_s * (self._retries + 1)
        transfer = Transfer(url, offset, size, max_bytes, patience_s)
        with self._readable_errors(url):
            for attempt in self._attempts():
                with attempt:
                    yield from self._attempt(transfer, attempt.retry_state.attempt_number)

    def exists(self, url: httpx.URL) -> bool:
        """Whether the server has the file."""
        with self._readable_errors(url):
            for attempt in self._attempts():
                with attempt:
                    return self._has(url)
        raise AssertionError("the attempts return or raise")

    def close(self) -> None:
        """Close every connection. Reads in progress, in any thread, end with a StoreError."""
        self._closed.set()
        with self._lock:
            connections = list(self._sockets)
        for connection in connections:
            # Closing a descriptor does not wake the thread that reads it; a shutdown does.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
        self._client.close()

    def _attempt(self, transfer: Transfer, number: int) -> Generator[bytes, None, None]:
        started_s, silence_s = time.monotonic(), self._silence_s(number)
        with self._get(transfer.url, transfer.range_header(), silence_s) as response:
            if response.status_code == 416 and transfer.ends_at(response):
                return
            check_status(response, transfer.url)
            transfer.begin(response)
            for received in response.iter_raw():
                transfer.spend(time.monotonic() - started_s)
                if piece := transfer.take(received):
                    yield piece
                if transfer.done:
                    return
                # The time that the consumer held the piece is not the link's.
                started_s = time.monotonic()
        transfer.finish()

    def _has(self, url: httpx.URL) -> bool:
        with self._open("HEAD", url, {}, self._timeout_s) as response:
            status = response.status_code
        if status in (405, 501):
            with self._get(url, {"Range": "bytes=0-0"}, self._timeout_s) as response:
                status = response.status_code
        if status in (404, 410):
            return False
        if status != 416:  # an empty file has no first byte
            check_status(response, url)
        return True

    def _silence_s(self, attempt: int) -> float:
        """How long an attempt, counted from 1, waits for anything to come."""
        if not self._answers_s or attempt > self._retries:
            return self._timeout_s
        first_s = max(MIN_SILENCE_S, SILENCE_RATIO * self.latency_s)
        return min(first_s * SILENCE_GROWTH ** (attempt - 1), self._timeout_s)

    def _get(
        self, url: httpx.URL, headers: dict[str, str], silence_s: float
    ) -> contextlib.AbstractContextManager[httpx.Response]:
        # Identity: a range counts the bytes of the file, not those of a compressed body.
        return self._open("GET", url, {"Accept-Encoding": "identity", **headers}, silence_s)

    @contextlib.contextmanager
    def _open(
        self, method: str, url: httpx.URL, headers: dict[str, str], silence_s: float
    ) -> Iterator[httpx.Response]:
        """Send a request and follow its redirects, without the credentials on other hosts."""
        target = url
        for _ in range(MAX_REDIRECTS + 1):
            own = self._headers if _origin(target) == _origin(url) else {}
            request = self._client.build_request(
                method,
                target,
                headers={**own, **headers},
                timeout=silence_s,
                extensions={"trace": self._trace},
            )
            started_s = time.monotonic()
            response = self._client.send(request, stream=True)
            with self._lock:
                self._answers_s.append(time.monotonic() - started_s)
            try:
                if response.next_request is None:
                    yield response
                    return
                target = response.next_request.url
            finally:
                response.close()
        raise StoreError(f"{public_url(url)} redirects more than {MAX_REDIRECTS} times")

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        """Note the socket of a new connection, so that :meth:`close` can wake its reader."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            connection = info["return_value"].get_extra_info("socket")
            if isinstance(connection, socket.socket):
                with self._lock:
                    self._sockets.add(connection)

    def _attempts(self) -> tenacity.Retrying:
        return tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._retries + 1),
            wait=_wait_s,
            retry=tenacity.retry_if_exception(self._is_transient),
            sleep=tenacity.sleep_using_event(self._closed),
        )

    def _is_transient(self, error: BaseException) -> bool:
        passing = isinstance(error, (TransientError, httpx.TransportError))
        return passing and not self._closed.is_set()

    @contextlib.contextmanager
    def _readable_errors(self, url: httpx.URL) -> Iterator[None]:
        if self._closed.is_set():
            raise StoreError(f"cannot read {public_url(url)}: the store is closed")
        try:
            yield
        except (tenacity.RetryError, httpx.TransportError, RuntimeError) as error:
            if self._closed.is_set():
                raise StoreError(f"cannot read {public_url(url)}: the store was closed") from error
            if not isinstance(error, tenacity.RetryError):
                raise
            cause = error.last_attempt.exception()
            raise StoreUnreachable(
                f"gave up on {public_url(url)} after {self._retries + 1} attempts: "
                f"{cause or type(cause).__name__}; check the link and the server, then try again"
            ) from cause


@functools.cache
def _tls() -> ssl.SSLContext:
    """One TLS setting for all clients: loading the certificates takes tens of milliseconds."""
    return httpx.create_ssl_context()


def _wait_s(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, httpx.TimeoutException):
        return 0.0  # it has waited already
    asked_s = error.retry_after_s if isinstance(error, TransientError) else None
    return max(asked_s or 0.0, _BACKOFF(state))


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    default = {"http": 80, "https": 443}.get(url.scheme)
    return url.scheme, url.host, url.port or default
