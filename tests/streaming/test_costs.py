"""What one context costs, from what the machine is known to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.artifact import Artifact
from hf_cachegen.stores import LocalStore
from hf_cachegen.streaming.costs import PASS_MARGIN, StreamCosts
from hf_cachegen.streaming.rates import MachineRates, PrefillCost

N_CHUNKS, N_LAYERS, N_LEVELS = 3, 4, 2
VALUES = 8 * 2 * 64  # tokens, heads and channels of a layer's segment


def costs(
    made_up: Path, rates: MachineRates, *, location: str = "here", workers: int = 2
) -> StreamCosts:
    manifest = Artifact.open(LocalStore(made_up)).manifest
    return StreamCosts(manifest, rates, location, workers)


def test_decoding_is_shared_by_the_workers(made_up: Path):
    rates = MachineRates()
    found = costs(made_up, rates, workers=4)
    assert found.decode_s() == [[0.0] * N_LEVELS] * N_CHUNKS
    low, high = Artifact.open(LocalStore(made_up)).manifest.read_bytes(0)
    # A segment of two layers, 1 ms a value.
    found.note_decode(1, 0, (0, 1), low // 2, 2 * VALUES * 1e-3)
    seconds = N_LAYERS * VALUES * 1e-3 / 4
    inferred = seconds * high / low  # as much a byte
    assert found.decode_s() == [[pytest.approx(seconds), pytest.approx(inferred)]] * N_CHUNKS
    assert found.tail_s(0.0) == pytest.approx(2 * VALUES * 1e-3)  # one thread is at the last one
    found.note_decode(1, 0, (), 0, 99.0)  # one that carried nothing tells nothing
    assert found.decode_s()[0][0] == pytest.approx(seconds)


def test_recomputing_costs_more_further_on(made_up: Path):
    rates = MachineRates()
    found = costs(made_up, rates)
    assert found.recompute_s() is None
    rates.prefill = PrefillCost(0.1, 0.01, 0.001)
    first, second, third = found.recompute_s() or ()
    assert first == pytest.approx(0.1 + 0.08 + 0.001 * 36)
    assert third - second == pytest.approx(second - first) == pytest.approx(0.064)
    found.note_recompute(0, 2 * first)
    assert found.recompute_s()[0] == pytest.approx(1.5 * first)


@given(st.floats(0, 10), st.integers(1, 500))
def test_prompt_follows_the_last_layers(made_up: Path, overlap_s: float, prompt: int):
    rates = MachineRates()
    rates.prefill = PrefillCost(0.0, 0.01, 0.0)
    found = costs(made_up, rates)
    found.prompt_tokens = prompt
    pass_s = PASS_MARGIN * 0.01 * prompt
    assert found.tail_s(0.0) == pytest.approx(pass_s)
    tail_s = found.tail_s(overlap_s)
    # One layer's part comes after the last layer's arrival in any case.
    assert tail_s >= pass_s / N_LAYERS * (1 - 1e-9)
    assert tail_s == pytest.approx(max(pass_s - overlap_s * 3 / 4, pass_s / 4))


def test_servers_and_not_artefacts_share_a_link(made_up: Path):
    rates = MachineRates()
    pairs = {
        "https://host:80/one": "https://host:80/other",
        "hf://org/name@main": "hf://else/other/folder",
        "/data/one": "/data/one",
    }
    for number, (one, other) in enumerate(pairs.items(), start=1):
        assert costs(made_up, rates, location=other).link_bytes_per_s() == []
        costs(made_up, rates, location=one).note_transfer(number)
        assert costs(made_up, rates, location=other).link_bytes_per_s() == [number]
    assert costs(made_up, rates, location="/data/other").link_bytes_per_s() == []
