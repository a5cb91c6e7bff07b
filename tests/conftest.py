"""A tiny random model with a tokenizer, and a Hugging Face environment of the tests' own."""

from __future__ import annotations

import os
import tempfile
import threading
import time

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

import contextlib  # noqa: E402
import socket  # noqa: E402
from collections import Counter, deque  # noqa: E402
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hf_cachegen.bench.kernel_link import check_kernel_links  # noqa: E402
from hf_cachegen.codec import gpu  # noqa: E402
from hf_cachegen.codec.bank import TableBank, normalise_counts  # noqa: E402
from hf_cachegen.codec.integer_tables import build_integer_bank  # noqa: E402
from hf_cachegen.codec.scale_classes import N_CLASSES  # noqa: E402
from hf_cachegen.codec.transform_tables import (  # noqa: E402
    THIRDS_STARTS,
    GroupTables,
    TransformConfig,
    TransformTables,
    group_specs,
    layer_groups,
)
from hf_cachegen.layout import KVLayout  # noqa: E402
from hf_cachegen.stores import client  # noqa: E402
from hf_cachegen.stores.local import LocalStore  # noqa: E402
from hf_cachegen.streaming.policy import Policy, Refinement, StreamState  # noqa: E402

# On tensors this small, threads only wait for each other, the more so under pytest-xdist.
torch.set_num_threads(1)

# Without deadlines: kernels compile on first use, and a busy machine may stand still for a while.
# The same examples every run.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")

ENDS_WITHIN_S = 60.0
"""For what ends in no time, unless it never does or the machine is very busy."""

SENTENCES = (
    "The tenant pays the rent on the first day of every month.",
    "The landlord keeps the roof, the walls and the pipes in good order.",
    "Either party may end the contract with three months of notice.",
    "The contract was signed in the presence of two witnesses.",
)


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> Iterator[None]:
    """Servers of tests are on this machine: if one is silent for a moment, so is all of it.

    Otherwise a client would ask once more, and what it asks for is what many tests are about.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "MIN_SILENCE_S", client.TIMEOUT_S)
        yield


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


@pytest.fixture(scope="session")
def random_transform_tables() -> Callable[..., TransformTables]:
    """``random_transform_tables(layout, seed, **config)``: well-formed and of no model."""

    def build(layout: KVLayout, seed: int = 0, **config: object) -> TransformTables:
        rng = np.random.default_rng(seed)
        params = TransformConfig(**{"group": 2, "step": 0.5, "levels": 2, **config})
        groups = layer_groups(layout, params.group)
        counts = rng.integers(1, 100, (N_CLASSES, 10), np.int32)
        counts[:, -1] = 0  # no other integers
        return TransformTables(
            params,
            tuple(_random_group(rng, layout, group) for group in groups),
            build_integer_bank(counts, -4),
            TableBank(normalise_counts(np.ones(3 * N_CLASSES), THIRDS_STARTS), THIRDS_STARTS),
            np.ones(params.levels, np.float32),
        )

    return build


def _random_group(rng: np.random.Generator, layout: KVLayout, group: range) -> GroupTables:
    widths = [layout.layers[layer].channels for layer in group]
    channels, kept = sum(widths), sum(widths) // 2
    features = sum(spec.heads for spec in group_specs(layout, group))
    triangles = [(np.eye(c) + 0.1 * rng.normal(size=(c, c)))[np.tril_indices(c)] for c in widths]
    return GroupTables(
        mean=rng.normal(size=channels).astype(np.float32),
        unwhitener=np.concatenate(triangles).astype(np.float16),
        unwhitener_scale=np.ones(len(group), np.float32),
        basis=rng.integers(-127, 128, (kept, channels), np.int8),
        basis_low=rng.integers(-128, 128, (kept // 2, channels), np.int8),
        coefficient_scale=np.full(kept, 1 / 127, np.float32),
        sigma=np.linspace(2, 0.1, kept, dtype=np.float32),
        importance=rng.normal(size=features + 1).astype(np.float32),
        recency=rng.normal(size=features + 2).astype(np.float32),
    )


class Scripted(Policy):
    """Chooses the levels given, then the refinements given, and keeps the states that it saw."""

    adapts = False

    def __init__(self, levels: Sequence[int], refinements: Sequence[Refinement] = ()) -> None:
        self.until_s = float("inf") if refinements else 0.0
        self.states: list[StreamState] = []
        self._levels = levels
        self._refinements = deque(refinements)

    def choose(self, state: StreamState) -> int:
        self.states.append(state)
        return self._levels[state.next_chunk]

    def refines_until_s(self, state: StreamState) -> float:
        return self.until_s

    def refine(self, state: StreamState) -> Refinement | None:
        self.states.append(state)
        if (
            self._refinements
            and state.chosen[self._refinements[0].chunk] == self._refinements[0].level
        ):
            self._refinements.popleft()  # it has begun
        return self._refinements[0] if self._refinements else None


@pytest.fixture(scope="session")
def scripted() -> type[Scripted]:
    """``scripted(levels, refinements)``, see :class:`Scripted`."""
    return Scripted


class RecordingStore(LocalStore):
    """A folder that remembers what was read of it: path, offset and size."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: list[tuple[str, int, int | None]] = []

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        self.reads.append((path, offset, size))
        return super()._pieces(path, offset, size, max_bytes)

    @property
    def paths(self) -> list[str]:
        """Which files were read."""
        return [path for path, _, _ in self.reads]


@pytest.fixture(scope="session")
def recording_store() -> type[RecordingStore]:
    """``recording_store(folder)``, see :class:`RecordingStore`."""
    return RecordingStore


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("hf-cachegen")}


@pytest.fixture
def threads_end() -> Callable[[], bool]:
    """``threads_end()`` says whether all threads started in the test end, and waits for it."""
    before = _threads()

    def threads_end() -> bool:
        deadline = time.monotonic() + ENDS_WITHIN_S
        while _threads() - before and time.monotonic() < deadline:
            time.sleep(0.01)
        return not _threads() - before

    return threads_end


@pytest.fixture
def kernel_links() -> Iterator[None]:
    """Skip where tc cannot shape links; afterwards, the devices of the test have to be gone."""
    try:
        check_kernel_links()
    except OSError as error:
        pytest.skip(str(error))
    before = set(socket.if_nameindex())
    yield
    left = set(socket.if_nameindex()) - before  # those of other workers go with their tests
    deadline = time.monotonic() + ENDS_WITHIN_S
    while left & set(socket.if_nameindex()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left & set(socket.if_nameindex())


class SimulatedStream:
    """A stream of a made-up GPU. Its clock says how much of each stream comes before its next work.

    That is what makes ``wait_event`` and ``record_event`` count: work on two streams is in order
    only if events say so, however long ago the host has queued it.
    """

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.clock: Counter[SimulatedStream] = Counter()
        self._gpu = gpu

    def record_event(self) -> Counter[SimulatedStream]:
        with self._gpu.lock:
            return Counter(self.clock)

    def wait_event(self, event: Counter[SimulatedStream]) -> None:
        with self._gpu.lock:
            self.clock |= event

    def synchronize(self) -> None:
        self._gpu.host_waits.append((threading.current_thread(), self))


class SimulatedGpu:
    """Stands in for ``torch.cuda`` while tensors are on the CPU, and finds races between streams.

    Attributes
    ----------
    default
        The default stream, which all threads begin with.
    races
        Work that has met other work on the same memory, with nothing that orders the two.
    host_waits
        Threads that waited for a stream, and the stream.
    freed_late
        (address, stream) of tensors that will not be freed before that stream is through.
    """

    def __init__(self) -> None:
        self.default = SimulatedStream(self)
        self.races: list[str] = []
        self.host_waits: list[tuple[threading.Thread, SimulatedStream]] = []
        self.freed_late: set[tuple[int, SimulatedStream]] = set()
        self._local = threading.local()
        self.lock = threading.Lock()
        self._written: dict[object, tuple[SimulatedStream, int]] = {}
        self._read: dict[object, dict[SimulatedStream, int]] = {}

    def current_stream(self, device: object = None) -> SimulatedStream:
        return getattr(self._local, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def work(self, name: str, *, reads: Iterable[object] = (), writes: Iterable[object] = ()):
        """Queue work on the current stream."""
        stream, writes = self.current_stream(), set(writes)
        with self.lock:
            stream.clock[stream] += 1
            for place in {*reads, *writes}:
                before = dict([self._written[place]] if place in self._written else [])
                if place in writes:
                    before |= self._read.pop(place, {})
                    self._written[place] = stream, stream.clock[stream]
                else:
                    self._read.setdefault(place, {})[stream] = stream.clock[stream]
                if any(stream.clock[other] < at for other, at in before.items()):
                    self.races.append(f"{name} of {place}")


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    """What this project asks of ``torch.cuda`` goes to it; all devices count as GPUs."""
    simulated = SimulatedGpu()
    monkeypatch.setattr(gpu, "has_streams", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_stream", simulated.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", simulated.stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimulatedStream(simulated))
    monkeypatch.setattr(
        Tensor, "record_stream", lambda t, stream: simulated.freed_late.add((t.data_ptr(), stream))
    )
    gpu._side_stream.cache_clear()
    yield simulated
    gpu._side_stream.cache_clear()
