"""What the answers to one ranged GET mean: which bytes they carry, and when they are refused."""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime

from hf_cachegen.errors import StoreError, StoreNotFound
from hf_cachegen.stores.base import TruncatedError, too_large, too_short

try:
    import httpx2 as httpx
except ImportError:  # huggingface_hub before 2.0 brings the client under its former name
    import httpx  # type: ignore[no-redef, import-not-found]

__all__ = ["Transfer", "TransientError", "check_status", "httpx", "public_url"]

MAX_RETRY_AFTER_S = 60.0
MIN_RATE_BYTES_PER_S = 8192
"""A transfer that stays below this on average is a stall, however steadily it drips."""

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_INTEGER = re.compile("[0-9]{1,18}")
_CONTENT_RANGE = re.compile("bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|[*])")


class TransientError(StoreError):
    """A failure that the next attempt may not meet."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Transfer:
    """Where the read of one range stands, over all its attempts.

    Parameters
    ----------
    url
        The file.
    offset, size, max_bytes
        As :meth:`Store.read`.
    patience_s
        Time that may pass in waiting for the server, on top of what a link at
        :data:`MIN_RATE_BYTES_PER_S` takes.
    """

    def __init__(
        self, url: httpx.URL, offset: int, size: int | None, max_bytes: int, patience_s: float
    ) -> None:
        self.url = url
        self._position = offset
        self._stop = None if size is None else offset + size
        self._limit = offset + max_bytes
        # A server that ignores Range sends what lies before the offset too.
        self._budget_s = patience_s + self._limit / MIN_RATE_BYTES_PER_S
        self._skip_bytes = 0
        self._version: str | None = None
        self._location, _, self._name = str(public_url(url)).rpartition("/")

    @property
    def done(self) -> bool:
        """Whether the last byte has been taken."""
        return self._position == self._stop

    def range_header(self) -> dict[str, str]:
        """Ask for what is still missing."""
        if self._position == 0 and self._stop is None:
            return {}
        last = "" if self._stop is None else self._stop - 1
        return {"Range": f"bytes={self._position}-{last}"}

    def ends_at(self, response: httpx.Response) -> bool:
        """Whether a 416 says that the open-ended range is empty rather than wrong."""
        total = response.headers.get("Content-Range", "").removeprefix("bytes */")
        return self._stop is None and total == str(self._position)

    def begin(self, response: httpx.Response) -> None:
        """Check the head of an answer: which bytes of which version does it carry?"""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise self._refuse(f"the server sends it with Content-Encoding {encoding}")
        version = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if self._version is not None and version != self._version:
            raise self._refuse("it changed while it was read")
        self._version = version
        if response.status_code == 206:
            self._skip_bytes = 0
            total = self._check_content_range(response.headers.get("Content-Range", ""))
        else:
            self._skip_bytes = self._position  # the server ignores Range and starts at byte 0
            total = _integer(response.headers.get("Content-Length"))
        self._check_total(total)

    def take(self, received: bytes) -> bytes:
        """The part of the received bytes that was asked for."""
        skipped = min(self._skip_bytes, len(received))
        self._skip_bytes -= skipped
        piece = received[skipped:]
        if self._stop is not None:
            piece = piece[: self._stop - self._position]
        self._position += len(piece)
        if self._position > self._limit:
            raise self._refuse(f"it holds more than the {self._limit} bytes allowed")
        return piece

    def spend(self, seconds: float) -> None:
        """Count time spent on waiting for the server."""
        self._budget_s -= seconds
        if self._budget_s < 0:
            raise self._refuse(f"it arrives at less than {MIN_RATE_BYTES_PER_S} bytes/s")

    def finish(self) -> None:
        """Check the end of a body against what its head announced."""
        if self._stop is not None and not self.done:
            raise TransientError(
                f"the body ended at byte {self._position} of {self._stop} ({self.url.path})"
            )

    def _check_content_range(self, header: str) -> int | None:
        match = _CONTENT_RANGE.fullmatch(header)
        first, last = (int(match[1]), int(match[2])) if match else (-1, -1)
        total = _integer(match[3]) if match else None
        beyond = total is None if self._stop is None else last >= self._stop
        if first != self._position or last < first or beyond:
            asked = self.range_header().get("Range", "the whole file")
            raise self._refuse(f"asked for {asked}, the server answers Content-Range {header!r}")
        return total

    def _check_total(self, total: int | None) -> None:
        if total is None:
            return
        if self._stop is None:
            self._stop = max(total, self._position)
            if self._stop > self._limit:
                size = self._stop - self._position
                raise too_large(self._location, self._name, size, self._limit - self._position)
        elif total < self._stop:
            raise too_short(self._location, self._name, total, self._stop)

    def _refuse(self, reason: str) -> StoreError:
        return StoreError(
            f"cannot read {self._name} in {self._location}: {reason}; "
            "check the server, or fetch the artefact from another one"
        )


def check_status(response: httpx.Response, url: httpx.URL) -> None:
    """Raise the error that the status of an answer stands for, if it is one."""
    status = response.status_code
    if status in (200, 206):
        return
    if status in (404, 410):
        raise StoreNotFound(f"{public_url(url)} is not there (status {status})")
    if status in (401, 403):
        raise StoreError(
            f"{public_url(url)} refuses access (status {status}): pass a token that may read it"
        )
    if status == 416:
        raise TruncatedError(
            f"{public_url(url)} is shorter than the range asked for: it is truncated"
        )
    wait_s = _retry_after_s(response.headers.get("Retry-After"))
    if status in _TRANSIENT_STATUS and (wait_s is None or wait_s <= MAX_RETRY_AFTER_S):
        raise TransientError(f"the server answers status {status}", wait_s)
    later = "" if wait_s is None else f" and asks to come back in {wait_s:.0f} s"
    raise StoreError(f"{public_url(url)} answers with status {status}{later}")


def public_url(url: httpx.URL) -> httpx.URL:
    """The URL without user, password, query and fragment, which may be secrets."""
    return url.copy_with(username="", password="", query=None, fragment=None)


def _retry_after_s(header: str | None) -> float | None:
    """Seconds that a Retry-After header (a number or a date) asks to wait."""
    if header is None:
        return None
    if _INTEGER.fullmatch(header):
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _integer(header: str | None) -> int | None:
    return int(header) if header is not None and _INTEGER.fullmatch(header) else None
