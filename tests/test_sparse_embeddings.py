"""Sparse gradients of embeddings: SparseAdam, SGD and Adagrad are right, Adam refuses."""

import copy

import pytest
import torch
from parity import INFO
from tensors import BACKENDS
from tolerance import assert_bit_equal, assert_close

from stepclock_ext import ClockedOptimizer

CONFIGS = {c.desc: c.kwargs for c in INFO["SparseAdam"].optim_inputs_func(device="cpu")}
each_backend = pytest.mark.parametrize("backend", BACKENDS)


class Embedding:
    """The plain loop on rows of a table; torch cannot clip sparse gradients, so by hand."""

    def __init__(self, kwargs, cls=torch.optim.SparseAdam):
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(50, 4, sparse=True, dtype=torch.float64)
        self.inner = cls(list(self.table.parameters()), **copy.deepcopy(kwargs))

    def losses(self, window):
        generator = torch.Generator().manual_seed(window)
        for _ in range(3):
            tokens = torch.randint(0, 50, (8,), generator=generator)
            yield self.table(tokens).square().sum()

    def run(self, window):
        for loss in self.losses(window):
            (loss / 3).backward()
        grad = self.table.weight.grad = self.table.weight.grad.coalesce()
        norm = grad.values().norm()
        assert norm > 1.0
        grad.values().mul_(1.0 / (norm + 1e-6))
        self.inner.step()
        self.inner.zero_grad()


class WrappedEmbedding(Embedding):
    """The same by the wrapper."""

    def __init__(self, kwargs, backend, cls=torch.optim.SparseAdam):
        super().__init__(kwargs, cls)
        self.opt = ClockedOptimizer(
            self.inner, gradient_accumulation_steps=3, max_grad_norm=1.0, backend=backend
        )

    def run(self, window):
        for loss in self.losses(window):
            self.opt.backward(loss)
            info = self.opt.step()
        assert info.updated
        assert info.grad_norm > 1.0 > info.clipped_norm


def check_embedding(wrapped, plain):
    for window in range(4):
        if window == 2:
            for group in wrapped.inner.param_groups + plain.inner.param_groups:
                group["lr"] = group["lr"] * 0.5
        wrapped.run(window)
        plain.run(window)
        assert_close(wrapped.table.weight.detach(), plain.table.weight.detach(), num_roundings=100)


@each_backend
@pytest.mark.parametrize("kwargs", CONFIGS.values(), ids=CONFIGS)
def test_sparse_adam_trains_embeddings_as_the_plain_loop(kwargs, backend):
    wrapped, plain = WrappedEmbedding(kwargs, backend), Embedding(kwargs)
    check_embedding(wrapped, plain)
    bare, rewrapped = Embedding(kwargs), WrappedEmbedding(kwargs, backend)
    for loop, source in ((bare, wrapped.opt), (rewrapped, plain.inner)):
        loop.table.load_state_dict(wrapped.table.state_dict())
        target = loop.opt if loop is rewrapped else loop.inner
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    for loop in (wrapped, bare, rewrapped):
        loop.run(5)
        assert_close(loop.table.weight.detach(), wrapped.table.weight.detach(), num_roundings=100)


@each_backend
@pytest.mark.parametrize(
    ("cls", "kwargs"), [(torch.optim.SGD, {"lr": 0.5}), (torch.optim.Adagrad, {"lr": 0.5})]
)
def test_sgd_and_adagrad_train_sparse_embeddings_as_the_plain_loop(cls, kwargs, backend):
    with torch.sparse.check_sparse_tensor_invariants():  # torch's Adagrad warns without a choice
        check_embedding(WrappedEmbedding(kwargs, backend, cls), Embedding(kwargs, cls))


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_refuses_a_sparse_gradient_by_name_and_changes_nothing(cls):
    wrapped = WrappedEmbedding({}, "auto", cls)
    before = wrapped.table.weight.detach().clone()
    with pytest.raises(TypeError, match="takes no sparse gradients"):
        wrapped.run(0)
    assert_bit_equal(wrapped.table.weight.detach(), before)
    assert wrapped.opt.clock.update_step == 0


@each_backend
@pytest.mark.parametrize("cls", [torch.optim.SparseAdam, torch.optim.SGD])
def test_rows_that_were_not_looked_up_keep_their_bits(cls, backend):
    wrapped = WrappedEmbedding({"lr": 0.5}, backend, cls)
    before = wrapped.table.weight.detach().clone()
    wrapped.run(0)
    moved = (wrapped.table.weight.detach() != before).any(dim=1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat([torch.randint(0, 50, (8,), generator=generator) for _ in range(3)])
    assert moved.nonzero().flatten().tolist() == tokens.unique().tolist()
