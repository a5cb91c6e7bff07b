"""A tiny random model with a tokenizer, and a Hugging Face environment of the tests' own."""

from __future__ import annotations

import os
import tempfile

# Read by huggingface_hub when it is imported, so they come before everything else.
_HF_HOME = tempfile.TemporaryDirectory(prefix="hf-cachegen-tests-")
os.environ |= {
    "HF_HOME": _HF_HOME.name,
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_ENDPOINT": "http://127.0.0.1:9",  # nobody listens: what a test fetches, it serves
}
for _name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
    os.environ.pop(_name, None)

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

# On tensors this small, threads only wait for each other, the more so under pytest-xdist.
torch.set_num_threads(1)

SENTENCES = (
    "The tenant pays the rent on the first day of every month.",
    "The landlord keeps the roof, the walls and the pipes in good order.",
    "Either party may end the contract with three months of notice.",
    "The contract was signed in the presence of two witnesses.",
)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A BPE tokenizer of 320 tokens that knows every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A Llama with random weights: 3 layers, 2 KV heads of 16, fp32, in eval mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_model_folder(
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The tiny model and its tokenizer, saved."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_text() -> str:
    """Some 700 tokens of text for the tiny tokenizer."""
    return "\n".join(f"{number}. {sentence}" for number in range(10) for sentence in SENTENCES)
