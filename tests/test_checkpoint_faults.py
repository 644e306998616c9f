"""Checkpoints that cannot be loaded change nothing; saves that die leave what was there before."""

import errno
import io
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from checkpoint_run import Run
from tolerance import assert_all_bit_equal

from stepclock_ext import ClockedOptimizer, LossScale
from stepclock_ext.checkpoint import latest_checkpoint, load_checkpoint

INSIDE = 6  # micro steps: a window is open


class Unchanged:
    """Around a load that must fail: run, clock and generators are as before."""

    def __init__(self, run, *, match, error=ValueError):
        self.run = run
        self.raises = pytest.raises(error, match=match)

    def look(self):
        opt = self.run.opt
        numbers = opt.clock.state_dict(), opt.loss_scale, [g["lr"] for g in opt.param_groups]
        return numbers, torch.get_rng_state().tolist()

    def __enter__(self):
        self.before, self.values = self.look(), self.run.values()
        self.error = self.raises.__enter__()
        return self.error

    def __exit__(self, *error):
        done = self.raises.__exit__(*error)
        assert self.look() == self.before
        assert_all_bit_equal(self.run.values(), self.values)
        return done


@pytest.fixture
def good(tmp_path):
    return Run().stopped_after(INSIDE).save(tmp_path)


@pytest.fixture
def other():
    """A run at another place, which a failed load must leave there."""
    return Run(seed=3).stopped_after(INSIDE - 1)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999, 1.0])
def test_a_file_cut_short_is_refused(good, other, share):
    whole = good.read_bytes()
    good.write_bytes(whole[: min(int(len(whole) * share), len(whole) - 1)])
    with Unchanged(other, match="whole checkpoint.*got .*cut short.*; pass another one") as error:
        other.load(good)
    assert str(good) in str(error.value)


def test_a_changed_bit_anywhere_in_a_tensor_is_found(good, other):
    whole = good.read_bytes()
    weight = torch.load(good, weights_only=True)["model"]["0.weight"]
    at = whole.index(bytes(weight.untyped_storage()))
    for offset in (0, weight.nbytes // 2, weight.nbytes - 1):
        damaged = bytearray(whole)
        damaged[at + offset] ^= 1
        good.write_bytes(damaged)
        with Unchanged(other, match="has other bytes than were written"):
            other.load(good)


def test_a_byte_changed_anywhere_gives_a_clear_error_or_harms_nothing(good):
    whole = good.read_bytes()
    run = Run(seed=3)
    refused = 0
    for at in range(0, len(whole), len(whole) // 200):
        damaged = bytearray(whole)
        damaged[at] ^= 0x15
        good.write_bytes(damaged)
        try:
            run.load(good)
        except ValueError as error:
            assert "load_checkpoint: " in str(error)
            refused += 1
    assert refused > 50  # the rest is padding


def foreign_files():
    def saved(value):
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()

    head = {"format": "stepclock checkpoint", "version": 1, "has_checksums": True}
    return {
        "text": (b"not a checkpoint", "of another program"),
        "pickle": (b"\x80\x04K\x01.", "of another program"),
        "tensor": (saved(torch.ones(3)), "of another program, with Tensor"),
        "model": (saved({"weight": torch.ones(3)}), r"of another program, with \['weight'\]"),
        "code": (saved({"run": print}), "UnpicklingError"),
        "older": (saved({**head, "version": 0}), "an older release .version 0, this one reads 1"),
        "unversioned": (saved({"format": head["format"]}), "an older release .version None"),
        "later": (saved({**head, "version": 2}), "a later release"),
        "partial": (saved({**head, "model": {}}), "one without extra, names, optimizer, random"),
    }


@pytest.mark.parametrize(("content", "message"), foreign_files().values(), ids=foreign_files())
def test_foreign_and_older_files_are_refused(tmp_path, other, content, message):
    path = tmp_path / "ckpt_step1.pt"
    path.write_bytes(content)
    with Unchanged(other, match=f"must be a whole checkpoint.*{message}"):
        other.load(path)


def test_a_missing_file_is_named(tmp_path, other):
    with Unchanged(other, match=r"none\.pt", error=FileNotFoundError):
        other.load(tmp_path / "none.pt")


def rewrite(path, change):
    """`path` with `change` made to its content."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


CHANGES = {
    "name": (lambda c: c["model"].pop("3.bias"), "3.bias is missing in the file"),
    "extra name": (lambda c: c["model"].update(new=torch.ones(1)), "new is in the file alone"),
    "shape": (
        lambda c: c["model"].update({"3.bias": torch.ones(5)}),
        r"3.bias is \(5,\) torch.float32 in the file, \(4,\) torch.float32 here",
    ),
    "dtype": (
        lambda c: c["model"].update({"3.bias": torch.ones(4).half()}),
        "torch.float16 in the file, .* torch.float32 here",
    ),
    "optimizer": (lambda c: c["names"].update(optimizers=["SGD"]), r"\['SGD'\], got \['AdamW'\]"),
    "order": (lambda c: c["names"]["groups"][0].reverse(), "must have the groups of"),
    "clock": (lambda c: c["optimizer"].pop("stepclock"), "without 'stepclock'"),
    "clock's part": (lambda c: c["optimizer"]["stepclock"]["clock"].pop("epoch"), "lacks epoch"),
    "scheduler": (lambda c: c["optimizer"]["stepclock"]["schedulers"].clear(), "0 schedulers"),
    "torch random": (lambda c: c["random"].update(torch_cpu=torch.ones(3)), "is damaged"),
    "python random": (lambda c: c["random"].update(python=(3, (), None)), "is damaged"),
    "numpy random": (lambda c: c["random"]["numpy"].pop("state"), "is damaged"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_what_does_not_fit_is_found_before_anything_changes(good, other, change, message):
    rewrite(good, change)
    with Unchanged(other, match=message):
        other.load(good)


def test_another_wrapper_is_refused_before_anything_changes(good, other):
    model = other.model
    settings = {"gradient_accumulation_steps": 4, "max_grad_norm": 1.0}
    other.opt = ClockedOptimizer(torch.optim.AdamW(model.parameters()), **settings)
    with Unchanged(other, match="schedulers|loss_scale"):
        other.load(good)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    other.opt = ClockedOptimizer(inner, loss_scale=LossScale(), **settings)
    with Unchanged(other, match=r"optimizers of .*\['AdamW'\], got \['SGD'\]; build the same"):
        other.load(good)
    with pytest.raises(TypeError, match="must be a ClockedOptimizer, got SGD"):
        load_checkpoint(good, model=model, optimizer=inner)


# Saves that die.

# Saves without end; the weights all have the value of the update that the file is of.
SAVER = """
    import sys, torch
    from stepclock_ext import ClockedOptimizer
    from stepclock_ext.checkpoint import save_checkpoint
    model = torch.nn.Linear(1500, 1500, bias=False)
    opt = ClockedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    while True:
        opt.clock.update_step += 1
        with torch.no_grad():
            model.weight.fill_(opt.clock.update_step)
        save_checkpoint(sys.argv[1], model=model, optimizer=opt, save_total_limit=3)
"""


def wait_for(condition, *, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the saving process does not get there"
        time.sleep(0.0005)


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path):
    model = torch.nn.Linear(1500, 1500, bias=False)
    opt = ClockedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for round_ in range(10):
        folder = tmp_path / str(round_)
        saver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SAVER), str(folder)])
        try:
            wait_for(lambda folder=folder: latest_checkpoint(folder) is not None)
            wait_for(lambda folder=folder: any(folder.glob(".ckpt*.tmp")))
        finally:
            saver.send_signal(signal.SIGKILL)
            saver.wait()
        in_the_middle = any(folder.glob(".ckpt*.tmp"))
        load_checkpoint(folder, model=model, optimizer=opt)
        assert opt.clock.update_step >= 1
        assert torch.equal(model.weight, torch.full_like(model.weight, opt.clock.update_step))
        Run().save(folder)
        assert not any(folder.glob(".ckpt*.tmp"))  # the next save clears up
        if in_the_middle:
            return
    raise AssertionError("no kill came in the middle of a save")


FULL_DISK = """
    import resource, signal, sys, torch
    from stepclock_ext import ClockedOptimizer
    from stepclock_ext.checkpoint import save_checkpoint
    model = torch.nn.Linear(500, 500)
    opt = ClockedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    save_checkpoint(sys.argv[1], model=model, optimizer=opt)
    model.weight.data.zero_()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
    try:
        save_checkpoint(sys.argv[1], model=model, optimizer=opt)
    except OSError as error:
        print(error.errno, error)
"""


def test_a_disk_that_is_full_is_said_and_the_file_before_stays(tmp_path):
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(FULL_DISK), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{errno.EFBIG} ")
    assert "ckpt_step0.pt must be a file that can be written, got File too large;" in done.stdout
    assert done.stderr == ""
    (path,) = tmp_path.iterdir()
    assert torch.load(path, weights_only=True)["model"]["weight"].any()


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"must be a file that can be written, got .*; make room"):
        Run().save(tmp_path / "file" / "folder")


def test_a_save_that_another_process_is_writing_is_left_alone(tmp_path):
    code = """
        import fcntl, sys
        file = open(sys.argv[1], "xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("locked", flush=True)
        sys.stdin.read()
    """
    temporary = tmp_path / ".ckpt_step1.pt.0123.tmp"
    command = [sys.executable, "-c", textwrap.dedent(code), str(temporary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"locked\n"
        Run().save(tmp_path)
        assert temporary.exists()
        writer.stdin.close()
    Run().save(tmp_path)
    assert not temporary.exists()
