"""What a plan refuses, and what it has to say; neither changes it."""

import math

import pytest
from plans import heard, plan

# The door.

BAD = {
    **{
        f"{name}={value!r}": (error, {name: value}, f"{name} must be a positive integer, got")
        for name in (
            "dataset_size",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "world_size",
        )
        for value, error in [
            (0, ValueError),
            (-1, ValueError),
            (2.5, TypeError),
            ("4", TypeError),
            (True, TypeError),
        ]
    },
    "no epoch": (ValueError, {"num_train_epochs": 0}, "num_train_epochs must be positive"),
    "NaN epochs": (ValueError, {"num_train_epochs": math.nan}, "num_train_epochs must be positive"),
    "epochs in words": (TypeError, {"num_train_epochs": "3"}, "num_train_epochs must be a number"),
    "no length": (ValueError, {"num_train_epochs": None}, "num_train_epochs or max_steps must be"),
    "max_steps 0": (ValueError, {"max_steps": 0}, "max_steps must be -1 or positive, got 0"),
    "max_steps -2": (ValueError, {"max_steps": -2}, "max_steps must be -1 or positive, got -2"),
    "max_steps 1.5": (TypeError, {"max_steps": 1.5}, "max_steps must be an integer, got 1.5"),
    "no rate": (ValueError, {"learning_rate": 0.0}, "learning_rate must be positive and finite"),
    "rate in words": (TypeError, {"learning_rate": "1e-4"}, "learning_rate must be a number"),
    "landing": (ValueError, {"min_lr": 2e-3}, "min_lr must be from 0 to learning_rate=0.001"),
    "kind": (ValueError, {"lr_scheduler_type": "step"}, "lr_scheduler_type must be one of linear"),
    "ratio": (ValueError, {"warmup_ratio": 1.1}, "warmup_ratio must be from 0 to 1, got 1.1"),
    "NaN ratio": (ValueError, {"warmup_ratio": math.nan}, "warmup_ratio must be from 0 to 1"),
    "ratio in words": (TypeError, {"warmup_ratio": "0.1"}, "warmup_ratio must be a number"),
    "negative steps": (ValueError, {"warmup_steps": -1}, "warmup_steps must be 0 or more, got -1"),
    "half steps": (TypeError, {"warmup_steps": 0.5}, "warmup_steps must be an integer, got 0.5"),
    "long warm-up": (ValueError, {"warmup_steps": 283}, "at most the 282 updates .* got 283"),
    "drop_last": (TypeError, {"dataloader_drop_last": 1}, "dataloader_drop_last must be True or"),
    "sampler": (TypeError, {"sampler_drop_last": "no"}, "sampler_drop_last must be True or False"),
    "tail": (ValueError, {"tail": "pad"}, "tail must be one of flush, carry, drop, got 'pad'"),
    "kwargs": (TypeError, {"lr_scheduler_kwargs": 3}, "lr_scheduler_kwargs must be a mapping"),
    "no such shape": (ValueError, {"lr_scheduler_kwargs": {"gamma": 1}}, "a shape has no 'gamma'"),
    "decay": (
        ValueError,
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 300},
        },
        "num_decay_steps must be an integer from 1 to the 282 updates after warm-up",
    ),
    "shape": (ValueError, {"lr_scheduler_kwargs": {"power": 2}}, "power belongs to 'polynomial'"),
}


@pytest.mark.parametrize("error, changes, message", BAD.values(), ids=BAD)
def test_a_plan_refuses_by_name(error, changes, message):
    with pytest.raises(error, match=f"^TrainPlan: .*{message}"):
        plan(**changes)


# Advice.


def test_a_plan_of_usual_values_has_nothing_to_say():
    assert plan(warmup_ratio=0.05).notes() == []


def test_advice_on_warm_up_goes_by_the_data_and_by_lora():
    assert heard(plan(), "0 of 282 updates", "3% to 10%")
    assert heard(plan(warmup_ratio=0.2), "57 of 282 updates (20.2%)", "3% to 10%")
    assert heard(
        plan(dataset_size=9_999, warmup_ratio=0.1), "5% to 8%", "fewer than 10,000 samples"
    )
    assert heard(plan(warmup_ratio=0.05), "10% to 15%", "LoRA", lora=True)
    assert not heard(plan(warmup_ratio=0.12), "warm-up", lora=True)
    assert not heard(plan(lr_scheduler_type="constant"), "warm-up is 0")


def test_advice_on_windows_and_batches_is_never_applied():
    assert heard(plan(gradient_accumulation_steps=33), "gradient_accumulation_steps=33", "updates")
    assert not heard(plan(gradient_accumulation_steps=32), "gradient_accumulation_steps")
    assert heard(plan(), "the linear rule", "8 times", "0.008 by the linear", old_batch_size=32)
    assert heard(
        plan(), "the square root rule", "16 times", "0.004 by the square root", old_batch_size=16
    )
    assert not heard(plan(), "rule", old_batch_size=256)


def test_arguments_that_do_not_count_are_named():
    assert heard(
        plan(max_steps=100), "max_steps=100 wins over num_train_epochs=3", "it takes 2 epochs"
    )
    assert heard(
        plan(warmup_steps=20, warmup_ratio=0.5), "warmup_steps=20 wins over warmup_ratio=0.5"
    )
    assert heard(plan(lr_scheduler_type="constant", warmup_steps=5), "'constant' has no warm-up")
    assert heard(plan(lr_scheduler_type="inverse_sqrt", min_lr=1e-5), "min_lr=1e-05 is not reached")
    assert heard(plan(warmup_ratio=1.0), "ends at the peak")
