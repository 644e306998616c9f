"""fp32 sums of an open window in copies and checkpoints: going on changes no bit."""

import copy
import io
import pickle

import pytest
import torch
from helpers import SIZES, each_backend, given
from tensors import HALVES, dtype_name
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_same_state

from stepclock_ext import ClockedOptimizer, LossScale

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
OPTIONS = {
    "plain": {},
    "masters": {"master_weights": True},
    "stochastic": {"rounding": "stochastic"},
    "scaled": {"loss_scale": LossScale(init_scale=8.0, growth_interval=1), "max_grad_norm": 0.5},
    "noise": {"noise_scale": True},
}
each_option = pytest.mark.parametrize("name", OPTIONS)
NUM_MICRO = 12  # three windows of four


class Run:
    """AdamW on 16-bit parameters, one of fp32 among them."""

    def __init__(self, dtype, *, seed=0, backend="auto", **options):
        generator = torch.Generator().manual_seed(seed)
        dtypes = [dtype] * len(SIZES) + [torch.float32]
        self.params = [
            torch.nn.Parameter(torch.randn(size, generator=generator).to(kind))
            for size, kind in zip([*SIZES, (5,)], dtypes, strict=True)
        ]
        self.inner = torch.optim.AdamW(self.params, lr=0.01)
        self.opt = ClockedOptimizer(
            self.inner, gradient_accumulation_steps=4, backend=backend, **options
        )
        self.reports = []

    def run(self, first=1, last=NUM_MICRO):
        for number in range(first, last + 1):
            generator = torch.Generator().manual_seed(number)
            grads = [torch.randn(p.shape, generator=generator) for p in self.params]
            used = [*zip(self.params, grads, strict=True)][number % 4 == 2 :]
            self.opt.backward(given(*used), weight=1 + number % 3)
            self.reports.append(repr(self.opt.step()))
        return self

    def values(self):
        """Copies of parameters, masters, moments and sums."""
        moments = [self.inner.state[p].get(key) for p in self.params for key in _MOMENTS]
        tensors = [
            *self.params,
            *map(self.opt.master_weight, self.params),
            *moments,
            *map(self.opt.accumulated, self.params),
        ]
        return [t.detach().clone() for t in tensors if t is not None]


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def by_pickle(run):
    return pickle.loads(pickle.dumps(run))


def by_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_run(run, expected):
    assert run.reports == expected.reports[-len(run.reports) :]
    assert_all_bit_equal(run.values(), expected.values())


@each_backend
@each_half
@each_option
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("last", [3, 6, 8])
def test_both_copies_of_an_open_window_finish_alike(backend, dtype, name, duplicate, last):
    whole = Run(dtype, backend=backend, **copy.deepcopy(OPTIONS[name])).run()
    original = Run(dtype, backend=backend, **copy.deepcopy(OPTIONS[name])).run(last=last)
    copied = duplicate(original)
    before = copied.values()
    assert_all_bit_equal(before, original.values())
    original.run(last + 1)
    assert_all_bit_equal(copied.values(), before)  # stepping one leaves the other
    copied.run(last + 1)
    assert_same_run(original, whole)
    assert_same_run(copied, whole)


@each_half
def test_a_model_and_its_wrapper_are_copied_together(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).to(dtype)
    opt = ClockedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1), gradient_accumulation_steps=2, model=model
    )
    x = torch.ones(2, 3, dtype=dtype)
    opt.backward(model(x).float().square().mean())
    opt.step()
    other_model, other = copy.deepcopy((model, opt))
    for each, wrapper in ((model, opt), (other_model, other)):
        wrapper.backward(each(2 * x).float().square().mean())
        assert all(p.grad is None for p in each.parameters())
        assert wrapper.step().updated
    pairs = zip(model.parameters(), other_model.parameters(), strict=True)
    for p, q in pairs:
        assert p is not q
        assert_bit_equal(p.detach(), q.detach())


@each_backend
@each_half
@each_option
@pytest.mark.parametrize("last", [3, 6, 8])
def test_a_run_that_stopped_inside_a_window_goes_on_to_the_bit(backend, dtype, name, last):
    make = lambda seed: Run(  # noqa: E731
        dtype, seed=seed, backend=backend, **copy.deepcopy(OPTIONS[name])
    )
    whole, stopped = make(0).run(), make(0).run(last=last)
    state = by_file(stopped.opt.state_dict())
    sums = state["stepclock"]["accumulators"]
    wide = [sums[row].dtype for row in sums]
    assert wide == [torch.float32] * len(sums)
    assert (len(sums) > 0) == (last % 4 != 0)
    resumed = make(1)
    resumed.run(last=2)  # an open window is replaced
    resumed.reports.clear()
    for p, saved in zip(resumed.params, stopped.params, strict=True):
        p.data.copy_(saved.data)
    resumed.opt.load_state_dict(state)
    assert_same_state(resumed.opt.state_dict(), stopped.opt.state_dict())
    resumed.run(last + 1)
    assert_same_run(resumed, whole)


@each_half
def test_saved_sums_are_not_moved_by_the_run_that_goes_on(dtype):
    run = Run(dtype).run(last=2)
    state = run.opt.state_dict()
    before = copy.deepcopy(state["stepclock"])
    run.run(3, 6)
    assert_same_state(state["stepclock"], before)


@each_backend
@each_half
def test_a_state_with_16_bit_sums_goes_on_in_fp32(backend, dtype):
    old = Run(dtype, accumulate_dtype=dtype, backend=backend).run(last=6)
    narrow = [p.grad.clone() for p in old.params]
    new = Run(dtype, backend=backend)
    for p, saved in zip(new.params, old.params, strict=True):
        p.data.copy_(saved.data)
    new.opt.load_state_dict(by_file(old.opt.state_dict()))
    for p, total in zip(new.params, narrow, strict=True):
        assert_bit_equal(new.opt.accumulated(p), total.float())
    new.run(7, 7)
    generator = torch.Generator().manual_seed(7)
    for p, total in zip(new.params, narrow, strict=True):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype).float() * 2  # of weight 2
        assert_bit_equal(new.opt.accumulated(p), total.float() + grad.to(p.dtype).float())
    new.run(8, 8)
    assert new.opt.clock.update_step == 2


@each_half
def test_a_state_with_fp32_sums_is_refused_where_sums_have_16_bits(dtype):
    state = by_file(Run(dtype).run(last=6).opt.state_dict())
    other = Run(dtype, accumulate_dtype=dtype).run(last=5)
    before, own = other.values(), copy.deepcopy(other.opt.state_dict())
    with pytest.raises(ValueError, match="accumulate_dtype") as caught:
        other.opt.load_state_dict(state)
    assert "torch.float32, here" in str(caught.value)
    assert_all_bit_equal(other.values(), before)
    assert_same_state(other.opt.state_dict(), own)


@each_half
def test_a_state_of_a_closed_window_goes_either_way(dtype):
    for saved, here in ((None, dtype), (dtype, None)):
        state = by_file(Run(dtype, accumulate_dtype=saved).run(last=4).opt.state_dict())
        other = Run(dtype, accumulate_dtype=here)
        other.opt.load_state_dict(state)
        assert other.opt.clock.update_step == 1
        other.run(5, 8)
        assert other.opt.clock.update_step == 2


@each_half
def test_a_sum_of_another_shape_is_refused_and_nothing_has_changed(dtype):
    run = Run(dtype).run(last=6)
    state = by_file(run.opt.state_dict())
    state["stepclock"]["accumulators"][1] = torch.zeros(4)
    before = run.values()
    with pytest.raises(ValueError, match="accumulator of 'group 0, parameter 1'"):
        run.opt.load_state_dict(state)
    assert_all_bit_equal(run.values(), before)
