"""How far two results may lie apart: bits, or one formula."""

import math

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def limit(dtype, *, num_roundings, magnitude):
    """``4 * eps * sqrt(num_roundings) * magnitude``.

    Rounding errors are independent: n of them, each at most eps / 2 of the largest value in play,
    come to some ``sqrt(n) * eps / 2``. Eight times that is beyond chance.

    >>> limit(torch.float64, num_roundings=4, magnitude=1.0) == 8 * 2.0**-52
    True
    """
    return 4 * torch.finfo(dtype).eps * math.sqrt(max(num_roundings, 1)) * magnitude


def assert_close(actual, expected, *, num_roundings, magnitude=0.0, dtype=None):
    """Every element of `actual` lies within the limit of `expected`; NaN and infinities match.

    Args:
        actual: tensor.
        expected: tensor of the same shape, any dtype.
        num_roundings: operations that an element has been through.
        magnitude: the largest value in play, if that is none of `expected`.
        dtype: in which `actual` was rounded; its own unless given.
    """
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    got, want = _wide(actual), _wide(expected)
    largest = max(magnitude, _largest(want))
    allowed = limit(dtype or actual.dtype, num_roundings=num_roundings, magnitude=largest)
    close = (got - want).abs() <= allowed
    if close.all():
        return
    wrong = ~close & (got != want) & ~(got.isnan() & want.isnan())
    if wrong.any():
        i = int(wrong.nonzero()[0, 0])
        raise AssertionError(
            f"value {i} of {got.numel()} is {got[i].item()!r}, expected {want[i].item()!r} within "
            f"{allowed:.3g}; {int(wrong.sum())} values are wrong"
        )


def assert_near(actual, expected, *, num_roundings, magnitude=0.0, dtype=torch.float64):
    """As `assert_close`, for two numbers."""
    values = (torch.tensor(float(x), dtype=torch.float64) for x in (actual, expected))
    assert_close(*values, num_roundings=num_roundings, magnitude=magnitude, dtype=dtype)


def assert_bit_equal(actual, expected):
    """Same shape, dtype and bits; all NaN count as one."""
    assert actual.dtype == expected.dtype, f"{actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    got, want = bits(actual), bits(expected)
    wrong = (got != want) & ~(_real(actual).isnan() & _real(expected).isnan())
    if wrong.any():
        i = int(wrong.nonzero()[0, 0])
        raise AssertionError(
            f"value {i} of {got.numel()} is {_real(actual)[i].item()!r}, expected "
            f"{_real(expected)[i].item()!r}; {int(wrong.sum())} values differ"
        )


def assert_all_bit_equal(actual, expected):
    """As `assert_bit_equal`, for two lists."""
    for got, want in zip(actual, expected, strict=True):
        assert_bit_equal(got, want)


def bits(tensor):
    """The bit patterns of a tensor's real numbers, in one dimension."""
    real = _real(tensor)
    return real.view(_BITS[real.element_size()])


def _real(tensor):
    """The real numbers of `tensor`, contiguous and in one dimension."""
    dense = tensor.detach().contiguous()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)


def _wide(tensor):
    return _real(tensor).to(torch.float64)


def _largest(values):
    """The largest finite magnitude."""
    if values.numel() == 0:
        return 0.0
    largest = values.abs().max().item()
    if math.isfinite(largest):
        return largest
    return values.abs().masked_fill(~values.isfinite(), 0.0).max().item()


def assert_same_state(actual, expected, where="state"):
    """Equal key by key: types, values and bits."""
    assert type(actual) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert_bit_equal(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key, value in expected.items():
            assert_same_state(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, value in enumerate(expected):
            assert_same_state(actual[i], value, f"{where}[{i}]")
    else:
        assert actual == expected, where
