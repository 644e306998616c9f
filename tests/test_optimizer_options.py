"""Tensor learning rates, capturable, differentiable, and options that differ between groups."""

import pytest
import torch
from parity import INFO, assert_same, check_parity
from plain_loop import Loop, Wrapped
from tensors import BACKENDS
from tolerance import assert_all_bit_equal

from stepclock_ext import ClockedOptimizer

each_backend = pytest.mark.parametrize("backend", BACKENDS)

# foreach and fused updates with a tensor rate are torch's affair: some of them refuse one.
TENSOR_LR = [name for name in INFO if name not in ("LBFGS", "SparseAdam")]


@each_backend
@pytest.mark.parametrize("name", TENSOR_LR)
def test_a_tensor_lr_is_read_anew_at_each_update(name, backend):
    rate = torch.tensor(0.01, dtype=torch.float64)
    kwargs = {"lr": rate, "foreach": False} if name != "Muon" else {"lr": rate}
    check_parity(name, kwargs, torch.float64, backend)
    wrapped = Wrapped(name, kwargs, torch.float64, backend)
    (group,) = wrapped.opt.param_groups
    before = group["lr"]
    wrapped.run(0)
    assert group["lr"] is before
    assert before == rate


DIFFERENTIABLE = [name for name in INFO if "differentiable" in INFO[name].supported_impls]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_differentiable_is_refused_at_construction(name):
    with pytest.raises(ValueError, match="differentiable=True"):
        Wrapped(name, {"differentiable": True}, torch.float32)


CAPTURABLE = [
    (name, config.kwargs)
    for name, info in INFO.items()
    for config in info.optim_inputs_func(device="cuda")
    if config.kwargs.get("capturable")
]


@each_backend
@pytest.mark.parametrize(("name", "kwargs"), CAPTURABLE)
def test_capturable_on_the_cpu_fails_as_torch_fails_and_the_window_can_be_dropped(
    name, kwargs, backend
):
    with pytest.raises(AssertionError, match="capturable=True") as plain_error:
        Loop(name, kwargs, torch.float32).run(0)
    wrapped = Wrapped(name, kwargs, torch.float32, backend)
    with pytest.raises(AssertionError) as error:
        wrapped.run(0)
    assert str(error.value) == str(plain_error.value)
    assert wrapped.opt.clock.update_step == 0
    assert_all_bit_equal([p.detach() for p in wrapped.params], wrapped.start)
    wrapped.opt.discard()
    assert wrapped.opt.clock.micro_step == 0


@each_backend
def test_groups_with_options_of_their_own_train_as_the_plain_loop(backend):
    def grouped(loop):
        ways = [{"fused": True}, {"foreach": True}, {"lr": 0.1}, {"amsgrad": True}, {}]
        groups = [{"params": [p], **way} for p, way in zip(loop.params, ways, strict=True)]
        return torch.optim.AdamW(groups, lr=1e-2)

    plain, wrapped = Loop("AdamW", {}, torch.float64), Wrapped("AdamW", {}, torch.float64)
    plain.inner, wrapped.inner = grouped(plain), grouped(wrapped)
    wrapped.opt = ClockedOptimizer(
        wrapped.inner, gradient_accumulation_steps=3, max_grad_norm=1.0, backend=backend
    )
    for window in range(4):
        plain.run(window)
        wrapped.run(window)
        assert_same(wrapped, plain, "AdamW", window + 1)
