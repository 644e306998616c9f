"""Wrapper and plain loop side by side: parameters, states, and states exchanged."""

import torch
from plain_loop import Loop, Wrapped
from tolerance import assert_close
from torch.testing._internal.common_optimizers import optim_db

# The sums of a window, and powers, roots and products in the longest of the update formulas; and,
# in every element by way of the clip, torch's sum of 66,000 squares, which it adds up in 32 lanes.
ROUNDINGS_PER_UPDATE = 32 + 66_000 // 32
# These keep fp32 scalars in their state, which torch widens when it loads them into fp64.
FP32_SCALARS = ("ASGD", "NAdam")

INFO = {info.optim_cls.__name__: info for info in optim_db}
CONFIGS = {
    f"{name} {config.desc}": (name, config.kwargs)
    for name, info in INFO.items()
    for config in info.optim_inputs_func(device="cpu")
}


def assert_same_params(loop, other, name, num_updates, dtype):
    for p, q, start in zip(loop.params, other.params, loop.start, strict=True):
        if name == "Muon":  # rounds each update to bf16
            moved, expected = (x.detach() - start for x in (p, q))
            assert_close(moved, expected, num_roundings=num_updates, dtype=torch.bfloat16)
        else:
            num_roundings = ROUNDINGS_PER_UPDATE * num_updates
            assert_close(p.detach(), q.detach(), num_roundings=num_roundings, dtype=dtype)


def assert_same(loop, other, name, num_updates, *, dtype=None):
    """Equal parameters and equal states, within the roundings of `num_updates`."""
    assert_same_params(loop, other, name, num_updates, dtype)
    states, others = loop.inner.state_dict()["state"], other.inner.state_dict()["state"]
    assert states.keys() == others.keys()
    for row, values in states.items():
        assert values.keys() == others[row].keys()
        for key, value in values.items():
            expected = others[row][key]
            if isinstance(value, torch.Tensor):
                assert dtype or value.dtype == expected.dtype
                num_roundings = ROUNDINGS_PER_UPDATE * num_updates
                assert_close(value, expected, num_roundings=num_roundings, dtype=dtype)
            else:
                assert value == expected


def check_parity(name, kwargs, dtype, backend):
    """Three updates, with another rate for the third; then a fourth by all who hold the state."""
    wrapped, plain = Wrapped(name, kwargs, dtype, backend), Loop(name, kwargs, dtype)
    for window in range(3):
        if window == 2:
            wrapped.halve_lr()
            plain.halve_lr()
        wrapped.run(window)
        plain.run(window)
    assert_same(wrapped, plain, name, 3)
    bare, rewrapped = Loop(name, kwargs, dtype), Wrapped(name, kwargs, dtype, backend)
    bare.load(wrapped)
    rewrapped.load(plain)
    for loop in (wrapped, plain, bare, rewrapped):
        loop.run(3)
    loaded = torch.float32 if name in FP32_SCALARS else None
    assert_same(wrapped, plain, name, 4)
    assert_same(bare, wrapped, name, 1, dtype=loaded)
    assert_same(rewrapped, plain, name, 1, dtype=loaded)
