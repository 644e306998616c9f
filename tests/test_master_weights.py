"""Masters: 16-bit parameters train as fp32 ones that are fed the same gradients, bit for bit."""

import pytest
import torch
from helpers import each_backend
from sixteen_bit import MAKERS, SHAPES, Twins, each_half, each_maker, given, nearest, start_params
from tensors import HALVES
from tolerance import assert_all_bit_equal, assert_bit_equal

from stepclock_ext import ClockedOptimizer


def assert_twins_agree(twins):
    assert_all_bit_equal(twins.masters(), twins.wide_values())
    rounded = [nearest(q, twins.dtype) for q in twins.wide]
    assert_all_bit_equal([p.detach() for p in twins.params], rounded)


@each_backend
@each_half
@each_maker
def test_twenty_windows_of_three_end_where_the_fp32_run_does(make, dtype, backend):
    twins = Twins(make, dtype, backend, shapes=SHAPES if backend == "cpu" else SHAPES[:3])
    for _ in range(20):
        twins.run(1)
        assert_twins_agree(twins)
    lost = (q.detach() != p.detach() for p, q in zip(twins.params, twins.wide, strict=True))
    assert any(differs.any() for differs in lost)  # else 16 bits would do


@each_backend
@each_half
@each_maker
def test_so_do_windows_of_one_whose_sums_are_of_16_bits(make, dtype, backend):
    twins = Twins(make, dtype, backend, steps=1)
    for _ in range(5):
        twins.run(1)
        assert_twins_agree(twins)


@each_backend
@each_half
def test_moments_beside_masters_are_those_of_the_fp32_run(dtype, backend):
    twins = Twins(MAKERS["Adam amsgrad"], dtype, backend).run(4)
    for p, q in zip(twins.params, twins.wide, strict=True):
        state, expected = twins.opt.state[p], twins.wide_opt.state[q]
        assert list(state) == list(expected)
        assert_all_bit_equal(state.values(), expected.values())


@each_backend
@each_half
def test_a_short_window_at_the_end_of_an_epoch_updates_masters_too(dtype, backend):
    twins = Twins(MAKERS["AdamW"], dtype, backend).run(1)
    twins.micro()
    assert twins.opt.end_epoch().updated
    assert twins.wide_opt.end_epoch().updated
    assert_twins_agree(twins)


@each_backend
@each_half
def test_a_skipped_window_leaves_masters_as_they_were(dtype, backend):
    twins = Twins(MAKERS["AdamW"], dtype, backend).run(2)
    before = twins.masters()
    for bad in (False, True, False):
        info = twins.micro(bad=bad)
    assert info.skipped
    assert_all_bit_equal(twins.masters(), before)
    twins.run(2)
    assert_twins_agree(twins)


@each_backend
@each_half
def test_updates_below_half_a_unit_add_up_in_masters_and_are_lost_without(dtype, backend):
    eps = torch.finfo(dtype).eps
    ends = {}
    for masters in (True, False):
        p = torch.nn.Parameter(torch.ones(33, dtype=dtype))
        inner = torch.optim.SGD([p], lr=eps / 16)  # half a unit below 1 is eps / 4
        opt = ClockedOptimizer(inner, master_weights=masters, backend=backend)
        for _ in range(64):
            opt.backward(given((p, torch.ones_like(p))))
            opt.step()
        ends[masters] = p.detach()
    assert_bit_equal(ends[True], torch.full((33,), 1 - 4 * eps, dtype=dtype))
    assert_bit_equal(ends[False], torch.ones(33, dtype=dtype))


@each_backend
def test_a_bf16_parameter_half_way_between_two_goes_away_from_zero(backend):
    p = torch.nn.Parameter(torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.bfloat16))
    opt = ClockedOptimizer(torch.optim.SGD([p], lr=1.0), master_weights=True, backend=backend)
    steps = torch.tensor([-(2.0**-8), 2.0**-8, -(2.0**-8) + 2.0**-16, 2.0**-9])
    opt.backward(given((p, steps.bfloat16())))
    opt.step()
    up = 1 + 2.0**-7
    assert p.tolist() == [up, -up, 1.0, -1.0 - 0.0]
    assert opt.master_weight(p).tolist() == [
        1 + 2.0**-8,
        -1 - 2.0**-8,
        1 + 2.0**-8 - 2.0**-16,
        -1 - 2.0**-9,
    ]


@each_backend
@each_maker
def test_wider_parameters_of_the_same_model_move_as_without_masters(make, backend):
    ends = []
    for masters, halves in ((True, HALVES), (False, [torch.float32] * 2)):
        dtypes = [halves[0], torch.float32, halves[1], torch.float64]
        origins = [torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16]
        params = [
            start_params(origin, as_dtype=dtype, shapes=[(257,)], seed=seed)[0]
            for seed, (origin, dtype) in enumerate(zip(origins, dtypes, strict=True))
        ]
        opt = ClockedOptimizer(
            make(params),
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            master_weights=masters,
            backend=backend,
        )
        for number in range(1, 13):
            grads = [torch.full((257,), number / 4, dtype=origin) for origin in origins]
            opt.backward(given(*zip(params, grads, strict=True)))
            opt.step()
        ends.append([opt.master_weight(p) for p in params])
    assert_all_bit_equal(*ends)
    assert [value.dtype for value in ends[0]] == [torch.float32] * 3 + [torch.float64]
    assert opt.state_dict()["stepclock"]["masters"] is None


@each_backend
@each_half
def test_a_parameter_without_a_gradient_keeps_its_master(dtype, backend):
    p, q = start_params(dtype, shapes=[(7,), (9,)])
    inner = torch.optim.AdamW([p, q], lr=1e-3)
    opt = ClockedOptimizer(inner, master_weights=True, backend=backend)
    ones = {x: torch.ones_like(x) for x in (p, q)}
    opt.backward(given((p, ones[p]), (q, ones[q])))
    opt.step()
    before, moving = opt.master_weight(q), opt.master_weight(p)
    assert not torch.equal(before, q.detach().float())
    for _ in range(3):
        opt.backward(given((p, ones[p])))
        assert opt.step().updated
    assert_bit_equal(opt.master_weight(q), before)
    assert not torch.equal(opt.master_weight(p), moving)


@each_backend
@each_half
def test_a_group_that_is_added_gets_masters(dtype, backend):
    twins = Twins(MAKERS["AdamW"], dtype, backend, steps=1).run(2)
    new, wide = start_params(dtype, shapes=[(300,)], seed=7), []
    wide = start_params(dtype, as_dtype=torch.float32, shapes=[(300,)], seed=7)
    twins.opt.add_param_group({"params": new, "lr": 1e-2})
    twins.wide_opt.add_param_group({"params": wide, "lr": 1e-2})
    twins.params += new
    twins.wide += wide
    twins.run(4)
    assert_twins_agree(twins)
    assert not torch.equal(new[0].detach().float(), wide[0].detach())


def two_optimizers(params):
    return [MAKERS["SGD nesterov"](params[:2]), MAKERS["AdamW"](params[2:])]


@each_backend
@each_half
def test_several_optimizers_keep_masters_under_one_norm(dtype, backend):
    twins = Twins(two_optimizers, dtype, backend)
    for _ in range(5):
        twins.run(1)
        assert_twins_agree(twins)


@each_backend
@each_half
@pytest.mark.parametrize("writes", [True, False])
def test_masters_go_on_from_what_step_hooks_write_and_from_the_sums_they_only_read(
    dtype, backend, writes
):
    seen = []

    def look(inner, args, kwargs):
        grads = [p.grad for group in inner.param_groups for p in group["params"]]
        seen.append({grad.dtype for grad in grads if grad is not None})
        for grad in grads:
            if writes and grad is not None:
                grad.mul_(1)

    def round_(inner, args, kwargs):
        for group in inner.param_groups:
            for q in group["params"]:
                if writes and q.grad is not None:
                    q.grad.copy_(q.grad.to(dtype))

    twins = Twins(MAKERS["AdamW"], dtype, backend)
    twins.opt.optimizers[0].register_step_pre_hook(look)
    twins.wide_opt.optimizers[0].register_step_pre_hook(round_)
    for _ in range(4):
        twins.run(1)
        assert_twins_agree(twins)
    assert seen == [{dtype}] * 4


@each_backend
@each_half
def test_without_masters_the_value_of_a_parameter_is_its_16_bits_in_fp32(dtype, backend):
    twins = Twins(MAKERS["SGD"], dtype, backend, masters=False).run(2)
    assert_all_bit_equal(twins.masters(), [p.detach().float() for p in twins.params])


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_value_that_was_read_is_not_moved_by_the_next_update(dtype, backend):
    p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    opt = ClockedOptimizer(torch.optim.SGD([p], lr=0.5), master_weights=True, backend=backend)
    read = opt.master_weight(p)
    for _ in range(2):
        before = read.clone()
        opt.backward(given((p, torch.ones_like(p))))
        opt.step()
        assert_bit_equal(read, before)
        read = opt.master_weight(p)


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (torch.optim.Adagrad, {}, ValueError, "must go with .*AdamW.*got Adagrad"),
        (torch.optim.AdamW, {"rounding": "stochastic"}, ValueError, "must be 'nearest' with"),
        (torch.optim.AdamW, {"master_weights": 1}, TypeError, "must be True or False, got 1"),
    ],
)
def test_what_cannot_keep_masters_is_refused_at_construction(kind, options, error, message):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(error, match=message):
        ClockedOptimizer(kind([p], lr=0.1), **{"master_weights": True, **options})
