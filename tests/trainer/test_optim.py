"""The numbers of the learning-rate schedule, and what decays."""

from typing import Any

import pytest

from packhouse.trainer.model import CONFIGS, InternLM2
from packhouse.trainer.optim import TrainConfig, learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 0}, [1] * 8),
        ({"warmup_steps": 4, "schedule": "cosine", "final_lr_share": 0.2}, [0.25, 0.5, 0.75, 1, 1, 0.882843, 0.6]),
    ],
)
def test_the_rate_warms_up_then_holds_or_falls(settings: dict[str, Any], expected: list[float]) -> None:
    config = TrainConfig(steps=8, peak_lr=1.0, **settings)
    assert [learning_rate(config, step) for step in range(len(expected))] == pytest.approx(expected, abs=1e-6)


def test_cosine_ends_at_its_final_share_and_stays_there() -> None:
    config = TrainConfig(steps=10, peak_lr=2.0, warmup_steps=3, schedule="cosine", final_lr_share=0.25)
    assert [learning_rate(config, step) for step in (10, 11, 1000)] == pytest.approx([0.5] * 3)


def test_norms_do_not_decay_and_no_parameter_is_missed() -> None:
    model = InternLM2(CONFIGS["tiny"])
    groups = make_optimizer(model, TrainConfig(steps=1, weight_decay=0.3)).param_groups
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    expected = {id(x): 0.0 if "norm" in name else 0.3 for name, x in model.named_parameters()}
    assert decays == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"steps": 5, "warmup_steps": 6}, "warmup_steps 6"),
        ({"steps": 5, "schedule": "linear"}, 'schedule "linear" is unknown'),
        ({"steps": 5, "clip_norm": 0.0}, "clip_norm 0.0 must be positive"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings)
