"""Who waits for what is noticed, and for how long."""

from __future__ import annotations

import itertools
import threading

import pytest

from hf_cachegen.streaming import ledger as module
from hf_cachegen.streaming.ledger import Ledger


@pytest.mark.parametrize("start_s", [9.97, 9.98, 9.99])
def test_the_end_of_refinements_is_not_missed(
    start_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it comes between two looks at the clock, and though nobody else notices anything."""
    ledger = Ledger([[0]], room=8)
    ledger.end_base()
    ledger.refine_until(10.0)
    clock = itertools.count(start_s, 0.02)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    waiting = threading.Thread(target=ledger.wait_fetched, daemon=True)
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()


def test_nobody_waits_any_more_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger([[0], [0]], room=8)

    def interrupt(timeout: float | None) -> None:
        assert ledger.awaits(0)
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger._changed, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ledger.wait_layer(0, lambda step: True)
    assert not ledger.awaits(0)
