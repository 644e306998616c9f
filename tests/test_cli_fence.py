"""`stepclock fence`: 0 where a checkpoint would resume, 3 where not, 2 and one line if unread."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import stepclock_ext
from stepclock_ext import ClockedOptimizer, TrainPlan
from stepclock_ext.checkpoint import save_checkpoint
from stepclock_ext.cli import app

ROOT = Path(stepclock_ext.__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"
CONFIG = """
output_dir: out
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 0.1
num_train_epochs: 2
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 0.01}
"""
OTHER = CONFIG.replace("steps: 4", "steps: 2")
SWIFT = "train_args:" + CONFIG.replace("\n", "\n  ")


@pytest.fixture
def config(tmp_path):
    def write(text, name="config.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def train(config, micro_steps=20, **given):
    """A model and its wrapper after some micro steps under the plan of `config`."""
    plan = TrainPlan.from_yaml(config, **{"dataset_size": 160, "world_size": 1, **given})
    model = torch.nn.Linear(2, 1)
    opt = ClockedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    for _ in range(micro_steps):
        opt.backward(model(torch.ones(2)).sum())
        opt.step()
    return model, opt


@pytest.fixture
def checkpoint(config, tmp_path):
    """After 5 of 40 updates of 8 samples."""
    model, opt = train(config(CONFIG, "saved.yaml"))
    return save_checkpoint(tmp_path / "checkpoints", model=model, optimizer=opt)


def invoke(checkpoint, config, *options):
    return CliRunner().invoke(app, ["fence", str(checkpoint), str(config), *options])


def rows(text):
    """The tables as name -> the cells after it."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if row}


def refused(done):
    """The one line of a command that ended with status 2."""
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("stepclock fence: ")
    return line.removeprefix("stepclock fence: ")


def test_the_same_plan_resumes_in_a_process_of_its_own(checkpoint, config):
    options = ("--dataset-size", "160", "--world-size", "1")
    command = ["fence", str(checkpoint), str(config(CONFIG)), *options]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "stepclock_ext", *command],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "LR Fence: the plan is the saved one" in done.stdout
    found = rows(done.stdout)
    assert (found["updates done"], found["updates remaining"]) == (["5"], ["35"])
    assert found["landing"] == ["update 40, rate 0.01"]


@pytest.mark.parametrize("text", [CONFIG, SWIFT])
def test_data_and_ranks_that_nobody_names_are_the_checkpoints(checkpoint, config, text):
    done = invoke(checkpoint, config(text))
    assert done.exit_code == 0, done.output
    assert "note: dataset_size=160 is the checkpoint's; --dataset-size says" in done.stdout
    assert "note: world_size=1 is the checkpoint's; --world-size says" in done.stdout


def test_a_size_in_the_file_is_not_taken_from_the_checkpoint(checkpoint, config):
    done = invoke(checkpoint, config(CONFIG + "dataset_size: 320\n"))
    assert done.exit_code == 3
    assert rows(done.stdout)["dataset_size"] == ["160", "320"]
    assert "dataset_size=" not in done.stdout


def test_another_accumulation_is_refused_with_status_3(checkpoint, config):
    done = invoke(checkpoint, config(OTHER))
    assert done.exit_code == 3
    found = rows(done.stdout)
    assert found["gradient_accumulation_steps"] == ["4", "2"]
    assert found["total_updates"] == ["40", "80"]
    assert (found["updates remaining"], found["updates in all"]) == (["70"], ["75"])
    (line,) = done.stderr.splitlines()
    assert line == (
        "stepclock fence: refused: other values of gradient_accumulation_steps, total_updates; "
        "pass --remap by_samples, by_progress, keep_lr, hold or as_is"
    )


def test_status_3_is_what_the_wrapper_would_say(checkpoint, config):
    content = torch.load(checkpoint, weights_only=True)
    for text in (CONFIG, OTHER):
        _, opt = train(config(text), micro_steps=0)
        status = invoke(checkpoint, config(text)).exit_code
        if status == 0:
            opt.load_state_dict(content["optimizer"])
        else:
            assert status == 3
            with pytest.raises(stepclock_ext.ScheduleMismatchError):
                opt.load_state_dict(content["optimizer"])


@pytest.mark.parametrize("option", [("--dataset-size", "200"), ("--world-size", "2")])
def test_another_size_given_as_an_option_is_refused(checkpoint, config, option):
    done = invoke(checkpoint, config(CONFIG), *option)
    assert done.exit_code == 3
    assert rows(done.stdout)[option[0][2:].replace("-", "_")][1] == option[1]


@pytest.mark.parametrize("how", ["by_samples", "by_progress", "keep_lr", "hold", "as_is"])
def test_a_remap_resumes_with_status_0(checkpoint, config, how):
    done = invoke(checkpoint, config(OTHER), "--remap", how)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    found = rows(done.stdout)
    assert found["gradient_accumulation_steps"] == ["4", "2"]
    if how != "as_is":
        assert f"first rates after ({how})" in found
        assert found["landing"][0].startswith("update 75, rate ")
        assert ("rate 0.01" in found["landing"][0]) == (how != "hold")


def test_the_rate_is_scaled_with_a_remap(checkpoint, config):
    for rule, factor in (("linear", "0.5"), ("sqrt", "0.707107")):
        options = ("--remap", "by_samples", "--lr-scaling", rule)
        done = invoke(checkpoint, config(OTHER), *options)
        assert done.exit_code == 0, done.output
        assert f"note: the rest of the curve is multiplied by {factor}" in done.stdout


def test_both_curves_are_written_as_a_png_also_when_refused(checkpoint, config, tmp_path):
    path = tmp_path / "curves.png"
    assert invoke(checkpoint, config(OTHER), "--plot", str(path)).exit_code == 3
    assert path.read_bytes().startswith(PNG)
    options = ("--remap", "by_samples", "--plot", str(path))
    refused_picture = path.read_bytes()
    assert invoke(checkpoint, config(OTHER), *options).exit_code == 0
    assert path.read_bytes().startswith(PNG)
    assert path.read_bytes() != refused_picture


def test_a_folder_stands_for_its_latest_checkpoint(checkpoint, config):
    model, opt = train(config(CONFIG), micro_steps=48)
    save_checkpoint(checkpoint.parent, model=model, optimizer=opt)
    done = invoke(checkpoint.parent, config(CONFIG))
    assert done.exit_code == 0, done.output
    assert rows(done.stdout)["updates done"] == ["12"]


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"optimizer": state}])
def test_a_state_that_torch_save_wrote_is_read_as_well(config, tmp_path, wrap):
    _, opt = train(config(CONFIG))
    path = tmp_path / "state.pt"
    torch.save(wrap(opt.state_dict()), path)
    assert invoke(path, config(CONFIG)).exit_code == 0
    assert invoke(path, config(OTHER)).exit_code == 3


def test_a_checkpoint_that_does_not_say_is_unknown_and_refused(config, tmp_path):
    _, opt = train(config(CONFIG))
    state = opt.state_dict()
    del state["stepclock"]["fingerprint"]
    path = tmp_path / "state.pt"
    torch.save(state, path)
    done = invoke(path, config(CONFIG), "--dataset-size", "160")
    assert done.exit_code == 3
    assert rows(done.stdout)["learning_rate"] == ["unknown", "0.1"]
    assert invoke(path, config(CONFIG), "--dataset-size", "160", "--remap", "as_is").exit_code == 0
    options = ("--dataset-size", "160", "--remap", "by_samples")
    assert "must hold the plan" in refused(invoke(path, config(CONFIG), *options))


def test_a_file_that_is_no_checkpoint_gives_one_line(checkpoint, config, tmp_path):
    whole = checkpoint.read_bytes()
    files = {
        "short.pt": whole[: len(whole) // 2],
        "empty.pt": b"",
        "text.pt": b"not a checkpoint",
        "old.pt": b"\x80\x02}q\x00.",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    torch.save({"weights": torch.ones(2)}, tmp_path / "weights.pt")
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    for name in (*files, "weights.pt", "tensor.pt"):
        line = refused(invoke(tmp_path / name, config(CONFIG)))
        assert f"{tmp_path / name} must be a whole checkpoint of save_checkpoint, got " in line
    line = refused(invoke(tmp_path / "none.pt", config(CONFIG)))
    assert line.startswith("CHECKPOINT must be a file that can be read, got ")
    (tmp_path / "bare").mkdir()
    line = refused(invoke(tmp_path / "bare", config(CONFIG)))
    assert line.startswith("CHECKPOINT must hold a ckpt_step*.pt, got none in ")


def test_a_damaged_fingerprint_gives_one_line(config, tmp_path):
    _, opt = train(config(CONFIG))
    state = opt.state_dict()
    state["stepclock"]["fingerprint"]["learning_rate"] = -1.0
    torch.save(state, tmp_path / "state.pt")
    assert "fingerprint is damaged" in refused(invoke(tmp_path / "state.pt", config(CONFIG)))
    state["stepclock"]["fingerprint"] = [1]
    torch.save(state, tmp_path / "state.pt")
    line = refused(invoke(tmp_path / "state.pt", config(CONFIG)))
    assert line.startswith("max_steps must be positive for a loader without a length")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--remap", "magic"), "--remap must be one of by_samples, by_progress, keep_lr, hold, as"),
        (("--lr-scaling", "sqrt"), "--lr-scaling must come with --remap "),
        (("--remap", "as_is", "--lr-scaling", "sqrt"), "--lr-scaling must come with --remap "),
        (("--remap", "hold", "--lr-scaling", "cube"), "--lr-scaling must be one of linear, sqrt, "),
        (("--dataset-size", "-1"), "--dataset-size must be a positive whole number, got '-1'; "),
        (("--world-size", "0.5"), "--world-size must be a positive whole number, got '0.5'; "),
        (("--plot", "curve.svg"), "--plot must be a file that ends in .png, got curve.svg; "),
        (("--plot", "none/curve.png"), "--plot must be a file that can be written, got none/curve"),
    ],
)
def test_a_wrong_option_gives_one_line_that_names_it(checkpoint, config, options, said):
    assert refused(invoke(checkpoint, config(CONFIG), *options)).startswith(said)


def test_a_wrong_configuration_gives_one_line(checkpoint, config, tmp_path):
    wrong = {
        "a: [1": "must be YAML, got ",
        CONFIG.replace("learning_rate: 0.1", ""): "the configuration must have learning_rate, ",
        CONFIG.replace("steps: 4", "steps: -4"): "gradient_accumulation_steps must be a positive",
        CONFIG.replace("size: 2", "size: 2.5"): "per_device_train_batch_size must be a positive",
    }
    for text, said in wrong.items():
        assert said in refused(invoke(checkpoint, config(text)))
    line = refused(invoke(checkpoint, tmp_path / "none.yaml"))
    assert line.startswith("CONFIG must be a file that can be read, got ")


def test_without_matplotlib_one_line_says_so(checkpoint, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused(invoke(checkpoint, config(CONFIG), "--plot", "curve.png"))
    assert line.startswith("--plot needs matplotlib, got none; ")
