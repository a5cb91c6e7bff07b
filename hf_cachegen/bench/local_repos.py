"""Repositories on disk for the local Hub: content-addressed objects, and commits that name them."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import tempfile
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from operator import itemgetter
from pathlib import Path

from pydantic import Field

from hf_cachegen.bench.loopback import Link, LoopbackServer, RangeHandler
from hf_cachegen.layout import Record
from hf_cachegen.stores.base import check_path

PIECE_BYTES = 1 << 20

_SHA256 = re.compile("[0-9a-f]{64}")


class FileEntry(Record):
    """One file of a commit. ``git_oid`` is the name git would give its content."""

    sha256: str
    git_oid: str
    size: int
    lfs: bool

    @property
    def oid(self) -> str:
        """What a client compares to see whether its file differs."""
        return self.sha256 if self.lfs else self.git_oid


class Commit(Record):
    """A snapshot of all files."""

    parent: str | None
    message: str
    files: dict[str, FileEntry]

    @property
    def sha(self) -> str:
        """40 hex digits that stand for the content and the history."""
        return hashlib.sha1(self.model_dump_json().encode()).hexdigest()


class Repo(Record):
    """A repository: its commits by sha, and the shas that branches and tags name."""

    repo_id: str
    private: bool
    branches: dict[str, str]
    tags: dict[str, str] = Field(default_factory=dict)
    commits: dict[str, Commit]

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, a tag or a sha names."""
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        return sha if sha in self.commits else None


@dataclass
class Changes:
    """What a commit does to the files of its parent, if that is ``parent`` (None: whatever it is).

    A deletion that ends with ``/`` is of a folder.
    """

    message: str = ""
    parent: str | None = None
    additions: dict[str, FileEntry] = field(default_factory=dict)
    deletions: list[str] = field(default_factory=list)

    def apply(self, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        """The files after the commit."""
        folders = tuple(path for path in self.deletions if path.endswith("/"))
        kept = {
            path: entry
            for path, entry in files.items()
            if path not in self.deletions and not path.startswith(folders)
        }
        return dict(sorted({**kept, **self.additions}.items()))


class RepoStore:
    """All repositories below one folder.

    Safe to use from several threads: each change is one file, replaced atomically under a lock.
    """

    def __init__(self, folder: Path) -> None:
        self._objects = folder / "objects"
        self._repos = folder / "repos"
        self._lock = threading.RLock()
        self._objects.mkdir(parents=True, exist_ok=True)

    def get(self, kind: str, repo_id: str) -> Repo | None:
        """The repository of this type (``models``, ``datasets``, ...), if there is one."""
        file = self._repo_file(kind, repo_id)
        with self._lock:
            return Repo.model_validate_json(file.read_bytes()) if file.is_file() else None

    def create(self, kind: str, repo_id: str, private: bool) -> bool:
        """Make an empty repository; False if it exists."""
        with self._lock:
            if self.get(kind, repo_id) is not None:
                return False
            first = Commit(parent=None, message=f"initial commit of {repo_id}", files={})
            heads = {"main": first.sha}
            repo = Repo(
                repo_id=repo_id, private=private, branches=heads, commits={first.sha: first}
            )
            self._save(kind, repo)
            return True

    def delete(self, kind: str, repo_id: str) -> None:
        """Forget a repository; its objects stay."""
        with self._lock:
            self._repo_file(kind, repo_id).unlink()

    def read_changes(self, ndjson: bytes) -> Changes:
        """Read a commit as the client sends it.

        Each line is ``{"key": kind, "value": {...}}``: a ``header``, then ``file`` (base64
        content), ``lfsFile`` (an object uploaded before), ``deletedFile`` or ``deletedFolder``.
        """
        changes = Changes()
        for line in ndjson.splitlines():
            kind, value = itemgetter("key", "value")(json.loads(line))
            match kind:
                case "header":
                    changes.message, changes.parent = value["summary"], value.get("parentCommit")
                case "file":
                    content = base64.b64decode(value["content"])
                    sha256, git_oid = self.add_object(io.BytesIO(content), len(content))
                    entry = FileEntry(sha256=sha256, git_oid=git_oid, size=len(content), lfs=False)
                    changes.additions[check_path(value["path"])] = entry
                case "lfsFile":
                    oid = value["oid"]
                    size = self.object_file(oid).stat().st_size
                    entry = FileEntry(sha256=oid, git_oid=oid[:40], size=size, lfs=True)
                    changes.additions[check_path(value["path"])] = entry
                case "deletedFile":
                    changes.deletions.append(value["path"])
                case "deletedFolder":
                    changes.deletions.append(value["path"].rstrip("/") + "/")
                case _:
                    raise ValueError(f"unknown kind of change {kind!r}")
        return changes

    def commit(self, kind: str, repo_id: str, branch: str, changes: Changes) -> str | None:
        """Commit on top of a branch; return the sha, or None if its parent is another one."""
        with self._lock:
            repo = self._get_known(kind, repo_id)
            head = repo.branches[branch]
            if changes.parent is not None and not head.startswith(changes.parent):
                return None
            files = changes.apply(repo.commits[head].files)
            new = Commit(parent=head, message=changes.message, files=files)
            commits = {**repo.commits, new.sha: new}
            branches = {**repo.branches, branch: new.sha}
            self._save(kind, repo.model_copy(update={"commits": commits, "branches": branches}))
            return new.sha

    def name(self, kind: str, repo_id: str, refs: str, name: str, sha: str) -> bool:
        """Add a branch or a tag (``refs``: ``branches`` or ``tags``); False if it exists."""
        with self._lock:
            repo = self._get_known(kind, repo_id)
            named: dict[str, str] = getattr(repo, refs)
            if name in named:
                return False
            self._save(kind, repo.model_copy(update={refs: {**named, name: sha}}))
            return True

    def object_file(self, sha256: str) -> Path:
        """Where the content with this digest is, or would be."""
        if not _SHA256.fullmatch(sha256):
            raise ValueError(f"expected a sha256 in hex, got {sha256!r}")
        return self._objects / sha256

    def add_object(self, source: io.BufferedIOBase, size: int) -> tuple[str, str]:
        """Keep ``size`` bytes of a stream; return their sha256 and their git blob id."""
        sha256, git = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode())
        with tempfile.NamedTemporaryFile(dir=self._objects, prefix="tmp-", delete=False) as file:
            while size > 0:
                piece = source.read(min(PIECE_BYTES, size))
                if not piece:
                    Path(file.name).unlink()
                    raise ConnectionAbortedError("the upload ended early")
                size -= len(piece)
                for sink in (sha256.update, git.update, file.write):
                    sink(piece)
        os.replace(file.name, self.object_file(sha256.hexdigest()))
        return sha256.hexdigest(), git.hexdigest()

    def _get_known(self, kind: str, repo_id: str) -> Repo:
        repo = self.get(kind, repo_id)
        assert repo is not None, "the caller has looked it up"
        return repo

    def _save(self, kind: str, repo: Repo) -> None:
        file = self._repo_file(kind, repo.repo_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(repo.model_dump_json())
        os.replace(temporary, file)

    def _repo_file(self, kind: str, repo_id: str) -> Path:
        return self._repos / kind / f"{repo_id.replace('/', '--')}.json"


class ObjectServer(LoopbackServer):
    """The storage host: serves the objects of a store by digest, and takes uploads of them.

    Requests that carry a token are refused: it is for the Hub alone.
    """

    def __init__(self, repos: RepoStore, link: Link) -> None:
        super().__init__(_ObjectHandler, link)
        self.repos = repos

    @property
    def url(self) -> str:
        """``http://localhost:port``: clients tell hosts apart by name, some by nothing else."""
        return super().url.replace("127.0.0.1", "localhost")


class _ObjectHandler(RangeHandler):
    def do_GET(self) -> None:  # noqa: N802 - as http.server names it
        file = self._file()
        if file is None or "Authorization" in self.headers:
            self.send_head(HTTPStatus.BAD_REQUEST, {"Content-Length": "0"})
        elif file.is_file():
            self.send_file(file, {"Accept-Ranges": "bytes", "ETag": f'"{file.name}"'})
        else:
            self.send_head(HTTPStatus.NOT_FOUND, {"Content-Length": "0"})

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:  # noqa: N802
        file = self._file()
        sha256, _ = self._repos.add_object(self.rfile, int(self.headers["Content-Length"]))
        matches = file is not None and file.name == sha256
        status = HTTPStatus.OK if matches else HTTPStatus.BAD_REQUEST
        self.send_head(status, {"Content-Length": "0"})

    @property
    def _repos(self) -> RepoStore:
        owner = self.server.owner
        assert isinstance(owner, ObjectServer)
        return owner.repos

    def _file(self) -> Path | None:
        try:
            return self._repos.object_file(self.record.path)
        except ValueError:
            return None
