"""A parameter whose ``.data`` was replaced: an error or a right update, never a stray write."""

import pytest
import torch
from tensors import BACKENDS, dtype_name
from tolerance import assert_close, assert_near

from stepclock_ext import ClockedOptimizer

each_backend = pytest.mark.parametrize("backend", BACKENDS)
GUARD = 7.0

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}
# torch's fused kernels pair memory blindly where strides differ, and are no oracle then.
UNFUSED = [name for name in OPTIMIZERS if name != "fused"]
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def guarded(num_elements, dtype=torch.float32):
    """Ones in the middle of memory that nobody may write, and that memory."""
    memory = torch.full((num_elements + 1200,), GUARD, dtype=dtype)
    memory[600 : 600 + num_elements] = 1.0
    return memory[600 : 600 + num_elements], memory


def is_intact(memory, num_elements):
    return bool((memory[:600] == GUARD).all() and (memory[600 + num_elements :] == GUARD).all())


def updated_once(make, backend):
    """Two parameters and their wrapper, after one update."""
    params = [torch.nn.Parameter(torch.ones(size)) for size in (300, 20)]
    opt = ClockedOptimizer(make(params), max_grad_norm=1.0, backend=backend)
    for p in params:
        p.grad = torch.ones_like(p)
    assert opt.step().updated
    return params, opt


@each_backend
@each_optimizer
@pytest.mark.parametrize("num_elements", [8, 299, 301, 600])
def test_another_size_is_refused_and_nothing_beyond_it_is_written(backend, make, num_elements):
    params, opt = updated_once(make, backend)
    params[0].data, memory = guarded(num_elements)
    for _ in range(2):
        params[0].grad, grad_memory = guarded(num_elements)
        params[1].grad = torch.ones_like(params[1])
        before = params[0].detach().clone()
        try:
            info = opt.step()
        except (TypeError, ValueError, RuntimeError):
            opt.discard()
        else:  # plain SGD has no state that a size could contradict
            assert_near(info.grad_norm, (num_elements + 20) ** 0.5, num_roundings=600)
            moved = before - 0.1 / (num_elements + 20) ** 0.5
            assert_close(params[0].detach(), moved, num_roundings=8)
        assert is_intact(memory, num_elements)
        assert is_intact(grad_memory, num_elements)


@each_backend
@each_optimizer
def test_a_shorter_view_of_the_same_memory_is_not_written_past_its_end(backend, make):
    params, opt = updated_once(make, backend)
    params[0].data, memory = guarded(300)
    for p in params:
        p.grad = torch.ones_like(p)
    assert opt.step().updated
    params[0].data = params[0].data[:8]
    memory[608:900] = GUARD
    for _ in range(2):
        params[0].grad, grad_memory = guarded(8)
        params[1].grad = torch.ones_like(params[1])
        try:
            opt.step()
        except (TypeError, ValueError, RuntimeError):
            opt.discard()
        assert is_intact(memory, 8)
        assert is_intact(grad_memory, 8)


def takes_state(params, opt):
    """Whether torch can update: it takes no fp32 state beside 16 bits (test_case_state_dtypes)."""
    values = [(p.dtype, v.dtype) for p in params for v in opt.state[p].values() if v.dim()]
    return all(own == of_state for own, of_state in values)


@each_backend
@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=dtype_name)
def test_another_dtype_is_refused_or_updated_as_torch_does(backend, make, dtype):
    params, opt = updated_once(make, backend)
    others, plain = updated_once(make, "reference")
    params[0].data, memory = guarded(300, dtype)
    others[0].data = params[0].detach().clone()
    for _ in range(2):
        params[0].grad, grad_memory = guarded(300, dtype)
        params[1].grad = torch.ones_like(params[1])
        for p in others:
            p.grad = torch.ones_like(p) / (320**0.5 + 1e-6)  # torch's rule of the clip
        try:
            opt.step()
        except (TypeError, ValueError, RuntimeError):
            opt.discard()
        else:
            if takes_state(others, plain):
                plain.optimizers[0].step()
                assert_close(params[0].detach(), others[0].detach(), num_roundings=8)
                assert_close(params[1].detach(), others[1].detach(), num_roundings=8)
        assert is_intact(memory, 300)
        assert is_intact(grad_memory, 300)


MOVES = {
    "new memory": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "fp64": lambda model: model.double(),
    "bf16": lambda model: model.bfloat16(),
}


def convolution():
    torch.manual_seed(3)
    return torch.nn.Conv2d(3, 5, 3)


def train_both(make, backend, move, *, updates_before):
    """One model by the wrapper and one by the plain loop, moved after some updates."""
    model, other = convolution(), convolution()
    opt = ClockedOptimizer(
        make(model.parameters()), gradient_accumulation_steps=2, max_grad_norm=1.0, backend=backend
    )
    plain = make(other.parameters())
    for update in range(updates_before + 2):
        if update == updates_before:
            move(model)
            move(other)
        for micro in range(2):
            x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(micro))
            x = x.to(model.weight.dtype)
            opt.backward((1 + model(x)).square().mean())
            opt.step()
            ((1 + other(x)).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    return model, other


@each_backend
@each_optimizer
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_model_moved_after_its_wrapper_was_built_trains_on(backend, make, move):
    model, other = train_both(make, backend, move, updates_before=0)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), num_roundings=64, magnitude=1.0)


@each_backend
@pytest.mark.parametrize("make", [OPTIMIZERS[name] for name in UNFUSED], ids=UNFUSED)
@pytest.mark.parametrize("name", ["new memory", "channels_last"])
def test_a_model_moved_between_two_updates_trains_on(backend, make, name):
    model, other = train_both(make, backend, MOVES[name], updates_before=2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), num_roundings=64, magnitude=1.0)
