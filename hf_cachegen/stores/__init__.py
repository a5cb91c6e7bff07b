"""Where an artefact's files are: a local folder, an HTTP server or a Hub repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hf_cachegen.stores.base import Store
from hf_cachegen.stores.http import HttpStore
from hf_cachegen.stores.hub import HubStore
from hf_cachegen.stores.local import LocalStore

__all__ = ["HttpStore", "HubStore", "LocalStore", "Store", "open_store"]

_REPO = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+)(?:@(\S+))?")


def open_store(location: str | os.PathLike[str], **hub_options: Any) -> Store:
    """Open the store that a location names.

    Parameters
    ----------
    location
        An existing folder, an ``http(s)://`` URL of a folder, or a Hub repository ``org/name``,
        also written ``hf://org/name`` or ``org/name@revision``. A folder goes before a repository
        of the same spelling.
    **hub_options
        Passed to :class:`HubStore`. An HTTP server takes only their ``token``, a folder none.

    Raises
    ------
    ValueError
        The location has none of the three forms.
    StoreNotFound, StoreError
        The folder or the repository is not there or cannot be read.
    """
    text = os.fspath(location)
    if isinstance(location, Path) or (text and Path(text).is_dir()):
        return LocalStore(text)
    if text.startswith(("http://", "https://")):
        return HttpStore(text, token=hub_options.get("token"))
    if match := _REPO.fullmatch(text):
        options = {**hub_options, **({"revision": match[2]} if match[2] else {})}
        return HubStore(match[1], **options)
    raise ValueError(
        f"expected an existing folder, a URL (https://host/folder) or a Hub repository (org/name "
        f"or org/name@revision), got {text!r}"
    )
