"""What `make gpu` runs, as far as a CPU takes it: a dry run, broken backends, exit statuses."""

import doctest
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensors import BACKENDS

from stepclock_ext.backends.native import NativeBackend
from stepclock_ext.backends.reference import ReferenceBackend

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # gpu/ is no part of the package

from gpu import parity, plan, processes, report, run, sanitizer  # noqa: E402
from gpu.device import Device  # noqa: E402
from gpu.setting import Setting, run_each  # noqa: E402

NO_GPU = "skipped: no GPU"
NO_TIME = "skipped: no time left"
FIRST = BACKENDS[-1]  # the C++ kernels where they were built
CHECKS = ("adam", "sgd", "gradients", "training")
ON_A_GPU_ALONE = ("sync", "launches", "graph", "memcheck", "racecheck")
RACES = {
    "bench:fp32": ["update of an accumulated window", "update of a window of one", "accumulation"],
    "bench:bf16": ["update of bf16 parameters with remainders"],
    "bench:small": [
        "update of an accumulated window",
        "update of a window of one",
        "accumulation",
        "step() of the wrapper",
    ],
}
ROW = {"name", "median_ms", "low_ms", "high_ms", "rounds", "ratio", "bytes", "gb_per_s"}


def run_script(folder, *arguments):
    unset = ("TRITON_INTERPRET",)
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, "-m", "gpu.run", "--out", str(folder), *arguments],
        cwd=ROOT,
        env=kept | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """The process of a dry run, and the report that it wrote."""
    folder = tmp_path_factory.mktemp("results")
    done = run_script(folder, "--dry-run")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done, json.loads((folder / "cpu.json").read_text(encoding="utf-8"))


def test_a_dry_run_records_every_stage_with_its_outcome(dry_run):
    outcomes = {name: found["outcome"] for name, found in dry_run[1]["stages"].items()}
    expected = {"environment": "pass"}
    expected |= {f"{kind}:{FIRST}": "pass" for kind in CHECKS}
    expected |= {f"{kind}:{FIRST}": NO_GPU for kind in ON_A_GPU_ALONE}
    assert outcomes == expected | {name: "pass" for name in RACES}


def test_a_report_says_what_was_measured_on_what(dry_run):
    _, found = dry_run
    head = {"card", "device", "date", "commit", "changed_files", "versions", "seconds"}
    assert set(found) == head | {"passed", "failed", "stages"}
    assert (found["card"], found["device"]) == ("cpu", "cpu")
    assert (found["passed"], found["failed"]) == (True, [])
    assert found["versions"]["torch"] == torch.__version__
    for stage in found["stages"].values():
        assert stage["seconds"] >= 0.0
    named = set(found["stages"][f"adam:{FIRST}"]["checks"])
    assert named == set(parity.PARTS["adam"])


def test_a_race_reports_times_bytes_and_the_share_of_a_copy(dry_run):
    for name, titles in RACES.items():
        stage = dry_run[1]["stages"][name]
        assert list(stage["races"]) == titles
        assert stage["copy"]["gb_per_s"] > 0
        assert stage["parameters"] == 10_000
        for race in stage["races"].values():
            first, *others = race["rows"]
            assert others
            assert first["ratio"] == 1.0
            for row in race["rows"]:
                assert ROW | {"share_of_copy"} == set(row)
                assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
                assert row["rounds"] == 3
                (stated,) = (int(w) for w in row["name"].split() if w.isdigit())
                assert row["bytes"] == stated * 10_000


def test_the_table_names_each_stage_and_each_rival(dry_run):
    done, found = dry_run
    for name, stage in found["stages"].items():
        assert f"  {name:<20}" in done.stdout
        for race in stage.get("races", {}).values():
            assert all(row["name"] in done.stdout for row in race["rows"])
    assert done.stdout.splitlines()[-1].endswith("cpu.json: passed")


def test_a_dry_run_gives_triton_to_its_interpreter_and_to_nothing_else():
    (job,) = plan.jobs_of(["cpu", "reference", "triton"], is_dry=True)
    interpreted = ["adam:triton", "sgd:triton", "gradients:triton"]
    assert [name for name in job.names if "triton" in name] == interpreted


def test_on_a_gpu_each_stage_has_a_process_and_races_run_alone():
    jobs = plan.jobs_of(["cuda", "triton"], is_dry=False)
    names = [name for job in jobs for name in job.names]
    assert len(names) == len(jobs) == len(set(names))
    both = {f"{kind}:{b}" for kind in CHECKS + ON_A_GPU_ALONE for b in ("cuda", "triton")}
    assert set(names) == both | set(RACES)
    assert [job.names[0] for job in jobs if job.is_alone] == list(RACES)
    assert run.sum_alone(jobs) < plan.LIMIT_S / 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_fails_and_says_so(tmp_path):
    done = run_script(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "unknown.json").read_text(encoding="utf-8"))["stages"]
    assert found["environment"]["error"] == "torch sees no CUDA device"
    assert found["environment"]["outcome"] == "fail"
    others = {name: stage["outcome"] for name, stage in found.items() if name != "environment"}
    assert set(others.values()) == {NO_GPU}
    assert "adam:cuda" in others


def test_without_time_every_stage_is_skipped_and_nothing_has_passed(tmp_path):
    assert run.main(["--dry-run", "--out", str(tmp_path), "--limit", "1"]) == 1
    found = json.loads((tmp_path / "unknown.json").read_text(encoding="utf-8"))
    assert {stage["outcome"] for stage in found["stages"].values()} == {NO_TIME}
    assert found["failed"] == ["environment"]


def test_stages_that_must_pass_decide_and_others_are_reported():
    stages = {"environment": {"outcome": "pass"}, "adam:cuda": {"outcome": "pass"}}
    stages |= {"bench:fp32": {"outcome": "fail"}, "graph:cuda": {"outcome": "fail"}}
    stages |= {"sgd:cuda": {"outcome": NO_TIME}}
    assert report.failed_stages(stages) == []
    for name in ("adam:cuda", "training:triton", "sync:cuda", "racecheck:cuda", "launches:triton"):
        assert report.failed_stages(stages | {name: {"outcome": "fail"}}) == [name]


# A backend that is wrong.


class OffByAnUlp(NativeBackend):
    """Its last parameter of more than one element is one unit in the last place away."""

    def adam_(self, params, *others):
        super().adam_(params, *others)
        for p in params[-1:]:
            if p.dtype == torch.float32 and p.is_contiguous():
                p.view(torch.int32).view(-1)[-1] += 1


class WithoutGate(ReferenceBackend):
    def sgd_(self, *arguments):
        *others, companions = arguments
        super().sgd_(*others, replace(companions, is_gated=False))


class WithoutNan(ReferenceBackend):
    def max_abs_(self, slots, tensors, layout):
        super().max_abs_(slots, tensors, layout)
        slots.nan_to_num_(nan=0.0)


class WithoutPrior(ReferenceBackend):
    def accumulate_(self, accumulators, slots, grads, layout, *, store):
        slots = replace(slots, prior_sums=None)
        super().accumulate_(accumulators, slots, grads, layout, store=store)


class Fickle(ReferenceBackend):
    calls = 0

    def sum_squares_(self, slots, tensors, layout):
        super().sum_squares_(slots, tensors, layout)
        Fickle.calls += 1
        slots.mul_(1.0 + 2.0**-52 * (Fickle.calls % 2))


WRONG = {
    OffByAnUlp: ("adam", "every_size_and_dtype"),
    WithoutGate: ("sgd", "a_gate"),
    WithoutNan: ("gradients", "values_that_are_not_finite"),
    WithoutPrior: ("gradients", "accumulation"),
    Fickle: ("gradients", "chunk_sums_and_maxima"),
}


def setting(seconds=600.0):
    return Setting(Device("cpu"), ("reference",), True, time.monotonic() + seconds)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda c: c.__name__)
def test_a_backend_that_is_wrong_fails(wrong):
    if issubclass(wrong, NativeBackend) and "cpu" not in BACKENDS:
        pytest.skip("the kernels were not built")
    part, check = WRONG[wrong]
    found = parity.check_backend(setting(), part, wrong())
    assert found["outcome"] == "fail"
    assert found["checks"][check].startswith("fail: AssertionError: ")
    assert check in found["error"]


def test_a_check_that_raises_does_not_stop_the_others():
    def fails():
        raise RuntimeError("no kernel image")

    found = run_each(setting(), {"first": fails, "second": lambda: None, "third": lambda: 2})
    assert found["checks"]["second"] == "pass"
    assert found["checks"]["third"] == 2
    assert found["error"] == "first: RuntimeError: no kernel image"


def test_checks_for_which_no_time_is_left_are_named():
    found = run_each(setting(seconds=-1.0), {"first": lambda: None})
    assert found == {"outcome": NO_TIME, "checks": {"first": NO_TIME}}


# Processes and tools.


def test_a_process_that_takes_too_long_is_ended_with_its_children():
    code = "import subprocess, sys; print('there', flush=True); "
    code += "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    started = time.monotonic()
    assert processes.run_command([sys.executable, "-c", code], 3.0) == (None, "there\n")
    assert time.monotonic() - started < 30.0


def test_a_stage_whose_process_dies_has_failed(tmp_path):
    given = run.Run(is_dry=True, deadline=time.monotonic() + 60.0, scratch=tmp_path / "none")
    found = given.job(plan.Job(("environment",), 30.0), [])
    assert found["environment"]["outcome"] == "fail"
    assert "its process ended with status 1" in found["environment"]["error"]
    assert "FileNotFoundError" in found["environment"]["error"]


@pytest.mark.parametrize(
    ("status", "said", "outcome"),
    [
        (0, "the small case is done\n========= ERROR SUMMARY: 0 errors", "pass"),
        (0, "the small case is done\n========= RACECHECK SUMMARY: 0 hazards displayed", "pass"),
        (99, "the small case is done\n========= ERROR SUMMARY: 3 errors", "fail"),
        (1, "AssertionError\n========= ERROR SUMMARY: 0 errors", "fail"),
        (0, "the small case is done", "skipped: compute-sanitizer does not work here"),
        (
            1,
            "========= Error: Device not supported\n========= ERROR SUMMARY: 1 error",
            "skipped: compute-sanitizer does not work here",
        ),
        (None, "", "skipped: no time left for compute-sanitizer"),
    ],
)
def test_the_sanitizers_report_is_read(status, said, outcome):
    assert sanitizer.judge(status, said)["outcome"] == outcome


def test_a_cpu_has_no_kernels_to_count_and_replays_by_running():
    device, ran = Device("cpu"), []
    assert device.count_launches(lambda: ran.append(1)) is None
    device.capture(lambda: ran.append(2))()
    assert ran == [1, 2]
    assert 0.0 < device.time_ms(lambda: time.sleep(0.001)) < math.inf
    assert device.free_bytes() > 0


@pytest.mark.parametrize("module", [report, run, sanitizer], ids=lambda m: m.__name__)
def test_the_examples_hold(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
