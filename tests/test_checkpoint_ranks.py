"""Checkpoints of several processes: the run goes on, on as many of them to the bit."""

from functools import partial

import pytest
import ranks
import torch
from joint_run import KINDS, JointRun, assert_same
from tolerance import assert_bit_equal, assert_close

from stepclock_ext import checkpoint_files
from stepclock_ext.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

each_kind = pytest.mark.parametrize("kind", KINDS)
FP32, BF16 = torch.float32, torch.bfloat16  # bf16 has masters
HALF, END = 2, 4  # updates


def train(rank, world, kind, updates, *, folder=None, path=None, remap=None, draws=True, **options):
    """Loads, trains, saves; what it came to."""
    run = JointRun(rank, world, kind, **options)
    resume = None if path is None else run.load(path, remap=remap)
    run.train(updates)
    if folder is not None:
        run.save(folder, extra={"rank": rank})
    extra = None if resume is None else resume.extra
    return run.values(draws=draws), extra


# ---- Going on ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "dtype"), [(2, FP32), (4, BF16)], ids=["2-fp32", "4-bf16"])
@each_kind
def test_a_run_that_stopped_goes_on_to_the_bit(tmp_path, kind, dtype, world):
    whole = ranks.run(world, train, world, kind, END, dtype=dtype)
    ranks.run(world, train, world, kind, HALF, folder=tmp_path, dtype=dtype)
    resumed = ranks.run(world, train, world, kind, END, path=tmp_path, dtype=dtype)
    for (values, extra), (expected, _) in zip(resumed, whole, strict=True):
        assert_same(values, expected, assert_bit_equal)
        assert extra == {"rank": 0}
    draws = [values["draws"] for values, _ in resumed]
    assert len(set(draws)) == world
    assert resumed[0][0]["clock"]["update_step"] == END


CHANGES = [
    (2, "fsdp", 4, "fsdp", FP32),
    (4, "fsdp", 2, "fsdp", BF16),
    (4, "fsdp", 1, "alone", BF16),
    (2, "fsdp", 2, "zero1", BF16),
    (2, "fsdp", 2, "ddp", FP32),
    (1, "alone", 4, "fsdp", BF16),
    (2, "zero1", 4, "fsdp", BF16),
    (2, "zero1", 1, "alone", FP32),
    (2, "ddp", 1, "alone", FP32),
    (1, "alone", 2, "ddp", BF16),
    (2, "own", 4, "zero1", BF16),
]


@pytest.mark.filterwarnings("ignore:load_checkpoint")
@pytest.mark.parametrize(("saved_on", "saver", "world", "kind", "dtype"), CHANGES)
def test_a_run_goes_on_elsewhere(tmp_path, saved_on, saver, world, kind, dtype):
    """To the bit up to the load; after it sums are rounded in another order."""
    options = {"dtype": dtype, "dropout": 0.0, "draws": False}
    saved = ranks.run(saved_on, train, saved_on, saver, HALF, folder=tmp_path, **options)[0][0]
    go_on = partial(ranks.run, world, train, world, kind, path=tmp_path, remap="as_is", **options)
    for values, _ in go_on(HALF):
        assert_same(values, saved, assert_bit_equal)
    expected = ranks.run(saved_on, train, saved_on, saver, END, **options)[0][0]
    compare = partial(assert_close, num_roundings=200, magnitude=1.0, dtype=dtype)
    for values, _ in go_on(END):
        for part in ("state", "model"):
            assert_same(drop_calls(values[part]), drop_calls(expected[part]), compare)


def drop_calls(values):
    return {key: value for key, value in values.items() if key != "calls"}


class RowScaled(torch.optim.Optimizer):
    """Keeps a mean square of each row, a state of another shape than its parameter's."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                squares = p.grad.square()
                if p.dim() > 1:
                    squares = squares.mean(dim=-1, keepdim=True)
                rows = self.state[p].setdefault("rows", torch.zeros_like(squares))
                rows.mul_(0.5).add_(squares, alpha=0.5)
                p.copy_(p - group["lr"] * p.grad / (rows.sqrt() + 1e-3))


def train_with_rows(rank, world, kind, updates, **paths):
    return train(rank, world, kind, updates, make=RowScaled, **paths)


def test_states_of_other_shapes_than_their_parameters_go_on(tmp_path):
    whole = ranks.run(2, train_with_rows, 2, "fsdp", END)
    ranks.run(2, train_with_rows, 2, "fsdp", HALF, folder=tmp_path)
    resumed = ranks.run(2, train_with_rows, 2, "fsdp", END, path=tmp_path)
    for (values, _), (expected, _) in zip(resumed, whole, strict=True):
        assert_same(values, expected, assert_bit_equal)


def states_after_loading(rank, world, path):
    run = JointRun(rank, world, "fsdp", dtype=torch.bfloat16)
    run.train(1)
    for state in run.opt.state.values():
        state["exp_avg"] = state["exp_avg"].float()
    run.save(path)
    other = JointRun(rank, world, "fsdp", dtype=torch.bfloat16)
    other.load(path)
    states = [other.opt.state[p] for p in other.model.parameters()]
    return {(state["exp_avg"].dtype, type(state["exp_avg"]).__name__) for state in states}


def test_spread_states_keep_their_dtype(tmp_path):
    for found in ranks.run(2, states_after_loading, 2, tmp_path):
        assert found == {(torch.float32, "DTensor")}


# ---- Models ------------------------------------------------------------------------------------


def save_either_way(rank, folder):
    run = JointRun(rank, 2, "ddp").train(1)
    for name, model in (("wrapped", run.model), ("bare", run.model.module)):
        save_checkpoint(folder / name, model=model, optimizer=run.opt)
        load_checkpoint(folder / name, model=model, optimizer=run.opt)
    return run.values()


def test_a_model_inside_ddp_has_the_names_of_the_bare_one(tmp_path):
    saved = ranks.run(2, save_either_way, tmp_path)[0]["model"]
    for name in ("wrapped", "bare"):
        content = checkpoint_files.read(tmp_path / name / "ckpt_step1.pt")
        assert content["model"].keys() == JointRun(0, 1, "alone").model.state_dict().keys()
        assert_same(dict(content["model"]), saved, assert_bit_equal)
        assert "body.0.weight" in content["names"]["groups"][0]


def save_after_evaluating(rank, folder):
    run = JointRun(rank, 2, "fsdp").train(1)
    run.model.set_reshard_after_forward(False)
    with torch.no_grad():
        run.model(torch.ones(3, 5))
    run.save(folder)
    run.model(torch.ones(3, 5))
    run.load(folder)
    return run.values()["model"]


def test_whole_parameters_that_an_evaluation_left_are_no_hindrance(tmp_path):
    saved = ranks.run(2, save_after_evaluating, tmp_path)[0]
    alone = JointRun(0, 1, "alone")
    alone.load(tmp_path, remap="as_is")
    assert_same(alone.values()["model"], saved, assert_bit_equal)


# ---- Files and folders -------------------------------------------------------------------------


def save_in_turn(rank, folder):
    """Files of three updates, then folders of two; two checkpoints stay."""
    found = []
    for kind, updates in (("own", (1, 2, 3)), ("fsdp", (2, 4))):
        run = JointRun(rank, 2, kind)
        for update in updates:
            run.train(update)
            options = {"save_total_limit": 2, "metric": ("f1", update / 8)}
            found.append(run.save(folder, **options).name)
    return found


def test_names_and_the_limit_hold_for_files_and_folders(tmp_path):
    (tmp_path / "ckpt_step9").mkdir()  # of somebody else
    (tmp_path / ".ckpt_step1.0123.tmp").mkdir()  # of a save that was killed
    saved = ranks.run(2, save_in_turn, tmp_path)
    assert saved[0] == saved[1]
    assert saved[0][2:] == ["ckpt_step3_f1-0.375.pt", "ckpt_step2_f1-0.25", "ckpt_step4_f1-0.5"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"ckpt_step9", "ckpt_step2_f1-0.25", "ckpt_step4_f1-0.5"}
    assert latest_checkpoint(tmp_path) == tmp_path / "ckpt_step4_f1-0.5"


def save_twice(rank, folder):
    run = JointRun(rank, 2, "fsdp").train(1)
    run.save(folder, extra="first")
    return run.save(folder, extra="second")


def test_a_folder_of_the_same_name_is_replaced(tmp_path):
    path = ranks.run(2, save_twice, tmp_path)[0]
    assert [item.name for item in tmp_path.iterdir()] == [path.name] == ["ckpt_step1"]
    alone = JointRun(0, 1, "alone")
    assert alone.load(path, remap="as_is").extra == "second"


def save_to(rank, path):
    run = JointRun(rank, 2, "fsdp")
    with pytest.raises(ValueError, match=r"must be saved to a folder, got the file .*best\.pt;"):
        run.save(path / "best.pt")
    (path / "ckpt_step0").mkdir(exist_ok=True)
    with pytest.raises(OSError, match="got something that is no checkpoint"):
        run.save(path)


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    ranks.run(2, save_to, tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["ckpt_step0"]


def test_a_folder_is_open_to_the_tools_of_dcp(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    values = ranks.run(2, train, 2, "fsdp", HALF, folder=tmp_path)[0][0]
    dcp_to_torch_save(tmp_path / "ckpt_step2", tmp_path / "whole.pt")
    content = torch.load(tmp_path / "whole.pt", weights_only=True)
    for name, weight in values["model"].items():
        if name != "calls":  # not spread: it lies in the skeleton
            assert_bit_equal(content[f"model/{name}"], weight)
