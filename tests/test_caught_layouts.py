"""fp32 sums of parameters and gradients of any shape and strides."""

import pytest
import torch
from helpers import clocked_sgd, each_backend, given
from tensors import HALVES, dtype_name
from tolerance import assert_bit_equal

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)


def channels_last(dtype):
    return torch.zeros(2, 3, 5, 7, dtype=dtype).to(memory_format=torch.channels_last)


LAYOUTS = {
    "channels_last": channels_last,
    "transposed": lambda dtype: torch.zeros(300, 301, dtype=dtype).t(),
    "every second column": lambda dtype: torch.zeros(5, 12, dtype=dtype)[:, ::2],
    "inside a larger one": lambda dtype: torch.zeros(9, 4, dtype=dtype)[2:5],
    "0-dim": lambda dtype: torch.zeros((), dtype=dtype),
    "empty": lambda dtype: torch.zeros(3, 0, dtype=dtype),
}


@each_backend
@each_half
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("like", ["contiguous", "as the parameter", "transposed", "expanded"])
def test_elements_are_paired_whatever_the_strides(backend, dtype, layout, like):
    w = torch.nn.Parameter(LAYOUTS[layout](dtype))
    other = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    opt = clocked_sgd(w, other, gradient_accumulation_steps=3, reduction="sum", backend=backend)
    total = torch.zeros(w.shape)
    for micro in range(3):
        generator = torch.Generator().manual_seed(micro)
        value = torch.randint(-99, 99, w.shape, generator=generator).to(dtype)
        grad = {
            "contiguous": value,
            "as the parameter": torch.empty_like(w).detach().copy_(value),
            "transposed": value.mT.contiguous().mT if w.dim() > 1 else value,
            "expanded": value.reshape(-1)[:1].expand(w.shape) if w.dim() and w.numel() else value,
        }[like]
        w.grad = grad
        opt.backward(given((other, torch.ones(3))))
        total += grad.float()
        assert_bit_equal(opt.accumulated(w), total)
        info = opt.step()
    assert info.grad_norm == pytest.approx((total.double().square().sum().item() + 27) ** 0.5)
    assert_bit_equal(w.detach(), (0 - total).to(dtype))


@each_backend
@each_half
def test_a_model_that_becomes_channels_last_between_windows_goes_on(backend, dtype):
    model = torch.nn.Conv2d(3, 4, 3, bias=False).to(dtype)
    w = model.weight
    torch.nn.init.zeros_(w)
    opt = clocked_sgd(w, gradient_accumulation_steps=2, reduction="sum", backend=backend)
    expected = torch.zeros(w.shape)
    for window in range(4):
        total = torch.zeros(w.shape)
        if window == 1:
            model.to(memory_format=torch.channels_last)
        for micro in range(2):
            grad = torch.arange(w.numel()).view(w.shape) % 7 + micro
            opt.backward(given((w, grad)))
            expected -= grad
            total += grad
            assert_bit_equal(opt.accumulated(w), total)
            info = opt.step()
        assert info.updated
        assert_bit_equal(w.detach(), expected.to(dtype))
