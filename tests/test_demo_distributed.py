"""The demo in several processes: one run, one voice, and the losses of one process."""

import io
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run
from rich.console import Console
from tolerance import assert_close, assert_near

import stepclock_ext
from stepclock_ext import ScheduleMismatchError
from stepclock_ext.demo import DemoError, DemoSettings, joined_world, run_demo
from stepclock_ext.demo.compare import run_in_turns
from stepclock_ext.demo.data import load_text, windows
from stepclock_ext.demo.model import ByteGPT, ModelShape
from stepclock_ext.demo.plain import PlainRun
from stepclock_ext.demo.recipe import Recipe
from stepclock_ext.demo.train import ClockedRun
from stepclock_ext.demo.world import ALONE, World
from stepclock_ext.runlog import read_run_log

ROOT = Path(stepclock_ext.__file__).parents[1]
SHAPE = ModelShape(width=16, num_layers=1, num_heads=2, context=8)
RECIPE = Recipe(updates=5, accumulation_steps=4, sequences=2, growth_interval=2)
TEXT = Path(__file__)


def train(rank, world_size, *, overflows_in=None):
    """Both loops in fp64: each window's skip, losses, norm and tokens; and the parameters."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(ByteGPT(SHAPE).double())
    world = World(rank, world_size)
    clocked = ClockedRun(models[0], RECIPE, backend="reference", world=world)
    plain = PlainRun(models[1], RECIPE, world=world)
    for model in models if rank == world_size - 1 else ():
        overflow_in_micro_step(model, overflows_in)
    text = load_text(TEXT, context=SHAPE.context)
    batches = windows(text, micro_steps=4, sequences=2, context=SHAPE.context, seed=0)
    told = []
    for record in run_in_turns(clocked, plain, batches, updates=RECIPE.updates, world=world):
        info = record.info
        told.append((info.skipped, info.loss, record.plain_loss, info.grad_norm, record.tokens))
    assert clocked.opt.loss_scale.scale == plain.scaler.get_scale()
    assert plain.scheduler.last_epoch == clocked.opt.clock.update_step
    return told, [[p.detach() for p in model.parameters()] for model in models]


def overflow_in_micro_step(model, number):
    """Makes one gradient of `model` infinite, once."""
    micro_steps = itertools.count(1)
    model.head.weight.register_hook(
        lambda grad: grad * math.inf if next(micro_steps) == number else grad
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_both_loops_train_as_in_one_process(world_size):
    expected, (params, _) = train(0, 1)
    num_roundings = sum(p.numel() for p in params) * RECIPE.updates
    for told, models in run(world_size, train, world_size):
        for (_, *got), (_, *want) in zip(told, expected, strict=True):
            for number, other in zip(got, want, strict=True):
                assert_near(number, other, num_roundings=num_roundings)
        for model in models:
            for p, q in zip(model, params, strict=True):
                assert_close(p, q, num_roundings=num_roundings)


def test_an_overflow_in_one_process_skips_the_update_of_all():
    for told, _ in run(2, train, 2, overflows_in=3):
        assert [skipped for skipped, *_ in told] == [False, True, *[False] * 4]


# What a process does for all.


def run_tiny(rank, out, seeds=(0, 0)):
    """A demo of a second's fraction on two ranks: what it printed and its last micro step."""
    settings = DemoSettings(
        out=out / str(rank), text=TEXT, recipe=RECIPE, shape=SHAPE, seed=seeds[rank]
    )
    console = Console(file=io.StringIO(), width=80)
    try:
        result = run_demo(settings, console=console, world=World(rank, 2))
    except DemoError as error:
        return str(error)
    return console.file.getvalue(), None if result is None else result.clock.micro_step


def test_the_first_process_alone_speaks_and_writes_what_one_process_can_load(tmp_path):
    (printed, micro_step), other = run(2, run_tiny, tmp_path)
    assert other == ("", None)
    assert not (tmp_path / "1").exists()
    assert micro_step == 2 * RECIPE.updates
    assert "seed 0, 2 processes\n" in printed
    assert "PyTorch DDP" in printed
    assert len(read_run_log(tmp_path / "0" / "run.jsonl")) == RECIPE.updates
    state = torch.load(tmp_path / "0" / "checkpoint.pt", weights_only=True)
    alone = ClockedRun(ByteGPT(SHAPE), RECIPE, backend="reference")
    alone.model.load_state_dict(state["model"])
    with pytest.raises(ScheduleMismatchError):
        alone.opt.load_state_dict(state["optimizer"])
    alone.opt.load_state_dict(state["optimizer"], remap="as_is")
    assert alone.opt.clock.update_step == RECIPE.updates
    assert alone.opt.clock.weight_seen == RECIPE.updates * 4 * 2 * SHAPE.context


def test_processes_with_other_options_are_refused_by_all(tmp_path):
    said = run(2, run_tiny, tmp_path, seeds=(0, 1))
    assert said[0] == said[1]
    assert "must be the same in all processes, got others in rank 1 than in rank 0; " in said[0]
    assert list(tmp_path.iterdir()) == []


def test_as_many_processes_as_do_not_divide_a_window_are_refused():
    with pytest.raises(DemoError, match=r"micro batches of a window, got 3; start 1, 2, 4, 8$"):
        World(size=3).check_share(Recipe().accumulation_steps)


def test_a_launcher_of_one_process_changes_nothing(monkeypatch):
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with joined_world() as world:
        assert world is ALONE
        assert not dist.is_initialized()


# Under torchrun.


def torchrun(folder, *options):
    """`torchrun --nproc-per-node 2 -m stepclock_ext demo`, its report, and what each rank wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--log-dir", f"{folder}/logs", "--redirects", "3", "-m", "stepclock_ext", "demo"]
    done = subprocess.run(
        [*command, "--out", f"{folder}/out", *options],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    wrote = {
        (int(path.parent.name), path.stem): path.read_text(encoding="utf-8")
        for path in Path(folder, "logs").glob("**/attempt_0/*/std*.log")
    }
    assert len(wrote) == 4
    return done, wrote


def test_under_torchrun_the_demo_has_the_losses_of_one_process(tmp_path):
    done, wrote = torchrun(tmp_path, "--updates", "2")
    assert done.returncode == 0, done.stderr
    printed = wrote.pop((0, "stdout"))
    assert set(wrote.values()) == {""}
    assert "2 processes" in printed
    assert "update step 2, micro step 8, 0 skipped, 4,096 tokens" in printed
    settings = DemoSettings(recipe=Recipe(updates=2))
    torch.manual_seed(settings.seed)
    alone = ClockedRun(ByteGPT(settings.shape), settings.recipe, backend=settings.backend)
    text = load_text(None, context=settings.shape.context)
    batches = windows(text, micro_steps=8, sequences=4, context=settings.shape.context, seed=0)
    lines = read_run_log(tmp_path / "out" / "run.jsonl")
    assert len(lines) == 2
    for line, window in zip(lines, batches, strict=False):
        info = alone.window(window)
        assert line["loss"] == pytest.approx(info.loss, rel=1e-5)
        assert line["plain_loss"] == pytest.approx(info.loss, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(info.grad_norm, rel=1e-5)


def test_a_wrong_option_is_told_once_and_ends_all_processes_with_status_2(tmp_path):
    done, wrote = torchrun(tmp_path, "--updates", "0")
    assert done.returncode != 0  # torchrun's own is 1, whatever its processes' is
    assert "exitcode  : 2 " in done.stderr
    assert "".join(wrote.values()) == (
        "stepclock demo: --updates must be 1 or more, got 0; 80 is usual\n"
    )


def test_what_stops_the_first_process_alone_is_told_once_and_ends_all(tmp_path):
    (tmp_path / "out").touch()  # rank 1, which makes no folder, waits for rank 0 in a collective
    done, wrote = torchrun(tmp_path)
    assert done.returncode != 0
    assert "exitcode  : 2 " in done.stderr
    assert "".join(wrote.values()) == (
        f"stepclock demo: --out must be a folder that can be written, got {tmp_path}/out (File "
        "exists); pass another folder\n"
    )
