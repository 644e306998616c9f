"""Masters follow what is written into their parameters from outside, in any order with a load."""

import copy
import pickle

import pytest
import torch
from helpers import each_backend, snapshot
from sixteen_bit import (
    MAKERS,
    Twins,
    each_half,
    given,
    micro_step,
    start_params,
    through_a_file,
)
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_same_state

from stepclock_ext import EMA, ClockedOptimizer
from stepclock_ext.checkpoint import load_checkpoint, save_checkpoint

SHAPES = [(3,), (257,)]
WRITES = {
    "copy_": lambda p: p.copy_(torch.full_like(p, 0.75)),
    "clamp_": lambda p: p.clamp_(-0.5, 0.5),
    "mul_": lambda p: p.mul_(0.5),
    "model.load_state_dict": lambda p: torch.nn.ParameterList([p]).load_state_dict(
        {"0": torch.full_like(p, 0.75)}
    ),
    "init": lambda p: torch.nn.init.constant_(p, 0.75),
}
each_write = pytest.mark.parametrize("write_", WRITES.values(), ids=WRITES)


def twins_of(dtype, backend, **options):
    return Twins(MAKERS["AdamW"], dtype, backend, shapes=SHAPES, **options)


def trained(dtype, backend, params, *, num_micro=6, **options):
    opt = ClockedOptimizer(
        MAKERS["AdamW"](params),
        gradient_accumulation_steps=3,
        master_weights=True,
        backend=backend,
        **options,
    )
    for number in range(1, num_micro + 1):
        micro_step(opt, params, number, dtype=dtype)
    return opt


@each_backend
@each_half
@each_write
def test_a_parameter_written_between_updates_goes_on_from_what_was_written(write_, dtype, backend):
    twins = twins_of(dtype, backend).run(2)
    twins.write(write_)
    assert_all_bit_equal(twins.masters(), [p.detach().float() for p in twins.params])
    twins.run(2)
    assert_all_bit_equal(twins.masters(), twins.wide_values())
    twins.write(write_)
    twins.run(2)
    assert_all_bit_equal(twins.masters(), twins.wide_values())


@each_backend
@each_half
@each_write
def test_so_does_one_written_inside_a_window(write_, dtype, backend):
    twins = twins_of(dtype, backend).run(1)
    twins.micro()
    twins.write(write_)
    twins.run(2)
    assert_all_bit_equal(twins.masters(), twins.wide_values())


@each_backend
@each_half
def test_so_does_one_written_before_the_first_update(dtype, backend):
    twins = twins_of(dtype, backend)
    twins.write(WRITES["copy_"])
    twins.run(1)
    assert_all_bit_equal(twins.masters(), twins.wide_values())


@each_backend
@each_half
@pytest.mark.parametrize("ema", [False, True])
def test_so_does_one_that_had_no_gradient_before_it_was_written(ema, dtype, backend):
    p, q = start_params(dtype, shapes=SHAPES)
    wide = torch.nn.Parameter(torch.ones_like(q, dtype=torch.float32))
    options = {"ema": EMA(decay=0.5)} if ema else {}
    make = MAKERS["SGD"]
    opt = ClockedOptimizer(make([p, q]), master_weights=True, backend=backend, **options)
    wide_opt = ClockedOptimizer(make([wide]), backend=backend)
    opt.backward(given((p, torch.ones_like(p))))
    opt.step()
    with torch.no_grad():
        q.fill_(1.0)
    for _ in range(2):
        opt.backward(given((q, torch.ones_like(q))))
        opt.step()
        wide_opt.backward(given((wide, torch.ones_like(q))))
        wide_opt.step()
        assert_bit_equal(opt.master_weight(q), wide.detach())


@each_backend
@each_half
def test_the_average_of_a_written_parameter_moves_to_what_was_written(dtype, backend):
    p, q = start_params(dtype, shapes=SHAPES)
    ema = EMA(decay=0.5)
    opt = ClockedOptimizer(MAKERS["SGD"]([p, q]), master_weights=True, ema=ema, backend=backend)
    opt.backward(given((p, torch.ones_like(p)), (q, torch.ones_like(q))))
    opt.step()
    with torch.no_grad():
        q.fill_(4.0)
    before = ema.average(q).clone()
    opt.backward(given((p, torch.ones_like(p))))  # q has no gradient here
    opt.step()
    assert_bit_equal(ema.average(q), before + 0.5 * (4.0 - before))


@each_backend
@each_half
def test_what_a_step_hook_writes_stays(dtype, backend):
    def halve(inner, args, kwargs):
        for group in inner.param_groups:
            for p in group["params"]:
                p.grad.zero_()
                with torch.no_grad():
                    p.copy_(p.to(dtype) * 0.5)

    twins = Twins(MAKERS["SGD"], dtype, backend, shapes=SHAPES, steps=1).run(1)
    for opt in (twins.opt, twins.wide_opt):
        opt.optimizers[0].register_step_pre_hook(halve)
    expected = [p.detach() * 0.25 for p in twins.params]
    twins.run(2)
    assert_all_bit_equal([p.detach() for p in twins.params], expected)
    assert_all_bit_equal(twins.masters(), twins.wide_values())


@each_backend
@each_half
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_model_may_be_loaded_before_the_optimizer_or_after(order, dtype, backend):
    params = start_params(dtype, shapes=SHAPES)
    opt = trained(dtype, backend, params)
    saved = through_a_file({"model": [p.detach() for p in params], "opt": opt.state_dict()})
    others = start_params(dtype, shapes=SHAPES, seed=200)
    resumed = trained(dtype, backend, others, num_micro=3)
    loads = [
        lambda: torch.nn.ParameterList(others).load_state_dict(
            {str(i): value for i, value in enumerate(saved["model"])}
        ),
        lambda: resumed.load_state_dict(saved["opt"]),
    ]
    for load in loads if order == "model first" else reversed(loads):
        load()
    for number in range(7, 13):
        assert_all_bit_equal(
            [resumed.master_weight(q) for q in others], [opt.master_weight(p) for p in params]
        )
        micro_step(opt, params, number, dtype=dtype)
        micro_step(resumed, others, number, dtype=dtype)
    assert_all_bit_equal([q.detach() for q in others], [p.detach() for p in params])
    assert_same_state(resumed.state_dict(), opt.state_dict())


@each_backend
@each_half
def test_a_parameter_written_after_a_checkpoint_was_loaded_is_not_what_it_was(
    tmp_path, dtype, backend
):
    params = start_params(dtype, shapes=SHAPES)
    opt = trained(dtype, backend, params)
    model = torch.nn.ParameterList(params)
    path = save_checkpoint(tmp_path, model=model, optimizer=opt)
    load_checkpoint(path, model=model, optimizer=opt)
    with torch.no_grad():
        for p in params:
            p.fill_(4.0)
    masters = [opt.master_weight(p) for p in params]
    assert_all_bit_equal(masters, [p.detach().float() for p in params])


@each_backend
@each_half
def test_a_copy_of_a_run_follows_what_is_written_too(dtype, backend):
    params = start_params(dtype, shapes=SHAPES)
    params, opt = copy.deepcopy((params, trained(dtype, backend, params)))
    with torch.no_grad():
        for p in params:
            p.fill_(4.0)
    masters = [opt.master_weight(p) for p in params]
    assert_all_bit_equal(masters, [p.detach().float() for p in params])


# Where the fused rule cannot run, nothing moves.


def replace_step(opt, params):
    inner = opt.optimizers[-1]
    inner.step = lambda: None

    def undo():
        del inner.step

    return undo


def make_capturable(opt, params):
    group = opt.optimizers[-1].param_groups[0]
    group["capturable"] = True

    def undo():
        group["capturable"] = False

    return undo


OBSTACLES = {"replaced step": replace_step, "capturable": make_capturable}


@each_backend
@each_half
@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=OBSTACLES)
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_rule_that_cannot_run_is_refused_and_changes_nothing(
    num_before, obstacle, dtype, backend
):
    twins = Twins(
        lambda ps: [MAKERS["SGD nesterov"](ps[:1]), MAKERS["AdamW"](ps[1:])],
        dtype,
        backend,
        shapes=SHAPES,
        steps=1,
    ).run(num_before)
    opt, params = twins.opt, twins.params
    before, masters = snapshot(opt), twins.masters()
    undo = obstacle(opt, params)
    with pytest.raises(RuntimeError, match=r"must go with the fused update rule of AdamW.*capt"):
        micro_step(opt, params, twins.number + 1, dtype=dtype)
    opt.discard()
    undo()
    moved = snapshot(opt)[: len(params)] if num_before == 0 else snapshot(opt)
    assert_all_bit_equal(moved, before)
    assert_all_bit_equal(twins.masters(), masters)
    assert opt.clock.update_step == num_before
    twins.run(3)
    assert_all_bit_equal(twins.masters(), twins.wide_values())


@each_backend
@each_half
def test_a_sparse_gradient_is_refused_and_changes_nothing(dtype, backend):
    table = torch.nn.Embedding(5, 4, sparse=True).to(dtype)
    dense = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    inner = torch.optim.SGD([dense, table.weight], lr=2.0**-12, momentum=0.5)
    opt = ClockedOptimizer(inner, master_weights=True, backend=backend)
    before = snapshot(opt)
    opt.backward(table(torch.tensor([1, 3])).float().sum() + dense.float().sum())
    with pytest.raises(RuntimeError, match=r"fused update rule of SGD.*sparse gradients"):
        opt.step()
    opt.discard()
    assert_all_bit_equal(snapshot(opt), before)
    opt.backward(dense.float().sum())
    assert opt.step().updated
    assert opt.master_weight(dense).tolist() == [1 - 2.0**-12] * 4


@each_half
@each_write
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_write_before_a_copy_goes_along(dtype, write_, how):
    (p,) = params = start_params(dtype, shapes=[(3,)])
    opt = trained(dtype, "cpu", params)
    with torch.no_grad():
        write_(p)
    (copied,), other = how((params, opt))
    assert_bit_equal(other.master_weight(copied), p.detach().float())
    assert_bit_equal(opt.master_weight(p), p.detach().float())
