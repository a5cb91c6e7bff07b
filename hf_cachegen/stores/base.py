"""The interface of a store: one artefact's folder of immutable files, read-only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Self, TypeVar

from hf_cachegen.errors import FormatError, StoreError

T = TypeVar("T")


def check_path(path: str) -> str:
    """Return ``path`` if it names a file below a folder on every system, else raise ValueError."""
    parts = path.split("/")
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"expected a relative POSIX path such as 'chunks/00.kv', got {path!r}: "
            "no empty part, '.', '..', backslash or NUL"
        )
    return path


class Store(ABC):
    """A read-only view of a folder of immutable files, wherever it lives.

    Safe to use from several threads. Paths are relative and POSIX, such as ``chunks/00.kv``.

    Attributes
    ----------
    location
        Where the files are, for messages; it carries no credentials.
    is_closed
        Whether :meth:`close` was called.
    latency_s
        The longest that answers have taken lately; 0 where there is no way to go.
    """

    location: str
    is_closed: bool = False

    @property
    def latency_s(self) -> float:
        return 0.0

    def read(self, path: str, offset: int = 0, size: int | None = None, *, max_bytes: int) -> bytes:
        """Read a whole file, or ``size`` bytes of it from ``offset`` on.

        Parameters
        ----------
        path
            File to read, relative to the store.
        offset
            First byte.
        size
            Bytes to read; None reads to the end of the file.
        max_bytes
            Most bytes the caller is ready to hold. More than that is refused before it is read.

        Raises
        ------
        ValueError
            The path leaves the store, or a number is negative.
        StoreNotFound
            The file is not there.
        StoreError
            The range goes past the end of the file, holds more than ``max_bytes``, or cannot be
            read.
        """
        _check_range(offset, size)
        if size is not None and size > max_bytes:
            raise too_large(self.location, path, size, max_bytes)
        return b"".join(self._pieces(check_path(path), offset, size, max_bytes))

    def stream(self, path: str, offset: int, size: int) -> Generator[bytes, None, None]:
        """Yield ``size`` bytes from ``offset`` on, in pieces, as they arrive.

        A transfer that breaks is resumed from the byte it reached. Closing the generator ends the
        transfer at once, and :meth:`close` does so from any thread. The pieces together hold
        exactly ``size`` bytes, or an error is raised.

        Raises
        ------
        ValueError, StoreNotFound, StoreError
            As :meth:`read`.
        """
        _check_range(offset, size)
        return self._pieces(check_path(path), offset, size, size)

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether the store holds a file at ``path``."""

    @abstractmethod
    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        """Yield ``size`` bytes (None: the rest of the file, if at most ``max_bytes``)."""

    def close(self) -> None:
        """Release connections. Transfers in progress end with a StoreError."""
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"


class TruncatedError(StoreError):
    """A file of the store ends before the bytes asked for."""


def intact(read: Callable[[], T]) -> T:
    """What a read gives; if that was damaged, maybe only on its way, what a second one gives.

    Raises
    ------
    FormatError
        So is that.
    """
    try:
        return read()
    except FormatError:
        return read()


def too_large(location: str, path: str, size_bytes: int, max_bytes: int) -> StoreError:
    """The error of a file that holds more than its reader allows."""
    return StoreError(
        f"{path} in {location} holds {size_bytes} bytes where at most {max_bytes} are allowed; "
        "it is not a file of this format, or it is damaged"
    )


def too_short(location: str, path: str, size_bytes: int, stop: int) -> TruncatedError:
    """The error of a file that ends before the range asked for."""
    return TruncatedError(
        f"{path} in {location} ends at byte {size_bytes} where byte {stop} was expected: the file "
        "is truncated, or its record is wrong; fetch, save or publish the artefact again"
    )


def _check_range(offset: int, size: int | None) -> None:
    if offset < 0 or (size is not None and size < 0):
        raise ValueError(f"expected a range of bytes, got offset={offset}, size={size}")
