"""`stepclock plan` on the files that people have, and one line with status 2 for wrong ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stepclock_ext
from stepclock_ext.cli import app

ROOT = Path(stepclock_ext.__file__).parents[1]
DATA = ("--dataset-size", "24000")
PNG = b"\x89PNG\r\n\x1a\n"

TRAINER = """
output_dir: out/bert
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
learning_rate: 3e-4
num_train_epochs: 3
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr: 3.0e-5
warmup_ratio: 0.07
"""

SWIFT = """
model: Qwen/Qwen2.5-7B-Instruct
train_args:
  train_type: lora
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 16
  learning_rate: 1e-4
  num_train_epochs: 2
  warmup_ratio: 0.1
  warmup_steps: 5
  split_dataset_ratio: 0.01
"""

LLAMA_FACTORY = """
stage: sft
finetuning_type: full
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
max_steps: 40
lr_scheduler_type: inverse_sqrt
warmup_ratio: 0.1
"""


@pytest.fixture
def config(tmp_path):
    def write(text, name="config.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def invoke(path, *options):
    return CliRunner().invoke(app, ["plan", str(path), *options])


def rows(text):
    """The tables as name -> value."""
    cells = [[cell.strip() for cell in line.split("\u2502")] for line in text.splitlines()]
    return {row[1]: row[2] for row in cells if len(row) == 4}


def refused(done):
    """The one line of a command that ended with status 2."""
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("stepclock plan: ")
    return line.removeprefix("stepclock plan: ")


def test_a_trainer_file_gives_the_counts_in_a_process_of_its_own(config):
    command = ["plan", str(config(TRAINER)), "--dataset-size", "24000", "--world-size", "8"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "stepclock_ext", *command],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = rows(done.stdout)
    assert found["configuration"] == "Hugging Face Trainer"
    assert (found["effective batch"], found["micro steps an epoch"]) == ("256", "750")
    assert (found["updates an epoch"], found["updates in all"]) == ("94", "282")
    assert found["warm-up"] == "updates 1 to 20 (7.1% of the run)"
    assert found["landing"] == "update 282, rate 3e-05"
    assert "note: not read: output_dir\n" in done.stdout
    assert "memory" not in done.stdout


def test_a_swift_file_gives_its_contradictions_and_advice_as_notes(config):
    done = invoke(config(SWIFT), "--dataset-size", "10000", "--world-size", "4")
    assert done.exit_code == 0, done.output
    found = rows(done.stdout)
    assert (found["configuration"], found["effective batch"]) == ("ms-swift", "128")
    assert found["updates in all"] == "158"
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert "note: not read: model, train_type, split_dataset_ratio" in notes
    assert "note: warmup_steps=5 wins over warmup_ratio=0.1: warm-up is 5 updates" in notes
    assert any("10% to 15% is usual for LoRA" in note for note in notes)
    assert any("dataset_size must be what is left" in note for note in notes)


def test_a_llama_factory_file_needs_no_dataset_size_with_max_steps(config):
    done = invoke(config(LLAMA_FACTORY))
    assert done.exit_code == 0, done.output
    found = rows(done.stdout)
    assert (found["configuration"], found["dataset size"]) == ("LLaMA-Factory", "unknown")
    assert (found["updates in all"], found["world size"]) == ("40", "1")
    assert found["landing"].startswith("none; update 40, rate ")
    assert "note: max_steps=40 wins over num_train_epochs=3" in done.stdout
    assert "note: world_size is not in the file; LLaMA-Factory takes 1" in done.stdout


@pytest.mark.parametrize("params", ["7e9", "7B", "7b", "7000M", "7_000_000_000", "0.007T"])
def test_seven_billion_parameters_take_112_gb(config, params):
    done = invoke(config(TRAINER), "--dataset-size", "100", "--params", params)
    assert done.exit_code == 0, done.output
    found = rows(done.stdout)
    assert (found["parameters"], found["total"]) == ("28,000,000,000", "112,000,000,000")
    assert "AdamW with 7,000,000,000 parameters in fp32" in done.stdout


def test_the_curve_is_written_as_a_png(config, tmp_path):
    path = tmp_path / "curve.png"
    done = invoke(config(TRAINER), "--dataset-size", "24000", "--plot", str(path))
    assert done.exit_code == 0, done.output
    assert path.read_bytes().startswith(PNG)


def test_without_matplotlib_one_line_says_so(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "curve.png"
    line = refused(invoke(config(TRAINER), "--dataset-size", "100", "--plot", str(path)))
    assert line.startswith("--plot needs matplotlib, got none; ")
    assert not path.exists()
    assert invoke(config(TRAINER), "--dataset-size", "100").exit_code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dataset-size", "-5"), "--dataset-size must be a positive whole number, got '-5'; "),
        (("--dataset-size", "0"), "--dataset-size must be a positive whole number, got '0'; "),
        (("--dataset-size", "2.5"), "--dataset-size must be a positive whole number, got '2.5'; "),
        (("--dataset-size", "9" * 5000), "--dataset-size must be a positive whole number, got '9"),
        (("--world-size", "1.0"), "--world-size must be a positive whole number, got '1.0'; "),
        (("--world-size", ""), "--world-size must be a positive whole number, got ''; "),
        (("--params", "-7B"), "--params must be a positive whole number, got '-7B'; "),
        (("--params", "0"), "--params must be a positive whole number, got '0'; "),
        (("--params", "1.5"), "--params must be a positive whole number, got '1.5'; "),
        (("--params", "many"), "--params must be a positive whole number, got 'many'; "),
        (("--params", "1e999999999"), "--params must be a positive whole number, got '1e9999"),
        (("--plot", "curve.pdf"), "--plot must be a file that ends in .png, got curve.pdf; "),
        ((), "max_steps must be positive for a loader without a length"),
    ],
)
def test_a_wrong_option_gives_one_line_that_names_it(config, options, said):
    options = options if not options or "--dataset-size" in options else (*DATA, *options)
    assert refused(invoke(config(TRAINER), *options)).startswith(said)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("learning_rate: 3e-4", "", "the configuration must have learning_rate, "),
        ("num_train_epochs: 3", "", "the configuration must have num_train_epochs or max_steps, "),
        ("batch_size: 4", "batch_size: -4", "per_device_train_batch_size must be a positive int"),
        ("batch_size: 4", "batch_size: 2.5", "per_device_train_batch_size must be a positive int"),
        ("steps: 8", "steps: 0", "gradient_accumulation_steps must be a positive integer, got 0; "),
        ("steps: 8", "steps: auto", "gradient_accumulation_steps must be a positive integer, got "),
        ("warmup_ratio: 0.07", "warmup_ratio: 1.5", "warmup_ratio must be from 0 to 1, got 1.5; "),
        ("3e-4", "-3e-4", "learning_rate must be "),
        ("3e-4", "1" * 400, ""),
        ("type: cosine_with_min_lr", "type: cosin", "lr_scheduler_type must be one of "),
        ("epochs: 3", "epochs: .inf", "num_train_epochs must be positive and finite, got inf; "),
    ],
)
def test_a_wrong_key_gives_one_line_that_names_it(config, old, new, said):
    text = TRAINER.replace(old, new)
    assert text != TRAINER
    assert refused(invoke(config(text), *DATA)).startswith(said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [1, 2", "must be YAML, got "),
        ("a: b: c", "must be YAML, got "),
        (b"key: \xff", "must be YAML, got "),
        ("? [a]\n: 1", "must be YAML, got "),
        ("", "must hold keys and values, got NoneType"),
        ("- 1\n- 2", "must hold keys and values, got list"),
        ("[" * 20_000, "CONFIG must nest a few levels deep at most, got "),
        ("day: 2026-99-99", "month must be in 1..12"),
    ],
)
def test_a_file_that_is_no_configuration_gives_one_line(config, content, said):
    assert said in refused(invoke(config(content), *DATA))


def test_a_path_that_cannot_be_used_gives_one_line(config, tmp_path):
    said = "CONFIG must be a file that can be read, got "
    assert refused(invoke(tmp_path / "none.yaml", *DATA)).startswith(said)
    assert refused(invoke(tmp_path, *DATA)).startswith(said)
    path = tmp_path / "none" / "curve.png"
    line = refused(invoke(config(TRAINER), *DATA, "--plot", str(path)))
    assert line.startswith(f"--plot must be a file that can be written, got {path} (No such file")


def test_words_of_the_file_are_not_markup(config):
    done = invoke(config(TRAINER + "'[bold]key': 1\n"), *DATA)
    assert "note: not read: output_dir, [bold]key\n" in done.stdout
