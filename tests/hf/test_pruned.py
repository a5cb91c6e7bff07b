"""Caches from which tokens were evicted: saved with their positions, and continued."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, set_seed

from hf_cachegen import (
    CompressedStreamingCache,
    FormatError,
    IdentityError,
    PromptMismatch,
    UnsupportedError,
    fill_cache,
    load_longest_prefix,
    push_artifact,
    record_cache,
    save_cache,
)
from hf_cachegen.artifact import Artifact
from hf_cachegen.bench.local_hub import LocalHub
from hf_cachegen.codec.rope import rotate, unrotate
from hf_cachegen.hf.compat import cache_argument, prefills_in_pieces
from hf_cachegen.hf.saved import find_saved
from hf_cachegen.stores import LocalStore
from hf_cachegen.streaming.policy import TEXT

CHUNK_TOKENS = 16
KEPT = 40
RECENT = 8
LEVELS = ("delta-0", "delta-3", "lossless", "raw")
NEW = torch.tensor([[7, 9, 11, 13]])


@torch.no_grad()
def heavy_hitters(model: PreTrainedModel, ids: Tensor, kept: int, recent: int) -> list[Tensor]:
    """Positions ``[H, kept]`` by layer, best first: the last ones, and those attended to most.

    As H2O (Zhang et al. 2023) chooses them, once for the whole context.
    """
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    attentions = eager(input_ids=ids[None], output_attentions=True).attentions
    positions = []
    for attention in attentions:
        score = attention[0].sum(dim=1).view(model.config.num_key_value_heads, -1, len(ids)).sum(1)
        score[:, -recent:] = torch.inf
        positions.append(score.topk(kept, dim=-1).indices)
    return positions


def evict(cache: DynamicCache, positions: list[Tensor]) -> DynamicCache:
    """A native cache with the tokens at some positions ``[n]`` or ``[H, n]`` of each layer."""
    pruned = DynamicCache()
    for index, (layer, place) in enumerate(zip(cache.layers, positions, strict=True)):
        by_head = place.expand(layer.keys.shape[1], -1)
        picked = [t.gather(2, by_head[None, ..., None].expand(*t.shape[:2], -1, t.shape[-1]))
                  for t in (layer.keys, layer.values)]  # fmt: skip
        pruned.update(*picked, index)
    return pruned


@dataclass(frozen=True)
class Pruned:
    """A model, a context, its cache after eviction, and the artefact of that."""

    model: PreTrainedModel
    ids: Tensor
    whole: DynamicCache
    positions: list[Tensor]
    folder: Path

    def load(self, level: str = "lossless", **options: Any) -> CompressedStreamingCache:
        """A new streamed cache."""
        options = {"level": level, **options}
        return CompressedStreamingCache.from_pretrained(self.folder, model=self.model, **options)

    def native(self) -> DynamicCache:
        """The same in a cache of transformers, in the order of the context."""
        return evict(self.whole, [place.sort(dim=-1).values for place in self.positions])

    @torch.no_grad()
    def logits(self, cache: Any, ids: Tensor, first: int | None = None) -> Tensor:
        """Of one pass of ``ids`` ``[1, T]``, at positions from ``first`` on if it is given."""
        place = {} if first is None else {"position_ids": torch.arange(ids.shape[1])[None] + first}
        arguments = {cache_argument(self.model): cache, **place}
        return self.model(input_ids=ids, **arguments).logits

    def greedy(self, cache: Any, ids: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """(ids, logits) of greedy decoding with a native cache, its positions given by hand."""
        first, found, logits = len(self.ids), [], []
        for _ in range(steps):
            # As generate() does: only the last token's logits are computed.
            place = torch.arange(first, first + ids.shape[1])[None]
            with torch.no_grad():
                arguments = {cache_argument(self.model): cache, "position_ids": place}
                out = self.model(input_ids=ids, logits_to_keep=1, **arguments).logits[:, -1]
            logits.append(out)
            first += ids.shape[1]
            allowed = out.index_fill(-1, torch.tensor([self.model.config.eos_token_id]), -torch.inf)
            ids = allowed.argmax(-1)[None]
            found.append(ids)
        return torch.cat(found, dim=1), torch.stack(logits)


Publish = Callable[..., Pruned]


@pytest.fixture(scope="session")
def prune(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Publish:
    """``prune(positions)`` saves the context of ``llama`` with these tokens of each layer."""

    def prune(positions: list[Tensor], given: Any = None, **options: Any) -> Pruned:
        folder = tmp_path_factory.mktemp("pruned") / "context"
        whole = llama.native()
        settings = {"levels": LEVELS, "chunk_tokens": CHUNK_TOKENS, "progress": False, **options}
        cache, places = evict(whole, positions), positions if given is None else given
        save_cache(llama.model, None, llama.ids, folder, cache=cache, positions=places, **settings)
        return Pruned(llama.model, llama.ids, whole, positions, folder)

    return prune


@pytest.fixture(scope="session")
def same_for_all(llama: Any, prune: Publish) -> Pruned:
    """Every layer and head has the same tokens."""
    kept = torch.tensor([*range(3), *range(5, 60, 2), 60, 61, 63, 64, 66, 67, 69])
    return prune([kept] * 3, kept.tolist())


@pytest.fixture(scope="session")
def by_layer(llama: Any, prune: Publish) -> Pruned:
    """Each layer has tokens of its own."""
    generator = torch.Generator().manual_seed(3)
    return prune([torch.randperm(70, generator=generator)[:KEPT].sort().values for _ in range(3)])


@pytest.fixture(scope="session")
def by_head(llama: Any, prune: Publish) -> Pruned:
    """Each head has heavy hitters of its own, in the order of their scores."""
    return prune(heavy_hitters(llama.model, llama.ids, KEPT, RECENT))


@pytest.fixture(params=["same_for_all", "by_layer", "by_head"])
def pruned(request: pytest.FixtureRequest) -> Pruned:
    """Each of them."""
    return request.getfixturevalue(request.param)


def generate(model: PreTrainedModel, cache: Any, prompt: Tensor | None, **options: Any) -> Any:
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **options}
    return model.generate(
        prompt,
        output_logits=True,
        return_dict_in_generate=True,
        **{cache_argument(model): cache},
        **settings,
    )


def generate_hiding(pruned: Pruned, prompt: Tensor, mask: Tensor, **options: Any) -> Any:
    """The same from the whole native cache, of which the mask hides what was evicted."""
    evicted = torch.ones(len(pruned.ids), dtype=torch.bool)
    evicted[pruned.positions[0]] = False
    hiding = mask.clone()
    hiding[:, : len(evicted)][:, evicted] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = copy.deepcopy(pruned.whole)
    rows = max(len(prompt), options.get("num_beams", 1), options.get("num_return_sequences", 1))
    cache.batch_repeat_interleave(rows)
    return generate(
        pruned.model, cache, prompt, attention_mask=hiding, position_ids=places, **options
    )


def prompts(pruned: Pruned, new: Tensor = NEW) -> Tensor:
    return torch.cat((pruned.ids.expand(len(new), -1), new), dim=1)


def test_pass_is_that_of_the_native_cache(pruned: Pruned) -> None:
    ours = pruned.logits(pruned.load(), NEW)
    assert torch.equal(ours, pruned.logits(pruned.native(), NEW, first=70))


def test_generation_is_that_from_the_native_cache(pruned: Pruned) -> None:
    cache = pruned.load()
    assert cache.get_seq_length() == cache.context_length == 70
    output = pruned.model.generate(
        **cache.inputs(input_ids=NEW),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens, logits = pruned.greedy(pruned.native(), NEW, 6)
    assert torch.equal(torch.stack(output.logits), logits)
    assert torch.equal(output.sequences[:, 74:], tokens)
    assert cache.get_seq_length() == 79
    assert cache.layers[0].keys.shape[-2] == pruned.positions[0].shape[-1] + 9


THREE = torch.tensor([[7, 9, 11], [8, 12, 6], [30, 31, 32]])
UNEVEN = torch.tensor([[0, 0, 7, 9, 11], [8, 12, 6, 5, 4]])
SAMPLED = {"do_sample": True, "num_return_sequences": 3, "temperature": 0.8}


@pytest.mark.parametrize(
    ("new", "options"),
    [
        (NEW, {}),
        (NEW[:, :1], {}),
        (THREE, {}),
        (UNEVEN, {}),
        (NEW, {"num_beams": 3}),
        (NEW, SAMPLED),
        (NEW, {"prefill_chunk_size": 2}),
    ],
    ids=["whole prompt", "one token", "batch", "padding", "beams", "sampling", "pieces"],
)
def test_calls_are_those_that_hide_what_was_evicted(
    same_for_all: Pruned, new: Tensor, options: dict[str, Any]
) -> None:
    if "prefill_chunk_size" in options and not prefills_in_pieces():
        pytest.skip("this version runs the whole prompt again")
    prompt = prompts(same_for_all, new)
    mask = torch.ones_like(prompt)
    mask[:, 70:][new == 0] = 0
    set_seed(5)
    ours = generate(same_for_all.model, same_for_all.load(), prompt, attention_mask=mask, **options)
    set_seed(5)
    truth = generate_hiding(same_for_all, prompt, mask, **options)
    assert torch.equal(ours.sequences, truth.sequences)
    torch.testing.assert_close(
        torch.stack(ours.logits), torch.stack(truth.logits), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}], ids=["", "lookup"])
def test_new_ids_with_the_mask_of_all(pruned: Pruned, options: dict[str, Any]) -> None:
    mask = torch.ones(1, 74, dtype=torch.long)
    ours = generate(pruned.model, pruned.load(), NEW, attention_mask=mask, **options)
    assert torch.equal(ours.sequences[:, 4:], pruned.greedy(pruned.native(), NEW, 6)[0])


def test_embeddings_of_the_whole_prompt(pruned: Pruned) -> None:
    embeds = pruned.model.get_input_embeddings()(prompts(pruned)).detach()
    ours = generate(pruned.model, pruned.load(), None, inputs_embeds=embeds)
    assert torch.equal(ours.sequences, pruned.greedy(pruned.native(), NEW, 6)[0])


def test_conversation_goes_on_and_goes_back(pruned: Pruned) -> None:
    cache = pruned.load()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    first = pruned.model.generate(**cache.inputs(input_ids=NEW), **options)
    second = pruned.model.generate(**cache.inputs(input_ids=THREE[:1], previous=first), **options)
    native = pruned.native()
    pruned.greedy(native, NEW, 6)
    again = torch.cat((first[:, 79:], THREE[:1]), dim=1)
    with torch.no_grad():
        place = torch.arange(79, 79 + again.shape[1])[None]
        arguments = {cache_argument(pruned.model): native, "position_ids": place}
        logits = pruned.model(again, logits_to_keep=1, **arguments).logits
    assert second[0, 83] == logits[0, -1, 1:].argmax() + 1
    # Without previous=, what was added is removed again.
    assert torch.equal(pruned.model.generate(**cache.inputs(input_ids=NEW), **options), first)


def test_copies_are_pruned_too(pruned: Pruned) -> None:
    cache = pruned.load()
    copied = copy.deepcopy(cache)
    assert torch.equal(pruned.logits(copied, NEW), pruned.logits(cache, NEW))
    assert copied.get_seq_length() == 74


def test_reset_cache_begins_anew(pruned: Pruned) -> None:
    cache = pruned.load()
    pruned.logits(cache, NEW)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(pruned.logits(cache, NEW), pruned.logits(DynamicCache(), NEW))


def test_gradients_reach_what_is_kept(pruned: Pruned) -> None:
    arguments = {cache_argument(pruned.model): pruned.load()}
    ours = pruned.model(NEW, **arguments).logits.detach()
    assert torch.equal(ours, pruned.logits(pruned.native(), NEW, first=70))


@pytest.mark.parametrize("level", ["delta-0", "delta-3", "transform-0", "transform-1"])
def test_lossy_levels_rotate_by_the_positions_that_were(
    llama: Any, prune: Publish, transform_table: Any, level: str
) -> None:
    # A level that took the keys for tokens in a row would be off by their rotation, which is far
    # more than its own error.
    table = transform_table(llama.model) if level.startswith("transform") else "auto"
    positions = heavy_hitters(llama.model, llama.ids, KEPT, RECENT)
    pruned = prune(positions, tables=table, levels=[level, "lossless"])
    rope = Artifact.open(LocalStore(pruned.folder)).manifest.identity.layout.ropes["default"]
    lossy, exact = pruned.load(level), pruned.load()
    for place, ours, theirs in zip(positions, lossy.layers, exact.layers, strict=True):
        at = place.sort(dim=-1).values
        before, after = (unrotate(keys[0], rope, at) for keys in (ours.keys, theirs.keys))
        assert torch.allclose(rotate(before, rope, at), ours.keys[0], atol=1e-5)
        error = (before - after).norm() / after.norm()
        values = (ours.values - theirs.values).norm() / theirs.values.norm()
        assert 0 < error < 2 * values


def test_order_of_the_cache_makes_no_difference(
    llama: Any, prune: Publish, by_head: Pruned
) -> None:
    in_order = [place.sort(dim=-1).values for place in by_head.positions]
    assert any(not torch.equal(*pair) for pair in zip(in_order, by_head.positions, strict=True))
    assert files(prune(in_order).folder) == files(by_head.folder)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.*") if path.name != ".lock"}


@pytest.mark.parametrize(
    "shape",
    [
        lambda p: p,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        lambda p: p.expand(3, -1),
        lambda p: p.expand(3, 2, -1),
        lambda p: [p.numpy()] * 3,
        lambda p: [p.expand(2, -1)] * 3,
        lambda p: [p.tolist()] * 3,
        lambda p: p.int(),
    ],
)
def test_positions_in_any_form(same_for_all: Pruned, prune: Publish, shape: Any) -> None:
    given = prune(same_for_all.positions, shape(same_for_all.positions[0]), levels=["lossless"])
    ours = given.logits(given.load(), NEW)
    assert torch.equal(ours, same_for_all.logits(same_for_all.load(), NEW))
    # Once is enough, however they were given.
    first, second = (next(p.folder.glob("kept-*")).read_bytes() for p in (given, same_for_all))
    assert first == second


def test_evicting_nothing_changes_no_chunk(llama: Any, prune: Publish) -> None:
    levels = [level.name for level in Artifact.open(LocalStore(llama.folder)).manifest.levels]
    pruned = prune([torch.arange(70)] * 3, levels=levels, chunk_tokens=32)
    assert torch.equal(pruned.logits(pruned.load(), NEW), pruned.logits(llama.load(), NEW))
    ours, theirs = (
        {path.read_bytes() for path in folder.glob("chunks/*.kv")}
        for folder in (pruned.folder, llama.folder)
    )
    assert ours == theirs


def test_prompt_equal_to_the_context(same_for_all: Pruned, by_layer: Pruned) -> None:
    # Every layer of the one has kept the last token, and computes it again.
    ours = generate(same_for_all.model, same_for_all.load(), same_for_all.ids[None])
    native = same_for_all.native()
    native.crop(-1)
    with torch.no_grad():
        arguments = {cache_argument(same_for_all.model): native}
        place = torch.tensor([[69]])
        last = same_for_all.ids[None, 69:]
        logits = same_for_all.model(last, position_ids=place, **arguments).logits[:, -1]
    assert torch.equal(ours.logits[0], logits)
    assert not all((place == 69).any() for place in by_layer.positions)
    with pytest.raises(PromptMismatch, match="pruned layers cannot give one up"):
        generate(by_layer.model, by_layer.load(), by_layer.ids[None])
    with pytest.raises(PromptMismatch, match="pruned layers cannot give them up"):
        by_layer.load().inputs()


@pytest.mark.parametrize("used", [False, True], ids=["on its way", "used"])
def test_crop_goes_back_as_far_as_all_is_there(same_for_all: Pruned, used: bool) -> None:
    cache = same_for_all.load()
    if used:
        same_for_all.logits(cache, NEW)
        cache.crop(-4)
    cache.crop(-1)  # 69, 67 and 66 are kept, and 68 is not
    assert cache.get_seq_length() == cache.known_length == 69
    with pytest.raises(RuntimeError, match="not every layer and head has kept"):
        cache.crop(-1)
    native = same_for_all.native()
    native.crop(-1)
    assert torch.equal(same_for_all.logits(cache, NEW), same_for_all.logits(native, NEW, first=69))
    shorter = same_for_all.ids[None, :60]
    with pytest.raises(PromptMismatch, match="pruned layers cannot be cropped"):
        generate(same_for_all.model, same_for_all.load(), shorter)
    assert cache.is_pruned


def test_other_tokens_are_refused(pruned: Pruned) -> None:
    prompt = prompts(pruned)
    prompt[0, 33] += 1
    with pytest.raises(PromptMismatch, match="position 33"):
        generate(pruned.model, pruned.load(), prompt)


def test_caches_of_transformers_cannot_take_it(pruned: Pruned) -> None:
    with pytest.raises(UnsupportedError, match="counts positions by the tokens that it holds"):
        fill_cache(DynamicCache(), pruned.load())


def test_chunks_are_no_text(pruned: Pruned) -> None:
    with pytest.raises(UnsupportedError, match="no parts of the text"):
        pruned.load(level=None, policy="text")
    cache = pruned.load(level=None, policy="robust", ttft_target_s=1e-4)
    cache.wait()
    assert all(step.level != TEXT for step in cache.stream_report())


def test_only_the_whole_context_is_a_prefix(
    llama: Any, same_for_all: Pruned, tmp_path: Path
) -> None:
    root = same_for_all.folder.parent
    more = torch.cat((llama.ids, NEW[0]))
    found = load_longest_prefix(root, more, model=llama.model, level="lossless")
    assert found is not None
    assert found.is_pruned
    assert torch.equal(
        same_for_all.logits(found, NEW), same_for_all.logits(same_for_all.load(), NEW)
    )
    assert load_longest_prefix(root, llama.ids[:69], model=llama.model) is None
    assert load_longest_prefix(root, llama.ids, model=llama.model) is None
    # As long a context that has every token is preferred.
    save_cache(llama.model, None, llama.ids, tmp_path / "z", levels=["raw"], progress=False)
    shutil.copytree(same_for_all.folder, tmp_path / "a")
    assert not load_longest_prefix(tmp_path, more, model=llama.model).is_pruned


def test_saved_again_as_it_is(pruned: Pruned, tmp_path: Path) -> None:
    pruned.load().save_pretrained(tmp_path / "copy")
    assert files(tmp_path / "copy") == files(pruned.folder)
    cache = pruned.load("delta-3")
    manifest = save_cache(
        pruned.model, None, pruned.ids, tmp_path / "again", cache=cache, levels=["delta-0", "raw"],
        progress=False,
    )  # fmt: skip
    assert {chunk.source for chunk in manifest.chunks} == {"delta-3"}
    again = CompressedStreamingCache.from_pretrained(
        tmp_path / "again", model=pruned.model, level="raw"
    )
    ours, expected = pruned.logits(again, NEW), pruned.logits(pruned.load("delta-3"), NEW)
    assert torch.equal(ours, expected)


def test_what_has_changed_is_not_saved(pruned: Pruned, tmp_path: Path) -> None:
    cache = pruned.load()
    pruned.logits(cache, NEW)
    ids = prompts(pruned)[0]
    with pytest.raises(UnsupportedError, match="gone from 70 to 74 tokens"):
        cache.save_pretrained(tmp_path / "out", token_ids=ids)
    with pytest.raises(UnsupportedError, match="gone from 70 to 74 tokens"):
        save_cache(pruned.model, None, ids, tmp_path / "out", cache=cache, progress=False)
    with (
        pytest.raises(UnsupportedError, match="gone from"),
        record_cache(pruned.model, tmp_path / "out", progress=False),
    ):
        pruned.model.generate(**pruned.load().inputs(input_ids=NEW), max_new_tokens=2)
    assert not (tmp_path / "out" / "cache.json").exists()


def test_eviction_while_recording_is_noticed(llama: Any, tmp_path: Path) -> None:
    # As a press does it: in a hook, after the prompt's own pass.
    def press(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs[cache_argument(llama.model)]
        layer = cache.layers[module.layer_idx]
        if layer.keys.shape[-2] == 70:
            layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]

    hooks = [
        block.self_attn.register_forward_hook(press, with_kwargs=True)
        for block in llama.model.model.layers
    ]
    try:
        with (
            pytest.raises(UnsupportedError, match="some were evicted"),
            record_cache(llama.model, tmp_path / "out", progress=False),
        ):
            llama.model.generate(llama.ids[None], max_new_tokens=3, do_sample=False)
    finally:
        for hook in hooks:
            hook.remove()


def test_it_is_not_what_a_plain_save_would_write(llama: Any, pruned: Pruned) -> None:
    assert find_saved(pruned.folder, llama.model, llama.ids, levels=["lossless"]) is None


def test_another_eviction_is_not_overwritten(
    llama: Any, same_for_all: Pruned, by_layer: Pruned, tmp_path: Path
) -> None:
    folder = tmp_path / "context"
    options = {"levels": ["raw"], "progress": False}
    save_cache(
        llama.model, None, llama.ids, folder, cache=by_layer.native(),
        positions=by_layer.positions, **options,
    )  # fmt: skip
    with pytest.raises(IdentityError, match="kept"):
        save_cache(llama.model, None, llama.ids, folder, **options)
    other = {"cache": same_for_all.native(), "positions": same_for_all.positions}
    with pytest.raises(IdentityError, match="kept"):
        save_cache(llama.model, None, llama.ids, folder, **other, **options)
    save_cache(llama.model, None, llama.ids, folder, **other, **options, overwrite=True)
    assert len(list(folder.glob("kept-*"))) == 1
    save_cache(llama.model, None, llama.ids, folder, **options, overwrite=True)
    assert not list(folder.glob("kept-*"))


@pytest.mark.parametrize(
    ("positions", "reason"),
    [
        (range(39), "got the shape"),
        (torch.arange(40).expand(2, -1), "got the shape"),
        (torch.arange(40).expand(3, 4, -1), "got the shape"),
        (torch.arange(40.0), "got torch.float32"),
        ([], "got"),
        (7, "got"),
        ("most", "got"),
        ([torch.arange(40), torch.arange(39), torch.arange(40)], "got list"),
        (torch.arange(40) - 1, "got -1 to 38"),
        (torch.arange(40) + 31, "got 31 to 70"),
        ([*range(39), 38], "one twice"),
    ],
)
def test_wrong_positions_are_refused(
    llama: Any, tmp_path: Path, positions: Any, reason: str
) -> None:
    cache = evict(llama.native(), [torch.arange(40)] * 3)
    with pytest.raises(ValueError, match=reason):
        save_cache(
            llama.model, None, llama.ids, tmp_path / "out", cache=cache, positions=positions,
            progress=False,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_layers_of_different_length_are_refused(llama: Any, tmp_path: Path) -> None:
    places = [torch.arange(n) for n in (40, 30, 40)]
    with pytest.raises(UnsupportedError, match="30 to 40 tokens: transformers makes one"):
        save_cache(
            llama.model, None, llama.ids, tmp_path / "out", cache=evict(llama.native(), places),
            positions=places, progress=False,
        )  # fmt: skip


def test_positions_need_a_cache_that_lacks_some(llama: Any, tmp_path: Path) -> None:
    for cache in (None, llama.load()):
        with pytest.raises(ValueError, match="only with a cache of transformers' own"):
            save_cache(
                llama.model, None, llama.ids, tmp_path / "out", cache=cache, positions=range(70)
            )


def test_windows_and_states_are_refused_before_the_model_runs(gemma: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="sliding windows count every token"):
        save_cache(
            gemma.model, None, gemma.ids, tmp_path / "out", cache=gemma.native(),
            positions=range(70),
        )  # fmt: skip


def test_kept_tokens_of_something_else_are_told(pruned: Pruned, tmp_path: Path) -> None:
    shutil.copytree(pruned.folder, tmp_path / "damaged")
    (path,) = (tmp_path / "damaged").glob("kept-*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FormatError, match=path.name):
        CompressedStreamingCache.from_pretrained(tmp_path / "damaged", model=pruned.model)


def test_importance_is_of_the_tokens_that_are_kept(
    llama: Any, prune: Publish, transform_table: Any
) -> None:
    kept = torch.arange(0, 70, 2)
    options = {"tables": transform_table(llama.model), "levels": ["transform-0"]}
    errors = []
    for importance in ("recent", [0.0] * 30 + [12.0] * 5, [12.0] * 5 + [0.0] * 30):
        pruned = prune([kept] * 3, importance=importance, **options)
        exact = pruned.native().layers[0].values
        lossy = pruned.load("transform-0").layers[0].values
        errors.append((lossy - exact)[0, :, -5:].norm())
    assert errors[1] < 0.8 * errors[2]
    with pytest.raises(ValueError, match=r"\[35\]"):
        prune([kept] * 3, importance=[0.0] * 70, **options)


def test_pushed_and_streamed_back_and_replaced(by_head: Pruned, llama: Any, hub: LocalHub) -> None:
    options = {"endpoint": hub.endpoint, "token": hub.token}
    push_artifact(by_head.folder, "me/context", **options)
    cache = CompressedStreamingCache.from_pretrained(
        "me/context", model=llama.model, level="lossless", **options
    )
    assert torch.equal(by_head.logits(cache, NEW), by_head.logits(by_head.load(), NEW))
    api = HfApi(**options)
    assert any(name.startswith("kept-") for name in api.list_repo_files("me/context"))
    push_artifact(llama.folder, "me/context", **options)
    assert not any(name.startswith("kept-") for name in api.list_repo_files("me/context"))


def test_a_mask_is_no_positions(llama: Any, tmp_path: Path) -> None:
    """The likeliest mistake: the message says what to pass."""
    mask = torch.zeros(len(llama.ids), dtype=torch.bool)
    mask[::2] = True
    with pytest.raises(ValueError, match=r"got a mask, whose positions are mask\.nonzero"):
        save_cache(
            llama.model, None, llama.ids, tmp_path / "a", cache=llama.native(), positions=mask
        )
