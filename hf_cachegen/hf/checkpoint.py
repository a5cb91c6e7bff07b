"""A profile that was interrupted goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from hf_cachegen.artifact.files import write_file
from hf_cachegen.layout import canonical_json

EVERY_SAMPLES = 8
"""Samples between two checkpoints: a minute or so of a small model on a CPU."""


class Checkpoint:
    """The accumulators of a profile in a file, with how many samples of which pass they hold.

    Parameters
    ----------
    path
        The file; None keeps no checkpoint.
    work
        What is profiled, in JSON types. A checkpoint of other work is not used.
    """

    def __init__(self, path: Path | None, work: object) -> None:
        self._path = path
        self._key = hashlib.blake2b(canonical_json(work), digest_size=16).hexdigest()

    def restore(self, accumulators: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
        """Fill the arrays in place; the pass and the sample to go on with, (0, 0) without one."""
        if self._path is None or not self._path.exists():
            return 0, 0
        try:
            data = self._path.read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            arrays = safetensors.numpy.load(data)
        except (safetensors.SafetensorError, ValueError, OSError):
            return 0, 0  # damaged: the profile begins anew and replaces it
        metadata = header.get("__metadata__", {})
        if metadata.get("key") != self._key or arrays.keys() != accumulators.keys():
            return 0, 0
        for name, array in accumulators.items():
            array[...] = arrays[name]
        return int(metadata["pass"]), int(metadata["samples"])

    def save(
        self, number: int, samples: int, accumulators: Mapping[str, NDArray[Any]], *, last: bool
    ) -> None:
        """Note that ``samples`` of a pass are in the arrays; every few samples, and the last."""
        if self._path is None or not (last or samples % EVERY_SAMPLES == 0):
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"key": self._key, "pass": str(number), "samples": str(samples)}
        arrays = {name: np.ascontiguousarray(array) for name, array in accumulators.items()}
        write_file(self._path, safetensors.numpy.save(arrays, metadata=metadata))

    def remove(self) -> None:
        """Forget it: the work is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
