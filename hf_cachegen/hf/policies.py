"""The policy that a caller of :class:`CompressedStreamingCache` asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_cachegen.artifact import LevelRecord
from hf_cachegen.streaming.controller import (
    OF_A_TARGET,
    FixedLevel,
    Policy,
    find_level,
    parse_policy,
    policy_for,
)

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


def check_request(
    *,
    level: str | None = None,
    policy: str | Policy | None = None,
    ttft_target_s: float | None = None,
) -> None:
    """Refuse arguments of ``from_pretrained`` that make no sense, whatever levels a cache has.

    Raises
    ------
    ValueError
        They exclude each other, one is of a wrong kind, or the policy is unknown.
    """
    if level is not None and (policy is not None or ttft_target_s is not None):
        raise ValueError("expected level, or policy and ttft_target_s; got both")
    if level is not None and not isinstance(level, str):
        raise ValueError(f"expected the name of a level, such as 'finest', got level={level!r}")
    if ttft_target_s is not None and not _is_duration(ttft_target_s):
        raise ValueError(f"expected a ttft_target_s above 0 seconds, got {ttft_target_s!r}")
    if isinstance(policy, Policy):
        if ttft_target_s is not None:
            raise ValueError(
                "expected a policy's name with ttft_target_s, got a policy, which has "
                "a target of its own"
            )
        return
    if policy is None:
        return
    if not isinstance(policy, str):
        raise ValueError(
            f"expected the name of a policy, such as 'layered', or a Policy, got policy={policy!r}"
        )
    kind, _ = parse_policy(policy)
    if kind in OF_A_TARGET and ttft_target_s is None:
        raise ValueError(
            f"policy {policy!r} needs a target, got none; pass ttft_target_s, the seconds to the "
            "first token"
        )
    if kind not in OF_A_TARGET and ttft_target_s is not None:
        raise ValueError(
            f"expected no ttft_target_s with policy {policy!r}, which pays no heed to one, got "
            f"{ttft_target_s}; leave out one of both, or choose a policy that meets targets: "
            f"{', '.join(OF_A_TARGET)}"
        )


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
    check_request(level=level, policy=policy, ttft_target_s=ttft_target_s)
    if isinstance(policy, Policy):
        return policy
    names, losses = [record.name for record in levels], nominal_losses(levels)
    if level is not None:
        return FixedLevel(find_level(level, names, losses))
    if policy is None and ttft_target_s is None:
        return FixedLevel(_finest_lossy(levels))
    nested = n_nested(levels)
    if policy is None:
        # Simulated and on the clock, it misses least of those that adapt, at the least loss; but
        # only where a refinement costs no more than the difference.
        policy = "layered" if nested else "robust"
    return policy_for(
        policy,
        levels=names,
        losses=losses,
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


def _finest_lossy(levels: Sequence[LevelRecord]) -> int:
    """Index of the finest lossy level, or of the last one where all are exact."""
    lossy = [index for index, record in enumerate(levels) if not record.exact]
    return lossy[-1] if lossy else len(levels) - 1
