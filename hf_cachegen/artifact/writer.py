"""Saving an artefact into a folder: new chunk files first, ``cache.json`` last."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import filelock
import numpy as np
import safetensors.numpy
from numpy.typing import ArrayLike, NDArray

from hf_cachegen.artifact.files import (
    SCRATCH_PREFIX,
    check_writable,
    sync_file,
    sync_folder,
    temporaries,
    write_file,
)
from hf_cachegen.artifact.identity import (
    EMBEDDED,
    PROVENANCE,
    TABLES_FOLDER,
    Difference,
    Identity,
    compare_identity,
    describe,
    differences,
)
from hf_cachegen.artifact.kept import pack_kept
from hf_cachegen.artifact.manifest import (
    EXACT,
    MAX_KEPT_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_STATES_BYTES,
    MAX_TOKENS,
    ChunkRecord,
    KeptRecord,
    LevelRecord,
    Manifest,
    StatesRecord,
    TokensRecord,
    check_levels,
    skips_at_most,
    token_bytes,
)
from hf_cachegen.artifact.naming import ChunkPlan, chunk_names, plan_chunks
from hf_cachegen.artifact.reader import TOKENS_TENSOR, Artifact
from hf_cachegen.config import CHUNKS_FOLDER, MANIFEST_NAME
from hf_cachegen.container import ChunkIndex, build_chunk, index_size_bytes
from hf_cachegen.errors import FormatError, IdentityError, StoreError
from hf_cachegen.stores.download import PART_SUFFIX
from hf_cachegen.stores.local import LocalStore

LOCK_NAME = ".lock"

ADVICE = "choose another folder, or pass overwrite=True to replace it"
"""What to do about a folder that holds something else."""

_PART = re.escape(PART_SUFFIX)
_CHUNK_FILE = re.compile(rf"[0-9a-f]{{32}}\.kv({_PART})?")
_NAMED_FILE = re.compile(rf"(tokens|states|kept)-[0-9a-f]{{32}}\.safetensors({_PART})?")
_TABLE_FOLDER = re.compile(rf"[0-9a-f]{{32}}({_PART})?|{re.escape(SCRATCH_PREFIX)}.*")


class ArtifactWriter:
    """One save of a document's cache into a local folder; a context manager.

    An artefact in the folder is extended if it has the same identity, levels and chunk length and
    its token ids begin the new ones: chunk files whose token prefix is the same are kept as they
    are. It stays loadable until :meth:`commit`, which replaces ``cache.json`` in one step and only
    then removes files that the new artefact does not use.

    Parameters
    ----------
    folder
        Created if need be. One writer at a time holds it, by a lock file.
    identity, levels, chunk_tokens
        As in :class:`~hf_cachegen.artifact.Manifest`.
    token_ids
        [T] integers.
    held_from
        First token that the cache at hand still holds, by layer, where a sliding window has dropped
        some; None: all are there.
    kept
        Which tokens are cached, bool ``[L or 1, H or 1, T]``, the same number in each layer and
        head, of a cache from which others were evicted; None: all are. An artefact in the folder is
        then extended only by other levels, and only if it keeps the same.
    overwrite
        Replace whatever artefact the folder holds: one of another identity, other levels, another
        chunk length or other tokens, or one whose ``cache.json`` or token ids cannot be read.
        Chunk files that fit are kept all the same.

    Raises
    ------
    ValueError
        ``token_ids`` are not a list of 1 to 2^24 token ids, or ``levels`` or ``chunk_tokens`` are
        outside the format.
    IdentityError
        The folder holds an artefact of something else, or of tokens that the new ones do not
        start with.
    FormatError
        The folder's ``cache.json`` or token ids are damaged or of a newer version.
    StoreError
        The folder cannot be read or written, or another writer holds it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        identity: Identity,
        levels: Sequence[LevelRecord],
        chunk_tokens: int,
        token_ids: ArrayLike,
        *,
        held_from: Sequence[int] | None = None,
        kept: NDArray[np.bool_] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.identity = identity
        self.levels = tuple(levels)
        self.chunk_tokens = chunk_tokens
        self.token_ids = _check_tokens(token_ids)
        check_levels(self.levels)
        self._kept_file = b"" if kept is None else pack_kept(kept)
        self.kept = None if kept is None else _record_kept(kept, self._kept_file)
        self._lock = _lock(self.folder)
        try:
            previous = self._previous(overwrite)
            self._plans = plan_chunks(
                identity, self.levels, chunk_tokens, self.token_ids, held_from, self.kept
            )
            self._records = self._reusable(previous) if previous else {}
        except BaseException:
            self.close()
            raise

    def missing_chunks(self) -> list[ChunkPlan]:
        """The chunks that are still to be added, in order."""
        return [plan for plan in self._plans if plan.position not in self._records]

    def add_chunk(
        self, plan: ChunkPlan, segments: Sequence[Sequence[bytes]], source: str = EXACT
    ) -> ChunkRecord:
        """Write one chunk file.

        Parameters
        ----------
        plan
            One of :meth:`missing_chunks`.
        segments
            Encoded bytes by level (coarsest first) and layer.
        source
            ``"exact"``, or the level that the values had been decoded from.

        Raises
        ------
        ValueError
            The chunk is not missing, the segments do not have the artefact's levels and layers,
            or the writer is closed.
        StoreError
            The file cannot be written.
        """
        self._check_open()
        if plan not in self.missing_chunks():  # its file may be in use, and files never change
            raise ValueError(f"expected one of missing_chunks(), got {plan}")
        n_levels, n_layers = len(self.levels), len(self.identity.layout.layers)
        if len(segments) != n_levels or any(len(layers) != n_layers for layers in segments):
            raise ValueError(
                f"expected segments of {n_levels} levels with {n_layers} layers each, "
                f"got {[len(layers) for layers in segments]}"
            )
        n_tokens = plan.end - plan.start
        data = build_chunk(segments, n_tokens)
        index = ChunkIndex.parse(
            data[: index_size_bytes(n_levels, n_layers)],
            n_levels=n_levels,
            n_layers=n_layers,
            n_tokens=n_tokens,
        )
        record = ChunkRecord(
            name=plan.name,
            start=plan.start,
            end=plan.end,
            size_bytes=len(data),
            index_digest=index.digest,
            sha256=hashlib.sha256(data).hexdigest(),
            level_bytes=index.level_bytes,
            skipped=plan.skipped,
            source=source,
        )
        write_file(self.folder / record.path, data)
        self._records[plan.position] = record
        return record

    def commit(self, states: bytes | None = None, states_source: str = EXACT) -> Manifest:
        """Make the new artefact the one that the folder holds, and release the folder.

        An embedded table must lie in ``folder / identity.table.folder`` by now.

        Parameters
        ----------
        states
            A safetensors file with the states after the last token, if there are layers that keep
            some.
        states_source
            ``"exact"``, or the lossy level that the model read when it came to these states.

        Raises
        ------
        ValueError
            A chunk, the embedded table or states of a layout without layers are missing, states are
            too large, the records contradict each other, or the writer is closed.
        StoreError
            A file cannot be written.
        """
        self._check_open()
        if missing := self.missing_chunks():
            raise ValueError(
                f"expected all {len(self._plans)} chunks before the commit, {len(missing)} are "
                f"missing, the first with tokens {missing[0].start} to {missing[0].end}"
            )
        tokens = TokensRecord(
            n=len(self.token_ids), sha256=hashlib.sha256(token_bytes(self.token_ids)).hexdigest()
        )
        manifest = Manifest(
            identity=self.identity,
            tokens=tokens,
            chunk_tokens=self.chunk_tokens,
            levels=self.levels,
            chunks=tuple(self._records[plan.position] for plan in self._plans),
            states=None if states is None else _record_states(states, states_source),
            kept=self.kept,
        )
        self._sync_table()
        if states is not None and manifest.states is not None:
            write_file(self.folder / manifest.states.path, states)
        if self.kept is not None:
            write_file(self.folder / self.kept.path, self._kept_file)
        write_file(
            self.folder / tokens.path, safetensors.numpy.save({TOKENS_TENSOR: self.token_ids})
        )
        write_file(self.folder / MANIFEST_NAME, manifest.to_bytes())
        remove_unused(self.folder, manifest)
        self.close()
        return manifest

    def close(self) -> None:
        """Release the folder. Without a commit the artefact in it stays as it was."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._lock.is_locked:
            raise ValueError("expected an open writer, this one has been committed or closed")

    def _previous(self, overwrite: bool) -> Manifest | None:
        """The artefact in the folder, if there is one that this save may extend or replace."""
        if overwrite:
            with contextlib.suppress(FormatError, StoreError):
                data = LocalStore(self.folder).read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
                return Manifest.parse(data)
            return None
        previous = open_previous(self.folder)
        if previous is None:
            return None
        self._check_same(previous.manifest)
        self._check_continued(previous.token_ids)
        return previous.manifest

    def _check_same(self, previous: Manifest) -> None:
        found = [
            *compare_identity(self.identity, previous.identity),
            *_level_differences(self.levels, previous.levels),
            *differences("chunk_tokens", self.chunk_tokens, previous.chunk_tokens),
            *differences("kept", _digest(self.kept), _digest(previous.kept)),
        ]
        if any(difference.field not in PROVENANCE for difference in found):
            headline = f"{self.folder} holds a cache of something else"
            raise IdentityError(f"{describe(headline, found)}\n{ADVICE}")

    def _check_continued(self, previous: NDArray[np.int32]) -> None:
        common = min(len(previous), len(self.token_ids))
        unequal = np.flatnonzero(previous[:common] != self.token_ids[:common])
        first = int(unequal[0]) if len(unequal) else common
        if first < len(previous):
            verb = "differ" if len(unequal) else "end"
            raise IdentityError(
                f"{self.folder} holds a cache of other tokens: expected token ids that start with "
                f"its {len(previous)}, found {len(self.token_ids)} that {verb} at position {first}"
                f"\n{ADVICE}"
            )

    def _reusable(self, previous: Manifest) -> dict[int, ChunkRecord]:
        """Chunks of the artefact in the folder that are also chunks of the new one.

        A chunk may hold more of a sliding layer than the longer document still needs.
        """
        old = {
            plan.position: record
            for plan, record in zip(self._plans, previous.chunks, strict=False)
            if skips_at_most(record.skipped, plan.skipped)
        }
        if not old:
            return {}
        names = chunk_names(
            self.identity,
            self.levels,
            self.chunk_tokens,
            self.token_ids,
            [old.get(plan.position, plan).skipped for plan in self._plans],
            self.kept,
        )
        return {
            position: record
            for position, record in old.items()
            if record.name == names[position] and self._intact(record)
        }

    def _intact(self, record: ChunkRecord) -> bool:
        n_levels, n_layers = len(self.levels), len(self.identity.layout.layers)
        path = self.folder / record.path
        try:
            if path.stat().st_size != record.size_bytes:
                return False
            with path.open("rb") as file:
                data = file.read(index_size_bytes(n_levels, n_layers))
            index = ChunkIndex.parse(
                data, n_levels=n_levels, n_layers=n_layers, n_tokens=record.n_tokens
            )
        except (OSError, FormatError):
            return False
        return index.digest == record.index_digest

    def _sync_table(self) -> None:
        """Flush the embedded table, which its own code wrote."""
        table = self.identity.table
        if table is None or table.location != EMBEDDED:
            return
        folder = self.folder / table.folder
        files = [path for path in folder.rglob("*") if path.is_file()]
        if not files:
            raise ValueError(f"expected the embedded table in {folder} before the commit")
        for path in files:
            sync_file(path)
        for path in (folder, folder.parent, self.folder):
            sync_folder(path)


def open_previous(folder: Path) -> Artifact | None:
    """The artefact that a save finds in a folder, None if there is none.

    Raises
    ------
    FormatError, StoreError
        It cannot be read; the message says how to replace it.
    """
    try:
        exists = (folder / MANIFEST_NAME).exists()
        return Artifact.open(LocalStore(folder)) if exists else None
    except (FormatError, StoreError) as error:
        raise type(error)(f"{folder}: {error}; {ADVICE}") from error


def remove_unused(folder: Path, manifest: Manifest) -> None:
    """Remove what earlier saves and fetches, finished or not, have left beside an artefact.

    Other files are not touched.
    """
    table = manifest.identity.table
    used = {manifest.tokens.path, *(record.path for record in manifest.files)}
    if table is not None and table.location == EMBEDDED:
        used.add(table.folder)
    chunks = folder / CHUNKS_FOLDER
    ours = [path for path in chunks.iterdir() if _CHUNK_FILE.fullmatch(path.name)]
    ours += [path for path in folder.iterdir() if _NAMED_FILE.fullmatch(path.name)]
    tables = (folder / TABLES_FOLDER).glob("*")
    ours += [path for path in tables if _TABLE_FOLDER.fullmatch(path.name)]
    unused = [path for path in ours if path.relative_to(folder).as_posix() not in used]
    for path in (*unused, *temporaries(folder), *temporaries(chunks)):
        # A file that cannot be removed does no harm, and the next save tries again.
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_free(folder: Path) -> None:
    """Raise StoreError if a save could not begin to write to a folder. Nothing is left behind."""
    for path in (folder, folder / CHUNKS_FOLDER):
        check_writable(path)
    if (folder / LOCK_NAME).exists():
        _acquire(folder).release()


def _record_states(data: bytes, source: str) -> StatesRecord:
    if not 0 < len(data) <= MAX_STATES_BYTES:
        raise ValueError(f"expected states of 1 to {MAX_STATES_BYTES} bytes, got {len(data)}")
    digest = hashlib.sha256(data).hexdigest()
    return StatesRecord(size_bytes=len(data), sha256=digest, source=source)


def _record_kept(kept: NDArray[np.bool_], data: bytes) -> KeptRecord:
    counts = kept.sum(axis=-1)
    if counts.min() != counts.max() or not 0 < len(data) <= MAX_KEPT_BYTES:
        raise ValueError(
            "expected as many kept tokens in every layer and head, in a file of at most "
            f"{MAX_KEPT_BYTES} bytes, got {counts.min()} to {counts.max()} in {len(data)} bytes"
        )
    digest = hashlib.sha256(data).hexdigest()
    return KeptRecord(n=int(counts.max()), size_bytes=len(data), sha256=digest)


def _level_differences(
    ours: Sequence[LevelRecord], theirs: Sequence[LevelRecord]
) -> Iterator[Difference]:
    """The names, where they differ, and else what else does."""
    expected, found = ([level.name for level in levels] for levels in (ours, theirs))
    if expected != found:
        yield Difference("levels", expected, found)
        return
    for name, one, other in zip(expected, ours, theirs, strict=True):
        yield from differences(f"levels[{name!r}]", one.model_dump(), other.model_dump())


def _digest(kept: KeptRecord | None) -> str | None:
    return None if kept is None else kept.sha256


def _lock(folder: Path) -> filelock.BaseFileLock:
    try:
        (folder / CHUNKS_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error}") from error
    return _acquire(folder)


def _acquire(folder: Path) -> filelock.BaseFileLock:
    lock = filelock.FileLock(folder / LOCK_NAME, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise StoreError(
            f"another save is writing to {folder}; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error}") from error
    return lock


def _check_tokens(token_ids: ArrayLike) -> NDArray[np.int32]:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 1 <= len(ids) <= MAX_TOKENS:
        raise ValueError(
            f"expected 1 to {MAX_TOKENS} token ids in one dimension, "
            f"got {ids.dtype} of shape {ids.shape}"
        )
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ValueError(f"expected token ids of 0 to 2^31 - 1, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)
