"""The gradient noise scale, against the micro gradients themselves."""

import math
import statistics

import pytest
import torch
from helpers import each_backend, given, parameter
from noise import DECAY, SIZES, Direct, Micro, check, exact_windows, make_params, make_sgd, run
from tensors import dtype_name
from tolerance import assert_near

from stepclock_ext import LossScale
from stepclock_ext.noise_scale import NoiseSample, NoiseScale

MIXED = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
DTYPES = {**{dtype_name(d): [d] for d in MIXED}, "mixed": MIXED}
each_dtypes = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
narrow_and_mixed = pytest.mark.parametrize(
    "dtypes", [[torch.bfloat16], MIXED], ids=["bf16", "mixed"]
)
WEIGHTS = (3, 1, 2, 0.5)
LAST = len(SIZES) - 1


@each_backend
@each_dtypes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_scale": 256.0},
        {"loss_scale": LossScale(init_scale=16.0, growth_interval=1)},
        {"reduction": "sum"},
        {"max_grad_norm": 0.01},
        {"max_grad_norm": 0.01, "loss_scale": 64.0, "reduction": "sum"},
    ],
    ids=["plain", "static scale", "growing scale", "sum", "clip", "all"],
)
def test_it_is_made_of_the_micro_gradients(backend, dtypes, options):
    params = make_params(dtypes)
    windows = exact_windows(params, 5, weights=WEIGHTS)
    infos = run(make_sgd(params, backend=backend, **options), params, windows)
    check(infos, windows)
    if isinstance(options.get("loss_scale"), LossScale):
        assert [info.loss_scale for info in infos] == [16.0, 32.0, 64.0, 128.0, 256.0]
    if "max_grad_norm" in options:
        assert all(info.clipped_norm < info.grad_norm / 100 for info in infos)


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_16_bit_sums_of_16_bit_gradients_do_as_well(backend, dtype):
    params = make_params([dtype])
    windows = exact_windows(params, 3, weights=WEIGHTS)
    infos = run(make_sgd(params, backend=backend, accumulate_dtype=dtype), params, windows)
    check(infos, windows)


@each_backend
@pytest.mark.parametrize("dtype", MIXED, ids=dtype_name)
def test_of_a_model_it_is_that_of_autograds_gradients(backend, dtype):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2)]
    model = torch.nn.Sequential(*layers).to(dtype)
    params = list(model.parameters())
    opt, direct = make_sgd(params, backend=backend), Direct()
    for _ in range(6):
        window = []
        for samples in (4, 3, 5, 4):
            x, y = torch.randn(samples, 20, dtype=dtype), torch.randn(samples, 2, dtype=dtype)
            loss = (model(x) - y - 2).square().mean()  # so that the mean gradient is not small
            seed = torch.tensor(float(samples), dtype=dtype)  # rounded as the wrapper's are
            found = torch.autograd.grad(loss, params, seed, retain_graph=True)
            window.append(Micro(samples, {i: g.double() / samples for i, g in enumerate(found)}))
            opt.backward(loss, weight=samples)
            info = opt.step()
        check([info], [window], direct=direct, dtype=max(torch.float32, dtype, key=_precision))


def _precision(dtype):
    return -torch.finfo(dtype).eps


@each_backend
@narrow_and_mixed
@pytest.mark.parametrize(
    "takes_part",
    [
        [{0, 3}, {0, 1, 3, LAST}, {0, 1, 3}, {0, 1, 2, LAST}],
        [{0, 1, 2, 3}, {0, LAST}, {0, 1}, {0}],
        [{0, 3}, {1, 3}, {3}, {3, LAST}],
        [{LAST}, {LAST}, {LAST}, {LAST, 3}],
        [{0, 1, 3}, set(), {0, 1, 3}, {1, 3}],
        [{0, 1, 2, 3, LAST}, {0, 1, 2, 3, LAST}, {0, 1, 2, 3, LAST}, set()],
    ],
    ids=["later", "once", "each once", "some never", "none in one", "none in the last"],
)
def test_a_parameter_that_takes_no_part_has_a_gradient_of_zero(backend, dtypes, takes_part):
    params = make_params(dtypes)
    first, second = exact_windows(params, 2, weights=WEIGHTS, takes_part=takes_part)
    windows = [first, *exact_windows(params, 1, weights=WEIGHTS, seed=1), second]
    check(run(make_sgd(params, backend=backend), params, windows), windows)


@each_backend
@narrow_and_mixed
@pytest.mark.parametrize("weights", [(0, 2, 1, 3), (2, 0, 0, 1), (1, 2, 3, 0)])
def test_a_micro_step_of_weight_0_is_none(backend, dtypes, weights):
    params = make_params(dtypes)
    windows = exact_windows(params, 3, weights=weights)
    check(run(make_sgd(params, backend=backend), params, windows), windows)


@pytest.mark.parametrize("weights", [(0, 2, 0, 0), (0, 0, 0, 0)])
def test_fewer_than_two_micro_steps_of_some_weight_say_nothing(weights):
    params = make_params([torch.float32])
    opt = make_sgd(params)
    first, second = exact_windows(params, 2)
    (empty,) = exact_windows(params, 1, weights=weights)
    infos = run(opt, params, [first, empty, second])
    assert infos[1].noise_scale is None
    check([infos[0], infos[2]], [first, second])  # and the average goes on


@each_backend
def test_losses_of_different_parameters_make_one_micro_gradient(backend):
    """Two backwards in a micro step: weights add up as losses do."""
    p, q = parameter(1.0, 1.0), parameter(1.0, 1.0)
    opt = make_sgd([p, q], backend=backend, gradient_accumulation_steps=2)
    window = []
    for a, b in (([3.0, 0.0], [1.0, 2.0]), ([2.0, 1.0], [1.0, 1.0])):
        opt.backward(given((p, a)), weight=1)
        opt.backward(given((q, b)), weight=3)
        info = opt.step()
        grads = {0: torch.tensor(a).double() / 4, 1: torch.tensor(b).double() * 3 / 4}
        window.append(Micro(4, grads))
    check([info], [window])


@each_backend
def test_complex_gradients_count_by_their_magnitude(backend):
    values = [[3 + 1j, 0 + 2j], [2 - 1j, 1 + 1j]]
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    opt = make_sgd([w], backend=backend, gradient_accumulation_steps=2)
    for grad in values:
        opt.backward(given((w, grad)))
        info = opt.step()
    wide = [torch.view_as_real(torch.tensor(grad, dtype=torch.complex128)) for grad in values]
    check([info], [[Micro(1, {0: grad}) for grad in wide]])


@each_backend
def test_noise_larger_than_the_gradient_is_infinite_until_the_average_says_more(backend):
    w = parameter(1.0, 1.0)
    opt = make_sgd([w], backend=backend, gradient_accumulation_steps=2)
    windows = [[[1.0, 0.0], [-1.0, 0.0]], [[9.0, 0.0], [9.0, 1.0]]]
    windows = [[Micro(1, {0: torch.tensor(g).double()}) for g in window] for window in windows]
    infos = run(opt, [w], windows)
    assert infos[0].noise_scale == math.inf
    check(infos[1:], windows[1:], direct=_after(windows[:1]))


def _after(windows):
    direct = Direct()
    for window in windows:
        direct.observe(window)
    return direct


def test_equal_batches_give_the_papers_two_estimates():
    """McCandlish et al. 2018, appendix A.1: of batch sizes 1 and n."""
    generator = torch.Generator().manual_seed(5)
    grads = torch.randn(7, 11, generator=generator, dtype=torch.float64) + 0.5
    small = grads.square().sum(1).mean().item()
    big = grads.mean(0).square().sum().item()
    square = (7 * big - 1 * small) / (7 - 1)
    trace = (small - big) / (1 / 1 - 1 / 7)
    noise = NoiseScale()
    value = noise.observe(NoiseSample(7 * small, 7, 7.0, math.sqrt(big)))
    assert_near(noise.trace, trace, num_roundings=8, magnitude=small)
    assert_near(noise.square, square, num_roundings=8, magnitude=small)
    assert value == noise.trace / noise.square


@each_backend
def test_over_many_windows_trace_and_square_are_the_true_ones(backend):
    """Samples x are normal with mean m and covariance C; the gradient of mean(x @ w) is mean(x).

    ``(n - 1) * trace`` is a sum of ``C_j * chi2(n - 1)`` and independent of the window's mean, so
    that both variances are known. Four standard errors: 1 run in 16,000 would leave them.
    """
    mean = torch.tensor([0.5, -1.0, 0.25, 0.0], dtype=torch.float64)
    covariance = torch.tensor([1.0, 4.0, 0.25, 2.0], dtype=torch.float64)
    sizes, num_windows = (1, 2, 5, 3), 300
    generator = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    opt = make_sgd([w], backend=backend)
    traces, squares, before = [], [], None
    for _ in range(num_windows):
        for size in sizes:
            x = torch.randn(size, 4, dtype=torch.float64, generator=generator)
            opt.backward(((mean + x * covariance.sqrt()) @ w).mean(), weight=size)
            opt.step()
        saved = opt.state_dict()["stepclock"]["noise_scale"]
        now = (saved["trace"], saved["square"])
        # the window's own estimate, out of the average
        new = now if before is None else [_newest(b, n) for b, n in zip(before, now, strict=True)]
        traces.append(new[0])
        squares.append(new[1])
        before = now
    n, total = len(sizes), sum(sizes)
    of_trace = 2 * covariance.square().sum().item() / (n - 1)
    of_mean = 2 * covariance.square().sum().item() / total**2
    of_mean += 4 * (mean.square() * covariance).sum().item() / total
    of_square = of_mean + of_trace / total**2
    _assert_unbiased(traces, covariance.sum().item(), of_trace)
    _assert_unbiased(squares, mean.square().sum().item(), of_square)


def _newest(before, now):
    return before + (now - before) / (1 - DECAY)


def _assert_unbiased(values, truth, variance):
    assert abs(statistics.fmean(values) - truth) <= 4 * math.sqrt(variance / len(values))
    # Of the variance, which has heavier tails: within a third.
    assert statistics.variance(values) == pytest.approx(variance, rel=1 / 3)
