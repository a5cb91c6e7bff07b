"""Work on many documents, shared by the processes that ``accelerate launch`` has started.

``torchrun`` and MPI start them as well. On CPUs and without MPI, ``accelerate launch --cpu`` starts
only one, and ``ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2`` two.

If a process ends with a status other than 0, the launcher adds a traceback of its own, whatever
that process has said; its ``--quiet`` keeps it back, but of a single process only.

Imports torch: for use inside commands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import filelock
import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from tqdm import tqdm

CLAIMS_FOLDER = ".claims"
"""Folder, beside the artefacts, of the lock files of documents that somebody works on."""

LONGEST_WAIT = timedelta(days=365)
"""For the other processes to be done; torch's own limit is minutes, and documents take longer."""


@dataclass
class Outcome:
    """What has become of documents, each by the name of its file.

    Attributes
    ----------
    written
        Encoded just now.
    present
        Whose caches were there already, complete.
    taken
        That another run is at work on.
    failures
        With the reason.
    """

    written: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def processes() -> Iterator[PartialState]:
    """This process among those that were started together; alone, if none were."""
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu, timeout=LONGEST_WAIT)
    try:
        yield state
    finally:
        state.destroy_process_group()


def share(documents: Mapping[Path, Path], state: PartialState) -> dict[Path, Path]:
    """The documents of one process, which are no other's, longest first.

    They follow from the files' names and sizes alone, so that machines need not talk to each
    other, and are dealt out by size, so that everyone gets about as much text.

    Parameters
    ----------
    documents
        Text file by folder of the artefact, alike in all processes.
    state
        From :func:`processes`.
    """
    by_size = sorted(documents.items(), key=lambda pair: (-pair[1].stat().st_size, pair[0].name))
    return dict(by_size[state.process_index :: state.num_processes])


def work_through(
    documents: Mapping[Path, Path], encode: Callable[[Path, Path], bool], state: PartialState
) -> Outcome:
    """Encode this process's documents, and wait for what the others have to tell.

    A document that fails does not keep the others from being encoded. Of several runs over the same
    folders, only one works on a document at a time. A progress bar shows the main process's share.

    Parameters
    ----------
    documents
        All documents: text file by folder of the artefact.
    encode
        ``encode(text, folder)`` encodes a document; False if the folder held its cache already.
    state
        From :func:`processes`.

    Returns
    -------
    Outcome
        Of all documents, the same in every process.
    """
    mine = share(documents, state)
    own = Outcome()
    bar = tqdm(mine.items(), "encode", unit="document", disable=not state.is_main_process)
    for folder, text in bar:
        try:
            with _claim(folder):
                (own.written if encode(text, folder) else own.present).append(str(text))
        except filelock.Timeout:
            own.taken.append(str(text))
        except Exception as error:  # whatever it is, the other documents can do nothing for it
            own.failures[str(text)] = str(error) or type(error).__name__
    return _join(gather_object([own]))


def _join(outcomes: Iterable[Outcome]) -> Outcome:
    whole = Outcome()
    for outcome in outcomes:
        whole.written += outcome.written
        whole.present += outcome.present
        whole.taken += outcome.taken
        whole.failures |= outcome.failures
    return whole


@contextlib.contextmanager
def _claim(folder: Path) -> Iterator[None]:
    """Keep other runs from a document; raises ``filelock.Timeout`` if one is at work on it."""
    claims = folder.parent / CLAIMS_FOLDER
    claims.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(claims / f"{folder.name}.lock", timeout=0):
        yield
