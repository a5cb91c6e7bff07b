"""The policy that a caller of :class:`CompressedStreamingCache` asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_cachegen.artifact import LevelRecord
from hf_cachegen.streaming.controller import FixedLevel, Policy, policy_for

LOSS_RATIOS = {"delta": 3.75, "transform": 5.8}
"""How many times less a lossy level loses than the next coarser one of its codec. Artefacts do not
say; this is what the KL of SmolLM2-135M comes to on average over the ladder (``bench codec``)."""

OTHER_LOSS_RATIO = 4.0


def nominal_losses(levels: Sequence[LevelRecord]) -> list[float]:
    """Loss of each level relative to the coarsest, 0 for exact ones."""
    losses = [1.0]
    for level in levels[1:]:
        losses.append(losses[-1] / LOSS_RATIOS.get(level.codec, OTHER_LOSS_RATIO))
    return [0.0 if level.exact else loss for level, loss in zip(levels, losses, strict=True)]


def resolve_policy(
    levels: Sequence[LevelRecord],
    *,
    level: str | None = None,
    policy: str | Policy | None = None,
    ttft_target_s: float | None = None,
) -> Policy:
    """The policy that arguments of ``from_pretrained`` mean, see there.

    Raises
    ------
    ValueError
        The arguments exclude each other, or a name is unknown.
    """
    if level is not None and (policy is not None or ttft_target_s is not None):
        raise ValueError("expected level, or policy and ttft_target_s; got both")
    if ttft_target_s is not None and not _is_duration(ttft_target_s):
        raise ValueError(f"expected a ttft_target_s above 0 seconds, got {ttft_target_s!r}")
    if isinstance(policy, Policy):
        if ttft_target_s is not None:
            raise ValueError(
                "expected a policy's name with ttft_target_s, got a policy, which has "
                "a target of its own"
            )
        return policy
    if policy is None and ttft_target_s is None:
        return FixedLevel(_level(levels, level))
    nested = n_nested(levels)
    return policy_for(
        # Simulated and on the clock, it misses least of those that adapt, at the least loss; but
        # only where a refinement costs no more than the difference.
        policy or ("layered" if nested else "robust"),
        levels=[record.name for record in levels],
        losses=nominal_losses(levels),
        target_s=ttft_target_s,
        nested=nested,
    )


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def n_nested(levels: Sequence[LevelRecord]) -> int:
    """How many of the coarsest levels nest: each refines the one before."""
    count = 1
    for level, below in zip(levels[1:], levels, strict=False):
        if level.refines != below.name:
            break
        count += 1
    return count if count > 1 else 0


def _level(levels: Sequence[LevelRecord], name: str | None) -> int:
    """Index of a level by name, ``coarsest`` or ``finest``; None is the finest lossy one."""
    exact = [index for index, record in enumerate(levels) if record.exact]
    lossy = [index for index, record in enumerate(levels) if not record.exact]
    if name is None:
        return lossy[-1] if lossy else len(levels) - 1
    named = {
        "coarsest": 0,
        "finest": exact[0] if exact else len(levels) - 1,
        **{record.name: index for index, record in enumerate(levels)},
    }
    if name not in named:
        names = ", ".join(record.name for record in levels)
        raise ValueError(
            f"unknown level {name!r}; this cache has {names}, and 'coarsest', 'finest'"
        )
    return named[name]
