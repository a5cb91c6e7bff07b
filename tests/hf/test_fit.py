"""A table that fits a text badly is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hf_cachegen import ModelTable, save_cache
from hf_cachegen.hf import fit


def promising(table: ModelTable, share: float) -> ModelTable:
    """The same table, whose samples took ``share`` times as many bits."""
    transform = table.tables["transform"]
    record = table.record
    return ModelTable.build(
        replace(transform, rates=(transform.rates * share).astype(np.float32)),
        model_id=record.model_id,
        config=record.config,
        layout=record.layout,
        data=record.data,
    )


@pytest.mark.parametrize(("share", "warns"), [(1e3, False), (1e-3, True)])
def test_a_misfit_is_logged(
    llama: Any,
    transform_table: Callable[[PreTrainedModel], ModelTable],
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    warns: bool,
) -> None:
    monkeypatch.setattr(fit, "MIN_TOKENS", 40)
    table = promising(transform_table(llama.model), share)
    ids = torch.arange(60) % 50
    with caplog.at_level(logging.WARNING, logger=fit.logger.name):
        save_cache(llama.model, None, ids, tmp_path / "a", tables=table, progress=False)
    assert ("fits this text badly" in caplog.text) == warns
