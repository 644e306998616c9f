"""The run log: one line an update, whole lines only, read back as it was written."""

import json
import math

import pytest
import torch

from stepclock_ext import ClockedOptimizer, StepInfo
from stepclock_ext.runlog import RunLog, read_run_log


def make_info(**changes):
    """An update, with some fields changed."""
    fields = {
        "updated": True,
        "skipped": False,
        "loss": 2.5,
        "grad_norm": 1.5,
        "clipped_norm": 1.0,
        "lr": (1e-3, 1e-4),
        "loss_scale": 65536.0,
        "micro_step": 8,
        "update_step": 1,
    }
    return StepInfo(**{**fields, **changes})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_a_run_leaves_one_line_an_update_with_every_field_and_what_the_caller_adds(path):
    w = torch.nn.Parameter(torch.tensor(1.0))
    opt = ClockedOptimizer(torch.optim.SGD([w], lr=0.5), gradient_accumulation_steps=2)
    infos = []
    with RunLog(path) as log:
        for micro in range(6):
            opt.backward(w * micro)
            infos.append(opt.step())
            log.write(infos[-1], tokens=256, split="train")
    lines = read_run_log(path)
    updates = [info for info in infos if info.updated]
    assert [line["update_step"] for line in lines] == [1, 2, 3]
    for line, info in zip(lines, updates, strict=True):
        assert line.pop("tokens") == 256
        assert line.pop("split") == "train"
        assert StepInfo(**{**line, "lr": tuple(line["lr"])}) == info


def test_a_line_is_there_as_soon_as_it_is_written(path):
    log = RunLog(path)
    log.write(make_info())
    assert len(read_run_log(path)) == 1
    log.close()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_skip_is_logged_in_strict_json_and_its_norm_comes_back(path, value):
    with RunLog(path) as log:
        log.write(make_info(updated=False, skipped=True, grad_norm=value), worst=[value, 1.0])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    (line,) = read_run_log(path)
    assert line["skipped"]
    assert repr(line["grad_norm"]) == repr(value)
    assert repr(line["worst"]) == repr([value, 1.0])


def test_an_opened_log_goes_on_where_it_ended(path):
    for step in (1, 2):
        with RunLog(path) as log:
            log.write(make_info(update_step=step))
    assert [line["update_step"] for line in read_run_log(path)] == [1, 2]


@pytest.mark.parametrize("torn", [b'{"upd', b"x" * 70_000])
@pytest.mark.parametrize("whole", [0, 1, 3])
def test_a_line_cut_short_is_not_read_and_goes_when_the_log_is_opened(path, whole, torn):
    with RunLog(path) as log:
        for step in range(whole):
            log.write(make_info(update_step=step))
    with path.open("ab") as file:
        file.write(torn)
    assert len(read_run_log(path)) == whole
    with RunLog(path) as log:
        log.write(make_info(update_step=whole))
    assert [line["update_step"] for line in read_run_log(path)] == list(range(whole + 1))


@pytest.mark.parametrize("damage", [b"{]\n", b"[1]\n", b"\n", b"\xff\n"])
def test_a_damaged_line_is_named(path, damage):
    with RunLog(path) as log:
        log.write(make_info())
    with path.open("ab") as file:
        file.write(damage)
    with pytest.raises(ValueError, match="line 2 must be"):
        read_run_log(path)


def test_a_name_of_a_field_is_refused(path):
    with RunLog(path) as log, pytest.raises(ValueError, match="got 'loss'; choose another"):
        log.write(make_info(), loss=1.0)


def test_a_value_without_a_json_form_is_refused_and_leaves_no_line(path):
    with RunLog(path) as log, pytest.raises(TypeError, match=r"norms must be .* got Tensor"):
        log.write(make_info(), norms=[torch.tensor(1.0)])
    assert read_run_log(path) == []
