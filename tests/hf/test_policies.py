"""What the arguments of ``from_pretrained`` mean."""

from __future__ import annotations

import pytest

from hf_cachegen.artifact import LevelRecord
from hf_cachegen.hf.policies import (
    LOSS_RATIOS,
    OTHER_LOSS_RATIO,
    nominal_losses,
    resolve_policy,
)
from hf_cachegen.streaming.controller import (
    OF_A_TARGET,
    FixedLevel,
    LayeredPolicy,
    PaperPolicy,
    RobustPolicy,
    Soonest,
    TextOnly,
)


def ladder(*exact: bool) -> list[LevelRecord]:
    return [LevelRecord(name=f"l{i}", codec="raw", exact=e) for i, e in enumerate(exact)]


LEVELS = ladder(False, False, False, True, True)


@pytest.mark.parametrize(
    ("levels", "name", "index"),
    [
        (LEVELS, None, 2),
        (LEVELS, "coarsest", 0),
        (LEVELS, "finest", 3),
        (LEVELS, "l1", 1),
        (ladder(True, True), None, 1),
        (ladder(False, False), "finest", 1),
    ],
)
def test_levels_go_by_the_same_names_everywhere(
    levels: list[LevelRecord], name: str | None, index: int
) -> None:
    assert resolve_policy(levels, level=name) == FixedLevel(index)
    if name is not None:
        assert resolve_policy(levels, policy=f"fixed:{name}") == FixedLevel(index)
        assert resolve_policy(levels, policy=f"soonest:{name}") == Soonest(index)


@pytest.mark.parametrize("policy", ["text", "fixed:l1", "fixed:finest", "soonest:l4"])
def test_a_target_is_for_policies_that_meet_one(policy: str) -> None:
    resolve_policy(LEVELS, policy=policy)
    with pytest.raises(
        ValueError, match=f"no ttft_target_s with policy '{policy}'.*got 2.0; leave"
    ):
        resolve_policy(LEVELS, policy=policy, ttft_target_s=2.0)


@pytest.mark.parametrize("policy", [3, 0, True, b"text", ["text"], TextOnly, object()])
def test_policies_are_names_or_objects(policy: object) -> None:
    with pytest.raises(ValueError, match=r"name of a policy.*or a Policy, got policy="):
        resolve_policy(LEVELS, policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [3, 0, True, b"l1", ["l1"], LEVELS[1]])
def test_levels_are_names(level: object) -> None:
    with pytest.raises(ValueError, match=r"name of a level.*got level="):
        resolve_policy(LEVELS, level=level)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["transform", "delta", "other"])
def test_finer_levels_lose_less_and_exact_ones_nothing(codec: str) -> None:
    levels = [level.model_copy(update={"codec": codec}) for level in LEVELS]
    losses = nominal_losses(levels)
    ratio = LOSS_RATIOS.get(codec, OTHER_LOSS_RATIO)
    assert losses == [1.0, pytest.approx(1 / ratio), pytest.approx(1 / ratio**2), 0.0, 0.0]


@pytest.mark.parametrize("target", [0, -1.0, float("nan"), float("inf"), "1", [1.0]])
def test_targets_are_finite_seconds_above_0(target: object) -> None:
    with pytest.raises(ValueError, match="expected a ttft_target_s above 0 seconds, got"):
        resolve_policy(LEVELS, ttft_target_s=target)  # type: ignore[arg-type]


def test_policies() -> None:
    assert resolve_policy(LEVELS, policy="fixed:l1") == FixedLevel(1)
    assert resolve_policy(LEVELS, policy="text") == TextOnly()
    assert resolve_policy(LEVELS, policy="paper", ttft_target_s=2.0) == PaperPolicy(2.0, 1)
    robust = resolve_policy(LEVELS, ttft_target_s=2.0)
    assert robust == RobustPolicy(2.0, nominal_losses(LEVELS), 1)
    layered = resolve_policy(LEVELS, policy="layered", ttft_target_s=2.0)
    assert isinstance(layered, LayeredPolicy)
    assert layered.nested == 0
    pairs = [(LEVELS[0], None), (LEVELS[1], "l0"), (LEVELS[2], "l1"), (LEVELS[3], None)]
    nested = [level.model_copy(update={"refines": refined}) for level, refined in pairs]
    layered = resolve_policy(nested, policy="layered", ttft_target_s=2.0)
    assert isinstance(layered, LayeredPolicy)
    assert layered.nested == 3
    assert resolve_policy(nested, ttft_target_s=2.0) == layered, "the best where levels nest"
    own = PaperPolicy(1.0, 0)
    assert resolve_policy(LEVELS, policy=own) is own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "l1", "policy": "text"}, "got both"),
        ({"level": "l1", "ttft_target_s": 1.0}, "got both"),
        ({"level": "best"}, "unknown level 'best'.*l0, l1, l2, l3, l4, coarsest or finest"),
        ({"level": ""}, "unknown level ''"),
        ({"policy": "fixed:best"}, "unknown level 'best'"),
        ({"policy": ""}, "unknown policy ''; expected fixed:<level>"),
        ({"policy": "", "ttft_target_s": 1.0}, "unknown policy ''"),
        *(
            ({"policy": name, **target}, f"'{name}' lacks its level; expected .*:<level>, such as")
            for name in ("fixed", "fixed:", "soonest", "soonest:")
            for target in ({}, {"ttft_target_s": 1.0})
        ),
        ({"policy": "text:l1"}, "unknown policy 'text:l1'"),
        ({"policy": "greedy", "ttft_target_s": 1.0}, "unknown policy 'greedy'"),
        *(({"policy": name}, "needs a target.*pass ttft_target_s") for name in OF_A_TARGET),
        ({"ttft_target_s": 0.0}, "above 0"),
        ({"policy": TextOnly(), "ttft_target_s": 1.0}, "a target of its own"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_policy(LEVELS, **arguments)
