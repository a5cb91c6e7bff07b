"""Recurrent and convolutional states: what is saved, loaded, refused and replaced."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import HfApi
from packaging.version import Version
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_cachegen import (
    CompressedStreamingCache,
    FormatError,
    PromptMismatch,
    StoreError,
    UnsupportedError,
    profile_model,
    push_artifact,
    record_cache,
    save_cache,
)
from hf_cachegen.artifact import Artifact
from hf_cachegen.artifact.files import write_file
from hf_cachegen.bench.local_hub import LocalHub
from hf_cachegen.codec.delta import DeltaConfig
from hf_cachegen.codec.transform_tables import TransformConfig
from hf_cachegen.hf import incoming
from hf_cachegen.hf.calibration import calibrate
from hf_cachegen.hf.compat import (
    cache_argument,
    keeps_states,
    native_layers,
    place_arguments,
    state_specs,
)
from hf_cachegen.hf.counting import CountingCache
from hf_cachegen.hf.incoming import Incoming
from hf_cachegen.hf.joining import fill_cache
from hf_cachegen.hf.prefixes import load_longest_prefix
from hf_cachegen.hf.states import (
    KINDS,
    cached_states,
    state_numbers,
    unpack_states,
)
from hf_cachegen.stores import LocalStore
from hf_cachegen.streaming.controller import FixedLevel
from hf_cachegen.streaming.pipeline import ChunkStream
from hf_cachegen.streaming.policy import TEXT

CONTEXT_TOKENS, CHUNK_TOKENS = 70, 32
NEW = torch.tensor([7, 9, 11])
LATER = 1e6
COMMON = {
    "vocab_size": 320,
    "hidden_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ATTENTION = {
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **ATTENTION,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "falcon_h1": {**ATTENTION, **MAMBA_2, "num_hidden_layers": 2, "mamba_d_ssm": 64},
    "lfm2": {
        **ATTENTION,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 16,
    },
    "jamba": {
        **ATTENTION,
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
    },
}
"""States before attention; beside it; of convolutions only; that go on token by token; alone."""

SINCE = {"jamba": "5.21", "mamba2": "5.24"}
"""First transformers that can go on from the states of a model, where it is not the oldest."""

VERSION = Version(transformers.__version__)
SERVED = [name for name in CONFIGS if Version(SINCE.get(name, "5.18")) <= VERSION]
needs_jamba, needs_mamba2 = (
    pytest.mark.skipif(name not in SERVED, reason=f"needs transformers {SINCE[name]}: {name}")
    for name in SINCE
)

HYBRID = ("qwen3_next", "falcon_h1", "lfm2")


def build(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(3)
    config = CONFIG_MAPPING[model_type](**COMMON, **CONFIGS[model_type])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model


@dataclass(frozen=True)
class Stateful:
    """A model, a context, and the artefact of its cache."""

    model: PreTrainedModel
    ids: Tensor
    folder: Path

    def load(self, level: str = "lossless", **options: Any) -> CompressedStreamingCache:
        """A new streamed cache."""
        options = {"level": level, **options}
        return CompressedStreamingCache.from_pretrained(self.folder, model=self.model, **options)

    def stream(self, store: LocalStore) -> CompressedStreamingCache:
        """A new streamed cache that reads from ``store``."""
        artifact = Artifact.open(store)
        names = [level.name for level in artifact.manifest.levels]
        return CompressedStreamingCache(artifact, self.model, FixedLevel(names.index("lossless")))

    @torch.no_grad()
    def native(self, ids: Tensor | None = None) -> Any:
        """A context in a cache of transformers; one that counts where its layers do not."""
        cache = DynamicCache(config=self.model.config)
        if all(cache.is_linear):
            cache = CountingCache(cache.layers)
        ids = self.ids if ids is None else ids
        self.model(input_ids=ids[None], **{cache_argument(self.model): cache})
        return cache

    @torch.no_grad()
    def forward(self, cache: Any, ids: Tensor) -> Tensor:
        """Logits ``[T, V]`` of ids ``[T]`` that follow a cache, one by one."""
        name = cache_argument(self.model)
        passes = [self.model(input_ids=i[None, None], **{name: cache}).logits[0] for i in ids]
        return torch.cat(passes)

    def generate(self, cache: Any, prompt: Tensor, new: int = 5) -> Tensor:
        """A prompt ``[T]`` and what follows it."""
        output: Tensor = self.model.generate(
            prompt[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            **{cache_argument(self.model): cache},
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )
        return output[0]


def publish(
    model: PreTrainedModel, folder: Path, n_tokens: int = CONTEXT_TOKENS, **save_options: Any
) -> Stateful:
    ids = torch.randint(3, 300, (CONTEXT_TOKENS,), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"chunk_tokens": CHUNK_TOKENS, "progress": False}
    save_cache(model, None, ids[:n_tokens], folder, **options, **save_options)
    return Stateful(model, ids, folder)


@pytest.fixture(scope="session")
def stateful_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stateful]:
    """``stateful_of(model_type)`` publishes a context's cache; once per model type."""
    known: dict[str, Stateful] = {}

    def stateful_of(model_type: str) -> Stateful:
        if model_type not in known:
            folder = tmp_path_factory.mktemp("stateful") / model_type
            known[model_type] = publish(build(model_type), folder)
        return known[model_type]

    return stateful_of


@pytest.fixture(params=SERVED)
def stateful(request: pytest.FixtureRequest, stateful_of: Callable[[str], Stateful]) -> Stateful:
    """Each of them."""
    return stateful_of(request.param)


def assert_same_states(ours: Any, exact: Any) -> None:
    """That two caches hold the same states, bit by bit."""
    found, expected = cached_states(ours), cached_states(exact)
    assert found.keys() == expected.keys()
    for layer, states in expected.items():
        for kind in KINDS:
            tensors, others = getattr(found[layer], kind), getattr(states, kind)
            assert tensors.keys() == others.keys()
            for number, tensor in others.items():
                assert tensors[number].dtype == tensor.dtype
                assert torch.equal(tensors[number], tensor)


def assert_same_tokens(ours: Any, exact: Any) -> None:
    """That two caches hold the same keys and values, bit by bit."""
    for (keys, values, _), layer in zip(ours, exact.layers, strict=True):
        assert keys is None or torch.equal(keys, layer.keys)
        assert values is None or torch.equal(values, layer.values)


# What is saved and loaded.


def test_states_are_those_of_the_native_cache(stateful: Stateful) -> None:
    cache, native = stateful.load(), stateful.native()
    assert cache.get_seq_length() == native.get_seq_length() == CONTEXT_TOKENS
    assert_same_states(cache, native)
    assert_same_tokens(cache, native)
    for ours, exact in zip(cache.layers, native.layers, strict=True):
        if keeps_states(exact):
            assert ours.has_previous_state == exact.has_previous_state
            assert ours.conv_kernel_size == exact.conv_kernel_size
            assert ours.is_recurrent_states_initialized == exact.is_recurrent_states_initialized
            assert (ours.dtype, ours.device) == (exact.dtype, exact.device)
    assert torch.equal(stateful.forward(cache, NEW), stateful.forward(native, NEW))
    assert cache.get_seq_length() == CONTEXT_TOKENS + len(NEW)
    assert_same_states(cache, native)


@pytest.mark.parametrize("model_type", SERVED)
def test_states_keep_their_own_dtypes(model_type: str, tmp_path: Path) -> None:
    stateful = publish(build(model_type, torch.bfloat16), tmp_path)
    cache, native = stateful.load(), stateful.native()
    assert_same_states(cache, native)
    assert torch.equal(stateful.forward(cache, NEW), stateful.forward(native, NEW))


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 5])
def test_context_shorter_than_a_convolution(
    stateful_of: Any, n_tokens: int, tmp_path: Path
) -> None:
    for model_type in SERVED:
        stateful = publish(stateful_of(model_type).model, tmp_path / model_type, n_tokens)
        cache, native = stateful.load(), stateful.native(stateful.ids[:n_tokens])
        assert_same_states(cache, native)
        assert torch.equal(stateful.forward(cache, NEW), stateful.forward(native, NEW))


@pytest.mark.parametrize("model_type", HYBRID)
def test_states_are_exact_at_a_lossy_level(model_type: str, stateful_of: Any) -> None:
    stateful = stateful_of(model_type)
    cache = stateful.load("coarsest")
    assert_same_states(cache, stateful.native())
    with pytest.raises(AssertionError):
        assert_same_tokens(cache, stateful.native())


def test_used_in_inference_mode_and_outside_of_it(stateful: Stateful) -> None:
    cache, native = stateful.load(), stateful.native()
    with torch.inference_mode():
        stateful.forward(cache, NEW)
    stateful.forward(native, NEW)
    with torch.no_grad():
        assert torch.equal(stateful.forward(cache, NEW), stateful.forward(native, NEW))


def test_reset_cache_begins_anew(stateful: Stateful) -> None:
    for use in (True, False):
        cache = stateful.load()
        if use:
            cache.wait()
        cache.reset()
        assert cache.get_seq_length() == 0
        fresh = DynamicCache(config=stateful.model.config)
        assert torch.equal(stateful.forward(cache, NEW), stateful.forward(fresh, NEW))


@dataclass
class StatesStore(LocalStore):
    """A folder whose states can be withheld and damaged.

    Attributes
    ----------
    gate
        States are not given out before it is open.
    damage
        How many reads of the states get a wrong last byte.
    """

    folder: Path
    damage: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    reads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.folder)

    def close(self) -> None:
        self.gate.set()

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        data = b"".join(super()._pieces(path, offset, size, max_bytes))
        self.reads.append(path.partition("-")[0])
        if path.startswith("states-"):
            self.gate.wait(timeout=20)
            if self.damage:
                self.damage -= 1
                data = data[:-1] + bytes([data[-1] ^ 1])
        yield data


def test_opening_does_not_wait_for_the_states(stateful: Stateful) -> None:
    store = StatesStore(stateful.folder)
    cache = stateful.stream(store)
    assert cache.get_seq_length() == CONTEXT_TOKENS
    assert all(layer.is_pending for layer in cache.layers)
    threading.Timer(0.05, store.gate.set).start()
    native = stateful.native()
    assert torch.equal(stateful.forward(cache, NEW), stateful.forward(native, NEW))
    assert store.reads[:3] == ["cache.json", "tokens", "states"]


def test_states_that_never_come_can_be_given_up(
    stateful_of: Any, threads_end: Callable[[], bool]
) -> None:
    cache = stateful_of("qwen3_next").stream(StatesStore(stateful_of("qwen3_next").folder))
    cache.close()
    assert threads_end()


def test_damaged_states_are_asked_for_again_and_then_told(stateful: Stateful) -> None:
    for damage in (1, 2):
        store = StatesStore(stateful.folder, damage=damage)
        store.gate.set()
        cache = stateful.stream(store)
        if damage == 1:
            assert_same_states(cache, stateful.native())
            continue
        for _ in range(2):
            with pytest.raises(FormatError, match=r"states-\w+\.safetensors.*SHA-256"):
                stateful.forward(cache, NEW)


def test_missing_states_are_told(stateful: Stateful, tmp_path: Path) -> None:
    folder = copied(stateful, tmp_path)
    next(folder.glob("states-*")).unlink()
    cache = CompressedStreamingCache.from_pretrained(folder, model=stateful.model)
    with pytest.raises(StoreError, match="states-"):
        stateful.generate(cache, torch.cat((stateful.ids, NEW)))


def copied(stateful: Stateful, folder: Path, states: bytes | None = None) -> Path:
    """The artefact with other states, and with ``cache.json`` naming them."""
    for path in stateful.folder.rglob("*"):
        if path.is_file() and path.name != ".lock":
            target = folder / path.relative_to(stateful.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, path.read_bytes())
    if states is not None:
        document = json.loads((folder / "cache.json").read_bytes())
        digest = hashlib.sha256(states).hexdigest()
        document["states"].update(size_bytes=len(states), sha256=digest)
        (folder / f"states-{digest[:32]}.safetensors").write_bytes(states)
        (folder / "cache.json").write_text(json.dumps(document))
    return folder


def _without_a_layer(states: dict[str, Tensor]) -> bytes:
    first = next(iter(states)).partition(".")[0]
    return save({name: t for name, t in states.items() if not name.startswith(f"{first}.")})


def _without_recurrent(states: dict[str, Tensor]) -> bytes:
    return save({name: t for name, t in states.items() if "recurrent" not in name})


def _cut(kind: str, axis: int) -> Callable[[dict[str, Tensor]], bytes]:
    """One row less in one state of a kind."""

    def cut(states: dict[str, Tensor]) -> bytes:
        name = max(name for name in states if kind in name)
        length = states[name].shape[axis] - 1
        return save({**states, name: states[name].narrow(axis, 0, length).contiguous()})

    return cut


def _with_another(name: str) -> Callable[[dict[str, Tensor]], bytes]:
    return lambda states: save({**states, name: torch.zeros(2, 3)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"\xff" * 64, "not a safetensors file"),
        (lambda _: b"x", "not a safetensors file"),
        (_without_a_layer, "found none of the layers"),
        (_with_another("99.conv_states.0"), "found '99"),
        (_with_another("0.conv_states.7"), "found '0.conv_states.7'"),
        (_with_another("0.keys.0"), "found '0.keys.0'"),
        (lambda s: save({k: t.to(torch.int32) for k, t in s.items()}), "of torch.int32"),
    ],
)
def test_states_of_something_else_are_told(
    stateful: Stateful, change: Any, message: str, tmp_path: Path
) -> None:
    (path,) = stateful.folder.glob("states-*")
    folder = copied(stateful, tmp_path, change(load(path.read_bytes())))
    cache = CompressedStreamingCache.from_pretrained(folder, model=stateful.model)
    prompt = torch.cat((stateful.ids, NEW))
    for use in (cache.wait, lambda: stateful.generate(cache, prompt), cache.wait):
        with pytest.raises(FormatError, match=message):
            use()


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_other_shapes_are_told_before_the_model_sees_them(
    stateful: Stateful, kind: str, axis: int, tmp_path: Path
) -> None:
    (path,) = stateful.folder.glob("states-*")
    states = load(path.read_bytes())
    if not any(kind in name for name in states):
        pytest.skip(f"no {kind}")
    folder = copied(stateful, tmp_path, _cut(kind, axis)(states))
    cache = CompressedStreamingCache.from_pretrained(folder, model=stateful.model)
    for _ in range(2):
        with pytest.raises(FormatError, match=rf"'\d\.{kind}\.0' of shape \[.*found \["):
            stateful.forward(cache, NEW)


def test_missing_recurrent_states_are_told(stateful: Stateful, tmp_path: Path) -> None:
    (path,) = stateful.folder.glob("states-*")
    states = load(path.read_bytes())
    if not any("recurrent" in name for name in states):
        pytest.skip("no recurrent_states")
    folder = copied(stateful, tmp_path, _without_recurrent(states))
    cache = CompressedStreamingCache.from_pretrained(folder, model=stateful.model)
    with pytest.raises(FormatError, match=r"recurrent_states\.0' of shape \[.*found none"):
        cache.wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", SERVED)
def test_shape_and_dtype_are_known_of_every_state(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = publish(build(model_type, dtype), tmp_path).model
    (path,) = tmp_path.glob("states-*")
    states, specs = load(path.read_bytes()), state_specs(model, state_numbers(native_layers(model)))
    assert specs.keys() == states.keys()
    for name, state in states.items():
        assert specs[name].shape == tuple(state.shape)
        assert state.dtype in specs[name].dtypes


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", KINDS)
def test_states_in_another_dtype_are_told_before_the_model_sees_them(
    stateful: Stateful, kind: str, other: torch.dtype, tmp_path: Path
) -> None:
    (path,) = stateful.folder.glob("states-*")
    states = load(path.read_bytes())
    if not any(kind in name for name in states):
        pytest.skip(f"no {kind}")
    changed = {key: t.to(other) if kind in key else t for key, t in states.items()}
    folder = copied(stateful, tmp_path, save(changed))
    cache = CompressedStreamingCache.from_pretrained(folder, model=stateful.model)
    found = str(other).removeprefix("torch.")
    for _ in range(2):
        with pytest.raises(FormatError, match=f"expected .*float32.* found .*{found}"):
            stateful.forward(cache, NEW)


@pytest.mark.parametrize("interrupted", ["wait_states", "unpack_states", "_load_states"])
def test_interrupt_while_states_are_loaded_leaves_them_to_be_loaded(
    stateful_of: Any, interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stateful = stateful_of("falcon_h1")
    owners = {"wait_states": ChunkStream, "unpack_states": incoming, "_load_states": Incoming}
    whole = getattr(owners[interrupted], interrupted)
    interrupts = iter((True, True))

    def interrupt(*args: Any) -> Any:
        result = whole(*args)
        if next(interrupts, False):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owners[interrupted], interrupted, interrupt)
    cache, native = stateful.load(), stateful.native()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            cache.layers[0].materialize()
    assert_same_states(cache, native)
    assert torch.equal(stateful.forward(cache, NEW), stateful.forward(native, NEW))


@pytest.mark.parametrize("model_type", HYBRID)
def test_artefact_without_states_is_refused(
    model_type: str, stateful_of: Any, tmp_path: Path, threads_end: Callable[[], bool]
) -> None:
    stateful = stateful_of(model_type)
    folder = copied(stateful, tmp_path)
    document = json.loads((folder / "cache.json").read_bytes())
    del document["states"]
    (folder / "cache.json").write_text(json.dumps(document))
    with pytest.raises(FormatError, match="has no states"):
        CompressedStreamingCache.from_pretrained(folder, model=stateful.model)
    assert threads_end()


# What goes on from there.


def test_states_cannot_be_taken_back(stateful: Stateful) -> None:
    cache = stateful.load()
    with pytest.raises(RuntimeError, match="no recurrent or convolutional states of before"):
        cache.crop(-1)
    with pytest.raises(PromptMismatch, match="at least one new token"):
        cache.inputs()
    cache.crop(0)
    prompt = torch.cat((stateful.ids, NEW))
    answer = stateful.generate(cache, prompt)
    assert torch.equal(answer, stateful.generate(stateful.load(), prompt))
    with pytest.raises(PromptMismatch, match="states cannot give them up"):
        cache.inputs(input_ids=NEW)
    second = cache.inputs(input_ids=NEW, previous=answer[None])
    assert second["input_ids"].shape[1] == len(answer) + len(NEW)


@pytest.mark.parametrize("model_type", SERVED)
def test_streamed_states_keep_their_levels_when_saved_by_hand(
    model_type: str, tmp_path: Path
) -> None:
    stateful = publish(build(model_type), tmp_path / "a", levels=["raw"])
    cache = stateful.load("raw")
    manifest = save_cache(stateful.model, None, stateful.ids, tmp_path / "b", cache=cache)
    with record_cache(stateful.model, tmp_path / "c"):
        stateful.generate(stateful.load("raw"), torch.cat((stateful.ids, NEW)))
    recorded = Artifact.open(LocalStore(tmp_path / "c")).manifest
    assert [level.name for level in (*manifest.levels, *recorded.levels)] == ["raw", "raw"]


@pytest.mark.parametrize("level", ["lossless", "coarsest"])
def test_grown_cache_is_saved_with_its_states(
    stateful: Stateful, level: str, tmp_path: Path
) -> None:
    cache = stateful.load(level)
    cache.save_pretrained(tmp_path / "same")
    first = Artifact.open(LocalStore(tmp_path / "same"))
    assert first.read_states() == Artifact.open(LocalStore(stateful.folder)).read_states()
    grown = stateful.generate(cache, torch.cat((stateful.ids, NEW)))
    cache.save_pretrained(tmp_path / "same", token_ids=grown)
    second = Artifact.open(LocalStore(tmp_path / "same"))
    second.verify()
    assert len(list((tmp_path / "same").glob("states-*"))) == 1
    exact = {record.name: record.exact for record in second.manifest.levels}
    coarsest = second.manifest.levels[0].name
    lossy = level == "coarsest" and not exact[coarsest]
    assert second.manifest.states.source == (coarsest if lossy else "exact")
    loaded = CompressedStreamingCache.from_pretrained(
        tmp_path / "same", model=stateful.model, level="lossless"
    )
    assert loaded.get_seq_length() == cache.get_seq_length() == len(grown) - 1
    assert_same_states(loaded, cache)
    # States that have seen a lossy level stay so, whatever is read of the artefact.
    stateful.forward(loaded, NEW[:1])
    ids = torch.cat((grown[:-1], NEW[:1]))
    loaded.save_pretrained(tmp_path / "other", token_ids=ids)
    third = Artifact.open(LocalStore(tmp_path / "other")).manifest
    assert third.states.source == second.manifest.states.source


def test_longer_context_replaces_the_states(stateful: Stateful, tmp_path: Path) -> None:
    publish(stateful.model, tmp_path, n_tokens=64, tables=None)
    publish(stateful.model, tmp_path, tables=None)
    (path,) = tmp_path.glob("states-*")
    assert path.name == next(stateful.folder.glob("states-*")).name
    cache = CompressedStreamingCache.from_pretrained(
        tmp_path, model=stateful.model, level="lossless"
    )
    assert_same_states(cache, stateful.native())


def test_recorded_generation_has_the_states_of_all_but_the_last_token(
    stateful: Stateful, tmp_path: Path
) -> None:
    with record_cache(stateful.model, tmp_path / "first", tables=None):
        answer = stateful.generate(None, stateful.ids)
    cache = CompressedStreamingCache.from_pretrained(tmp_path / "first", model=stateful.model)
    assert cache.token_ids.tolist() == answer[:-1].tolist()
    native = DynamicCache(config=stateful.model.config)
    assert torch.equal(stateful.generate(native, stateful.ids), answer)
    assert_same_states(cache, native)
    with record_cache(stateful.model, tmp_path / "second", tables=None):
        answer = stateful.generate(cache, torch.cat((answer, NEW)))
    second = CompressedStreamingCache.from_pretrained(tmp_path / "second", model=stateful.model)
    assert second.token_ids.tolist() == answer[:-1].tolist()
    assert_same_states(second, cache)


@needs_mamba2
def test_cache_that_cannot_count_is_not_saved(stateful_of: Any, tmp_path: Path) -> None:
    stateful = stateful_of("mamba2")
    native = DynamicCache(config=stateful.model.config)
    stateful.model(input_ids=stateful.ids[None], **{cache_argument(stateful.model): native})
    with pytest.raises(UnsupportedError, match="record_cache"):
        save_cache(stateful.model, None, stateful.ids, tmp_path / "a", cache=native)
    with (
        pytest.raises(UnsupportedError, match="begin the block before"),
        record_cache(stateful.model, tmp_path / "a"),
    ):
        stateful.forward(native, NEW)
    assert not (tmp_path / "a").exists()


def test_batch_of_states_is_not_saved(stateful: Stateful, tmp_path: Path) -> None:
    native = stateful.native()
    native.reorder_cache(torch.tensor([0, 0]))
    with pytest.raises(UnsupportedError, match="batch of 2"):
        save_cache(stateful.model, None, stateful.ids, tmp_path / "a", cache=native)


def test_rows_are_selected_with_their_states(stateful: Stateful) -> None:
    cache = stateful.load()
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([1]))
    assert_same_states(cache, stateful.native())


# Beginnings, chunks as text, policies.


def test_only_whole_contexts_that_the_prompt_goes_on_from_are_prefixes(
    stateful: Stateful, tmp_path: Path
) -> None:
    for n_tokens in (32, 64, 70):
        publish(stateful.model, tmp_path / str(n_tokens), n_tokens=n_tokens)
    for prompt, found in ((70, 64), (69, 64), (65, 64), (64, 32), (33, 32), (32, None)):
        cache = load_longest_prefix(tmp_path, stateful.ids[:prompt], model=stateful.model)
        assert (cache and cache.context_length) == found
    longer = torch.cat((stateful.ids, NEW))
    cache = load_longest_prefix(tmp_path, longer, model=stateful.model, level="lossless")
    assert cache is not None
    assert cache.context_length == 70
    expected = stateful.generate(stateful.load(), longer)
    assert torch.equal(stateful.generate(cache, longer), expected)


def scripted_cache(stateful: Stateful, policy: Any) -> CompressedStreamingCache:
    artifact = Artifact.open(LocalStore(stateful.folder))
    return CompressedStreamingCache(artifact, stateful.model, policy)


@pytest.mark.parametrize("model_type", HYBRID)
def test_first_chunks_can_come_as_text(model_type: str, stateful_of: Any, scripted: Any) -> None:
    stateful = stateful_of(model_type)
    exact = len(Artifact.open(LocalStore(stateful.folder)).manifest.levels) - 1
    native = stateful.native()
    for levels in ((TEXT,) * 3, (TEXT, TEXT, exact), (TEXT, exact, exact)):
        cache = scripted_cache(stateful, scripted(levels))
        for (keys, values, _), layer in zip(cache, native.layers, strict=True):
            if keys is not None:
                torch.testing.assert_close(keys, layer.keys)
                torch.testing.assert_close(values, layer.values)
        assert_same_states(cache, native)  # those of the artefact, not recomputed ones
    for levels in ((exact, TEXT, exact), (TEXT, exact, TEXT)):
        with pytest.raises(UnsupportedError, match="recompute chunk"):
            scripted_cache(stateful, scripted(levels)).wait()


def test_policy_knows_that_later_chunks_follow_recomputed_ones_only(
    stateful_of: Any, scripted: Any
) -> None:
    stateful = stateful_of("qwen3_next")
    calibrate(stateful.model)
    policy = scripted((TEXT, 0, 0))
    scripted_cache(stateful, policy).wait()
    finite = [[seconds < LATER for seconds in state.recompute_s] for state in policy.states[:3]]
    assert finite == [[True] * 3, [True] * 3, [True, True, False]]


@pytest.mark.parametrize("policy", ["paper", "robust", "layered"])
def test_target_is_met_whatever_is_kept(stateful: Stateful, policy: str) -> None:
    options = {"level": None, "policy": policy, "ttft_target_s": 30.0}
    cache = stateful.load(**options)
    answer = stateful.generate(cache, torch.cat((stateful.ids, NEW)))
    assert len(answer) == CONTEXT_TOKENS + len(NEW) + 5
    assert_same_states(stateful.load(**options), stateful.native())


@needs_jamba
def test_text_of_a_model_that_goes_on_token_by_token_is_refused(stateful_of: Any) -> None:
    with pytest.raises(UnsupportedError, match="token by token"):
        stateful_of("jamba").load(None, policy="text")


# What cannot be.


@needs_jamba
@needs_mamba2
def test_models_that_have_no_table(stateful_of: Any, tiny_tokenizer: Any, tiny_text: str) -> None:
    def profile(model_type: str, config: Any) -> Any:
        return profile_model(
            stateful_of(model_type).model,
            tiny_tokenizer,
            {"text": tiny_text},
            configs=[config],
            sample_tokens=100,
            max_samples=1,
            progress=False,
        )

    with pytest.raises(UnsupportedError, match="for `delta` alone"):
        profile("jamba", TransformConfig())
    with pytest.raises(UnsupportedError, match="Mamba2ForCausalLM keeps nothing but states"):
        profile("mamba2", DeltaConfig())


@pytest.mark.parametrize("model_type", HYBRID)
def test_levels_of_transform_leave_states_exact(
    model_type: str, stateful_of: Any, tiny_tokenizer: Any, tiny_text: str, tmp_path: Path
) -> None:
    stateful = stateful_of(model_type)
    table = profile_model(
        stateful.model,
        tiny_tokenizer,
        {"text": tiny_text},
        configs=[TransformConfig(group=2, step=3e-4, levels=3)],
        sample_tokens=100,
        max_samples=2,
        progress=False,
    )
    save_cache(stateful.model, None, stateful.ids, tmp_path, tables=table, progress=False)
    native, errors = stateful.native(), []
    for level in ("transform-0", "transform-2"):
        cache = CompressedStreamingCache.from_pretrained(
            tmp_path, model=stateful.model, level=level, tables=table
        )
        assert_same_states(cache, native)
        pairs = zip(cache, native.layers, strict=True)
        errors.append(
            sum((keys - layer.keys).norm() for (keys, *_), layer in pairs if keys is not None)
        )
    assert 0 < errors[1] < errors[0]


def test_version_that_cannot_go_on_token_by_token_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("jamba")
    monkeypatch.setattr(transformers, "__version__", "5.20.9")
    with pytest.raises(UnsupportedError, match=r"JambaForCausalLM .* from transformers 5\.21 on"):
        native_layers(model)
    monkeypatch.setattr(transformers, "__version__", "5.21.0.dev0")
    assert len(native_layers(model)) == 2


@needs_jamba
def test_several_new_tokens_in_a_pass_of_a_model_that_would_forget(stateful_of: Any) -> None:
    stateful = stateful_of("jamba")
    with pytest.raises(UnsupportedError, match="a pass of 3 tokens"):
        stateful.model(input_ids=NEW[None], **{cache_argument(stateful.model): stateful.load()})


@pytest.mark.parametrize(
    "model_type",
    [pytest.param("jamba", marks=needs_jamba), pytest.param("mamba2", marks=needs_mamba2)],
)
def test_context_that_would_be_forgotten_is_not_handed_over(
    model_type: str, stateful_of: Any
) -> None:
    source = stateful_of(model_type)
    target = DynamicCache(config=source.model.config)
    with pytest.raises(UnsupportedError, match="streamed cache itself"):
        fill_cache(target, source.load())


def test_states_are_handed_over_for_several_contexts(stateful_of: Any) -> None:
    for model_type in HYBRID:
        stateful = stateful_of(model_type)
        other = stateful.native(stateful.ids[9:])
        target, mask = fill_cache(
            DynamicCache(config=stateful.model.config), stateful.load(), other
        )
        assert mask.tolist() == [[1] * 70, [0] * 9 + [1] * 61]
        for index, exact in ((0, stateful.native()), (1, other)):
            row = copy.deepcopy(target)
            row.reorder_cache(torch.tensor([index]))
            assert_same_states(row, exact)


# The Hub.


def test_pushed_states_are_streamed_back_and_replaced(
    hub: LocalHub, stateful: Stateful, tmp_path: Path
) -> None:
    options = {"endpoint": hub.endpoint, "token": hub.token}
    publish(stateful.model, tmp_path / "short", n_tokens=64)
    push_artifact(tmp_path / "short", "me/context", **options)
    push_artifact(stateful.folder, "me/context", **options)
    files = HfApi(**options).list_repo_files("me/context")
    (states,) = (file for file in files if file.startswith("states-"))
    assert (stateful.folder / states).exists()
    cache = CompressedStreamingCache.from_pretrained(
        "me/context", model=stateful.model, level="lossless", **options
    )
    assert_same_states(cache, stateful.native())


# The file.


def test_file_names_every_state_by_layer_kind_and_number(stateful: Stateful) -> None:
    artifact = Artifact.open(LocalStore(stateful.folder))
    data = artifact.read_states()
    layers = native_layers(stateful.model)
    native = cached_states(stateful.native())
    for name, tensor in load(data).items():
        layer, kind, number = name.split(".")
        assert torch.equal(tensor, getattr(native[int(layer)], kind)[int(number)])
    numbers = state_numbers(layers)
    states = unpack_states(data, numbers, state_specs(stateful.model, numbers))
    assert sum(held.size_bytes for held in states.values()) < len(data)


def test_unplaced_model_is_given_its_positions() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    config = CONFIG_MAPPING["bamba"](
        **COMMON, **ATTENTION, **MAMBA_2, num_hidden_layers=1, attn_layer_indices=[0]
    )
    model = AutoModelForCausalLM.from_config(config)
    assert place_arguments(model, 4, ids)["position_ids"].tolist() == [[4, 5, 6]]
    assert place_arguments(build("lfm2"), 4, ids) == {}
