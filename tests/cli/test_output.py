"""How numbers and errors are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.cli.output import count, figure, report_error


@pytest.mark.parametrize("number", range(4))
def test_nouns_are_as_many_as_their_numbers(number: int):
    assert count(number, "chunk") == f"{number} {'chunk' if number == 1 else 'chunks'}"


@given(st.floats(1e-12, 1e15), st.integers(1, 9))
def test_figures_are_written_out(value: float, digits: int):
    text = figure(value, digits)
    assert set(text) <= set("0123456789.")
    assert float(text) == float(f"{value:.{digits}g}")


@pytest.mark.parametrize(
    ("value", "text"), [(12345.0, "12300"), (0.000123456, "0.000123"), (1.0, "1"), (0.5, "0.5")]
)
def test_figures_by_hand(value: float, text: str):
    assert figure(value) == text


def test_advice_is_for_the_shell(capsys: pytest.CaptureFixture[str]):
    report_error("expected level, or policy and ttft_target_s; got both;\n  pass overwrite=True")
    assert capsys.readouterr().err == (
        "hf-cachegen: error: expected --level, or --policy and --ttft-target; got both; "
        "pass --overwrite\n"
    )
