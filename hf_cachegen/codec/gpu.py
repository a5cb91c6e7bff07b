"""What the codecs need to know of GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Generic, TypeVar

import torch
from torch import Tensor

Built = TypeVar("Built")


def takes_kernels(out: Sequence[Tensor]) -> bool:
    """Whether the Triton kernels can fill these tensors: all on one GPU, and Triton is there."""
    device = out[0].device
    on_one_gpu = device.type == "cuda" and all(tensor.device == device for tensor in out)
    return on_one_gpu and find_spec("triton") is not None


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is queued on streams, which run beside each other."""
    return device.type == "cuda"


def side_streams(devices: Iterable[torch.device]) -> list[torch.cuda.Stream]:
    """A stream of each GPU among some devices, for work beside the model's.

    A GPU has one, whatever is decoded, so that all of it takes its temporary memory by turns.
    """
    return [_side_stream(device) for device in set(devices) if has_streams(device)]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def on_streams(streams: Iterable[torch.cuda.Stream]) -> Iterator[None]:
    """Make streams of several GPUs the current ones of this thread."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


class SharedTensors:
    """Tensors of one device that threads use by turns, each on its current stream.

    Streams of a GPU run beside each other, so what is done on one has to be told to come after what
    was done on others. The host never waits for that. On other devices there is nothing to do. Who
    may use which part of the tensors, and when, is up to the threads.

    Parameters
    ----------
    tensors
        All on one device. The current stream is that of the thread that has allocated them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._events: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._lock = threading.Lock()
        # Memory is handed out while what has used it before is still queued on this stream.
        self.record()

    def use(self) -> Sequence[Tensor]:
        """The tensors, for work on the current stream: it comes after all that was recorded."""
        stream = self._current_stream()
        if stream is not None:
            with self._lock:
                for other, event in self._events.items():
                    if other != stream:
                        stream.wait_event(event)
                if stream not in self._events:
                    for tensor in self._tensors:
                        tensor.record_stream(stream)  # so that it is not freed while in use there
        return self._tensors

    def record(self) -> None:
        """Have other streams wait for what is queued on the current one by now."""
        stream = self._current_stream()
        if stream is not None:
            with self._lock:
                self._events[stream] = stream.record_event()

    def _current_stream(self) -> torch.cuda.Stream | None:
        """None on a device without streams."""
        device = self._tensors[0].device if self._tensors else None
        if device is None or not has_streams(device):
            return None
        return torch.cuda.current_stream(device)


class PerDevice(Generic[Built]):
    """What is built once for each device and number, for use by any thread on any stream."""

    def __init__(self) -> None:
        self._built: dict[tuple[int, torch.device], Built] = {}
        self._lock = threading.Lock()

    def get(self, number: int, device: torch.device, build: Callable[[], Built]) -> Built:
        """What there is, or what ``build`` gives."""
        with self._lock:
            if (number, device) not in self._built:
                built = build()
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
                self._built[number, device] = built
            return self._built[number, device]
