"""Run the kernels under Triton's interpreter where there is no GPU, and guard all their buffers."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
import triton.language
from hypothesis import settings

# The one place that sets it: Triton reads it when a kernel is defined, so before any import of one.
# Triton's own kernels (tl.sum, ...) were defined if something imported it first, as transformers
# does. With a GPU the compiled kernels are what these tests run.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.reload(triton.language.standard)
    importlib.reload(triton.language)

from hf_cachegen.triton_kernels import delta, rans, transform

sys.path.insert(0, str(Path(__file__).parent))  # for the samples beside this file

settings.register_profile("kernels", settings.get_profile("tests"), max_examples=10)
settings.load_profile("kernels")

KERNELS = {
    rans: ("rans_decode_kernel", "fill_escapes_kernel", "rans_encode_kernel"),
    delta: ("delta_kernel",),
    transform: ("transform_join_kernel", "transform_store_kernel"),
}
GUARD_BYTES = 1024
POISON = 0xA5


class GuardedKernel:
    """A kernel that gets copies of its tensors, each between guard bytes.

    Fails if a guard changed. What the kernel wrote is copied back, with all that it did not write
    in the same storage.
    """

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches = 0

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches += 1
            buffers = [guarded(arg) if isinstance(arg, torch.Tensor) else None for arg in args]
            views = [
                arg if buffer is None else inside(buffer, arg)
                for arg, buffer in zip(args, buffers, strict=True)
            ]
            self.kernel[grid](*views, **options)
            for arg, buffer in zip(args, buffers, strict=True):
                if buffer is not None:
                    assert (buffer[:GUARD_BYTES] == POISON).all(), "wrote before a buffer"
                    assert (buffer[-GUARD_BYTES:] == POISON).all(), "wrote behind a buffer"
                    storage_bytes(arg).copy_(buffer[GUARD_BYTES:-GUARD_BYTES])

        return launch


def storage_bytes(tensor):
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def guarded(tensor):
    content = storage_bytes(tensor)
    guard = torch.full((GUARD_BYTES,), POISON, dtype=torch.uint8, device=tensor.device)
    return torch.cat([guard, content, guard])


def inside(buffer, tensor):
    content = buffer[GUARD_BYTES : len(buffer) - GUARD_BYTES].view(tensor.dtype)
    offset = GUARD_BYTES // tensor.element_size() + tensor.storage_offset()
    return content.as_strided(tensor.shape, tensor.stride(), offset)


@pytest.fixture(autouse=True)
def guards(monkeypatch):
    """Every launch is guarded; maps names of kernels to their guarded selves."""
    proxies = {}
    for module, names in KERNELS.items():
        for name in names:
            proxies[name] = GuardedKernel(getattr(module, name))
            monkeypatch.setattr(module, name, proxies[name])
    return proxies


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def poisoned(device):
    """Makes a tensor of poison bytes, so that what is not written shows."""

    def make(shape, dtype):
        n = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        content = torch.full((n,), POISON, dtype=torch.uint8, device=device)
        return content.view(dtype).view(shape)

    return make
