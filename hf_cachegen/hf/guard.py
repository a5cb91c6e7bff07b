"""Checks before every ``generate()`` of a model that is given a streamed cache."""

from __future__ import annotations

import copy
import inspect
import weakref
from abc import ABC, abstractmethod
from types import MethodType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.calls import GenerateCall, StreamedCache, check_call, known_ids
from hf_cachegen.hf.compat import cache_argument, output_cache


def guard_generate(model: PreTrainedModel) -> None:
    """Check every later ``generate()`` of a model that is given a streamed cache.

    Calls without one are not touched. Only this object is changed, and copies of it are guarded.
    """
    for guard in (GuardedGenerate, GuardedGenerateBatch):
        if guard.name not in vars(model):
            setattr(model, guard.name, guard(model))


class _Guarded(ABC):
    """A method of one model with a check before it; it does not keep the model alive.

    Parameters
    ----------
    model
        The model.
    """

    name: ClassVar[str]

    def __init__(self, model: PreTrainedModel) -> None:
        native = getattr(type(model), self.name)
        self._model = weakref.ref(model)
        self.__signature__ = inspect.signature(MethodType(native, model))
        self.__doc__ = native.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._living()
        cache = output_cache(kwargs)
        if "past_key_values" in kwargs:  # a warning of it would name this file
            kwargs[cache_argument(model)] = kwargs.pop("past_key_values")
        if hasattr(cache, "known_length") and cache.get_seq_length() > 0:
            return self.run(model, cache, *args, **kwargs)
        return getattr(type(model), self.name)(model, *args, **kwargs)

    @abstractmethod
    def run(self, model: PreTrainedModel, cache: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The call with a streamed cache, which is also among ``kwargs``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(self._living(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._living(), self.name)

    def _living(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None, "called through a model that is gone"
        return model


class GuardedGenerate(_Guarded):
    """``generate`` with :func:`check_call` before it."""

    name = "generate"

    def run(self, model: PreTrainedModel, cache: Any, /, *args: Any, **kwargs: Any) -> Any:
        arguments = self.__signature__.bind(*args, **kwargs).arguments
        call = GenerateCall.of(model, {**arguments, **kwargs})
        check_call(cache, call, model)
        if cache.one_by_one:
            kwargs["prefill_chunk_size"] = 1
        cached = known_ids(cache), cache.get_seq_length()
        output = type(model).generate(model, *args, **kwargs)
        if call.rows == 1 and call.input_ids is not None:
            sequences = output if isinstance(output, Tensor) else output.sequences
            _remember(cache, call, *cached, sequences[0].cpu())
        return output


class GuardedGenerateBatch(_Guarded):
    """``generate_batch``, which would leave a cache unused without a word."""

    name = "generate_batch"

    def run(self, model: PreTrainedModel, cache: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            "continuous batching takes no cache; call model.generate() with the whole prompts, or "
            "generate_batch() without a cache"
        )


def _remember(
    cache: StreamedCache, call: GenerateCall, known: Tensor, past: int, sequence: Tensor
) -> None:
    """Keep the ids of all tokens that are cached after a call, if they are known."""
    whole = call.mask_length == call.length
    if whole or len(known) == past:
        ids = torch.cat((known[:0] if whole else known, sequence))
        cache.history = ids[: cache.get_seq_length()]
