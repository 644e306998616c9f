"""Evaluation with the averages: they come, they go, and nothing else moves."""

import copy

import pytest
import torch
from helpers import counters, each_backend, snapshot
from sixteen_bit import each_half, given, start_params
from tensors import dtype_name
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_same_state

from stepclock_ext import EMA, ClockedOptimizer
from stepclock_ext.checkpoint import load_checkpoint, save_checkpoint

each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=dtype_name
)
STEPS = 3


class Run:
    """A small model with buffers, in windows of three."""

    def __init__(self, backend="reference", *, dtype=torch.float32, num_micro=0, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
        ).to(dtype)
        self.dtype = dtype
        self.ema = EMA(decay=0.5)
        self.opt = ClockedOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.05),
            gradient_accumulation_steps=STEPS,
            ema=self.ema,
            backend=backend,
            **options,
        )
        self.inputs = torch.randn(40, 8, 4).to(dtype)
        for _ in range(num_micro):
            self.micro()

    def loss(self):
        return self.model(self.inputs[self.opt.clock.micro_step]).float().square().mean()

    def micro(self):
        self.opt.backward(self.loss())
        return self.opt.step()

    def params(self):
        return list(self.model.parameters())

    def everything(self):
        """Weights, buffers, inner state, averages, gradients so far."""
        sums = [self.opt.accumulated(p) for p in self.params()]
        averages = [self.ema.average(p) for p in self.params()]
        tensors = [*self.model.state_dict().values(), *averages]
        tensors += [total for total in sums if total is not None]
        return [t.detach().clone() for t in tensors] + snapshot(self.opt)


@each_backend
@each_dtype
@pytest.mark.parametrize("num_micro", [STEPS, 2 * STEPS + 1])
def test_inside_the_model_is_the_averages_and_outside_itself_again(num_micro, dtype, backend):
    run = Run(backend, dtype=dtype, num_micro=num_micro)
    run.model.eval()
    before = run.everything()
    averaged = {name: run.ema.average(p).to(dtype) for name, p in run.model.named_parameters()}
    x = run.inputs[0]
    own = run.model(x)
    expected = torch.func.functional_call(run.model, averaged, x)
    assert not torch.equal(own, expected)
    with run.ema.swap(run.model), torch.no_grad():
        assert_bit_equal(run.model(x), expected.detach())
        for name, p in run.model.named_parameters():
            assert_bit_equal(p.detach(), averaged[name])
    assert_all_bit_equal(run.everything(), before)
    assert_bit_equal(run.model(x).detach(), own.detach())


class UserError(Exception):
    """From the user's evaluation."""


@each_backend
@each_dtype
@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_an_exception_inside_brings_the_weights_back_to_the_bit(error, dtype, backend):
    run = Run(backend, dtype=dtype, num_micro=2 * STEPS + 1)
    run.model.eval()
    before = run.everything()
    with pytest.raises(error), run.ema.swap(run.model):
        run.model(torch.full_like(run.inputs[0], torch.nan))
        raise error
    assert_all_bit_equal(run.everything(), before)
    run.model.train()
    for _ in range(2):
        info = run.micro()
    assert info.updated


@each_backend
def test_buffers_are_never_averaged(backend):
    run = Run(backend, num_micro=2 * STEPS)
    norm = run.model[1]
    before = [norm.running_mean.clone(), norm.running_var.clone()]
    with run.ema.swap(run.model):
        assert_all_bit_equal([norm.running_mean, norm.running_var], before)
        norm.running_mean.fill_(5.0)
    assert norm.running_mean.tolist() == [5.0] * 6


@each_backend
@each_half
def test_masters_survive_a_swap_to_the_bit_and_training_goes_on(dtype, backend):
    runs = []
    for swaps in (True, False):
        params = start_params(dtype, shapes=[(3,), (257,)])
        model, ema = torch.nn.ParameterList(params), EMA(decay=0.5)
        inner = torch.optim.AdamW(params, lr=1e-3)
        opt = ClockedOptimizer(inner, master_weights=True, ema=ema, backend=backend)
        for _ in range(6):
            opt.backward(given(*((p, torch.ones_like(p)) for p in params)))
            opt.step()
            if swaps:
                before = [opt.master_weight(p) for p in params]
                with ema.swap(model):
                    assert not torch.equal(params[1].detach(), before[1].to(dtype))
                assert_all_bit_equal([opt.master_weight(p) for p in params], before)
        runs.append([*(opt.master_weight(p) for p in params), *(ema.average(p) for p in params)])
    assert_all_bit_equal(*runs)


@each_backend
def test_before_the_first_update_a_swap_is_the_weights_themselves(backend):
    run = Run(backend, num_micro=1)
    before = run.everything()
    with run.ema.swap(run.model):
        assert_all_bit_equal(run.everything(), before)
    assert_all_bit_equal(run.everything(), before)


@each_backend
def test_a_model_that_is_not_averaged_is_refused(backend):
    run = Run(backend, num_micro=STEPS)
    with (
        pytest.raises(ValueError, match="must hold parameters that are averaged, got Linear"),
        run.ema.swap(torch.nn.Linear(3, 3)),
    ):
        raise AssertionError("entered")
    assert not run.ema.is_swapped


@each_backend
def test_a_part_of_the_model_can_be_swapped_alone(backend):
    run = Run(backend, num_micro=2 * STEPS)
    first, last = run.model[0].weight, run.model[2].weight
    before = last.detach().clone()
    with run.ema.swap(run.model[0]):
        assert_bit_equal(first.detach(), run.ema.average(first))
        assert_bit_equal(last.detach(), before)


@each_backend
def test_a_swap_inside_a_swap_is_refused_and_the_outer_one_ends_well(backend):
    run = Run(backend, num_micro=STEPS)
    before = run.everything()
    with run.ema.swap(run.model):
        inside = run.everything()
        with pytest.raises(RuntimeError, match="swapped in already"), run.ema.swap(run.model):
            raise AssertionError("entered")
        assert_all_bit_equal(run.everything(), inside)
    assert_all_bit_equal(run.everything(), before)


TRAINING = {
    "backward": lambda run: run.opt.backward(run.loss()),
    "step": lambda run: run.opt.step(),
    "step(closure)": lambda run: run.opt.step(lambda: run.opt.backward(run.loss())),
    "flush": lambda run: run.opt.flush(),
    "end_epoch": lambda run: run.opt.end_epoch(),
    "state_dict": lambda run: run.opt.state_dict(),
    "load_state_dict": lambda run: run.opt.load_state_dict(run.saved),
    "save_checkpoint": lambda run: save_checkpoint(
        run.folder / "new", model=run.model, optimizer=run.opt
    ),
    "load_checkpoint": lambda run: load_checkpoint(run.folder, model=run.model, optimizer=run.opt),
}


@each_backend
@pytest.mark.parametrize("method", TRAINING.values(), ids=TRAINING)
def test_training_and_saving_inside_a_swap_are_refused_and_change_nothing(
    method, backend, tmp_path
):
    run = Run(backend, num_micro=2 * STEPS + 1)
    run.folder, run.saved = tmp_path, copy.deepcopy(run.opt.state_dict())
    save_checkpoint(tmp_path, model=run.model, optimizer=run.opt)
    run.micro()
    run.model.eval()
    before, counts = run.everything(), counters(run.opt.clock)
    with run.ema.swap(run.model):
        inside = run.everything()
        with pytest.raises(RuntimeError, match="averaged weights are swapped in"):
            method(run)
        assert_all_bit_equal(run.everything(), inside)
    assert_all_bit_equal(run.everything(), before)
    assert counters(run.opt.clock) == counts
    assert not (tmp_path / "new").exists()
    whole = Run(backend, num_micro=2 * STEPS + 2)
    for other in (run, whole):
        other.model.train()
        for _ in range(4):
            other.micro()
    assert_same_state(run.opt.state_dict(), whole.opt.state_dict())


@each_backend
def test_a_copy_made_inside_a_swap_is_refused_or_can_train(backend):
    run = Run(backend, num_micro=STEPS)
    with run.ema.swap(run.model):
        try:
            copied = copy.deepcopy(run)
        except RuntimeError as error:
            assert "swapped in" in str(error)
            return
    copied.micro()


@each_backend
def test_an_ema_belongs_to_one_wrapper(backend):
    p, q = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    ema = EMA(decay=0.5)
    ClockedOptimizer(torch.optim.SGD([p], lr=0.1), ema=ema, backend=backend)
    with pytest.raises(ValueError, match="must belong to one wrapper"):
        ClockedOptimizer(torch.optim.SGD([q], lr=0.1), ema=ema, backend=backend)


def test_an_ema_whose_wrapper_was_refused_is_still_free():
    p, ema = torch.nn.Parameter(torch.ones(2)), EMA(decay=0.5)
    with pytest.raises(ValueError, match="max_grad_norm"):
        ClockedOptimizer(torch.optim.SGD([p], lr=0.1), ema=ema, max_grad_norm=-1.0)
    ClockedOptimizer(torch.optim.SGD([p], lr=0.1), ema=ema)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.0,), ValueError, "must be from 0 to below 1, got 1.0"),
        ((-0.1,), ValueError, "must be from 0 to below 1, got -0.1"),
        ((float("nan"),), ValueError, "must be from 0 to below 1, got nan"),
        (("0.9",), TypeError, "must be a number, got '0.9'"),
        ((True,), TypeError, "must be a number, got True"),
        ((None,), TypeError, "must be a number, got None"),
        ((0.9, 1), TypeError, "warmup must be True or False, got 1"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        EMA(*arguments)


def test_what_is_no_ema_is_refused():
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="ema"):
        ClockedOptimizer(torch.optim.SGD([p], lr=0.1), ema=0.999)
