"""Opening the location that a command is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_cachegen.stores import Store


def open_location(
    location: str, *, revision: str | None, token: str | None, endpoint: str | None
) -> Store:
    """Open a store with the options of a command; no option is ignored.

    Raises
    ------
    ValueError
        The location has no revisions, or names another one itself.
    StoreNotFound, StoreError
        As :func:`~hf_cachegen.stores.open_store`.
    """
    from hf_cachegen.stores import HubStore, open_store

    store = open_store(location, revision=revision, token=token, endpoint=endpoint)
    if revision is None:
        return store
    if not isinstance(store, HubStore):
        store.close()
        raise ValueError(
            f"--revision {revision}: expected a Hub repository, {store.location} is not one and "
            "has no revisions; leave the option out"
        )
    _, _, named = location.partition("@")
    if named not in ("", revision):
        store.close()
        raise ValueError(f"--revision {revision}: {location} names another one; give only one")
    return store
