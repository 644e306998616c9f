"""Checkpoints: a run that stopped and resumed is the run that never stopped, to the bit."""

import random

import numpy as np
import pytest
import torch
from checkpoint_run import BAD_MICRO, MICRO_STEPS_PER_EPOCH, NUM_MICRO, Run
from helpers import clocked_sgd
from tolerance import assert_all_bit_equal

from stepclock_ext import ClockedOptimizer
from stepclock_ext.checkpoint import (
    Resume,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_run_that_stopped_after_any_of_thirty_micro_steps_goes_on_to_the_bit(tmp_path, make):
    whole = Run(make=make).train()
    assert whole.opt.clock.micro_step == NUM_MICRO
    assert whole.opt.clock.skipped_updates == 1
    end = whole.draws()
    for number in range(1, NUM_MICRO + 1):
        path = Run(make=make).stopped_after(number).save(tmp_path / str(number))
        resumed = Run(seed=number, make=make)
        resumed.train(resume=resumed.load(path))
        assert resumed.reports == whole.reports[-len(resumed.reports) :]
        assert f"micro_step={NUM_MICRO}" in resumed.reports[-1]
        assert_all_bit_equal(resumed.values(), whole.values())
        assert resumed.opt.clock.state_dict() == whole.opt.clock.state_dict()
        assert resumed.draws() == end


def test_saving_and_loading_change_nothing_in_the_run_itself(tmp_path):
    whole, saving = Run().train(), Run().stopped_after(BAD_MICRO)
    path = saving.save(tmp_path, extra=torch.ones(3))
    saving.train(resume=Resume(path, 0, BAD_MICRO))  # its loader draws; the next run does not
    restarted = Run().stopped_after(BAD_MICRO)
    before = restarted.values()
    resume = restarted.load(path)
    assert_all_bit_equal(restarted.values(), before)
    restarted.train(resume=resume)
    assert_all_bit_equal(restarted.values(), whole.values())


def test_the_position_in_the_data_is_absolute_in_every_resume(tmp_path):
    """Case 23: 10 micros an epoch, resumed at 3: 7, then 10; after 2 more the position is 5."""
    path = Run().stopped_after(3).save(tmp_path)
    first = Run(seed=1)
    resume = first.load(path)
    assert (resume.epoch, resume.micro_steps_to_skip) == (0, 3)
    batches = range(MICRO_STEPS_PER_EPOCH)
    assert [len(list(resume.remaining(batches, epoch=epoch))) for epoch in (0, 1)] == [7, 10]
    for (x,) in list(first.loader(0))[3:5]:
        first.micro_step(x)
    second = Run(seed=2).load(first.save(tmp_path))
    assert (second.epoch, second.micro_steps_to_skip) == (0, 5)
    assert list(second.remaining(batches, epoch=0)) == [5, 6, 7, 8, 9]


def test_the_position_after_an_epoch_is_the_beginning_of_the_next(tmp_path):
    run = Run().stopped_after(MICRO_STEPS_PER_EPOCH)
    ended = Run(seed=1).load(run.save(tmp_path))
    assert list(ended.remaining(range(MICRO_STEPS_PER_EPOCH), epoch=0)) == []
    run.opt.end_epoch()
    begun = Run(seed=1).load(run.save(tmp_path))
    assert (begun.epoch, begun.micro_steps_to_skip) == (1, 0)


def test_a_loader_that_is_too_short_and_an_epoch_that_is_over_are_refused(tmp_path):
    resume = Resume(tmp_path, epoch=2, micro_steps_to_skip=5)
    with pytest.raises(ValueError, match="loader must have 5 batches or more, got 4;"):
        resume.remaining(range(4), epoch=2)
    with pytest.raises(ValueError, match="epoch must be 2 or more, got 1;"):
        resume.remaining(range(4), epoch=1)


def test_the_random_numbers_of_all_generators_go_on(tmp_path):
    run = Run()
    random.gauss(0, 1), np.random.standard_normal()  # each keeps a second number for the next call
    path = run.save(tmp_path)
    expected = (random.gauss(0, 1), np.random.standard_normal(), *run.draws())
    other = Run(seed=5)
    other.load(path)
    assert (random.gauss(0, 1), np.random.standard_normal(), *other.draws()) == expected


def test_a_file_is_plain_to_torch_load(tmp_path):
    path = Run().stopped_after(6).save(tmp_path)
    content = torch.load(path, weights_only=True)
    torch.optim.AdamW(Run().model.parameters()).load_state_dict(content["optimizer"])
    Run().model.load_state_dict(content["model"])
    weights = content["model"]
    assert weights["0.weight"].data_ptr() == weights["5.weight"].data_ptr()  # written once


def test_extra_comes_back_with_plain_numbers(tmp_path):
    extra = {"seen": [1, (2.5, "three")], "best": np.float32(0.5), "t": torch.arange(3), 4: None}
    back = Run().load(Run().save(tmp_path, extra=extra)).extra
    assert torch.equal(back.pop("t"), torch.arange(3))
    assert back == {"seen": [1, (2.5, "three")], "best": 0.5, 4: None}
    assert type(back["best"]) is float
    assert Run().load(Run().save(tmp_path)).extra is None


@pytest.mark.parametrize(
    ("extra", "where"),
    [({"a": [1, object()]}, "'extra, a, 1'.*got object"), (np.ones(2), "'extra'.*got ndarray")],
)
def test_what_cannot_be_read_safely_is_refused_at_the_save(tmp_path, extra, where):
    with pytest.raises(TypeError, match=where):
        Run().save(tmp_path, extra=extra)
    assert list(tmp_path.iterdir()) == []


# Names, and which files stay.


def test_names_say_updates_and_metric(tmp_path):
    run = Run().stopped_after(4)
    assert run.save(tmp_path / "new" / "folder").name == "ckpt_step1.pt"
    assert run.save(tmp_path, metric=("f1", 0.863)).name == "ckpt_step1_f1-0.863.pt"
    assert run.save(tmp_path, metric=("eval.loss", np.float64(-2))).name.endswith(
        "_eval.loss--2.pt"
    )
    own = run.save(tmp_path / "best.pt")
    assert own == tmp_path / "best.pt"
    assert run.load(own).path == own


def test_the_latest_is_the_one_with_the_most_updates_then_the_one_written_last(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="no ckpt_step"):
        Run().load(tmp_path)
    p = torch.nn.Parameter(torch.ones(1))
    model, opt = torch.nn.ParameterList([p]), clocked_sgd(p)
    for _ in range(11):
        opt.backward(p.sum())
        opt.step()
        path = save_checkpoint(tmp_path, model=model, optimizer=opt)
    assert latest_checkpoint(tmp_path) == path == tmp_path / "ckpt_step11.pt"
    again = save_checkpoint(tmp_path, model=model, optimizer=opt, metric=("acc", 0.5))
    assert latest_checkpoint(tmp_path) == again
    assert load_checkpoint(tmp_path, model=model, optimizer=opt).path == again


def test_the_limit_removes_the_oldest_of_our_own_and_nothing_else(tmp_path):
    foreign = [tmp_path / name for name in ("model.pt", "ckpt_stepX.pt", "ckpt_step1.pt.bak")]
    for path in foreign:
        path.touch()
    run = Run()
    names = []
    for update in range(1, 5):
        run.opt.clock.update_step = update
        names.append(run.save(tmp_path, save_total_limit=2, metric=("f1", 1 / update)).name)
    assert {path.name for path in tmp_path.iterdir()} == {*names[2:], *(p.name for p in foreign)}
    run.opt.clock.update_step = 1  # a run that was taken up again from an earlier checkpoint
    path = run.save(tmp_path, save_total_limit=2)
    assert path.exists()
    assert not (tmp_path / names[2]).exists()
    run.save(tmp_path, save_total_limit=1)
    assert [p.name for p in tmp_path.glob("ckpt_step*.pt") if p not in foreign] == [path.name]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"save_total_limit": 0}, ValueError, "must be 1 or more, got 0;"),
        ({"save_total_limit": 1.5}, TypeError, "must be an integer, got 1.5"),
        ({"metric": ("a/b", 1.0)}, ValueError, "got 'a/b'; rename"),
        ({"metric": ("f1", "high")}, ValueError, "must be a number, got 'high'"),
        ({"metric": 0.5}, TypeError, "must be a name and a value, got 0.5"),
    ],
)
def test_bad_arguments_are_named(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        Run().save(tmp_path, **options)
    with pytest.raises(ValueError, match="must come with a folder"):
        Run().save(tmp_path / "own.pt", save_total_limit=1)
    assert list(tmp_path.iterdir()) == []


# What is refused at the save.


@pytest.mark.parametrize("way", ["opt.backward", "loss.backward"])
def test_a_backward_that_is_not_counted_is_not_saved(tmp_path, way):
    model = torch.nn.Linear(2, 1)
    opt = ClockedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), gradient_accumulation_steps=4
    )
    for _ in range(2):
        loss = model(torch.ones(2)).sum()
        opt.backward(loss) if way == "opt.backward" else loss.backward()
        with pytest.raises(RuntimeError, match="call step"):
            save_checkpoint(tmp_path, model=model, optimizer=opt)
        opt.step()
        save_checkpoint(tmp_path, model=model, optimizer=opt)


def test_a_parameter_outside_the_model_is_not_forgotten_in_silence(tmp_path):
    model, p = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.ones(7))
    opt = clocked_sgd(*model.parameters(), p)
    with pytest.raises(ValueError, match=r"none for parameter 2 of group 0, of shape \(7,\);"):
        save_checkpoint(tmp_path, model=model, optimizer=opt)
    with pytest.raises(TypeError, match="must be a ClockedOptimizer, got SGD"):
        save_checkpoint(tmp_path, model=model, optimizer=opt.optimizers[0])
