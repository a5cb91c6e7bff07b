"""A context on its way into a model's cache: the stream, and the tensors that it fills."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from hf_cachegen.artifact import Artifact
from hf_cachegen.errors import FormatError, UnsupportedError
from hf_cachegen.hf.buffers import LayerBuffers
from hf_cachegen.hf.calibration import calibrate, machine_rates
from hf_cachegen.hf.codecs import LevelCodecs
from hf_cachegen.hf.compat import layer_devices, native_layers, state_specs, token_layers
from hf_cachegen.hf.recompute import Recomputer
from hf_cachegen.hf.states import LayerStates, state_numbers, unpack_states
from hf_cachegen.streaming.controller import Policy, TextOnly
from hf_cachegen.streaming.pipeline import ChunkStream


class Incoming:
    """Starts the stream of an artefact; ends it when the last cache or layer that needs it is gone.

    Parameters
    ----------
    artifact
        The opened artefact; its store is closed with the stream.
    model
        The model that the context is for.
    policy
        Chooses what to do about each chunk.
    codecs
        Codec of each level.
    started_at
        When the stream's time begins, as :func:`time.monotonic` counts; by default now.

    Raises
    ------
    UnsupportedError
        The policy knows nothing but text, and the model cannot recompute it.
    """

    def __init__(
        self,
        artifact: Artifact,
        model: PreTrainedModel,
        policy: Policy,
        codecs: LevelCodecs,
        started_at: float | None,
    ) -> None:
        manifest = artifact.manifest
        chunks = range(len(manifest.chunks))
        self._on_cpu = model.device.type == "cpu"
        natives = native_layers(model)
        self.devices = layer_devices(model, len(natives))
        devices = [self.devices[index] for index in token_layers(natives)]
        self._buffers = LayerBuffers(manifest, devices, codecs)
        self._state_numbers = state_numbers(natives)
        self._state_specs = state_specs(model, self._state_numbers)
        self._states: dict[int, LayerStates] | None = None
        self._states_lock = threading.Lock()
        self._release_lock = threading.Lock()
        recompute = _recomputer(model, policy, artifact, self._buffers)
        self.stream = ChunkStream(
            artifact,
            policy,
            [self._buffers.layers_of(chunk) for chunk in chunks],
            self._buffers.decode,
            prepare=codecs.prepare,
            besides_bytes=codecs.missing_bytes,
            decode_many=self._buffers.decode_many if self._buffers.decodes_together else None,
            recompute=recompute,
            holds_past=[recompute is not None and recompute.holds_past(chunk) for chunk in chunks],
            rates=calibrate(model) if policy.adapts else machine_rates(model),
            started_at=started_at,
        )
        self._pass = _Pass()
        # Garbage may be collected in any thread, the stream's own among them: no waiting.
        weakref.finalize(self, self.stream.close, wait=False)

    def first_token(self, layer: int) -> int:
        """First token of the context that the tensors of a layer of the layout hold."""
        return self._buffers.first_token(layer)

    def loading(self, layer: int) -> Callable[[], tuple[Tensor, Tensor]]:
        """A function that waits for a layer of the layout and hands over its tensors.

        They are ``[1, H, T, D]``, the same however often it is called, and the function keeps them
        itself: who has taken them lets go of it.
        """
        return partial(self._load, layer, [])

    def loading_states(self, layer: int) -> Callable[[], LayerStates]:
        """A function that waits for the states of a layer of the model.

        It gives the same states, or raises the same error, however often it is called, and keeps
        the states itself: who has what they need of them lets go of the function.

        Raises
        ------
        FormatError
            The artefact has no states.
        """
        if self.stream.artifact.manifest.states is None:
            raise FormatError(
                f"{self.stream.artifact.store.location} has no states, which this model cannot go "
                "on without; encode the context again"
            )
        return partial(self._load_states, layer, [])

    def begin_pass(self) -> None:
        """A pass of this thread, the first after the stream, has its first layer's tensors."""
        self._pass.began_at, self._pass.waited_s = time.perf_counter(), 0.0

    def end_pass(self, start: int, n_tokens: int) -> None:
        """It has come to its last layer's: learn from it what the next prompt will take.

        Not counted are waits for layers. Only on a CPU has a pass done what it has called for.
        """
        if self._pass.began_at is None:
            return
        seconds = time.perf_counter() - self._pass.began_at - self._pass.waited_s
        self._pass.began_at = None
        n_layers = self.stream.artifact.manifest.n_layers
        if self._on_cpu and n_layers > 1:
            whole_s = seconds * n_layers / (n_layers - 1)
            self.stream.costs.note_pass(start, n_tokens, whole_s)

    def _load(self, layer: int, kept: list[Tensor]) -> tuple[Tensor, Tensor]:
        started = time.perf_counter()
        self.stream.wait_layer(layer)
        self._pass.waited_s += time.perf_counter() - started
        # As of states, below: kept before they are released.
        with self._release_lock:
            if not kept:
                kept.extend(self._buffers.tensors(layer))
            self._buffers.release(layer)
        keys, values = kept
        return keys, values

    def _load_states(self, layer: int, kept: list[LayerStates]) -> LayerStates:
        started = time.perf_counter()
        # An interrupt may come between any two steps: nothing is let go of before its successor
        # is in place.
        with self._states_lock:
            if self._states is None:
                data = self.stream.wait_states()
                self._states = unpack_states(data, self._state_numbers, self._state_specs)
                self.stream.release_states()
            if not kept:
                kept.append(self._states[layer])
            self._states.pop(layer, None)
        self._pass.waited_s += time.perf_counter() - started
        return kept[0]


class _Pass(threading.local):
    """The pass of a thread: others may wait for layers beside it.

    Attributes
    ----------
    began_at
        When it began, as :func:`time.perf_counter` counts; None if there is none.
    waited_s
        Seconds that it has waited for layers.
    """

    began_at: float | None = None
    waited_s: float = 0.0


def _recomputer(
    model: PreTrainedModel, policy: Policy, artifact: Artifact, buffers: LayerBuffers
) -> Recomputer | None:
    """What recomputes chunks; None of a model that cannot, unless the policy has to have it."""
    if not artifact.manifest.chunks:
        return None
    try:
        return Recomputer(model, artifact, buffers)
    except UnsupportedError:
        if isinstance(policy, TextOnly):
            raise
        return None
