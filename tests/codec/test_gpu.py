from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_cachegen.codec import gpu

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("devices", "installed", "expected"),
    [
        (["cuda:0", "cuda:0"], True, True),
        (["cuda:0", "cuda:1"], True, False),
        (["cuda:0", "cpu"], True, False),
        (["cpu", "cpu"], True, False),
        (["cuda:0", "cuda:0"], False, False),
    ],
)
def test_kernels_fill_tensors_of_one_gpu(devices, installed, expected, monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: object() if installed else None)
    with FakeTensorMode():
        tensors = [torch.empty(2, device=device) for device in devices]
    assert gpu.takes_kernels(tensors) is expected


def test_a_gpu_has_one_side_stream(simulated_gpu):
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    streams = gpu.side_streams([first, second, first])
    assert len(set(streams)) == 2
    assert set(gpu.side_streams([second, first])) == set(streams)


def test_devices_without_streams_have_none():
    assert gpu.side_streams([CPU, META]) == []


def test_streams_are_current_within(simulated_gpu):
    (stream,) = gpu.side_streams([CPU])
    with gpu.on_streams([stream]):
        assert torch.cuda.current_stream() is stream
    assert torch.cuda.current_stream() is simulated_gpu.default


@pytest.mark.parametrize("tensors", [[], [torch.zeros(2)]], ids=["none", "on the CPU"])
def test_tensors_without_streams_are_just_there(tensors, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("asked for a stream"))
    shared = gpu.SharedTensors(tensors)
    assert shared.use() is tensors
    shared.record()


def test_work_comes_after_all_that_was_recorded_elsewhere(simulated_gpu):
    a, b = simulated_gpu.default, gpu.side_streams([CPU])[0]
    simulated_gpu.work("before", writes=["memory"])
    shared = gpu.SharedTensors([torch.zeros(2)])
    with gpu.on_streams([b]):
        shared.use()
        assert b.clock[a] == 1
        simulated_gpu.work("fill", writes=["memory"])
        shared.record()
        simulated_gpu.work("other", writes=["elsewhere"])
    simulated_gpu.work("meanwhile", writes=["elsewhere too"])
    assert a.clock[b] == 0  # nobody has used the tensors
    shared.use()
    assert a.clock[b] == 1  # up to what was recorded
    simulated_gpu.work("read", reads=["memory"])
    with gpu.on_streams([b]):
        shared.use()
        assert b.clock[a] == 1  # what was not recorded is not waited for
    shared.record()
    with gpu.on_streams([b]):
        shared.use()
        assert b.clock[a] == 3
    assert simulated_gpu.races == []
    assert simulated_gpu.host_waits == []


def test_memory_is_kept_for_every_stream_but_its_own(simulated_gpu):
    tensors = [torch.zeros(2), torch.zeros(3)]
    shared = gpu.SharedTensors(tensors)
    shared.use()
    assert simulated_gpu.freed_late == set()
    (side,) = gpu.side_streams([CPU])
    with gpu.on_streams([side]):
        shared.use()
    assert simulated_gpu.freed_late == {(tensor.data_ptr(), side) for tensor in tensors}


def test_things_are_built_once_for_each_number_and_device():
    built, calls = gpu.PerDevice(), []

    def get(number, device):
        def build():
            time.sleep(0.01)
            calls.append((number, device))
            return object()

        return built.get(number, device, build)

    keys = [(0, CPU), (1, CPU), (0, META)] * 4
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda key: get(*key), keys))
    assert sorted(calls, key=str) == sorted(set(keys), key=str)
    assert len(set(found)) == 3
    assert found[:3] == found[3:6]


def test_what_could_not_be_built_is_tried_again():
    built = gpu.PerDevice()
    with pytest.raises(ZeroDivisionError):
        built.get(0, CPU, lambda: 1 / 0)
    assert built.get(0, CPU, lambda: 3) == 3
