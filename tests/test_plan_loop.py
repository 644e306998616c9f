"""Case 15: a plan counts what the loop does, for every length, window and tail."""

import pytest
from helpers import clocked_sgd, parameter
from plans import micro_plan

TAILS = ["flush", "carry", "drop"]
each_tail = pytest.mark.parametrize("tail", TAILS)
each_accumulation = pytest.mark.parametrize("accumulation", range(1, 10))


def run_loop(micro_steps, accumulation, tail, epochs):
    """Each position in the data: (updates so far, epoch, micro step in epoch, in window)."""
    updates = window = 0
    for epoch in range(epochs):
        for micro_step in range(micro_steps):
            yield updates, epoch, micro_step, window
            window += 1
            if window == accumulation:
                updates, window = updates + 1, 0
        yield updates, epoch, micro_steps, window
        if tail == "flush" and window:
            updates, window = updates + 1, 0
        if tail == "drop":
            window = 0
    yield updates, epochs, 0, window


def loop_updates(micro_steps, accumulation, tail, epochs):
    *_, (updates, *_) = run_loop(micro_steps, accumulation, tail, epochs)
    return updates


def plans_of(accumulation, tail, epochs):
    """The plans of 1 to 40 micro steps an epoch that update at all."""
    for micro_steps in range(1, 41):
        updates = loop_updates(micro_steps, accumulation, tail, epochs)
        if updates:
            changes = {"num_train_epochs": epochs, "tail": tail}
            yield micro_steps, updates, micro_plan(micro_steps, accumulation, **changes)
        else:
            with pytest.raises(ValueError, match="must have an update"):
                micro_plan(micro_steps, accumulation, num_train_epochs=epochs, tail=tail)


@each_tail
@each_accumulation
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_plan_counts_the_updates_of_the_loop(tail, accumulation, epochs):
    for micro_steps, updates, plan in plans_of(accumulation, tail, epochs):
        assert plan.total_updates == updates, micro_steps
        if epochs == 1:
            assert plan.updates_per_epoch == updates, micro_steps


@each_tail
@each_accumulation
def test_a_plan_knows_what_is_left_at_every_position(tail, accumulation):
    for micro_steps, total, plan in plans_of(accumulation, tail, 3):
        for updates, epoch, micro_step, window in run_loop(micro_steps, accumulation, tail, 3):
            left = plan.remaining_updates(
                updates, epoch=epoch, micro_step_in_epoch=micro_step, micro_step_in_window=window
            )
            assert left == plan.remaining_updates(updates) == total - updates, (epoch, micro_step)


@each_tail
@each_accumulation
def test_max_steps_take_the_fewest_epochs_whose_loop_makes_them(tail, accumulation):
    for micro_steps, total, _ in plans_of(accumulation, tail, 3):
        reached = [loop_updates(micro_steps, accumulation, tail, epochs) for epochs in (1, 2, 3)]
        for max_steps in range(1, total + 1):
            plan = micro_plan(micro_steps, accumulation, max_steps=max_steps, tail=tail)
            fewest = next(epochs for epochs in (1, 2, 3) if reached[epochs - 1] >= max_steps)
            assert plan.num_epochs == fewest, (micro_steps, max_steps)


@each_tail
def test_with_max_steps_only_the_updates_done_count(tail):
    plan = micro_plan(7, 4, max_steps=10, tail=tail)
    assert plan.remaining_updates(4, epoch=2, micro_step_in_epoch=3) == 6
    assert plan.remaining_updates(12) == 0


@pytest.mark.parametrize("tail, epochs, left", [("flush", 1.5, 4), ("carry", 1.5, 3)])
def test_the_part_of_a_last_epoch_counts_as_what_is_left_of_it(tail, epochs, left):
    plan = micro_plan(15, 2, num_train_epochs=epochs, tail=tail)
    done = plan.total_updates - left
    assert plan.remaining_updates(done, epoch=1, micro_step_in_epoch=0) == left
    assert plan.remaining_updates(99, epoch=2) == 0


# The wrapper's own loop.


def train(plan, **options):
    """The wrapper's updates under a plan's schedule: the rate that each of them used."""
    w = parameter(0.0)
    opt = clocked_sgd(
        w,
        lr=plan.learning_rate,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        tail=plan.tail,
        **options,
    )
    opt.attach(plan.make_scheduler(opt))
    rates = []
    for _ in range(plan.num_epochs):
        for _ in range(plan.micro_steps_per_epoch):
            w.backward()
            rates += [info.lr[0] for info in [opt.step()] if info.updated]
        rates += [info.lr[0] for info in [opt.end_epoch()] if info.updated]
    return opt, rates


@each_tail
@pytest.mark.parametrize("micro_steps, accumulation", [(1, 1), (7, 4), (8, 4), (9, 4), (40, 9)])
@pytest.mark.parametrize("kind", ["cosine", "linear", "warmup_stable_decay"])
def test_the_wrapper_makes_the_planned_updates_at_the_planned_rates(
    tail, micro_steps, accumulation, kind
):
    shape = {"warmup_ratio": 0.2, "min_lr": 1e-4, "lr_scheduler_type": kind}
    plan = micro_plan(micro_steps, accumulation, tail=tail, **shape)
    opt, rates = train(plan)
    assert opt.clock.update_step == plan.total_updates
    assert rates == [plan.lr_at(update) for update in range(1, plan.total_updates + 1)]
    assert rates[-1] == 1e-4


# 55: a loader without a length.


def test_a_loader_without_a_length_is_begun_again_until_max_steps():
    plan = micro_plan(None, 4, num_train_epochs=None, max_steps=3)
    w = parameter(0.0)
    opt = clocked_sgd(w, lr=1e-3, gradient_accumulation_steps=4)
    opt.attach(plan.make_scheduler(opt))
    windows, before = [], 0
    while opt.clock.update_step < plan.total_updates:
        for loss in iter([1, 1, 1, 1, 1, 1, 1]):
            opt.backward(loss * w)
            if opt.step().updated:
                windows.append(opt.clock.micro_step - before)
                before = opt.clock.micro_step
            if opt.clock.update_step == plan.total_updates:
                break
        else:
            opt.end_epoch()
            windows.append(opt.clock.micro_step - before)
            before = opt.clock.micro_step
    assert (windows, opt.clock.micro_step) == ([4, 3, 4], 11)
