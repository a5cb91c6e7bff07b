"""A transformers cache that streams an encoded context in while ``generate()`` already runs."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from hf_cachegen.artifact import Artifact, Manifest, check_identity
from hf_cachegen.codec.entropy import begin_warm_up
from hf_cachegen.errors import PromptMismatch, UnsupportedError
from hf_cachegen.hf.codecs import LevelCodecs, TableSource
from hf_cachegen.hf.compat import (
    cache_argument,
    keeps_states,
    native_layers,
    running_device,
    runs_one_by_one,
    token_layers,
)
from hf_cachegen.hf.counting import CountsTokens
from hf_cachegen.hf.describe import expected_identity, weights_fingerprint
from hf_cachegen.hf.guard import guard_generate
from hf_cachegen.hf.hub import push_artifact
from hf_cachegen.hf.incoming import Incoming
from hf_cachegen.hf.layers import StreamedLayer, StreamedPrunedLayer, StreamedSlidingLayer
from hf_cachegen.hf.policies import resolve_policy
from hf_cachegen.hf.pruning import check_prunable, complete_from, kept_positions
from hf_cachegen.hf.saving import one_sequence, save_extended
from hf_cachegen.hf.settings import check_push
from hf_cachegen.hf.state_layers import StreamedLayerWithState, StreamedStateLayer
from hf_cachegen.stores import open_store
from hf_cachegen.streaming.controller import Policy
from hf_cachegen.streaming.steps import StreamStep
from hf_cachegen.tables import ModelTable


class CompressedStreamingCache(CountsTokens):
    """The KV cache of a published context, decoded layer by layer while it arrives.

    Construction returns at once; a background thread fetches chunks while others decode. Each layer
    waits for its own tensors when attention first needs them; chunks that the policy chose as text
    are recomputed by then, in the thread that waits. Afterwards the cache behaves like a
    ``DynamicCache``: it grows, crops, reorders, repeats and copies. Recurrent and convolutional
    states arrive first, exact at any level, and cannot be cropped. Of a context from which tokens
    were evicted, it has the length of the whole, so that new tokens get the positions after it.

    Create one with :meth:`from_pretrained`.

    Parameters
    ----------
    artifact
        The opened artefact; its store is closed when everything has arrived.
    model
        The model that will use the cache.
    policy
        Chooses the level of each chunk, or its text.
    tables
        The model table or where it is, if not where the artefact says.
    hub_options
        Options of huggingface_hub for a table that has to be fetched from its own repository.
    started_at
        When the stream's time begins, as :func:`time.monotonic` counts; by default now.
    weights
        The fingerprint of the model's weights, if it is known already.

    Raises
    ------
    ModelMismatch
        The artefact was made with another model, dtype or RoPE.
    StoreError, FormatError
        The token ids cannot be read, or are damaged.
    TableMismatch
        ``tables`` is not the table that the artefact was encoded with.
    UnsupportedError
        The model caches something this class cannot hold, or cannot recompute what is to be, or
        cannot do without tokens that were evicted.
    """

    def __init__(
        self,
        artifact: Artifact,
        model: PreTrainedModel,
        policy: Policy,
        tables: TableSource | None = None,
        hub_options: Mapping[str, Any] | None = None,
        *,
        started_at: float | None = None,
        weights: str | None = None,
    ) -> None:
        manifest, kept = artifact.manifest, artifact.read_kept()
        ours = expected_identity(model, manifest.identity, weights=weights)
        check_identity(ours, manifest.identity)
        if kept is not None:
            check_prunable(model)
        self.artifact = artifact
        identity = manifest.identity
        self._codecs = LevelCodecs(
            manifest.levels,
            identity.layout,
            identity.table,
            artifact.store,
            tables,
            hub_options,
            kept=kept_positions(kept),
        )
        layers = [_streamed(native, pruned=kept is not None) for native in native_layers(model)]
        super().__init__(layers=layers)
        self.one_by_one = runs_one_by_one(model)
        self._incoming = Incoming(artifact, model, policy, self._codecs, started_at)
        self._stream = self._incoming.stream
        try:
            self._attach(manifest, kept)
            # They may still have to be read, which the first chunk does not wait for.
            self.token_ids: Tensor = torch.from_numpy(artifact.token_ids.copy()).long()
        except BaseException:
            self._stream.close()
            raise
        self.history = self.token_ids
        self._known_length = manifest.tokens.n
        self._cache_argument = cache_argument(model)
        self._device = running_device(model)
        guard_generate(model)
        self._prompt_length: int | None = None

    def _attach(self, manifest: Manifest, kept: NDArray[np.bool_] | None) -> None:
        """Tell every layer where its tensors and states come from."""
        self._token_layers = token_layers(self.layers)
        n_tokens = manifest.tokens.n
        complete = None if kept is None else complete_from(kept, manifest.n_layers)
        for place, index in enumerate(self._token_layers):
            loading, layer = self._incoming.loading(place), self.layers[index]
            if complete is None:
                layer.attach(loading, n_tokens, self._incoming.first_token(place))
            else:
                layer.attach(loading, n_tokens, n_tokens - manifest.n_cached, complete[place])
        for index, layer in enumerate(self.layers):
            if keeps_states(layer):
                load, device = self._incoming.loading_states(index), self._incoming.devices[index]
                layer.attach_states(load, device, one_by_one=self.one_by_one)
        self._n_tokens = None if self._token_layers else n_tokens

    @classmethod
    def from_pretrained(
        cls,
        location: str | os.PathLike[str],
        *,
        model: PreTrainedModel,
        level: str | None = None,
        policy: str | Policy | None = None,
        ttft_target_s: float | None = None,
        tables: TableSource | None = None,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        endpoint: str | None = None,
    ) -> CompressedStreamingCache:
        """Open an artefact and start to stream it.

        Parameters
        ----------
        location
            A local folder, an ``http(s)://`` URL of one, or a Hub repository ``org/name``.
        model
            The model that will use the cache. It must be the one that made it.
        level
            Name of the level to fetch, ``"coarsest"`` or ``"finest"`` (bit-exact where there is
            such a level); by default the finest lossy one. Not together with a policy.
        policy
            What to do about each chunk, knowing how fast the link, the decoders and the model are:
            ``"paper"`` (the finest level in time at the throughput of the chunk before),
            ``"robust"`` (a bounded probability to be late, and chunks recomputed from text while
            others travel), ``"layered"`` (the coarsest level of everything first, then refinements
            until the time is up), ``"text"`` (no fetching), ``"fixed:<level>"``,
            ``"soonest:<level>"`` (the first chunks recomputed while the others travel, as long as
            that is not slower; levels as for ``level``), or an object. By default, if there is a
            target, ``"layered"`` for levels that refine each other, else ``"robust"``.
        ttft_target_s
            Seconds from this call to the first token, for ``"paper"``, ``"robust"`` and
            ``"layered"``, which need it. Not together with another policy.
        tables
            The model table, or where it is; by default where the artefact says.
        revision, token, cache_dir, local_files_only, endpoint
            As everywhere in huggingface_hub; for a Hub repository.

        Raises
        ------
        ModelMismatch, TableMismatch
            The artefact or the table belongs to another model.
        StoreError, FormatError
            The artefact cannot be read, or is damaged.
        UnsupportedError
            The model caches something this class cannot hold, or cannot recompute what is to be.
        ValueError
            An argument is wrong; the message lists what there is.
        """
        started_at = time.monotonic()
        begin_warm_up()  # while the first bytes are on their way
        hub_options = {
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
            "endpoint": endpoint,
        }
        store = open_store(location, revision=revision, **hub_options)
        try:
            # Both take a while, one of the link and the other of this machine.
            with ThreadPoolExecutor(1, thread_name_prefix="hf-cachegen-fingerprint") as beside:
                fingerprint = beside.submit(weights_fingerprint, model)
                artifact = Artifact.open(store, tokens=False)
                weights = fingerprint.result()
            chosen = resolve_policy(
                artifact.manifest.levels, level=level, policy=policy, ttft_target_s=ttft_target_s
            )
            return cls(
                artifact,
                model,
                chosen,
                tables,
                hub_options,
                started_at=started_at,
                weights=weights,
            )
        except BaseException:
            store.close()
            raise

    @property
    def context_length(self) -> int:
        """Tokens of the published context."""
        return len(self.token_ids)

    @property
    def known_length(self) -> int:
        """First tokens of this cache that are certainly the context's: all, unless it was cropped.

        Of what has been appended after them the cache holds no ids.
        """
        return self._known_length

    @property
    def keeps_states(self) -> bool:
        """Whether a layer keeps a recurrent or convolutional state, which cannot be cropped."""
        return any(keeps_states(layer) for layer in self.layers)

    @property
    def is_pruned(self) -> bool:
        """Whether tokens of the context were evicted before it was published."""
        return any(isinstance(layer, StreamedPrunedLayer) for layer in self.layers)

    @property
    def uncroppable_part(self) -> str:
        """What cannot give up tokens, where something cannot."""
        if self.keeps_states:
            return "states"
        return "pruned layers" if self.is_pruned else "sliding windows"

    def inputs(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        question: str | None = None,
        *,
        input_ids: Tensor | None = None,
        previous: Tensor | None = None,
    ) -> dict[str, Any]:
        """Everything ``generate()`` needs to continue this cache, the cache included.

        ``model.generate(**cache.inputs(tokenizer, "Who signed it?"))`` passes the whole prompt and
        its full attention mask, which is the form that ``generate()`` handles right. Without
        ``previous`` the prompt follows the context itself: what the cache has grown by since, such
        as an earlier question and its answer, is removed from it.

        Parameters
        ----------
        tokenizer, question
            Text that follows the context; tokenised without special tokens.
        input_ids
            Token ids ``[T]`` or ``[1, T]`` that follow the context, instead of a question.
        previous
            Ids ``[1, T]`` that an earlier ``generate()`` with this cache returned, to continue the
            conversation from there.

        Raises
        ------
        PromptMismatch
            ``previous`` does not start with the cached context, or is shorter than the cache; or
            the cache would have to give up tokens that a sliding window has replaced already, or
            that are in its states.
        """
        if (question is not None) + (input_ids is not None) > 1:
            raise ValueError("expected question or input_ids, got both")
        if question is not None:
            if tokenizer is None:
                raise ValueError("expected a tokenizer for the question")
            encoded = tokenizer(question, add_special_tokens=False, return_tensors="pt")
            input_ids = encoded["input_ids"]
        new = torch.empty(0, dtype=torch.long) if input_ids is None else one_sequence(input_ids)
        past = self.token_ids if previous is None else self._check_previous(previous)
        prompt = torch.cat((past, new))[None].to(self._device)
        # generate() needs a token to run on: of a cached prompt, the last is computed again.
        reused = min(self.get_seq_length(), prompt.shape[1] - 1)
        self._shorten(reused if previous is not None else min(reused, self._known_length))
        self._prompt_length = prompt.shape[1]
        self._stream.costs.prompt_tokens = prompt.shape[1] - self.get_seq_length()
        return {
            "input_ids": prompt,
            "attention_mask": torch.ones_like(prompt),
            self._cache_argument: self,
        }

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        prompt_length, self._prompt_length = self._prompt_length, None
        cached = self.get_seq_length()
        if prompt_length is not None and cached > 0 and prompt_length <= key_states.shape[-2]:
            raise UnsupportedError(
                f"generate() passed the whole prompt of {prompt_length} tokens on top of the "
                f"{cached} that are cached, as assisted decoding does; give it the new tokens, "
                f"input_ids[:, {cached}:], with the attention mask of all"
            )
        begins = layer_idx == self._token_layers[0] and self.layers[layer_idx].is_pending
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if begins:
            self._incoming.begin_pass()
        if layer_idx == self._token_layers[-1]:
            n_tokens = key_states.shape[-2]
            self._incoming.end_pass(self.get_seq_length() - n_tokens, n_tokens)
        return states

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        token_ids: Tensor | None = None,
        push_to_hub: bool = False,
        **push_options: Any,
    ) -> None:
        """Save this cache, with what it has grown by, as an artefact with the same levels.

        Chunks of the published context are copied as they are; only new tokens are encoded.

        Parameters
        ----------
        save_directory
            Folder of the artefact. In the folder of the context itself, only new files are written.
        token_ids
            Ids of all cached tokens, such as what ``generate()`` returned; needed once the cache
            has grown past its context. More ids than cached tokens are cut.
        push_to_hub
            Also upload the folder; ``push_options`` as for :meth:`push_to_hub`, ``repo_id`` by
            default the folder's name.

        Raises
        ------
        ValueError
            An argument makes no sense, found before anything is written.
        """
        if not isinstance(push_to_hub, bool):
            raise ValueError(
                f"expected True or False, got push_to_hub={push_to_hub!r}; name the repository "
                "with repo_id"
            )
        repo_id = push_options.pop("repo_id", Path(save_directory).name) if push_to_hub else None
        check_push(repo_id, push_options)
        save_extended(self, save_directory, token_ids=token_ids)
        if repo_id is not None:
            push_artifact(save_directory, repo_id, **push_options)

    def push_to_hub(
        self, repo_id: str, *, token_ids: Tensor | None = None, **push_options: Any
    ) -> str:
        """Save to a temporary folder and upload it; returns the URL of the commit.

        Parameters
        ----------
        repo_id
            ``org/name`` of a model repository, created if need be.
        token_ids
            As for :meth:`save_pretrained`.
        **push_options
            As for :func:`~hf_cachegen.push_artifact`: ``commit_message``, ``private``, ``token``,
            ``revision``, ``create_pr``, ``endpoint``.
        """
        check_push(repo_id, push_options)
        with tempfile.TemporaryDirectory() as folder:
            save_extended(self, folder, token_ids=token_ids)
            return push_artifact(folder, repo_id, **push_options)

    def table(self) -> ModelTable | None:
        """The model table of the artefact, fetched if need be; None if it has none."""
        return self._codecs.table()

    def stream_report(self) -> list[StreamStep]:
        """What was done so far, with the seconds that it took and was expected to take.

        One step per choice: of each chunk in order, another one where a chunk was given up for
        something else, then those of chunks fetched from the back, and of refinements.
        """
        return self._stream.report()

    def chunk_sources(self) -> list[str]:
        """By chunk, the name of the lossy level that its values come from, or ``"exact"``.

        Of a chunk that was given up for a coarser level, some layers may be better than that. One
        that has not arrived yet counts as exact.
        """
        return self._stream.sources()

    def wait(self) -> None:
        """Block until every layer is decoded."""
        for layer in self.layers:
            layer.materialize()
        self._stream.wait_transfers()

    def close(self) -> None:
        """Stop streaming and release the store, which copies of this cache share.

        Layers that have not arrived raise when they are used.
        """
        self._stream.close()

    def reset(self) -> None:
        if any(layer.is_pending for layer in self.layers):
            self.close()
        self._known_length = 0
        self.history = self.history[:0]
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, from all layers or, with an error, none."""
        if tokens_to_remove > 0:
            raise ValueError(f"expected at most 0, got {tokens_to_remove}: -n removes n tokens")
        if not all(layer.can_crop(tokens_to_remove) for layer in self.layers):
            raise RuntimeError(
                f"cannot remove {-tokens_to_remove} tokens: " + _UNCROPPABLE[self.uncroppable_part]
            )
        super().crop(tokens_to_remove)
        self._known_length = min(self._known_length, self.get_seq_length())
        self.history = self.history[: self.get_seq_length()]

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        for layer in self.layers:
            keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
            yield keys, values, getattr(layer, "_sliding_window_tensor", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedStreamingCache:
        self.wait()
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        shared = {"artifact", "_codecs", "_incoming", "_stream"}
        for name, value in self.__dict__.items():
            setattr(clone, name, value if name in shared else copy.deepcopy(value, memo))
        return clone

    def _shorten(self, length: int) -> None:
        """Crop to at most ``length`` tokens."""
        excess = self.get_seq_length() - length
        if excess > 0 and not all(layer.can_crop(-excess) for layer in self.layers):
            raise PromptMismatch(
                f"the cache holds {excess} tokens more than this prompt can reuse, and its "
                f"{self.uncroppable_part} cannot give them up; pass "
                "at least one new token, previous= to continue the conversation, or use a fresh "
                "cache (or copy.deepcopy of one) for each question"
            )
        if excess > 0:
            self.crop(-excess)

    def _check_previous(self, previous: Tensor) -> Tensor:
        ids = one_sequence(previous)
        common = min(len(ids), self._known_length)
        differing = torch.nonzero(ids[:common] != self.token_ids[:common])
        if len(differing) or len(ids) < self.get_seq_length():
            raise PromptMismatch(
                f"expected the ids that generate() returned with this cache: at least "
                f"{self.get_seq_length()} that start with the cached context; got {len(ids)} ids"
                + (f" that differ at position {int(differing[0])}" if len(differing) else "")
            )
        return ids


_UNCROPPABLE = {
    "states": "there are no recurrent or convolutional states of before them; load the context "
    "again, or use a copy.deepcopy(cache) for what is to be undone",
    "pruned layers": "not every layer and head has kept what came right before them; load the "
    "context again, or use a copy.deepcopy(cache) for what is to be undone",
    "sliding windows": "a sliding window no longer holds what came before them; call "
    "activate_past_recording() before the cache is used",
}


def _streamed(native: Any, *, pruned: bool) -> Any:
    """The streamed layer that stands in for a native one."""
    if pruned:
        return StreamedPrunedLayer()
    if isinstance(native, LinearAttentionAndFullAttentionLayer):
        return StreamedLayerWithState(native.number_of_states)
    if isinstance(native, LinearAttentionLayer):
        return StreamedStateLayer(native.number_of_states)
    if isinstance(native, DynamicSlidingWindowLayer):
        return StreamedSlidingLayer(sliding_window=native.sliding_window)
    return StreamedLayer()
