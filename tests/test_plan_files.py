"""Plans from configuration files in the shapes of three systems."""

import re

import pytest
from plans import from_keys, heard

from stepclock_ext.plan import TrainPlan

TRAINER = """
output_dir: out/bert
overwrite_output_dir: true
per_device_train_batch_size: 4
per_device_eval_batch_size: 16
gradient_accumulation_steps: 8
learning_rate: 3e-4   # no point: YAML 1.1 reads text here
weight_decay: 0.01
num_train_epochs: 3
max_steps: -1
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr: 3.0e-5
warmup_ratio: 0.07
max_grad_norm: 1.0
bf16: true
eval_strategy: steps
dataloader_drop_last: false
"""

SWIFT = """
model: Qwen/Qwen2.5-7B-Instruct
dataset: [swift/self-cognition]
output_dir: output
train_args:
  train_type: lora
  lora_rank: 8
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 16
  learning_rate: 1e-4
  num_train_epochs: 2
  warmup_ratio: 0.1
  split_dataset_ratio: 0.01
  lr_scheduler_kwargs: '{"min_lr_rate": 0.1}'
  lr_scheduler_type: cosine_with_min_lr
"""

LLAMA_FACTORY = """
### model
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: full
deepspeed: ds_z3.json

### dataset
dataset: identity
template: qwen3_nothink
cutoff_len: 2048

### output
output_dir: saves/qwen3-4b/full/sft
logging_steps: 10

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
resume_from_checkpoint: null
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


# Three systems.


def test_a_file_of_hugging_face_trainer(write):
    plan = TrainPlan.from_yaml(write(TRAINER), dataset_size=24_000, world_size=8)
    assert (plan.effective_batch_size, plan.total_updates, plan.warmup_updates) == (256, 282, 20)
    assert (plan.learning_rate, plan.min_lr, plan.lr_at(282)) == (3e-4, 3e-5, 3e-5)
    assert plan.lr_scheduler_type == "cosine_with_min_lr"
    assert plan.source.system == "Hugging Face Trainer"
    assert not plan.source.lora
    assert plan.source.unknown_keys == (
        "output_dir",
        "overwrite_output_dir",
        "per_device_eval_batch_size",
        "weight_decay",
        "max_grad_norm",
        "bf16",
        "eval_strategy",
    )
    assert plan.source.notes == (f"not read: {', '.join(plan.source.unknown_keys)}",)


def test_a_file_of_ms_swift_nested_under_train_args(write):
    plan = TrainPlan.from_yaml(write(SWIFT), dataset_size=10_000, world_size=4)
    assert (plan.effective_batch_size, plan.updates_per_epoch, plan.total_updates) == (128, 79, 158)
    assert (plan.learning_rate, plan.min_lr, plan.warmup_updates) == (1e-4, 1e-5, 16)
    assert (plan.source.system, plan.source.lora) == ("ms-swift", True)
    assert {"model", "dataset", "train_type", "lora_rank"} <= set(plan.source.unknown_keys)
    assert heard(plan, "split_dataset_ratio", "dataset_size must be what is left")


def test_a_flat_file_of_ms_swift(write):
    flat = re.sub("^  ", "", SWIFT.replace("train_args:\n", ""), flags=re.MULTILINE)
    plans = [
        TrainPlan.from_yaml(write(t), dataset_size=10_000, world_size=4) for t in (SWIFT, flat)
    ]
    assert plans[0] == plans[1]
    assert plans[1].source.system == "ms-swift"


def test_a_file_of_llama_factory(write):
    plan = TrainPlan.from_yaml(write(LLAMA_FACTORY), dataset_size=1_000, world_size=2)
    assert (plan.effective_batch_size, plan.total_updates, plan.warmup_updates) == (16, 189, 19)
    assert (plan.source.system, plan.source.lora) == ("LLaMA-Factory", False)
    assert {"stage", "cutoff_len", "resume_from_checkpoint"} <= set(plan.source.unknown_keys)


def test_a_plan_from_a_file_equals_the_one_that_was_written_in_code():
    written = TrainPlan(
        dataset_size=24_000,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        world_size=8,
        num_train_epochs=3,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
    )
    assert from_keys() == written
    assert hash(from_keys()) == hash(written)


# Contradictions, resolved as those systems do, and said.


def test_max_steps_win_over_epochs():
    plan = from_keys(max_steps=100)
    assert plan.total_updates == 100
    assert heard(plan, "max_steps=100 wins over num_train_epochs=3")


def test_warm_up_steps_win_over_the_ratio():
    plan = from_keys(warmup_steps=20, warmup_ratio=0.5)
    assert plan.warmup_updates == 20
    assert heard(plan, "warmup_steps=20 wins over warmup_ratio=0.5")


def test_warm_up_steps_below_one_are_a_ratio():
    plan = from_keys(warmup_steps=0.1)
    assert (plan.warmup_updates, plan.warmup_ratio) == (29, 0.1)
    assert heard(plan, "warmup_steps=0.1 is a share")
    assert from_keys(warmup_steps=20.0).warmup_updates == 20


def test_a_nested_key_wins_over_the_same_key_outside():
    nested = {"per_device_train_batch_size": 8, "train_type": "full"}
    plan = from_keys(train_args=nested)
    assert plan.per_device_train_batch_size == 8
    assert heard(plan, "train_args.per_device_train_batch_size=8 wins over", "=4")


def test_what_is_passed_beside_the_file_wins():
    settings = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 10}
    plan = TrainPlan.from_mapping(settings, learning_rate=2e-3, world_size=None, tail="drop")
    assert (plan.learning_rate, plan.world_size, plan.tail) == (2e-3, 1, "drop")
    assert heard(plan, "learning_rate=0.002 was given; the file has 0.001")
    assert not heard(plan, "tail='drop' was given")


def test_a_key_without_a_value_is_not_there():
    plan = TrainPlan.from_mapping(
        {
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "max_steps": 10,
            "num_train_epochs": None,
            "warmup_ratio": None,
            "lr_scheduler_kwargs": None,
        }
    )
    assert (plan.num_train_epochs, plan.warmup_updates) == (None, 0)


def test_dropping_the_last_batch_on_several_ranks_is_said_to_drop_more():
    changes = {"dataloader_drop_last": True}
    assert heard(from_keys(**changes), "sampler_drop_last=True counts so")
    assert not heard(from_keys(**changes, world_size=1), "sampler_drop_last")
    assert not heard(from_keys(**changes, sampler_drop_last=True), "counts so")


# What a system takes where its file is silent.


@pytest.mark.parametrize(
    ("mark", "kind"),
    [({}, "linear"), ({"stage": "sft"}, "linear"), ({"train_type": "full"}, "cosine")],
)
def test_the_schedule_is_the_systems_own_default(mark, kind):
    plan = from_keys(lr_scheduler_type=None, **mark)
    assert plan.lr_scheduler_type == kind
    assert heard(plan, f"lr_scheduler_type is not in the file; {plan.source.system} takes {kind}")


@pytest.mark.parametrize(("batch", "ranks", "steps"), [(1, 1, 16), (2, 4, 2), (4, 8, 1), (3, 1, 6)])
def test_ms_swift_accumulates_to_a_batch_of_sixteen(batch, ranks, steps):
    changes = {"per_device_train_batch_size": batch, "world_size": ranks, "train_type": "lora"}
    plan = from_keys(gradient_accumulation_steps=None, **changes)
    assert plan.gradient_accumulation_steps == steps
    assert heard(plan, f"gradient_accumulation_steps is not in the file; ms-swift takes {steps}")


def test_other_systems_do_not_accumulate_unasked():
    assert from_keys(gradient_accumulation_steps=None).gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("mark", "lora"),
    [
        ({"stage": "sft"}, True),
        ({"stage": "sft", "finetuning_type": "full"}, False),
        ({"tuner_type": "lora"}, True),
        ({"train_type": "full"}, False),
        ({"use_peft": True}, True),
        ({"fp16": True}, False),
    ],
)
def test_lora_is_known_from_the_file(mark, lora):
    assert from_keys(**mark).source.lora is lora
    assert heard(from_keys(**mark), "10% to 15%", "LoRA") is lora
