"""A Hub on the loopback: enough of the Hugging Face Hub's HTTP API for its real client.

What ``huggingface_hub`` and ``transformers`` ask for to create, push, list and download works as
on the Hub: repositories with commits, branches and tags, LFS uploads, redirects of LFS files to a
storage host of its own, private repositories and tokens. Xet is not spoken; clients must disable
it (see :attr:`LocalHub.env`).
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from hf_cachegen.bench.local_repos import FileEntry, ObjectServer, Repo, RepoStore
from hf_cachegen.bench.loopback import Link, LoopbackServer, RangeHandler

USER = "local-user"
TOKEN = "hf_local_token"
LFS_FROM_BYTES = 10 << 20
"""Files from this size on, and binary files of any size, go to LFS."""

_EPOCH = datetime.fromtimestamp(0, UTC).isoformat().replace("+00:00", ".000Z")


class LocalHub(LoopbackServer):
    """Serve a Hub whose state lives below a folder.

    Parameters
    ----------
    folder
        Where repositories and objects are kept; the next hub on it finds them again.
    rate_bytes_per_s
        Rate of the link that all downloads share; None is without a limit.

    Attributes
    ----------
    storage
        The :class:`ObjectServer` of LFS files, in the place of a content delivery network.
    token
        The token that may read private repositories and write.
    """

    token = TOKEN

    def __init__(
        self, folder: str | os.PathLike[str], *, rate_bytes_per_s: float | None = None
    ) -> None:
        link = Link(None if rate_bytes_per_s is None else [(0.0, rate_bytes_per_s)])
        super().__init__(_HubHandler, link)
        self.repos = RepoStore(Path(folder))
        self.storage = ObjectServer(self.repos, link)

    @property
    def endpoint(self) -> str:
        """What ``HF_ENDPOINT`` or ``endpoint=`` takes."""
        return self.url

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for a process that is to use this hub; read at its start."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": self.token,
        }

    def __enter__(self) -> Self:
        self.storage.__enter__()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self.storage.__exit__(kind, error, trace)


class _Refusal(Exception):  # noqa: N818 - an answer, not an error of this program
    """An error answer; ``code`` is the Hub's name for it, which clients turn into exceptions."""

    def __init__(self, status: HTTPStatus, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.fields = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}


_Action = Callable[..., None]
_ROUTES: list[tuple[str, re.Pattern[str], _Action]] = []
_API_REPO = r"/api/(?P<kind>models|datasets|spaces)/(?P<repo_id>[^/]+/[^/]+)"
_WEB_REPO = r"/(?:(?P<kind>datasets|spaces)/)?(?P<repo_id>[^/]+/[^/]+?)"


def _route(method: str, pattern: str) -> Callable[[_Action], _Action]:
    def register(action: _Action) -> _Action:
        _ROUTES.append((method, re.compile(pattern), action))
        return action

    return register


class _HubHandler(RangeHandler):
    _body: bytes

    def _dispatch(self) -> None:
        self._body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        method = "GET" if self.command == "HEAD" else self.command
        path = urlsplit(self.path).path
        try:
            for known, pattern, action in _ROUTES:
                match = pattern.fullmatch(path) if known == method else None
                if match is not None:
                    names = {k: unquote(v) for k, v in match.groupdict("").items()}
                    action(self, **names)
                    return
            raise _Refusal(HTTPStatus.NOT_FOUND, f"no such page: {method} {path}")
        except _Refusal as refusal:
            self._send_json({"error": str(refusal)}, refusal.status, refusal.fields)
        except (KeyError, ValueError, FileNotFoundError) as error:
            self._send_json({"error": repr(error)}, HTTPStatus.BAD_REQUEST)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _dispatch  # noqa: N815

    @_route("GET", "/api/whoami-v2")
    def _whoami(self) -> None:
        self._require_token()
        access = {"displayName": "local", "role": "write"}
        user = {"type": "user", "name": USER, "fullname": USER, "orgs": []}
        self._send_json({**user, "auth": {"type": "access_token", "accessToken": access}})

    @_route("POST", "/api/validate-yaml")
    def _validate_yaml(self) -> None:
        self._send_json({"errors": [], "warnings": []})

    @_route("POST", "/api/repos/create")
    def _create_repo(self) -> None:
        self._require_token()
        wanted = json.loads(self._body)
        kind = f"{wanted.get('type') or 'model'}s"
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        private = wanted.get("visibility") == "private" or wanted.get("private") is True
        prefix = "" if kind == "models" else f"{kind}/"
        answer = {"url": f"{self._hub.endpoint}/{prefix}{repo_id}", "name": repo_id}
        created = self._hub.repos.create(kind, repo_id, private)
        self._send_json(answer, HTTPStatus.OK if created else HTTPStatus.CONFLICT)

    @_route("DELETE", "/api/repos/delete")
    def _delete_repo(self) -> None:
        wanted = json.loads(self._body)
        kind = f"{wanted.get('type') or 'model'}s"
        repo = self._repo(kind, f"{wanted.get('organization') or USER}/{wanted['name']}", True)
        self._hub.repos.delete(kind, repo.repo_id)
        self._send_json({})

    @_route("GET", _API_REPO + "(?:/revision/(?P<revision>[^/]+))?")
    def _info(self, kind: str, repo_id: str, revision: str) -> None:
        repo = self._repo(kind, repo_id)
        sha, files = self._files(repo, revision or "main")
        siblings = [
            {
                "rfilename": path,
                "size": entry.size,
                "blobId": entry.git_oid,
                **_lfs(entry, "sha256"),
            }
            for path, entry in files.items()
        ]
        names = {"_id": repo_id, "id": repo_id, "modelId": repo_id, "author": repo_id.split("/")[0]}
        state = {"private": repo.private, "gated": False, "disabled": False, "tags": []}
        counts = {"downloads": 0, "likes": 0, "lastModified": _EPOCH, "createdAt": _EPOCH}
        self._send_json({**names, **state, **counts, "sha": sha, "siblings": siblings})

    @_route("GET", _API_REPO + "/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?")
    def _tree(self, kind: str, repo_id: str, revision: str, folder: str) -> None:
        _, files = self._files(self._repo(kind, repo_id), revision)
        query = parse_qs(urlsplit(self.path).query)
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for path, entry in files.items():
            if not path.startswith(prefix):
                continue
            *parents, _ = path[len(prefix) :].split("/")
            if parents and not recursive:
                name = prefix + parents[0]
                entries[name] = {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
            else:
                facts = {"oid": entry.git_oid, "size": entry.size, **_lfs(entry, "oid")}
                entries[path] = {"type": "file", "path": path, **facts}
        self._send_json(list(entries.values()))

    @_route("GET", _API_REPO + "/refs")
    def _refs(self, kind: str, repo_id: str) -> None:
        repo = self._repo(kind, repo_id)
        listed = {
            refs: [
                {"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": sha}
                for name, sha in named.items()
            ]
            for refs, folder, named in (
                ("branches", "heads", repo.branches),
                ("tags", "tags", repo.tags),
            )
        }
        self._send_json({**listed, "converts": [], "pullRequests": []})

    @_route("POST", _API_REPO + "/branch/(?P<branch>[^/]+)")
    def _create_branch(self, kind: str, repo_id: str, branch: str) -> None:
        start = json.loads(self._body or b"{}").get("startingPoint") or "main"
        self._create_ref(kind, repo_id, "branches", branch, start)

    @_route("POST", _API_REPO + "/tag/(?P<revision>[^/]+)")
    def _create_tag(self, kind: str, repo_id: str, revision: str) -> None:
        self._create_ref(kind, repo_id, "tags", json.loads(self._body)["tag"], revision)

    @_route("POST", _API_REPO + "/preupload/(?P<revision>[^/]+)")
    def _preupload(self, kind: str, repo_id: str, revision: str) -> None:
        _, files = self._files(self._repo(kind, repo_id, write=True), revision)
        answers = []
        for file in json.loads(self._body)["files"]:
            binary = b"\0" in base64.b64decode(file["sample"])
            lfs = binary or file["size"] >= LFS_FROM_BYTES
            answer = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular"}
            known = files.get(file["path"])
            oid = known.oid if known is not None and known.lfs == lfs else None
            answers.append({**answer, "shouldIgnore": False, "oid": oid})
        self._send_json({"files": answers})

    @_route("POST", _WEB_REPO + r"\.git/info/lfs/objects/batch")
    def _lfs_batch(self, kind: str, repo_id: str) -> None:
        self._repo(kind or "models", repo_id, write=True)
        verify = {"href": f"{self._hub.endpoint}/api/lfs-verify"}
        objects = []
        for wanted in json.loads(self._body)["objects"]:
            upload = {"href": f"{self._hub.storage.url}/{wanted['oid']}"}
            new = not self._hub.repos.object_file(wanted["oid"]).is_file()
            actions = {"actions": {"upload": upload, "verify": verify}} if new else {}
            objects.append({"oid": wanted["oid"], "size": wanted["size"], **actions})
        self._send_json({"transfer": "basic", "objects": objects})

    @_route("POST", "/api/lfs-verify")
    def _lfs_verify(self) -> None:
        self._require_token()
        wanted = json.loads(self._body)
        file = self._hub.repos.object_file(wanted["oid"])
        if not file.is_file() or file.stat().st_size != wanted["size"]:
            raise _Refusal(HTTPStatus.NOT_FOUND, f"object {wanted['oid']} was not uploaded")
        self._send_json({})

    @_route("POST", _API_REPO + "/commit/(?P<revision>[^/]+)")
    def _commit(self, kind: str, repo_id: str, revision: str) -> None:
        repo = self._repo(kind, repo_id, write=True)
        if revision not in repo.branches:
            raise _Refusal(HTTPStatus.NOT_FOUND, f"no branch {revision}", "RevisionNotFound")
        if "create_pr" in parse_qs(urlsplit(self.path).query):
            raise _Refusal(HTTPStatus.BAD_REQUEST, "no pull requests here: push to a branch")
        changes = self._hub.repos.read_changes(self._body)
        sha = self._hub.repos.commit(kind, repo_id, revision, changes)
        if sha is None:
            message = f"{revision} has moved on from the parent commit {changes.parent}"
            raise _Refusal(HTTPStatus.PRECONDITION_FAILED, message)
        url = f"{self._hub.endpoint}/{repo_id}/commit/{sha}"
        self._send_json({"success": True, "commitUrl": url, "commitOid": sha})

    @_route("GET", _WEB_REPO + "/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
    def _resolve(self, kind: str, repo_id: str, revision: str, path: str) -> None:
        sha, files = self._files(self._repo(kind or "models", repo_id), revision)
        entry = files.get(path)
        if entry is None:
            refusal = _Refusal(HTTPStatus.NOT_FOUND, f"no file {path}", "EntryNotFound")
            refusal.fields["X-Repo-Commit"] = sha
            raise refusal
        fields = {"X-Repo-Commit": sha, "ETag": f'"{entry.oid}"', "Accept-Ranges": "bytes"}
        if entry.lfs:
            place = {"Location": f"{self._hub.storage.url}/{entry.sha256}", "Content-Length": "0"}
            linked = {"X-Linked-ETag": f'"{entry.oid}"', "X-Linked-Size": str(entry.size)}
            self.send_head(HTTPStatus.FOUND, {**fields, **place, **linked})
        else:
            self.send_file(self._hub.repos.object_file(entry.sha256), fields)

    @property
    def _hub(self) -> LocalHub:
        hub = self.server.owner
        assert isinstance(hub, LocalHub)
        return hub

    def _has_token(self) -> bool:
        given = self.headers.get("Authorization")
        if given is not None and given != f"Bearer {self._hub.token}":
            message = "Invalid credentials in Authorization header"
            raise _Refusal(HTTPStatus.UNAUTHORIZED, message)
        return given is not None

    def _require_token(self) -> None:
        if not self._has_token():
            raise _Refusal(HTTPStatus.UNAUTHORIZED, "a token is needed")

    def _repo(self, kind: str, repo_id: str, write: bool = False) -> Repo:
        known = self._has_token()
        repo = self._hub.repos.get(kind, repo_id)
        if repo is None or (repo.private and not known):
            # As the Hub does: who may not see a repository does not learn whether it exists.
            status = HTTPStatus.NOT_FOUND if known else HTTPStatus.UNAUTHORIZED
            raise _Refusal(status, "Repository not found", "RepoNotFound")
        if write:
            self._require_token()
        return repo

    def _files(self, repo: Repo, revision: str) -> tuple[str, dict[str, FileEntry]]:
        sha = repo.resolve(revision)
        if sha is None:
            message = f"{repo.repo_id} has no revision {revision}"
            raise _Refusal(HTTPStatus.NOT_FOUND, message, "RevisionNotFound")
        return sha, repo.commits[sha].files

    def _create_ref(self, kind: str, repo_id: str, refs: str, name: str, revision: str) -> None:
        sha, _ = self._files(self._repo(kind, repo_id, write=True), revision)
        if not self._hub.repos.name(kind, repo_id, refs, name, sha):
            raise _Refusal(HTTPStatus.CONFLICT, f"{name} exists")
        self._send_json({})

    def _send_json(
        self,
        value: object,
        status: HTTPStatus = HTTPStatus.OK,
        fields: dict[str, str] | None = None,
    ) -> None:
        text = json.dumps(value).encode()
        kind = {"Content-Type": "application/json", "Content-Length": str(len(text))}
        self.send_head(status, {**kind, **(fields or {})})
        if self.command != "HEAD":
            self.wfile.write(text)


def _lfs(entry: FileEntry, digest: str) -> dict[str, Any]:
    """The ``lfs`` field of a file, whose digest the two APIs name ``oid`` and ``sha256``."""
    if not entry.lfs:
        return {}
    return {"lfs": {digest: entry.sha256, "size": entry.size, "pointerSize": 134}}
