"""The demo: two runs that agree, files that can be read, a screen that fits."""

import copy
import io
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensors import BACKENDS
from tolerance import assert_all_bit_equal, assert_close, assert_near

from stepclock_ext import ClockedOptimizer, LossScale
from stepclock_ext.demo import DemoError, DemoSettings, run_demo
from stepclock_ext.demo.compare import run_in_turns
from stepclock_ext.demo.data import MAX_TEXT_BYTES, load_text, windows
from stepclock_ext.demo.files import replacing
from stepclock_ext.demo.model import ByteGPT, ModelShape
from stepclock_ext.demo.plain import PlainRun
from stepclock_ext.demo.recipe import Recipe
from stepclock_ext.demo.train import ClockedRun
from stepclock_ext.runlog import read_run_log

SHAPE = ModelShape(width=16, num_layers=1, num_heads=2, context=8)
RECIPE = Recipe(updates=5, accumulation_steps=2, sequences=2, growth_interval=2)
TEXT = Path(__file__)


def make_console(**options):
    """A console that writes into memory."""
    return Console(file=io.StringIO(), width=80, **options)


def run_tiny(out, *, console=None, **options):
    """A demo of a second's fraction."""
    settings = DemoSettings(out=out, text=TEXT, recipe=RECIPE, shape=SHAPE, **options)
    return run_demo(settings, console=console or make_console())


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors as small as these are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """One tiny demo and what it printed, for the tests that only look."""
    console = make_console()
    result = run_tiny(tmp_path_factory.mktemp("demo"), console=console)
    return result, console.file.getvalue()


# The two runs.


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_loops_train_alike_in_fp64_while_the_loss_scale_grows(backend):
    torch.manual_seed(0)
    model = ByteGPT(SHAPE).double()
    start = copy.deepcopy(model)
    clocked, plain = (
        ClockedRun(copy.deepcopy(model), RECIPE, backend=backend),
        PlainRun(model, RECIPE),
    )
    text = load_text(TEXT, context=SHAPE.context)
    batches = windows(text, micro_steps=2, sequences=2, context=SHAPE.context, seed=0)
    records = list(run_in_turns(clocked, plain, batches, updates=RECIPE.updates))
    num_roundings = model.num_parameters() * RECIPE.updates
    for record in records:
        assert_near(record.info.loss, record.plain_loss, num_roundings=num_roundings)
    pairs = list(
        zip(clocked.model.parameters(), model.parameters(), start.parameters(), strict=True)
    )
    assert any(bool((p != before).any()) for p, _, before in pairs)
    for p, q, _ in pairs:
        assert_close(p, q, num_roundings=num_roundings)
    assert clocked.opt.loss_scale.scale == plain.scaler.get_scale() == 4 * RECIPE.init_scale
    assert clocked.opt.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]


def overflow_in_micro_step(model, number):
    """Makes one gradient of `model` infinite, once."""
    micro_steps = itertools.count(1)
    model.head.weight.register_hook(
        lambda grad: grad * math.inf if next(micro_steps) == number else grad
    )


def test_both_loops_skip_the_same_update_and_hold_their_schedules():
    torch.manual_seed(0)
    model = ByteGPT(SHAPE)
    clocked = ClockedRun(copy.deepcopy(model), RECIPE, backend="reference")
    plain = PlainRun(model, RECIPE)
    for run in (clocked, plain):
        overflow_in_micro_step(run.model, 3)
    text = load_text(TEXT, context=SHAPE.context)
    batches = windows(text, micro_steps=2, sequences=2, context=SHAPE.context, seed=0)
    records = list(run_in_turns(clocked, plain, batches, updates=RECIPE.updates))
    assert [record.info.skipped for record in records] == [False, True, *[False] * 4]
    assert clocked.opt.clock.skipped_updates == 1
    assert plain.scheduler.last_epoch == RECIPE.updates
    assert plain.scaler.get_scale() == clocked.opt.loss_scale.scale == 2 * RECIPE.init_scale


def test_a_seed_gives_the_same_bits_and_another_seed_does_not(tmp_path):
    losses, models = [], []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        result = run_tiny(tmp_path / name, seed=seed)
        lines = read_run_log(result.files.run_log)
        losses.append([(line["loss"], line["plain_loss"]) for line in lines])
        models.append(torch.load(result.files.checkpoint, weights_only=True)["model"])
    assert losses[0] == losses[1] != losses[2]
    assert_all_bit_equal(models[0].values(), models[1].values())


def test_the_loss_falls_by_half_a_nat_on_the_real_text(tmp_path):
    recipe = Recipe(updates=30, accumulation_steps=2, learning_rate=3e-3)
    settings = DemoSettings(out=tmp_path, recipe=recipe, shape=SHAPE)
    records = run_demo(settings, console=make_console()).records
    assert records[0].info.loss == pytest.approx(math.log(256), abs=0.1)  # knows nothing
    assert records[-1].info.loss < records[0].info.loss - 0.5


def test_the_demo_as_users_run_it_has_some_three_million_parameters():
    assert 2.5e6 < ByteGPT(ModelShape()).num_parameters() < 3.5e6


def test_the_rate_peaks_once_and_lands_on_the_last_update():
    recipe = Recipe(updates=100)
    rates = [recipe.lr_factor(done) for done in range(101)]
    assert rates.index(1.0) == recipe.warmup_updates - 1
    assert rates[99] == rates[100] == min(rates[10:]) == pytest.approx(recipe.landing)


# The text.


def test_inputs_are_the_text_and_targets_the_bytes_that_follow():
    text = torch.arange(200, dtype=torch.uint8)
    batches = windows(text, micro_steps=3, sequences=2, context=5, seed=0)
    for _ in range(20):
        window = next(batches)
        assert len(window) == 3
        for inputs, targets in window:
            assert inputs.shape == (2, 5)
            assert (targets == inputs + 1).all()


def test_the_shortest_text_has_one_sequence_and_its_next_byte(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(bytes(9))
    batches = windows(load_text(path, context=8), micro_steps=1, sequences=1, context=8, seed=0)
    assert next(batches)[0][0].shape == (1, 8)


def test_of_a_long_text_the_beginning_is_read(tmp_path):
    path = tmp_path / "long.bin"
    path.write_bytes(bytes(MAX_TEXT_BYTES + 1))
    assert len(load_text(path, context=8)) == MAX_TEXT_BYTES


# The files.


def test_the_log_has_a_line_for_each_update(tiny):
    lines = read_run_log(tiny[0].files.run_log)
    assert [line["update_step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["tokens"] == 32 and line["update_ms"] > 0 for line in lines)


def test_the_checkpoint_loads_into_the_wrapper_and_into_the_bare_optimizer(tiny):
    state = torch.load(tiny[0].files.checkpoint, weights_only=True)
    run = ClockedRun(ByteGPT(SHAPE), RECIPE, backend="reference")
    run.model.load_state_dict(state["model"])
    run.opt.load_state_dict(state["optimizer"])
    assert run.opt.clock.update_step == 5
    assert isinstance(run.opt, ClockedOptimizer)
    assert run.opt.loss_scale == LossScale(
        RECIPE.init_scale, growth_interval=2, scale=4 * RECIPE.init_scale, good_steps=1
    )
    bare = torch.optim.AdamW(run.model.parameters())
    bare.load_state_dict(state["optimizer"])
    assert bare.state_dict()["state"][0]["step"] == 5


def test_the_plot_is_a_png_and_nothing_temporary_is_left(tiny):
    files = tiny[0].files
    assert files.plot.read_bytes().startswith(b"\x89PNG\r\n")
    written = {path.name for path in files.folder.iterdir()}
    assert written == {"run.jsonl", "checkpoint.pt", "run.png"}


def test_a_second_demo_replaces_the_files_of_the_first(tmp_path):
    for _ in range(2):
        result = run_tiny(tmp_path)
    assert len(read_run_log(result.files.run_log)) == 5


def test_without_matplotlib_the_demo_says_so_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    console = make_console()
    result = run_tiny(tmp_path, console=console)
    assert not result.has_plot
    assert not result.files.plot.exists()
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if line.startswith("plot ")] == [
        "plot        left out, matplotlib is not installed; pip install 'stepclock_ext[plot]'"
    ]


def test_a_file_that_fails_half_way_leaves_the_one_before(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    with pytest.raises(DemoError, match="No space left"), replacing(path) as file:
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


# The screen.


def test_the_last_screen_fits_and_says_what_happened(tiny):
    result, printed = tiny
    screen = printed[printed.index("\nByte-level GPT") :]
    lines = [line for line in screen.splitlines() if str(result.files.folder) not in line]
    assert len(screen.splitlines()) <= 24
    assert max(map(len, lines)) <= 80
    for what in ("update step 5, micro step 10, 0 skipped, 160 tokens", "update stretch", "faster"):
        assert what in screen or what.replace("faster", "slower") in screen
    for path in (result.files.run_log, result.files.checkpoint, result.files.plot):
        assert str(path) in screen


def test_without_a_terminal_there_is_a_line_for_each_of_some_updates(tiny):
    printed = tiny[1]
    assert "\x1b" not in printed
    assert "\r" not in printed
    assert [line for line in printed.splitlines() if line.startswith("update 3/5  loss ")]


def test_on_a_terminal_there_is_a_bar(tmp_path):
    console = make_console(force_terminal=True)
    run_tiny(tmp_path, console=console)
    printed = console.file.getvalue()
    assert "update 5/5" in printed
    assert "tokens/s" in printed
    assert "\x1b[" in printed
