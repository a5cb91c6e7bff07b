"""``info`` and ``verify``: what a cache or a table holds, and whether it is intact."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_cachegen.artifact import EMBEDDED, Artifact, Manifest
from hf_cachegen.artifact.summary import stored_values, summarise_levels
from hf_cachegen.cli import options
from hf_cachegen.cli.locations import open_location
from hf_cachegen.cli.output import (
    bytes_bar,
    count,
    megabytes,
    print_facts,
    print_json,
    print_table,
)
from hf_cachegen.config import DTYPE_BYTES, MANIFEST_NAME
from hf_cachegen.errors import StoreNotFound, TableMismatch

if TYPE_CHECKING:
    from hf_cachegen.stores import Store
    from hf_cachegen.tables import ModelTable, TableRecord

VERSIONS_OF = ("hf-cachegen", "torch", "transformers", "huggingface-hub", "numpy", "numba")
TABLE_NAME = "table.json"


def info(
    location: Annotated[
        str | None,
        typer.Argument(
            help="Folder, URL or Hub repository of a cache or a model table; without it, versions "
            "and usable backends are shown.",
            metavar="[LOCATION]",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
    revision: options.Revision = None,
    token: options.Token = None,
    endpoint: options.Endpoint = None,
) -> None:
    """Show what a cache or a table holds, or what can run here."""
    if location is None:
        _show(_installation(), json, _print_installation)
        return
    with open_location(location, revision=revision, token=token, endpoint=endpoint) as store:
        if is_table(store):
            _show(_describe_table(store), json, _print_table)
            return
        manifest = Artifact.open(store).manifest
        if json:
            print_json({"location": store.location, **_describe(manifest)})
        else:
            _print_manifest(store.location, manifest)


def verify(
    location: options.Location,
    revision: options.Revision = None,
    token: options.Token = None,
    endpoint: options.Endpoint = None,
) -> None:
    """Check every byte of a cache or a table."""
    from hf_cachegen.stores import HubStore, LocalStore

    with open_location(location, revision=revision, token=token, endpoint=endpoint) as store:
        if is_table(store):
            from hf_cachegen.tables import ModelTable  # imports torch

            print(f"intact: model table, {megabytes(ModelTable.load(store).size_bytes())}")
        elif isinstance(store, HubStore):  # all of it is read, so it may as well be kept
            verify_artifact(LocalStore(store.download()))
        else:
            verify_artifact(store)


def verify_artifact(store: Store) -> None:
    """Check all of an artefact, an embedded table included, and say what was found intact."""
    artifact = Artifact.open(store)
    with bytes_bar("verify", sum(f.size_bytes for f in artifact.manifest.files)) as bar:
        report = artifact.verify(bar.update)
    table = embedded_table(artifact)
    states = "" if artifact.manifest.states is None else " and the states"
    extra = "" if table is None else f", and the embedded table, {megabytes(table.size_bytes())}"
    print(
        f"intact: {count(report.n_chunks, 'chunk')} with "
        f"{count(report.n_segments, 'segment')}{states}, "
        f"{megabytes(report.size_bytes)}{extra}"
    )


def embedded_table(artifact: Artifact) -> ModelTable | None:
    """The table inside an artefact, checked; None if it has none or names one elsewhere.

    Raises
    ------
    FormatError, StoreError, TableMismatch
        The table is damaged, missing, or another than the manifest names.
    """
    record, reference = embedded_record(artifact), artifact.manifest.identity.table
    if record is None or reference is None:
        return None
    from hf_cachegen.tables import ModelTable  # imports torch

    return ModelTable.read(record, artifact.store, reference.folder)


def embedded_record(artifact: Artifact) -> TableRecord | None:
    """What the record of the table inside an artefact says; else as :func:`embedded_table`."""
    reference = artifact.manifest.identity.table
    if reference is None or reference.location != EMBEDDED:
        return None
    from hf_cachegen.tables import TableRecord  # imports torch

    record = TableRecord.read(artifact.store, reference.folder).subset(reference.codecs)
    if record.digests != reference.codecs:
        raise TableMismatch(
            f"expected an embedded table of the digests {reference.codecs} in "
            f"{artifact.store.location}, found {record.digests}; fetch it again"
        )
    return record


def is_table(store: Store) -> bool:
    """Whether a store holds a model table and not a cache.

    Raises
    ------
    StoreNotFound
        It holds neither.
    """
    if store.exists(MANIFEST_NAME):
        return False
    if store.exists(TABLE_NAME):
        return True
    raise StoreNotFound(
        f"expected {MANIFEST_NAME} (a cache) or {TABLE_NAME} (a model table) in "
        f"{store.location}, found neither"
    )


def print_levels(manifest: Manifest) -> None:
    """The levels of an artefact with their sizes."""
    print_table(
        ("level", "values", "size", "bits/value", "smaller by"),
        [
            (
                level.name,
                "bit-exact" if level.exact else "lossy",
                megabytes(level.size_bytes),
                f"{level.bits_per_value:.2f}",
                f"{level.ratio:.1f}x",
            )
            for level in summarise_levels(manifest)
        ],
    )


def _show(facts: dict[str, Any], as_json: bool, show: Any) -> None:
    (print_json if as_json else show)(facts)


def _describe(manifest: Manifest) -> dict[str, Any]:
    identity = manifest.identity
    table = identity.table
    states_bytes = 0 if manifest.states is None else manifest.states.size_bytes
    raw_bytes = stored_values(manifest) * DTYPE_BYTES[identity.layout.dtype]
    return {
        "kind": "cache",
        "model": identity.model_id,
        "revision": identity.revision,
        "architecture": identity.architecture,
        "dtype": identity.layout.dtype,
        "layers": manifest.n_layers,
        "tokens": manifest.tokens.n,
        "kept": manifest.n_cached,
        "chunks": len(manifest.chunks),
        "chunk_tokens": manifest.chunk_tokens,
        "raw_bytes": raw_bytes + states_bytes,
        "states_bytes": states_bytes,
        "size_bytes": sum(record.size_bytes for record in manifest.files),
        "levels": [asdict(level) for level in summarise_levels(manifest)],
        "table": None if table is None else table.model_dump(),
        "library_version": manifest.library_version,
    }


def _print_manifest(location: str, manifest: Manifest) -> None:
    facts = _describe(manifest)
    table = facts["table"]
    print_facts(
        {
            "cache": location,
            "model": f"{facts['model']} ({facts['architecture']}, {facts['dtype']})",
            "tokens": f"{_tokens_fact(manifest)} in {count(facts['chunks'], 'chunk')}",
            "uncompressed": megabytes(facts["raw_bytes"]),
            "all levels": megabytes(facts["size_bytes"]),
            **_states_fact(facts["states_bytes"]),
            "table": "none" if table is None else f"{table['location']} (for {table['name']})",
        }
    )
    print_levels(manifest)


def _tokens_fact(manifest: Manifest) -> str:
    """How many tokens there are, and how many of them are kept if some were evicted."""
    kept = "" if manifest.kept is None else f", {manifest.kept.n} of them kept by each head"
    return f"{manifest.tokens.n}{kept}"


def _states_fact(size_bytes: int) -> dict[str, str]:
    """How much of every level are states; nothing if there are none."""
    return {"states": f"{megabytes(size_bytes)}, exact, with any level"} if size_bytes else {}


def _describe_table(store: Store) -> dict[str, Any]:
    from hf_cachegen.tables import TableRecord  # imports torch

    record = TableRecord.read(store)
    return {
        "kind": "table",
        "location": store.location,
        "model": record.model_id,
        "tokens": sum(tokens for _, tokens in record.data),
        "codecs": {
            entry.codec: {
                "digest": record.digests[entry.codec],
                "size_bytes": entry.arrays.size_bytes,
                "params": entry.params.model_dump(mode="json"),
            }
            for entry in record.codecs
        },
        "library_version": record.library_version,
    }


def _print_table(facts: dict[str, Any]) -> None:
    print_facts({**facts, "codecs": ", ".join(facts["codecs"])})
    for name, codec in facts["codecs"].items():
        print(f"\n{name}")
        shown = {
            "digest": codec["digest"],
            "size": megabytes(codec["size_bytes"]),
            **codec["params"],
        }
        print_facts({f"  {key}": value for key, value in shown.items()})


def _installation() -> dict[str, Any]:
    from hf_cachegen.codec.entropy import available_backends

    versions = {"python": platform.python_version()}
    return {
        "versions": versions | {name: importlib.metadata.version(name) for name in VERSIONS_OF},
        "entropy_backends": available_backends(),
    }


def _print_installation(facts: dict[str, Any]) -> None:
    print_facts(facts["versions"])
    print("\nentropy coders")
    print_facts(
        {
            f"  {name}": "usable" if reason is None else f"not usable: {reason}"
            for name, reason in facts["entropy_backends"].items()
        }
    )
