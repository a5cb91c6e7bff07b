"""A folder on this machine as a store."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

from hf_cachegen.errors import StoreError, StoreNotFound
from hf_cachegen.stores.base import Store, check_path, too_large, too_short

PIECE_BYTES = 1 << 20


class LocalStore(Store):
    """Files of a local folder.

    Parameters
    ----------
    folder
        An existing folder. Symbolic links may point inside it, or into the blobs of a Hugging
        Face cache whose snapshot this folder is; others are refused.

    Raises
    ------
    StoreNotFound
        There is no such folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.location = str(self.folder)
        if not self.folder.is_dir():
            raise StoreNotFound(f"expected a folder at {self.location}, found none")
        root = self.folder.resolve()
        self._roots = (root, *_cache_blobs(root))

    def exists(self, path: str) -> bool:
        return self._resolve(check_path(path)).is_file()

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        target = self._resolve(path)
        if not target.is_file():
            raise StoreNotFound(f"expected a file {path} in {self.location}, found none")
        try:
            yield from self._read_file(target, path, offset, size, max_bytes)
        except OSError as error:
            raise StoreError(f"cannot read {path} in {self.location}: {error}") from error

    def _read_file(
        self, target: Path, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        with target.open("rb", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            stop = max(offset, end) if size is None else offset + size
            if stop > end:
                raise too_short(self.location, path, end, stop)
            if stop - offset > max_bytes:
                raise too_large(self.location, path, stop - offset, max_bytes)
            file.seek(offset)
            while offset < stop:
                piece = file.read(min(PIECE_BYTES, stop - offset))
                if not piece:
                    raise too_short(self.location, path, offset, stop)
                offset += len(piece)
                yield piece

    def _resolve(self, path: str) -> Path:
        try:
            target = (self.folder / path).resolve()
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links before 3.13
            raise StoreError(f"cannot resolve {path} in {self.location}: {error}") from error
        if not any(target.is_relative_to(root) for root in self._roots):
            raise StoreError(
                f"{path} in {self.location} is a link that leaves the folder (to {target}); "
                "replace it by a copy of the file"
            )
        return target


def _cache_blobs(root: Path) -> list[Path]:
    """The folder that a Hugging Face cache's snapshot links into, if ``root`` lies in one.

    Its layout is ``<repo>/snapshots/<commit>/file -> <repo>/blobs/<etag>``.
    """
    repos = [parent.parent for parent in root.parents if parent.name == "snapshots"]
    return [repo / "blobs" for repo in repos if (repo / "blobs").is_dir()]
