"""The error tree: what can go wrong with data or with the environment.

::

    CacheGenError
    ├── FormatError          bytes do not follow the format (damaged, truncated, hostile, too new)
    ├── IdentityError        an artefact, a table or a prompt belongs to something else
    │   ├── ModelMismatch    … to another model, revision, dtype or RoPE setting
    │   ├── TableMismatch    … to another model table
    │   └── PromptMismatch   … to other tokens
    ├── StoreError           a file cannot be read or written where it should be
    │   ├── StoreNotFound    … because it is not there
    │   └── StoreUnreachable … because its server does not answer, however often it is asked
    ├── UnsupportedError     a model, layer or call this library cannot serve, named with the reason
    └── BackendUnavailable   a backend was asked for by name and cannot run here

A caller's wrong argument is a plain ``ValueError``. Messages say what was expected, what was found
and what to do.
"""


class CacheGenError(Exception):
    """Base of every error this library raises about data or environment."""


class FormatError(CacheGenError):
    """Bytes do not follow the format: damaged, truncated, hostile, or from a newer version."""


class IdentityError(CacheGenError):
    """Something fits the format but belongs to something else."""


class ModelMismatch(IdentityError):  # noqa: N818 - reads as the fact it reports
    """The artefact was made with another model, revision, dtype or RoPE setting."""


class TableMismatch(IdentityError):  # noqa: N818
    """The artefact was encoded with another model table."""


class PromptMismatch(IdentityError):  # noqa: N818
    """The prompt does not continue the cached context."""


class StoreError(CacheGenError):
    """A file cannot be read from or written to its store."""


class StoreNotFound(StoreError):  # noqa: N818
    """The file is not in the store."""


class StoreUnreachable(StoreError):  # noqa: N818
    """The store's server does not answer, however often it is asked."""


class UnsupportedError(CacheGenError):
    """A model, layer or call that this library cannot serve; the message names the reason."""


class BackendUnavailable(CacheGenError):  # noqa: N818
    """A backend was asked for by name and cannot run here; the message carries the reason."""
