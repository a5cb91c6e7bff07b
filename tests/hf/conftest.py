"""Tiny models, artefacts of their caches, and stores that fail or wait on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_cachegen import CompressedStreamingCache, ModelTable, profile_model, save_cache
from hf_cachegen.artifact import Artifact
from hf_cachegen.bench.local_hub import LocalHub
from hf_cachegen.codec.transform_tables import TransformConfig
from hf_cachegen.errors import StoreError
from hf_cachegen.hf import codecs
from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.stores import LocalStore
from hf_cachegen.streaming.controller import FixedLevel

torch.set_num_threads(1)  # tiny models gain nothing from more, and workers share the machine

CONTEXT_TOKENS = 70
CHUNK_TOKENS = 32  # 70 = 32 + 32 + 6
WINDOW = 16
LEVELS = ("delta-0", "delta-1", "delta-2", "delta-3", "lossless", "raw")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "since(version): needs this transformers, which first serves a model"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("since"):
        if Version(transformers.__version__) < Version(*mark.args):
            pytest.skip(f"needs transformers {mark.args[0]}")


@pytest.fixture(scope="session")
def tiny_gemma(tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A Gemma 3 with random weights, fp32: sliding (16 tokens) and full layers by turns."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
        dtype="float32",
    )
    return Gemma3ForCausalLM(config).eval()


@dataclass(frozen=True)
class Published:
    """A model, a context, and the artefact of its cache with every level."""

    model: PreTrainedModel
    ids: Tensor
    folder: Path

    def load(self, level: str = "lossless", **options: object) -> CompressedStreamingCache:
        """A new streamed cache."""
        options = {"level": level, **options}
        return CompressedStreamingCache.from_pretrained(self.folder, model=self.model, **options)

    def stream(self, store: LocalStore, level: int = LEVELS.index("lossless")) -> object:
        """A new streamed cache that reads from ``store``."""
        return CompressedStreamingCache(Artifact.open(store), self.model, FixedLevel(level))

    @torch.no_grad()
    def native(self, *, recording: bool = False) -> DynamicCache:
        """The same context in an untouched cache of transformers."""
        cache = DynamicCache(config=self.model.config)
        if recording:
            cache.activate_past_recording()
        self.model(input_ids=self.ids[None], **{cache_argument(self.model): cache})
        return cache

    @torch.no_grad()
    def forward(self, cache: object, ids: Tensor) -> Tensor:
        """Logits of one pass of ``ids`` ``[B, T]`` that follow ``cache``."""
        return self.model(input_ids=ids, **{cache_argument(self.model): cache}).logits


@pytest.fixture(scope="session")
def publish(tmp_path_factory: pytest.TempPathFactory) -> Callable[[PreTrainedModel], Published]:
    """``publish(model)`` saves a context's cache with every level."""

    def publish(model: PreTrainedModel) -> Published:
        ids = torch.randint(3, 300, (CONTEXT_TOKENS,), generator=torch.Generator().manual_seed(2))
        folder = tmp_path_factory.mktemp("published") / "context"
        save_cache(
            model, None, ids, folder, levels=LEVELS, chunk_tokens=CHUNK_TOKENS, progress=False
        )
        return Published(model, ids, folder)

    return publish


@pytest.fixture(scope="session")
def llama(tiny_model: PreTrainedModel, publish: Callable[..., Published]) -> Published:
    """Full layers only."""
    return publish(tiny_model)


@pytest.fixture(scope="session")
def gemma(tiny_gemma: PreTrainedModel, publish: Callable[..., Published]) -> Published:
    """Sliding and full layers, the context past the window."""
    return publish(tiny_gemma)


@pytest.fixture(scope="session", params=["llama", "gemma"])
def published(request: pytest.FixtureRequest) -> Published:
    """Each of the two."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def transform_table(
    tiny_tokenizer: PreTrainedTokenizerBase, tiny_text: str
) -> Callable[[PreTrainedModel], ModelTable]:
    """``transform_table(model)``: of three levels, for pairs of layers."""

    def transform_table(model: PreTrainedModel) -> ModelTable:
        return profile_model(
            model,
            tiny_tokenizer,
            {"text": tiny_text},
            configs=[TransformConfig(group=2, step=3e-4, levels=3)],
            sample_tokens=200,
            progress=False,
        )

    return transform_table


@dataclass
class TrickyStore(LocalStore):
    """A folder whose chunks can be withheld, damaged and counted.

    Attributes
    ----------
    chunk_reads
        (path, offset, size) of every request for a chunk.
    withhold_from
        Bytes of the first chunk's segments that pass before ``gate`` opens; None: no gate.
    damage
        How many of the next chunk reads at or past ``damage_offset`` get a wrong last byte.
    fail_at
        Number of the chunk read that fails; None: none.
    linger_s
        Seconds that a transfer takes to end after its last byte.
    """

    folder: Path
    withhold_from: int | None = None
    damage: int = 0
    damage_offset: int = 0
    fail_at: int | None = None
    linger_s: float = 0.0
    chunk_reads: list[tuple[str, int, int | None]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(self.folder)
        self.index_bytes = Artifact.open(LocalStore(self.folder), tokens=False).index_bytes

    def close(self) -> None:
        self.closed.set()
        self.gate.set()

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        data = b"".join(super()._pieces(path, offset, size, max_bytes))
        if not path.startswith("chunks/"):
            yield data
            return
        self.chunk_reads.append((path, offset, size))
        if self.fail_at is not None and len(self.chunk_reads) > self.fail_at:
            raise StoreError(f"the link to {path} is down")
        if self.damage and offset >= self.damage_offset:
            self.damage -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        head = max(self.index_bytes - offset, 0)
        if self.withhold_from is not None and len(data) > head:
            yield data[: head + self.withhold_from]
            data = data[head + self.withhold_from :]
            self.gate.wait(timeout=20)
            if self.closed.is_set():
                raise StoreError("the store was closed")
        try:
            yield data
        finally:
            time.sleep(self.linger_s)


@pytest.fixture
def tricky_store() -> Callable[..., TrickyStore]:
    """``tricky_store(folder, **tricks)``, see :class:`TrickyStore`."""
    return TrickyStore


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """An empty Hub that huggingface_hub talks to, with caches of its own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(codecs, "HF_HOME", str(tmp_path / "hf-home"))
    with LocalHub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def table_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table cache of the test's own."""
    monkeypatch.setattr(codecs, "HF_HOME", str(tmp_path / "hf-home"))
    return tmp_path / "hf-home" / "hf-cachegen" / "tables"
