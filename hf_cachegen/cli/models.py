"""Loading the model that a command works with. Imports transformers: for use inside commands."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hf_cachegen.codec.entropy import begin_warm_up
from hf_cachegen.errors import StoreNotFound


def load_model(
    name: str, dtype: str = "auto", device: torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in eval mode, and its tokenizer.

    Parameters
    ----------
    name
        Folder or Hub id.
    dtype
        ``auto`` is the dtype the model was saved in.
    device
        Where all of it goes; None: spread over the GPUs, if there are any.

    Raises
    ------
    StoreNotFound
        There is no such model, or transformers cannot read it.
    """
    begin_warm_up()  # while the files are read
    logging.disable_progress_bar()
    device_map = device or ("auto" if torch.cuda.is_available() else None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise StoreNotFound(f"cannot load the model {name!r}: {reason}") from error
    return model.eval(), tokenizer
