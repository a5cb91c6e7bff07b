"""``docs/compatibility.md`` is written from the tables that are tested."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"

KINDS = {
    "full": "full attention",
    "sliding": "with sliding windows",
    "states": "with recurrent states",
}

OLDEST = "5.18"
"""The oldest transformers that is supported."""

HEAD = """\
# Compatibility

Written by `tests/families/test_document.py` from the tables that are tested. Each family is a model
with random weights (float32, CPU); its context is longer than its windows and comes in three
chunks. transformers {oldest} and later; some model types are newer than that.

## Families

Of each of these, `lossless` gives the tokens and the logits of a native warm cache, bit by bit;
every tensor at the finest `delta` level is within 10% of it (Frobenius norm); and the native cache
itself gives what the whole prompt gives. The column on rotation says how keys are un-rotated before
a lossy level codes them: `half` and `interleaved` name the pairs of channels, `partial` a head that
is not rotated to its end, `MLA` latents with the rotated part in the place of the values, `NoPE`
layers without a rotation. Keys are coded `as cached` where the rotation is not known here or moves
with the length: right, but larger. So are those of model types that are not listed, which are
served if all their layers have full or sliding attention. Recurrent and convolutional states are
stored whole and exact, whatever the level; of model types that are not listed they are refused.

{families}

Refused by name, before the model runs:

{refused}

## Calls of `generate()`

Every call is tested with every family above, against the same call with a native cache. What cannot
be right is refused before the model runs, and the message says what to call instead.
`model.generate(**cache.inputs(tokenizer, question))` makes a right call.

{calls}

A cache from which tokens were evicted (kvpress, H2O) can be saved with the positions of the others
and used in the same calls, by families with full attention alone; sliding windows, states and ALiBi
are refused. It cannot be handed to a cache of transformers' own, cropped to where a head lacks a
token, recomputed from text, or saved once it has grown.

A forward pass that `torch.compile` traces as one graph, over a static cache that `fill_cache` has
filled, is tested with `llama` and `gemma3_text`; models that accelerate has moved to the CPU or to
disk, whole or in part, with those and `gpt2`.

transformers itself has contrastive search, groups of beams and DoLa no longer, and refuses them.
"""


def test_document_is_what_is_tested(families: Any, calls: Any) -> None:
    expected = document(families, calls)
    if os.environ.get("WRITE_DOCS"):
        DOCUMENT.write_text(expected, encoding="utf-8")
    found = DOCUMENT.read_text(encoding="utf-8")
    assert found == expected, "run WRITE_DOCS=1 python -m pytest tests/families/test_document.py"


def document(families: Any, calls: Any) -> str:
    """The text of ``docs/compatibility.md``."""
    supported = [
        (family.name, family.layers, family.rotation, _remarks(family))
        for family in families
        if family.refused is None
    ]
    refused = [(family.name, family.refused) for family in families if family.refused]
    outcomes = [
        (call.what, _code(call), *(_outcome(call, kind) for kind in KINDS)) for call in calls
    ]
    return HEAD.format(
        oldest=OLDEST,
        families=_table(("family", "attention", "rotation undone", "remarks"), supported),
        refused=_table(("family", "why"), refused),
        calls=_table(("call", "in code", *KINDS.values()), outcomes),
    )


def _remarks(family: Any) -> str:
    refused = (f"{call}: refused" for call in family.refused_calls)
    since = (
        f"{call}: transformers {first} and later" for call, first in family.calls_since.items()
    )
    text = () if family.recomputed else ("no chunks as text",)
    right = (f"{call}: right" for call in family.right_calls)
    first = (f"transformers {family.since} and later",) if family.since != OLDEST else ()
    return "; ".join(filter(None, (family.note, *first, *text, *refused, *right, *since)))


def _code(call: Any) -> str:
    return f"`{call.code}`" if call.code else ""


def _outcome(call: Any, kind: str) -> str:
    if kind in call.refused:
        return f"refused, `{call.error.__name__}`"
    near = ", last bits may differ" if call.near else ""
    since = f", transformers {call.since} and later" if call.since != OLDEST else ""
    return f"right{near}{since}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
