"""The command: a demo, a doctor, and one line with status 2 for a wrong choice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import stepclock_ext
from stepclock_ext.cli import app
from stepclock_ext.runlog import read_run_log

ROOT = Path(stepclock_ext.__file__).parents[1]


def run_command(*arguments):
    """`python -m stepclock_ext` in a process of its own, not on a terminal."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "stepclock_ext", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_the_command_runs_in_a_process_of_its_own(tmp_path):
    done = run_command("demo", "--quick", "--updates", "1", "--out", str(tmp_path / "a" / "b"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "update step 1, micro step 8, 0 skipped, 2,048 tokens" in done.stdout
    assert len(read_run_log(tmp_path / "a" / "b" / "run.jsonl")) == 1


def make_wrong_choices(folder):
    """Options that cannot be followed, and what the line about them says."""
    (folder / "empty").touch()
    (folder / "short").write_bytes(bytes(64))
    absent = {n: s.reason for n, s in stepclock_ext.backends().items() if not s.available}
    return {
        **{("--backend", name): f"got {name!r} ({reason}); " for name, reason in absent.items()},
        ("--updates", "0"): "--updates must be 1 or more, got 0; ",
        ("--updates", "-3"): "--updates must be 1 or more, got -3; ",
        ("--seed", "-1"): "--seed must be from 0 to 2**63 - 1, got -1; ",
        (
            "--backend",
            "gpu",
        ): "must be one of auto, reference, cpu, cuda, triton, got 'gpu'; ",
        ("--text", f"{folder}/none"): f"got {folder}/none (No such file or directory); ",
        ("--text", f"{folder}"): f"got {folder} (Is a directory); ",
        ("--text", f"{folder}/empty"): f"more than 64 bytes, got 0 from {folder}/empty; ",
        ("--text", f"{folder}/short"): f"more than 64 bytes, got 64 from {folder}/short; ",
        ("--out", f"{folder}/empty"): f"got {folder}/empty (File exists); ",
        ("--out", f"{folder}/empty/a"): f"got {folder}/empty/a (Not a directory); ",
    }


def test_a_choice_that_cannot_be_followed_gives_one_line_and_status_2(tmp_path):
    for options, said in make_wrong_choices(tmp_path).items():
        out = () if "--out" in options else ("--out", f"{tmp_path}/out")
        done = CliRunner().invoke(app, ["demo", *options, *out])
        assert done.exit_code == 2, options
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith("stepclock demo: ")
        assert said in line
    assert not (tmp_path / "out").exists()


def test_a_folder_without_permission_gives_one_line_and_status_2(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    done = CliRunner().invoke(app, ["demo", "--out", f"{tmp_path}/out"])
    assert done.exit_code == 2
    assert "(Permission denied); pass another folder" in done.stderr


def test_the_process_ends_with_status_2_and_without_a_traceback():
    done = run_command("demo", "--updates", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "stepclock demo: --updates must be 1 or more, got 0; 80 is usual"
    ]


def test_the_doctor_names_every_backend_and_why():
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    for name, status in stepclock_ext.backends().items():
        (line,) = (line for line in done.stdout.splitlines() if f" {name} " in line)
        assert ("yes" if status.available else "no") in line
        assert status.reason.split(" ")[0] in line
    assert torch.__version__ in done.stdout
    assert f"threads       {torch.get_num_threads()}" in done.stdout


def test_the_version_is_the_packages():
    done = CliRunner().invoke(app, ["--version"])
    assert done.stdout == f"stepclock {stepclock_ext.__version__}\n"
    assert done.exit_code == 0


def test_importing_the_core_imports_no_outer_room():
    rooms = "typer", "rich", "matplotlib", "stepclock_ext.cli", "stepclock_ext.demo"
    code = f"import sys, stepclock_ext; print([m for m in {rooms} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
