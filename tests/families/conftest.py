"""Models of every family, with the artefacts of their caches; every row of the tables is tested."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))  # for the tables beside this file

from call_table import CALLS, Call
from family_table import FAMILIES, REFUSED, SUPPORTED, Family
from warm import Warm, build, publish

torch.set_num_threads(1)  # tiny models gain nothing from more, and workers share the machine


@pytest.fixture(scope="session")
def warm_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Warm]:
    """``warm_of(family)`` builds a model of it and saves a context's cache; once per family."""
    known: dict[str, Warm] = {}

    def warm_of(family: Family) -> Warm:
        if family.name not in known:
            folder = tmp_path_factory.mktemp("families") / "context"
            known[family.name] = publish(family, folder)
        return known[family.name]

    return warm_of


@pytest.fixture(params=SUPPORTED, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    """Each family that is supported."""
    return request.param


@pytest.fixture(params=[family for family in SUPPORTED if family.layers != "states"], ids=str)
def token_family(request: pytest.FixtureRequest) -> Family:
    """Each family that caches keys and values."""
    return request.param


@pytest.fixture(params=[family for family in SUPPORTED if "states" in family.layers], ids=str)
def state_family(request: pytest.FixtureRequest) -> Family:
    """Each family that keeps recurrent or convolutional states."""
    return request.param


@pytest.fixture(
    params=[family for family in SUPPORTED if family.rotation not in ("none", "as cached")], ids=str
)
def rotated_family(request: pytest.FixtureRequest) -> Family:
    """Each family whose rotation the codecs undo."""
    return request.param


@pytest.fixture(params=REFUSED, ids=str)
def refused_family(request: pytest.FixtureRequest) -> tuple[Family, PreTrainedModel]:
    """Each family that is refused, with a model of it."""
    return request.param, build(request.param)


@pytest.fixture(params=[family for family in REFUSED if "sees" in str(family.refused)], ids=str)
def uncontinuable_family(request: pytest.FixtureRequest) -> tuple[Family, PreTrainedModel]:
    """Each family whose own cache gives another answer than the whole prompt."""
    return request.param, build(request.param)


@pytest.fixture(scope="session")
def families() -> list[Family]:
    """All of them, in the order of the table."""
    return FAMILIES


@pytest.fixture(scope="session")
def calls() -> list[Call]:
    """All of them, in the order of the table."""
    return CALLS
