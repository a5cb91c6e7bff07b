"""The files below a URL as a store."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from urllib.parse import quote

from hf_cachegen.stores.base import Store, check_path
from hf_cachegen.stores.client import RETRIES, TIMEOUT_S, RangeClient
from hf_cachegen.stores.transfer import httpx, public_url


class HttpStore(Store):
    """The files below a URL.

    Parameters
    ----------
    url
        ``http://`` or ``https://`` folder; a query string (a signature) is kept on every request.
    headers
        Sent with every request to this host, never to another one it redirects to.
    timeout_s
        Longest silence of the server, in seconds, before the transfer is resumed.
    retries
        Failed attempts that one read may make good.
    token
        Sent as ``Authorization: Bearer``.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        token: str | None = None,
    ) -> None:
        self._url = httpx.URL(url)
        if self._url.scheme not in ("http", "https") or not self._url.host:
            raise ValueError(f"expected a URL such as https://host/folder, got {url!r}")
        bearer = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.location = str(public_url(self._url))
        self._client = RangeClient({**(headers or {}), **bearer}, timeout_s, retries)

    @property
    def latency_s(self) -> float:
        return self._client.latency_s

    def exists(self, path: str) -> bool:
        return self._client.exists(self._file_url(check_path(path)))

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        return self._client.pieces(self._file_url(path), offset, size, max_bytes)

    def _file_url(self, path: str) -> httpx.URL:
        folder, mark, query = self._url.raw_path.partition(b"?")
        raw_path = folder.rstrip(b"/") + b"/" + quote(path).encode() + mark + query
        return self._url.copy_with(raw_path=raw_path)

    def close(self) -> None:
        super().close()
        self._client.close()
