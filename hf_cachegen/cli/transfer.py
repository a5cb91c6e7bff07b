"""``push`` and ``fetch``: to the Hub, and back from anywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_cachegen.artifact import EMBEDDED, Artifact
from hf_cachegen.artifact.files import check_writable
from hf_cachegen.cli import options
from hf_cachegen.cli.inspect import is_table, verify_artifact
from hf_cachegen.cli.locations import open_location
from hf_cachegen.cli.output import bytes_bar, megabytes
from hf_cachegen.errors import StoreError, StoreNotFound

if TYPE_CHECKING:
    from hf_cachegen.stores import Store


def push(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of a cache or a model table.",
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ],
    repo: Annotated[
        str, typer.Argument(help="Hub repository, org/name.", metavar="REPO", show_default=False)
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    revision: options.Revision = None,
    message: Annotated[
        str | None, typer.Option(help="Message of the commit.", show_default=False)
    ] = None,
    token: options.Token = None,
    endpoint: options.Endpoint = None,
) -> None:
    """Upload a cache or a table to the Hub, with a card.

    A cache holds the token ids of its document: push only what you may publish.
    """
    from hf_cachegen.stores import LocalStore

    given: dict[str, Any] = {"revision": revision, "token": token, "endpoint": endpoint}
    given |= {"commit_message": message, "private": private or None}
    push_options = {name: value for name, value in given.items() if value is not None}
    with LocalStore(folder) as store:
        table = is_table(store)
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    from hf_cachegen.hf.hub import push_artifact
    from hf_cachegen.hf.table_hub import push_table

    try:
        url = (push_table if table else push_artifact)(folder, repo, **push_options)
    except HfHubHTTPError as error:
        raise StoreError(f"cannot push to {repo}: {error}") from error
    except HTTPError as error:  # without an answer
        raise StoreError(
            f"cannot push to {repo}: the Hub at {endpoint or constants.ENDPOINT} cannot be reached "
            f"({str(error) or type(error).__name__}); check the link and that address (--endpoint, "
            "HF_ENDPOINT), then run the same command again"
        ) from error
    print(url)


def fetch(
    location: options.Location,
    out: Annotated[
        Path | None,
        options.folder_option(
            "Folder to write to.  [default, for a Hub repository: the Hugging Face cache]",
            "--out",
            "-o",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a cache of something else.")
    ] = False,
    revision: options.Revision = None,
    token: options.Token = None,
    endpoint: options.Endpoint = None,
) -> None:
    """Copy a cache or a table to this machine.

    It can then be used without a network. Interrupted, it goes on from where it was when it is run
    again: with -o from the last byte, else from the last whole file.
    """
    if out is not None:
        check_writable(out)
    hub_options: dict[str, Any] = {"token": token, "endpoint": endpoint}
    with open_location(location, revision=revision, **hub_options) as store:
        folder = _download(store) if out is None else _copy(store, out, overwrite)
    from hf_cachegen.stores import LocalStore

    with LocalStore(folder) as copied:
        if not is_table(copied):
            verify_artifact(copied)
            _download_table(copied, hub_options)
    print(folder)


def _download(store: Store) -> Path:
    from hf_cachegen.stores import HubStore

    if not isinstance(store, HubStore):
        raise ValueError(f"expected -o FOLDER, where {store.location} is to be copied to")
    return store.download()


def _copy(store: Store, out: Path, overwrite: bool) -> Path:
    if is_table(store):
        return _copy_table(store, out)
    from hf_cachegen.cli.copying import copy_artifact

    artifact = Artifact.open(store)
    with _goes_on(sum(f.size_bytes for f in artifact.manifest.files), out) as progress:
        copy_artifact(artifact, out, overwrite=overwrite, progress=progress)
    return out


def _copy_table(store: Store, out: Path) -> Path:
    from hf_cachegen.tables import TableRecord
    from hf_cachegen.tables.download import download_table

    record = TableRecord.read(store)
    with _goes_on(record.size_bytes, out) as progress:
        try:
            download_table(record, store, "", out, progress=progress)
        except OSError as error:
            raise StoreError(f"cannot write to {out}: {error}") from error
    return out


@contextlib.contextmanager
def _goes_on(size_bytes: int, out: Path) -> Iterator[Callable[[int], object]]:
    """A bar for a copy; if it fails when it has begun, say what is there, and how to go on."""
    with bytes_bar("fetch", size_bytes) as bar:
        try:
            yield bar.update
        except StoreError as error:
            if not bar.n or isinstance(error, StoreNotFound):
                raise
            raise type(error)(
                f"{error}; {megabytes(bar.n)} of {megabytes(size_bytes)} are there for {out}: once "
                "that is mended, run the same command again to go on"
            ) from error


def _download_table(store: Store, hub_options: dict[str, Any]) -> None:
    """Also fetch the codecs that an artefact uses of the table that it names on the Hub."""
    from hf_cachegen.hf.codecs import LevelCodecs

    manifest = Artifact.open(store).manifest
    identity, reference = manifest.identity, manifest.identity.table
    if reference is not None and reference.location != EMBEDDED:
        # They stay in the table cache.
        LevelCodecs(
            manifest.levels, identity.layout, reference, store, hub_options=hub_options
        ).table()
