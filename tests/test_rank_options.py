"""Wrappers that were constructed differently on some rank are refused on all of them."""

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import parameter

from stepclock_ext import ClockedOptimizer, TrainPlan

KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
PLAN = {"dataset_size": 64, "per_device_train_batch_size": 4, "num_train_epochs": 1}


def construct(rank, each, kind="adamw", **common):
    """The error of a wrapper that is constructed with `each[rank]`; None without one."""
    given = {**common, **each[rank]}
    inner = {key: given.pop(key) for key in ("weight_decay", "betas", "note") if key in given}
    note = inner.pop("note", None)
    group = {"params": [parameter(1.0, 2.0)], **inner}
    if note is not None:
        group["note"] = object() if note == "object" else note
    optimizer = KINDS[given.pop("kind", kind)]([group], lr=0.1)
    if "world_size" in given:
        given["plan"] = TrainPlan(world_size=given.pop("world_size"), learning_rate=0.1, **PLAN)
    try:
        opt = ClockedOptimizer(optimizer, process_group=dist.group.WORLD, **given)
    except ValueError as error:
        return str(error)
    opt.backward(optimizer.param_groups[0]["params"][0].sum())
    opt.step()
    return None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("weight_decay", (0.1, 0.0)),
        ("betas", ((0.9, 0.99), (0.9, 0.999))),
        ("kind", ("adamw", "adam")),
        ("note", ("one", "other")),
    ],
)
def test_another_inner_optimizer_is_refused_on_all_ranks(name, values):
    for said in ranks.run(2, construct, [{name: value} for value in values]):
        assert "optimizer must be the same on all ranks" in said
        assert "ranks [1] have others than rank 0" in said


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("backend", ("cpu", "reference")),
        ("max_grad_norm", (1.0, None)),
        ("tail", ("flush", "drop")),
        ("nonfinite", ("skip", "raise")),
        ("loss_scale", (1024.0, 512.0)),
    ],
)
def test_another_option_is_refused_on_all_ranks(name, values):
    for said in ranks.run(2, construct, [{name: value} for value in values]):
        assert f"{name} must be the same on all ranks" in said


def test_an_option_that_is_an_object_of_each_process_is_no_difference():
    assert ranks.run(2, construct, [{"note": "object"}] * 2) == [None, None]


def test_a_plan_for_another_world_is_refused():
    assert ranks.run(2, construct, [{"world_size": 2}] * 2) == [None, None]
    for said in ranks.run(2, construct, [{"world_size": 4}] * 2):
        assert "world_size must be the 2 processes that read different data, got 4" in said
