"""What stands in a configuration file: the landing, the shape, and what is refused."""

import pytest
from plans import from_keys, heard

from stepclock_ext.plan import TrainPlan


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


# Landing and shape.


@pytest.mark.parametrize(
    ("kind", "kwargs", "low"),
    [
        ("cosine_with_min_lr", {"min_lr": "1e-5"}, 1e-5),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, 1e-4),
        ("cosine_with_min_lr", '{"min_lr": 1e-6}', 1e-6),
        ("warmup_stable_decay", {"min_lr_ratio": 0.07, "num_decay_steps": 30}, 7e-5),
        ("polynomial", {"lr_end": 1e-6, "power": 2.0}, 1e-6),
        ("polynomial", {}, 1e-7),
        ("linear", {}, 0.0),
    ],
)
def test_the_landing_is_read_in_every_spelling(kind, kwargs, low):
    plan = from_keys(lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs)
    assert plan.min_lr == plan.lr_at(282) == low
    assert heard(plan, "polynomial lands at 1e-07") == (low == 1e-7)


def test_the_shape_is_read():
    kwargs = {"num_decay_steps": 30.0, "decay_type": "1-sqrt", "num_cycles": 0.5}
    plan = from_keys(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=kwargs)
    assert plan.lr_scheduler_kwargs == {"num_decay_steps": 30, "decay_type": "1-sqrt"}
    assert (plan.lr_at(252), plan.lr_at(282)) == (1e-3, 0.0)
    assert plan.source.unknown_keys == ()


def test_a_shape_that_is_not_planned_is_listed():
    plan = from_keys(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 2})
    assert plan.source.unknown_keys == ("lr_scheduler_kwargs.num_cycles",)
    assert heard(plan, "not read: lr_scheduler_kwargs.num_cycles")


def test_a_cosine_with_another_name_is_the_same_cosine():
    kwargs = {"min_lr_rate": 0.1}
    plan = from_keys(lr_scheduler_type="cosine_warmup_with_min_lr", lr_scheduler_kwargs=kwargs)
    assert (plan.lr_scheduler_type, plan.lr_at(282)) == ("cosine_with_min_lr", 1e-4)
    assert heard(plan, "cosine_warmup_with_min_lr is planned as")


def test_a_landing_of_the_plans_own_key_wins():
    plan = from_keys(min_lr=2e-5, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 0})
    assert plan.min_lr == 2e-5


# The door.


@pytest.mark.parametrize(
    "key", ["per_device_train_batch_size", "learning_rate", "num_train_epochs"]
)
def test_a_missing_key_is_named(key):
    with pytest.raises(ValueError, match=f"^TrainPlan: the configuration must have {key}"):
        from_keys(**{key: None})


def test_a_missing_dataset_size_is_named():
    with pytest.raises(ValueError, match="dataset_size"):
        from_keys(dataset_size=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps must be a positive"),
        ({"gradient_accumulation_steps": "auto"}, "gradient_accumulation_steps must be a positive"),
        ({"gradient_accumulation_steps": -4}, "gradient_accumulation_steps must be a positive"),
        ({"per_device_train_batch_size": "4"}, "per_device_train_batch_size must be a positive"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, got 'fast'"),
        ({"num_train_epochs": "three"}, "num_train_epochs must be a number, got 'three'"),
        ({"max_steps": -5}, "max_steps must be -1 or positive, got -5"),
        ({"warmup_steps": 2.5}, "warmup_steps must be an integer, got 2.5"),
        ({"warmup_ratio": -0.1}, "warmup_ratio must be from 0 to 1, got -0.1"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type must be one of linear"),
        ({"dataloader_drop_last": "yes"}, "dataloader_drop_last must be True or False"),
        ({"lr_scheduler_kwargs": "{"}, "lr_scheduler_kwargs must be a mapping, .* got '{'"),
        ({"lr_scheduler_kwargs": [1]}, r"lr_scheduler_kwargs must be a mapping, .* got \[1\]"),
        ({"lr_scheduler_kwargs": {"min_lr": 0, "min_lr_rate": 0}}, "min_lr and min_lr_rate; keep"),
        ({"lr_scheduler_kwargs": {"min_lr_rate": "low"}}, "min_lr must be a number, got 'low'"),
        ({"lr_scheduler_kwargs": {"power": 2.0}}, "power belongs to 'polynomial'"),
        (
            {"train_type": "lora", "gradient_accumulation_steps": None, "world_size": "two"},
            "world_size must be a positive integer, got 'two'",
        ),
        (
            {"train_type": "lora", "gradient_accumulation_steps": None, "world_size": 0},
            "world_size must be a positive integer, got 0",
        ),
    ],
)
def test_a_value_out_of_range_is_one_line_with_its_key(changes, message):
    with pytest.raises((TypeError, ValueError), match=f"^TrainPlan: .*{message}") as caught:
        from_keys(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "must be YAML, got .*line"),
        ("a: b: c", "must be YAML, got .*line 1"),
        ("\x00", "must be YAML"),
        ("- a\n- b", "must hold keys and values, got list"),
        ("", "must hold keys and values, got NoneType"),
        ("!!python/object:os.system {}", "must be YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_one_line_with_its_name(write, text, message):
    with pytest.raises(
        ValueError, match=rf"^TrainPlan.from_yaml: .*config.yaml {message}"
    ) as caught:
        TrainPlan.from_yaml(write(text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        TrainPlan.from_yaml(tmp_path / "none.yaml")
