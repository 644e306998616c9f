"""The noise scale over the life of a window: tails, saving, what it says nothing about."""

import copy
import io
import pickle

import pytest
import torch
from helpers import clocked_sgd, each_backend, given, parameter
from noise import Direct, Micro, check, exact_windows, make_params, make_sgd, micro_step, run

from stepclock_ext import ClockedOptimizer

FP32, BF16 = [torch.float32], [torch.bfloat16]
MIXED = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
each_dtypes = pytest.mark.parametrize("dtypes", [FP32, BF16, MIXED], ids=["fp32", "bf16", "mixed"])
# The last parameter comes once, in the second micro step.
PARTS = [range(4), range(5), range(4), range(4)]


@each_backend
@each_dtypes
def test_a_flushed_tail_is_a_window_of_its_own_length(backend, dtypes):
    params = make_params(dtypes)
    opt = make_sgd(params, backend=backend)
    windows = exact_windows(params, 3, weights=(2, 1, 1, 3), takes_part=PARTS)
    windows[1] = windows[1][:3]
    direct = Direct()
    check(run(opt, params, windows[:1]), windows[:1], direct=direct)
    for micro in windows[1]:
        micro_step(opt, params, micro)
    check([opt.end_epoch()], [windows[1]], direct=direct)
    assert micro_step(opt, params, windows[2][0]).noise_scale is None
    assert opt.flush().noise_scale is None  # of one micro step
    check(run(opt, params, windows[2:]), windows[2:], direct=direct)


@each_backend
@each_dtypes
def test_a_carried_tail_goes_on_and_a_dropped_one_is_forgotten(backend, dtypes):
    for tail in ("carry", "drop"):
        params = make_params(dtypes)
        opt = make_sgd(params, backend=backend, tail=tail)
        (window, other) = exact_windows(params, 2, weights=(2, 1, 1, 3), takes_part=PARTS)
        for micro in window[:2]:
            micro_step(opt, params, micro)
        assert opt.end_epoch().noise_scale is None
        if tail == "carry":
            check(run(opt, params, [window[2:]]), [window])
        else:
            check(run(opt, params, [other]), [other])


@each_backend
def test_a_discarded_window_leaves_nothing(backend):
    params = make_params(MIXED)
    opt = make_sgd(params, backend=backend)
    (window, other) = exact_windows(params, 2, weights=(2, 1, 1, 3), takes_part=PARTS)
    for micro in window[:3]:
        micro_step(opt, params, micro)
    opt.discard()
    check(run(opt, params, [other]), [other])


@each_backend
@each_dtypes
def test_zero_grad_forgets_what_came_before_the_window(backend, dtypes):
    params = make_params(dtypes)
    opt = make_sgd(params, backend=backend)
    for _ in range(2):
        given(*((p, torch.full(p.shape, 5.0)) for p in params)).backward()
    opt.zero_grad()
    windows = exact_windows(params, 1, takes_part=[{0}, {0}, {1}, {0}])
    check(run(opt, params, windows), windows)


def test_windows_of_one_and_skips_say_nothing():
    params = make_params(FP32)
    opt = make_sgd(params, gradient_accumulation_steps=1)
    first, second, third = exact_windows(params, 3)
    for micro in first:
        info = micro_step(opt, params, micro)
        assert info.updated and info.noise_scale is None
    opt.gradient_accumulation_steps = 4
    direct = Direct()
    check(run(opt, params, [second]), [second], direct=direct)
    for number, micro in enumerate(first):
        value = torch.inf if number == 1 else 1.0
        opt.backward(given(*((params[i], grad * value) for i, grad in micro.grads.items())))
        info = opt.step()
    assert info.skipped and info.noise_scale is None
    check(run(opt, params, [third]), [third], direct=direct)


@each_backend
@pytest.mark.parametrize("dtypes", [FP32, BF16], ids=["fp32", "bf16"])
def test_two_gradients_of_a_parameter_in_one_micro_step_say_nothing(backend, dtypes):
    params = make_params(dtypes)
    opt = make_sgd(params, backend=backend)
    windows = exact_windows(params, 2)
    direct = Direct()
    check(run(opt, params, windows[:1]), windows[:1], direct=direct)
    opt.backward(given((params[1], [1.0, 2.0, 3.0])))
    for micro in windows[0]:
        info = micro_step(opt, params, micro)
    assert info.updated and info.noise_scale is None
    check(run(opt, params, windows[1:]), windows[1:], direct=direct)


def test_sparse_gradients_say_nothing():
    table = torch.nn.Embedding(5, 2, sparse=True)
    w = parameter(1.0, 2.0)
    opt = make_sgd([table.weight, w], gradient_accumulation_steps=2)
    for _ in range(2):
        opt.backward((table(torch.tensor([1, 3])) * w).sum())
        info = opt.step()
    assert info.updated and info.noise_scale is None
    windows = [[Micro(1, {1: torch.tensor(g).double()}) for g in ([3.0, 1.0], [2.0, 2.0])]]
    check(run(opt, [table.weight, w], windows), windows)


@each_backend
@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("dtypes", [FP32, BF16], ids=["fp32", "bf16"])
def test_plain_backward_and_closures_are_micro_steps_as_well(backend, by_closure, dtypes):
    params = make_params(dtypes)
    opt = make_sgd(params, backend=backend)
    windows = exact_windows(params, 2, takes_part=PARTS)
    infos = []
    for micro in (micro for window in windows for micro in window):
        loss = given(*((params[i], grad) for i, grad in micro.grads.items()))
        if by_closure:
            infos.append(opt.step(lambda loss=loss: loss.backward()))
        else:
            loss.backward()
            assert all(p.grad is None for p in params if p.numel())
            infos.append(opt.step())
    assert [info.noise_scale for info in infos[:3]] == [None] * 3
    check(infos[3::4], windows)


def test_a_step_without_a_backward_is_a_micro_step_of_gradient_zero():
    w = parameter(1.0, 2.0)
    opt = make_sgd([w], gradient_accumulation_steps=3)
    grads = [[3.0, 1.0], None, [2.0, 2.0]]
    for grad in grads:
        if grad is not None:
            given((w, grad)).backward()
        info = opt.step()
    window = [Micro(1, {0: torch.tensor(grad or [0.0, 0.0]).double()}) for grad in grads]
    check([info], [window])


def test_parameters_that_are_thawed_or_added_between_windows_take_part():
    params = make_params(FP32)
    params[1].requires_grad_(False)
    opt, direct = make_sgd(params[:4]), Direct()
    first = exact_windows(params, 1, takes_part=[{0, 2, 3}] * 4)
    check(run(opt, params, first), first, direct=direct)
    params[1].requires_grad_(True)
    second = exact_windows(params, 1, takes_part=[range(4)] * 4)
    check(run(opt, params, second), second, direct=direct)
    opt.add_param_group({"params": params[4:]})
    third = exact_windows(params, 1)
    check(run(opt, params, third), third, direct=direct)


def after(window):
    direct = Direct()
    direct.observe(window)
    return direct


def resumed(opt, params, **options):
    """A second wrapper on copies of the parameters, after what a checkpoint file holds."""
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = make_sgd(copies, **options)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other, copies


@each_backend
@each_dtypes
@pytest.mark.parametrize("micro_steps", [4, 5, 6, 7])
def test_a_loaded_state_goes_on_with_the_same_values(backend, dtypes, micro_steps):
    params = make_params(dtypes)
    opt = make_sgd(params, backend=backend)
    windows = exact_windows(params, 3, weights=(2, 1, 1, 3), takes_part=PARTS)
    micros = [micro for window in windows for micro in window]
    for micro in micros[:micro_steps]:
        micro_step(opt, params, micro)
    other, copies = resumed(opt, params, backend=backend)
    values = []
    for each, of_each in ((opt, params), (other, copies)):
        infos = [micro_step(each, of_each, micro) for micro in micros[micro_steps:]]
        assert [info.noise_scale for info in infos if not info.updated] == [None] * (len(infos) - 2)
        updates = [info for info in infos if info.updated]
        check(updates, windows[1:], direct=after(windows[0]))
        values.append([info.noise_scale for info in updates])
    if micro_steps == 4:  # inside a window, norms are added up in another order
        assert values[0] == values[1]


@pytest.mark.parametrize("micro_steps", [4, 6])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_with_the_same_values(micro_steps, copied):
    params = make_params(MIXED)
    opt = make_sgd(params)
    windows = exact_windows(params, 3, weights=(2, 1, 1, 3), takes_part=PARTS)
    micros = [micro for window in windows for micro in window]
    for micro in micros[:micro_steps]:
        micro_step(opt, params, micro)
    other, copies = copied((opt, params))
    for each, of_each in ((opt, params), (other, copies)):
        infos = [micro_step(each, of_each, micro) for micro in micros[micro_steps:]]
        updates = [info for info in infos if info.updated]
        check(updates, windows[1:], direct=after(windows[0]))


def test_a_state_without_norms_leaves_its_window_unknown_and_starts_a_new_average():
    params = make_params(MIXED)
    plain = make_sgd(params, noise_scale=False)
    first, second, third = exact_windows(params, 3)
    for micro in first[:2]:
        micro_step(plain, params, micro)
    other, copies = resumed(plain, params)
    for micro in first[2:]:
        info = micro_step(other, copies, micro)
    assert info.updated and info.noise_scale is None
    check(run(other, copies, [second]), [second])
    plain.discard()
    other.load_state_dict(plain.state_dict())
    check(run(other, copies, [third]), [third])


def test_lbfgs_trains_as_it_does_without():
    values = []
    for noise_scale in (False, True):
        w = parameter(1.0, 2.0)
        opt = ClockedOptimizer(torch.optim.LBFGS([w], lr=0.1), noise_scale=noise_scale)

        def closure(w=w):
            loss = w.square().sum()
            loss.backward()
            return loss

        info = opt.step(closure)
        assert info.updated and info.noise_scale is None
        values.append(w.tolist())
    assert values[0] == values[1] != [1.0, 2.0]


def test_what_it_cannot_be_made_of_is_refused():
    w = parameter(1.0)
    with pytest.raises(TypeError, match="noise_scale must be True or False, got 1"):
        clocked_sgd(w, noise_scale=1)
    with pytest.raises(ValueError, match=r"noise_scale must go with norm_type=2.0, got inf"):
        clocked_sgd(w, noise_scale=True, norm_type=float("inf"))
    info = micro_step(clocked_sgd(w), [w], Micro(1, {0: torch.tensor(2.0)}))
    assert info.updated and info.noise_scale is None


def test_a_longer_window_after_an_uncounted_backward_does_not_tell():
    w = torch.nn.Parameter(torch.ones(1))
    opt = ClockedOptimizer(torch.optim.SGD([w], lr=0.0), noise_scale=True)
    w.sum().backward()
    opt.gradient_accumulation_steps = 2
    opt.step()
    (3 * w).sum().backward()
    assert opt.step().noise_scale is None
