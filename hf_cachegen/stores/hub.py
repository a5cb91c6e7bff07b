"""A repository of the Hugging Face Hub as a store."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    is_offline_mode,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]

from hf_cachegen.errors import StoreError, StoreNotFound
from hf_cachegen.stores.base import Store, check_path, too_large
from hf_cachegen.stores.client import RETRIES, TIMEOUT_S, RangeClient
from hf_cachegen.stores.local import LocalStore
from hf_cachegen.stores.transfer import httpx


class HubStore(Store):
    """One commit of a Hub repository.

    The revision is resolved once, so that all reads see the same version however often the
    repository is pushed to meanwhile. Whole files are kept in the Hugging Face cache; ranges come
    from the cache if the file is there, else from the Hub and are not kept.

    Parameters
    ----------
    repo_id
        ``org/name``.
    revision
        Branch, tag or commit; None is the default branch.
    token
        As everywhere in huggingface_hub: a string, True (the saved one, required), False (none)
        or None (the saved one, if any). It is never sent to the storage hosts that the Hub
        redirects to.
    cache_dir
        The Hugging Face cache; None is the usual one.
    local_files_only
        Read from the cache alone, as with ``HF_HUB_OFFLINE=1``.
    endpoint
        Another Hub; None is ``HF_ENDPOINT``.
    repo_type
        ``model``, ``dataset`` or ``space``.
    subfolder
        Folder of the repository that is the root of this store.
    timeout_s, retries
        As :class:`HttpStore`, for the revision and for ranges; other requests follow
        ``HF_HUB_ETAG_TIMEOUT`` and ``HF_HUB_DOWNLOAD_TIMEOUT``.

    Attributes
    ----------
    commit
        The commit that all reads see.

    Raises
    ------
    ValueError
        ``repo_id`` or ``subfolder`` is malformed.
    StoreNotFound
        There is no such repository or revision, or the token may not see it.
    StoreError
        The Hub cannot be reached and the cache does not know the revision.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        endpoint: str | None = None,
        repo_type: str = "model",
        subfolder: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
    ) -> None:
        self.repo_id = repo_id
        self.location = f"hf://{repo_id}" + (f"@{revision}" if revision else "")
        self._prefix = f"{check_path(subfolder)}/" if subfolder else ""
        self._repo_type = repo_type
        self._endpoint = endpoint
        self._token = token
        self._cache_dir = cache_dir
        self._offline = local_files_only or is_offline_mode()
        self._api = _TimedApi(timeout_s, endpoint=endpoint, token=token)
        with self._readable_errors(f"revision {revision or 'main'}"):
            resolved = self._api.resolve_revision(
                repo_id,
                repo_type=repo_type,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=self._offline,
            )
        self.commit = resolved.resolved
        self.location = f"hf://{repo_id}@{self.commit}" + (f"/{subfolder}" if subfolder else "")
        self._client = RangeClient(build_hf_headers(token=token), timeout_s, retries)

    @property
    def latency_s(self) -> float:
        return self._client.latency_s

    def exists(self, path: str) -> bool:
        if self._cached(check_path(path)) is not None:
            return True
        if self._offline:
            return False
        with self._readable_errors(path):
            try:
                self._size_bytes(path)
            except EntryNotFoundError:
                return False
        return True

    def download(self, progress: bool = True) -> Path:
        """Fetch all files into the Hugging Face cache, for work without a network.

        Returns the folder they are in, which opens with :func:`open_store` too.
        """
        with self._readable_errors("the repository"):
            folder = snapshot_download(
                self.repo_id,
                repo_type=self._repo_type,
                revision=self.commit,
                cache_dir=self._cache_dir,
                token=self._token,
                local_files_only=self._offline,
                endpoint=self._endpoint,
                allow_patterns=f"{self._prefix}*",
                tqdm_class=tqdm if progress else _SilentBar,
            )
        return Path(folder) / self._prefix

    def close(self) -> None:
        super().close()
        self._client.close()

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        file = self._cached(path)
        if file is None and self._offline:
            raise self._unreachable(path, None)
        if file is None and size is not None:
            yield from self._client.pieces(httpx.URL(self._url(path)), offset, size, max_bytes)
            return
        if file is None:
            file = self._download_file(path, offset + max_bytes)
        yield from LocalStore(file.parent)._pieces(file.name, offset, size, max_bytes)

    def _download_file(self, path: str, max_bytes: int) -> Path:
        with self._readable_errors(path):
            size_bytes = self._size_bytes(path)
            if size_bytes is not None and size_bytes > max_bytes:
                raise too_large(self.location, path, size_bytes, max_bytes)
            file = self._api.hf_hub_download(
                self.repo_id,
                self._prefix + path,
                repo_type=self._repo_type,
                revision=self.commit,
                cache_dir=self._cache_dir,
                tqdm_class=_SilentBar,
            )
        return Path(file)

    def _cached(self, path: str) -> Path | None:
        file = try_to_load_from_cache(
            self.repo_id,
            self._prefix + path,
            cache_dir=self._cache_dir,
            revision=self.commit,
            repo_type=self._repo_type,
        )
        return Path(file) if isinstance(file, str) else None

    def _size_bytes(self, path: str) -> int | None:
        url = self._url(path)
        return get_hf_file_metadata(url, token=self._token, endpoint=self._endpoint).size

    def _url(self, path: str) -> str:
        return hf_hub_url(
            self.repo_id,
            self._prefix + path,
            repo_type=self._repo_type,
            revision=self.commit,
            endpoint=self._endpoint,
        )

    @contextlib.contextmanager
    def _readable_errors(self, what: str) -> Iterator[None]:
        """Say the client's errors in this library's terms, with the way out."""
        try:
            yield
        except GatedRepoError as error:
            raise StoreError(
                f"{self.location} is gated: accept its conditions on the Hub, then pass a token"
            ) from error
        except RepositoryNotFoundError as error:
            raise StoreNotFound(
                f"no repository {self.location} that this token may see: check the name, and if "
                "it is private pass token=... or run `hf auth login`"
            ) from error
        except (LocalEntryNotFoundError, RevisionResolutionError, OfflineModeIsEnabled) as error:
            raise self._unreachable(what, error) from error
        except (RevisionNotFoundError, EntryNotFoundError) as error:
            raise StoreNotFound(f"{self.location} has no {what}") from error
        except HfHubHTTPError as error:
            raise StoreError(f"cannot read {what} of {self.location}: {_reason(error)}") from error
        except (HTTPError, ConnectionError, TimeoutError) as error:
            raise self._unreachable(what, error) from error
        except OSError as error:
            if error.errno is None:  # the client's own, which says what to do
                raise StoreError(f"cannot read {what} of {self.location}: {error}") from error
            raise StoreError(
                f"cannot keep {what} of {self.location} in the Hugging Face cache: {error}; make "
                "room there, or choose another cache (cache_dir=..., HF_HOME)"
            ) from error

    def _unreachable(self, what: str, error: Exception | None) -> StoreError:
        if self._offline or isinstance(error, OfflineModeIsEnabled):
            reason = "offline mode is on and the cache lacks it;"
        else:
            cause = (error and error.__cause__) or error
            reason = (
                f"the Hub at {self._endpoint or constants.ENDPOINT} cannot be reached and the "
                f"cache lacks it ({str(cause) or type(cause).__name__}); check the link and that "
                "address (endpoint=..., HF_ENDPOINT), or else"
            )
        return StoreError(
            f"cannot read {what} of {self.location}: {reason} run "
            f"`hf-cachegen fetch {self.repo_id}` with a connection first"
        )


class _TimedApi(HfApi):
    """The Hub's API, which by itself waits for ever for the commit of a revision."""

    def __init__(self, timeout_s: float, **kwargs: Any) -> None:
        super().__init__(library_name="hf-cachegen", **kwargs)
        self._timeout_s = timeout_s

    def repo_info(self, *args: Any, **kwargs: Any) -> Any:
        return super().repo_info(*args, **{"timeout": self._timeout_s, **kwargs})


class _SilentBar(tqdm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]


def _reason(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    hint = {401: "pass a token that is valid", 403: "pass a token that may read it"}
    return f"the Hub answers status {status}; {hint.get(status, 'try again later')}"
