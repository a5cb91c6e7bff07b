"""Models that accelerate has spread over devices: every layer's cache is where that layer runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from family_table import SUPPORTED
from transformers import PreTrainedModel
from warm import generate

from hf_cachegen import CompressedStreamingCache, UnsupportedError
from hf_cachegen.hf.compat import layer_devices, loaded_parameters, running_device
from hf_cachegen.hf.describe import weights_fingerprint

CPU = torch.device("cpu")
OFFLOADED = {"llama", "gpt2", "gemma3_text", "qwen3_next", "falcon_h1", "jamba", "mamba2"} & {
    family.name for family in SUPPORTED
}


def _to_cpu(model: PreTrainedModel, _: Path) -> PreTrainedModel:
    return cpu_offload(copy.deepcopy(model), execution_device=CPU)


def _to_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return disk_offload(copy.deepcopy(model), str(folder), execution_device=CPU)


def _by_map(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The first block on disk, everything else on the CPU."""
    model.save_pretrained(folder / "model")
    blocks = next(
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.count(".") == 1
    )
    outer = blocks.partition(".")[0]
    places = {name: "cpu" for name, _ in model.named_children() if name != outer}
    for name, child in getattr(model, outer).named_children():
        names = [f"{outer}.{name}"]
        if names == [blocks]:
            names = [f"{blocks}.{index}" for index in range(len(child))]
        places |= dict.fromkeys(names, "cpu")
    places[f"{blocks}.0"] = "disk"
    return type(model).from_pretrained(
        folder / "model", device_map=places, offload_folder=folder / "offload", dtype=torch.float32
    )


@pytest.mark.parametrize("name", sorted(OFFLOADED))
@pytest.mark.parametrize("spread", [_to_cpu, _to_disk, _by_map])
def test_offloaded_model_is_served(
    name: str,
    spread: Callable[..., PreTrainedModel],
    warm_of: Any,
    families: Any,
    tmp_path: Path,
) -> None:
    warm = warm_of(next(family for family in families if family.name == name))
    model = spread(warm.model, tmp_path)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    assert weights_fingerprint(model) == weights_fingerprint(warm.model)
    assert layer_devices(model, 2) == [CPU, CPU]
    assert running_device(model) == CPU
    prompt = torch.cat((warm.ids, torch.tensor([7, 9, 11])))[None]
    cache = CompressedStreamingCache.from_pretrained(warm.folder, model=model, level="lossless")
    ours, exact = (generate(model, each, prompt) for each in (cache, warm.native()))
    assert all(torch.equal(a, b) for a, b in zip(ours, exact, strict=True))


def test_changed_weight_is_seen_when_it_is_offloaded(warm_of: Any, families: Any) -> None:
    model = warm_of(families[0]).model
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.down_proj.weight.data[0, 0] += 1e-3
    assert weights_fingerprint(cpu_offload(other, execution_device=CPU)) != weights_fingerprint(
        model
    )


def test_weights_that_are_nowhere_are_named(warm_of: Any, families: Any) -> None:
    model = copy.deepcopy(warm_of(families[0]).model).to("meta")
    with pytest.raises(UnsupportedError, match=r"model\.embed_tokens\.weight are on the meta"):
        list(loaded_parameters(model))
