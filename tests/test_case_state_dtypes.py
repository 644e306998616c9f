"""Case 21: loading keeps fp32 moments of a 16-bit model, and the update runs on them."""

import pytest
import torch
from helpers import each_backend
from tolerance import assert_all_bit_equal, assert_close

from stepclock_ext import ClockedOptimizer, ops

HALVES = [torch.bfloat16, torch.float16]
EXP_AVG = 1.000244140625  # 1 + 2**-12: bf16 holds 1.0


def loaded(make, dtype, backend, state):
    p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    opt = ClockedOptimizer(make([p]), backend=backend)
    saved = opt.state_dict()
    saved["state"] = {0: state}
    opt.load_state_dict(saved)
    return p, opt


def adam_state():
    return {
        "step": torch.tensor(1001.0),
        "exp_avg": torch.full((3,), EXP_AVG),
        "exp_avg_sq": torch.full((3,), EXP_AVG),
    }


@each_backend
@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_moments_of_a_16_bit_parameter_survive_loading(dtype, backend):
    p, opt = loaded(lambda ps: torch.optim.AdamW(ps, lr=0.1), dtype, backend, adam_state())
    state = opt.state[p]
    for key in ("exp_avg", "exp_avg_sq"):
        assert state[key].dtype == torch.float32
        assert state[key].tolist() == [EXP_AVG] * 3
    assert state["step"].item() == 1001.0
    assert state["exp_avg"] is not adam_state()["exp_avg"]


@each_backend
@pytest.mark.parametrize("dtype", HALVES)
def test_an_update_runs_on_fp32_moments_and_rounds_the_parameter_once(dtype, backend):
    p, opt = loaded(
        lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.0), dtype, backend, adam_state()
    )
    opt.backward((p.float() * 2).sum())
    assert opt.step().updated
    m = EXP_AVG + 0.1 * (2 - EXP_AVG)
    v = EXP_AVG * 0.999 + 0.001 * 4
    assert_close(opt.state[p]["exp_avg"], torch.full((3,), m), num_roundings=4)
    assert_close(opt.state[p]["exp_avg_sq"], torch.full((3,), v), num_roundings=4)
    step = 0.1 / (1 - 0.9**1002) * m / ((v / (1 - 0.999**1002)) ** 0.5 + 1e-8)
    expected = torch.full((3,), 1 - step, dtype=torch.float64).to(dtype)
    assert torch.equal(p.detach(), expected)
    assert opt.state[p]["step"].item() == 1002.0


@each_backend
@pytest.mark.parametrize("dtype", HALVES)
def test_a_momentum_buffer_keeps_its_fp32_too(dtype, backend):
    p, opt = loaded(
        lambda ps: torch.optim.SGD(ps, lr=0.5, momentum=0.5),
        dtype,
        backend,
        {"momentum_buffer": torch.full((3,), EXP_AVG)},
    )
    opt.backward((p.float() * 2).sum())
    opt.step()
    buffer = opt.state[p]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    assert buffer.tolist() == [0.5 * EXP_AVG + 2] * 3
    assert torch.equal(p.detach(), torch.full((3,), 1 - 0.5 * (0.5 * EXP_AVG + 2)).to(dtype))


def mixed_update(backend, sizes, dtype, threads=2):
    generator = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        params = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
        grads = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
        moments = [[torch.rand(n, generator=generator) for n in sizes] for _ in range(3)]
        layout = ops.Layout.of(ops.make_backend(backend), params)
        layout.adopt_state_dtypes(moments[0])
        states = ops.AdamStates([torch.tensor(3.0) for _ in sizes], *moments)
        scalars = ops.AdamScalars(
            lr=0.01,
            beta1=0.9,
            beta2=0.99,
            eps=1e-8,
            weight_decay=0.1,
            decoupled=True,
            amsgrad=True,
            maximize=False,
        )
        ops.adam_(params, states, grads, ops.make_stats(), layout, scalars)
    finally:
        torch.set_num_threads(before)
    return params, [column for columns in moments for column in columns]


SIZES = [0, 1, 255, 16_383, 16_384, 16_385, 40_001]


@pytest.mark.parametrize("dtype", HALVES)
def test_backends_agree_on_fp32_state_beside_16_bits(dtype):
    params, moments = mixed_update("cpu", SIZES, dtype)
    expected_params, expected_moments = mixed_update("reference", SIZES, dtype)
    for actual, expected in zip(moments, expected_moments, strict=True):
        torch.testing.assert_close(actual, expected, rtol=4 * 2.0**-23, atol=4 * 2.0**-23)
    eps = torch.finfo(dtype).eps
    for actual, expected in zip(params, expected_params, strict=True):
        torch.testing.assert_close(actual, expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", HALVES)
def test_threads_change_no_bit_of_it(dtype):
    one, two = mixed_update("cpu", SIZES, dtype, 1), mixed_update("cpu", SIZES, dtype, 2)
    assert_all_bit_equal([*one[0], *one[1]], [*two[0], *two[1]])


def test_a_state_of_another_dtype_is_refused_by_the_op():
    params = [torch.ones(4, dtype=torch.bfloat16)]
    layout = ops.Layout.of(ops.make_backend("cpu"), params)
    layout.adopt_state_dtypes([torch.ones(4)])
    states = ops.AdamStates(
        [torch.tensor(0.0)], [torch.ones(4)], [torch.ones(4, dtype=torch.bfloat16)], None
    )
    scalars = ops.AdamScalars(0.1, 0.9, 0.99, 1e-8, 0.0, True, False, False)
    with pytest.raises(TypeError, match=r"EXP_AVG_SQ 0: must hold 4 values of torch\.float32"):
        ops.adam_(params, states, params, ops.make_stats(), layout, scalars)
