"""Sparse gradients of 16-bit embeddings: torch cannot add two of them on a CPU; windows must."""

import pytest
import torch
from helpers import each_backend
from tensors import HALVES, dtype_name
from tolerance import assert_bit_equal

from stepclock_ext import ClockedOptimizer

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
LAST_SUM = {torch.bfloat16: 256.0, torch.float16: 2048.0}


def embedding(dtype, *, sparse=True):
    table = torch.nn.Embedding(5, 2, sparse=sparse).to(dtype)
    torch.nn.init.zeros_(table.weight)
    return table


def wrap(table, accumulation, backend):
    inner = torch.optim.SGD(table.parameters(), lr=1.0)
    return ClockedOptimizer(
        inner, gradient_accumulation_steps=accumulation, reduction="sum", backend=backend
    )


@each_backend
@each_half
@pytest.mark.parametrize("asked", [None, torch.float32], ids=str)
def test_a_window_of_one_takes_a_sparse_gradient(backend, dtype, asked):
    table = embedding(dtype)
    inner = torch.optim.SGD(table.parameters(), lr=1.0)
    opt = ClockedOptimizer(inner, accumulate_dtype=asked, backend=backend)
    for _ in range(2):
        opt.backward(table(torch.tensor([1, 3])).sum())
        info = opt.step()
        assert info.grad_norm == 2.0
    assert table.weight[:, 0].tolist() == [0, -2, 0, -2, 0]


@each_backend
@each_half
@pytest.mark.parametrize("sparse", [True, False])
def test_a_longer_window_of_embeddings_is_summed_exactly(backend, dtype, sparse):
    table = embedding(dtype, sparse=sparse)
    opt = wrap(table, 3, backend)
    for slope, tokens in ((LAST_SUM[dtype], [1, 3]), (1.0, [1]), (1.0, [1, 2])):
        opt.backward(slope * table(torch.tensor(tokens)).sum())
        info = opt.step()
    last = LAST_SUM[dtype]
    exact = (2 * ((last + 2) ** 2 + last**2 + 1)) ** 0.5
    assert info.grad_norm == pytest.approx(exact, rel=1e-6)
    expected = torch.tensor([0, -(last + 2), -1, -last, 0]).to(dtype)
    assert_bit_equal(table.weight.detach()[:, 0].contiguous(), expected)


@each_backend
@each_half
def test_a_sparse_gradient_after_a_dense_one_is_added_to_it(backend, dtype):
    table = embedding(dtype)
    opt = wrap(table, 2, backend)
    opt.backward(LAST_SUM[dtype] * table.weight.sum())
    opt.step()
    opt.backward(table(torch.tensor([1])).sum())
    last = LAST_SUM[dtype]
    expected = torch.full((5, 2), last)
    expected[1] += 1
    assert_bit_equal(opt.accumulated(table.weight), expected)
    assert opt.step().updated


@each_backend
@each_half
def test_a_dense_gradient_after_a_sparse_one_is_added_to_it(backend, dtype):
    table = embedding(dtype)
    opt = wrap(table, 2, backend)
    opt.backward(table(torch.tensor([1])).sum())
    opt.step()
    opt.backward(LAST_SUM[dtype] * table.weight.sum())
    expected = torch.full((5, 2), LAST_SUM[dtype])
    expected[1] += 1
    assert_bit_equal(opt.accumulated(table.weight), expected)
    assert opt.step().updated
