"""What to fetch next: the policies by name. Equal states give equal choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_cachegen.streaming.layered import LayeredPolicy
from hf_cachegen.streaming.policy import TEXT, Policy, Refinement, StreamState, TargetPolicy
from hf_cachegen.streaming.robust import RobustPolicy

__all__ = [
    "OF_A_LEVEL",
    "OF_A_TARGET",
    "TEXT",
    "FixedLevel",
    "LayeredPolicy",
    "PaperPolicy",
    "Policy",
    "Refinement",
    "RobustPolicy",
    "Soonest",
    "StreamState",
    "TextOnly",
    "find_level",
    "for_each_level",
    "parse_policy",
    "policy_for",
]


OF_A_LEVEL = ("fixed", "soonest")
"""Policies whose name goes on with ``:<level>``."""

OF_A_TARGET = ("paper", "robust", "layered")
"""Policies that are to meet a time to first token, which the others have no use for."""


def for_each_level(name: str, levels: Sequence[str]) -> list[str]:
    """What a name stands for: the policy of each level where the level is left out."""
    return [f"{name}:{level}" for level in levels] if name in OF_A_LEVEL else [name]


@dataclass(frozen=True)
class FixedLevel(Policy):
    """The same level for every chunk."""

    adapts = False
    level: int

    def choose(self, state: StreamState) -> int:
        return self.level


@dataclass(frozen=True)
class Soonest(Policy):
    """Everything at a level or as text, whichever way all of it is there first.

    The model recomputes the first chunks while the link brings the others, as long as that is not
    slower: both work at once. With an exact level, the context is exact.
    """

    level: int

    def choose(self, state: StreamState) -> int:
        estimate = state.estimate()
        if estimate is None:
            return self.level
        return TEXT if state.text_is_as_soon(estimate, self.level) else self.level

    def instead_of_text(self, state: StreamState) -> int | None:
        return state.level_to_try(self.level)


@dataclass(frozen=True)
class TextOnly(Policy):
    """Every chunk recomputed: an ordinary prefill."""

    adapts = False

    def choose(self, state: StreamState) -> int:
        return TEXT


@dataclass(frozen=True)
class PaperPolicy(TargetPolicy):
    """CacheGen's rule (SIGCOMM 2024, section 5.3 and algorithm 1).

    Text if recomputing all remaining chunks fits the remaining time. Otherwise the finest level
    whose remaining bytes, of all chunks, arrive within it at the throughput of the last transfer;
    the smallest if none does. Before a throughput is known it takes ``first_level``. Remaining time
    ends :attr:`StreamState.tail_s` before the target, which is the first token's and not the last
    byte's.

    Attributes
    ----------
    first_level
        Level of the first chunk.
    """

    first_level: int

    def choose(self, state: StreamState) -> int:
        deadline_s = self.deadline_s(state)
        text_s = state.compute_free_s + state.remaining_recompute_s()
        if state.recompute_s and text_s <= deadline_s:
            return TEXT
        if not state.throughputs_bytes_per_s:
            return self.first_level
        remaining_s = max(deadline_s - state.elapsed_s, 0)
        budget = remaining_s * state.throughputs_bytes_per_s[-1]
        levels = range(len(state.sizes_bytes[0]))
        fitting = [level for level in levels if sum(state.remaining_bytes(level)) <= budget]
        return max(fitting, default=state.smallest_level())


def parse_policy(name: str) -> tuple[str, str]:
    """The kind of policy that a name means, and its level; "" for kinds that are not of one.

    Raises
    ------
    ValueError
        There is no such policy, or its level is missing.
    """
    kind, _, level = name.partition(":")
    if kind in OF_A_LEVEL:
        if not level:
            raise ValueError(
                f"policy {name!r} lacks its level; expected {kind}:<level>, such as {kind}:finest"
            )
        return kind, level
    if name not in ("text", *OF_A_TARGET):
        single = ", ".join(f"{kind}:<level>" for kind in OF_A_LEVEL)
        *others, last = ("text", *OF_A_TARGET)
        raise ValueError(
            f"unknown policy {name!r}; expected {single}, {', '.join(others)} or {last}"
        )
    return name, ""


def policy_for(
    name: str,
    *,
    levels: Sequence[str],
    losses: Sequence[float],
    target_s: float | None = None,
    nested: int = 0,
) -> Policy:
    """The policy of a name.

    Parameters
    ----------
    name
        ``fixed:<level>``, ``soonest:<level>``, ``text``, ``paper``, ``robust`` or ``layered``. A
        level goes by its name, or is the ``coarsest`` or the ``finest``, which is the first exact
        one where there is one.
    levels, losses
        Names of the levels, coarse to fine, and the loss of quality of each; 0 for exact ones.
    target_s
        Time to first token to meet; :data:`OF_A_TARGET` need it, the others ignore it.
    nested
        How many of the coarsest levels nest, see :class:`LayeredPolicy`.

    Raises
    ------
    ValueError
        The name or the level is unknown, or the target is missing.
    """
    kind, level = parse_policy(name)
    if kind in OF_A_LEVEL:
        index = find_level(level, levels, losses)
        return FixedLevel(index) if kind == "fixed" else Soonest(index)
    if name == "text":
        return TextOnly()
    if target_s is None or target_s <= 0:
        raise ValueError(f"policy {name!r} needs a target of more than 0 seconds, got {target_s}")
    if name == "layered":
        return LayeredPolicy(target_s, losses, nested)
    lossy = [index for index, loss in enumerate(losses) if loss > 0]
    first_level = lossy[len(lossy) // 2] if lossy else 0
    if name == "paper":
        return PaperPolicy(target_s, first_level)
    return RobustPolicy(target_s, losses, first_level)


def find_level(name: str, levels: Sequence[str], losses: Sequence[float]) -> int:
    """Index of a level; the arguments are as for :func:`policy_for`.

    Raises
    ------
    ValueError
        There is no such level; the message lists those that there are.
    """
    exact = [index for index, loss in enumerate(losses) if loss == 0]
    named = {
        "coarsest": 0,
        "finest": exact[0] if exact else len(levels) - 1,
        **{level: index for index, level in enumerate(levels)},
    }
    if name not in named:
        raise ValueError(
            f"unknown level {name!r}; expected one of {', '.join(levels)}, coarsest or finest"
        )
    return named[name]
