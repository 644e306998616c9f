"""The norm and the decision over parts: of shards, replicas, uneven rows and plain parameters."""

from math import inf, nan

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import clip_factor
from test_fsdp import MAKERS, build_model, full, shard
from tolerance import assert_all_bit_equal, assert_close, assert_near
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from stepclock_ext import EMA, ClockedOptimizer, LossScale

NORM_TYPES = [2.0, inf, 3.0, 0.5]


def local(tensor):
    """What lies here; shares the tensor's memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# ---- Norm and clip -----------------------------------------------------------------------------


def clip(rank, layout, norm_type, dtype, size):
    """Mean gradients of a window, what the wrapper says of them, and where they move parameters."""
    net, max_norm = shard(build_model(dtype), layout), 1 / 8 if size == 1 else None
    inner = torch.optim.SGD(net.parameters(), lr=1 / size)
    options = {"max_grad_norm": max_norm, "norm_type": norm_type}
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=2, model=net, **options)
    torch.manual_seed(rank)
    for _ in range(2):
        opt.backward(size * net(torch.randn(4, 7, dtype=dtype)).square().mean())
        grads = [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]
        before = [full(p) for p in net.parameters()]
        info = opt.step()
    for grad in grads:
        if not hasattr(grad, "full_tensor"):  # at the end of a window these are averaged by us
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
    moved = [old - full(p) for old, p in zip(before, net.parameters(), strict=True)]
    return [full(grad) / 2 for grad in grads], moved, info.grad_norm, info.clipped_norm


CASES = [
    (norm_type, dtype, 1.0) for norm_type in NORM_TYPES for dtype in (torch.float32, torch.float64)
]
CASES += [(n, torch.float64, size) for n in (2.0, 3.0) for size in (2.0**-550, 2.0**550)]
LAID_OUT = [
    (2, "groups"),
    *((4, name) for name in ("groups", "hsdp", "ignored", "beside", "meshes")),
]


def clip_all(rank, layout):
    return [clip(rank, layout, *case) for case in CASES]


@pytest.mark.parametrize(("world", "layout"), LAID_OUT)
def test_clipping_is_that_of_whole_gradients(world, layout):
    results = ranks.run(world, clip_all, layout)
    for case, *told in zip(CASES, *results, strict=True):
        check_clip(told[0], *case)
        for _, moved, *norms in told[1:]:
            assert norms == list(told[0][2:])
            assert_all_bit_equal(moved, told[0][1])


def check_clip(told, norm_type, dtype, size):
    """The oracle is torch's clip of whole fp64 gradients, brought to size 1."""
    grads, moved, norm, clipped = told
    whole = [torch.nn.Parameter(torch.zeros_like(grad.double())) for grad in grads]
    for p, grad in zip(whole, grads, strict=True):
        p.grad = grad.double() / size
    max_norm = 1 / 8 if size == 1 else inf
    expected = torch.nn.utils.clip_grad_norm_(whole, max_norm, norm_type).item()
    assert expected > 1 / 8
    assert_near(norm / size, expected, num_roundings=64, dtype=dtype)
    expected *= clip_factor(expected, max_norm)
    assert_near(clipped / size, expected, num_roundings=64, dtype=dtype)
    for got, p in zip(moved, whole, strict=True):
        assert_close(got, p.grad, num_roundings=64, magnitude=1.0, dtype=dtype)


# ---- NaN and infinity --------------------------------------------------------------------------


def everything(net, opt):
    """Copies of the local parts of parameters, states and averages."""
    own = opt.state_dict()
    values = [*net.parameters(), *own["stepclock"]["ema"]["averages"].values()]
    for state in own["state"].values():
        values += [value for _, value in sorted(state.items()) if torch.is_tensor(value)]
    return [local(value).detach().clone() for value in values]


def poison(rank, layout, make, norm_type, dtype):
    """A NaN or infinity in the gradient of one parameter of one rank, rank by rank."""
    net = shard(build_model(dtype), layout)
    options = {"norm_type": norm_type, "loss_scale": LossScale(init_scale=1024.0), "ema": EMA(0.5)}
    opt = ClockedOptimizer(MAKERS[make](net.parameters()), model=net, **options)
    outcomes, params = [], list(net.parameters())
    for case in range(dist.get_world_size() + 2):
        before = everything(net, opt)
        opt.backward(net(torch.ones(2, 7, dtype=dtype)).square().mean())
        grad = local(params[case % 3].grad)  # of 5 or 3 rows; the last ranks may have none
        if case and rank == case - 1:
            grad[:1] = (nan, inf)[case % 2]
        has_any = torch.tensor(float(rank == case - 1 and grad.numel() > 0))
        dist.all_reduce(has_any)
        info = opt.step()
        outcomes.append((info.skipped, bool(case and has_any), opt.loss_scale.scale))
        if info.skipped:
            assert_all_bit_equal(everything(net, opt), before)
    return outcomes, opt.clock.state_dict()


POISONED = [("groups", "hooked"), ("hsdp", "adamw"), ("ignored", "sgd")]


def poison_all(rank, layout, make):
    cases = [(2.0, torch.float32), *((n, torch.float64) for n in NORM_TYPES)]
    return [poison(rank, layout, make, *case) for case in cases]


@pytest.mark.parametrize(("layout", "make"), POISONED)
def test_a_nan_or_infinity_anywhere_skips_everywhere(layout, make):
    results = ranks.run(4, poison_all, layout, make, timeout=30)
    assert results == [results[0]] * 4
    for outcomes, _ in results[0]:
        skipped, is_poisoned, scales = zip(*outcomes, strict=True)
        assert skipped == is_poisoned
        assert scales[-1] == 1024.0 / 2 ** sum(skipped)
        assert sum(skipped) >= 3


# ---- DTensors without FSDP2 --------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(6)
        self.up, self.down = torch.nn.Linear(6, 10), torch.nn.Linear(10, 4)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh()) * 1.0  # a view draws a warning


def spread_by_hand(block, mesh):
    for layer, placement in (
        (block.norm, Replicate()),
        (block.up, Shard(0)),
        (block.down, Shard(0)),
    ):
        for name, p in list(layer.named_parameters()):
            spread = distribute_tensor(p.detach(), mesh, [placement])
            layer.register_parameter(name, torch.nn.Parameter(spread))


def spread_by_plan(block, mesh):
    plan = {"norm": SequenceParallel(sequence_dim=0), "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel()}  # fmt: skip
    parallelize_module(block, mesh, plan)


def train_block(rank, how=None):
    """Two windows and a tail. Under "2d" pairs of ranks read different data."""
    block, inputs = Block().double(), torch.randn(10, 4, 6).double()
    if how == "by hand":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        spread_by_hand(block, mesh)
    elif how == "by plan":
        spread_by_plan(block, init_device_mesh("cpu", (dist.get_world_size(),)))
    elif how == "2d":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        spread_by_plan(block, mesh["tp"])
        fully_shard(block, mesh=mesh["dp"])
    options = {"max_grad_norm": 0.1, "model": block}
    steps = 4 if how is None else 2
    opt = ClockedOptimizer(
        torch.optim.AdamW(block.parameters(), lr=0.01), gradient_accumulation_steps=steps, **options
    )
    infos = []
    for micro in range(5):
        here = range(2) if how is None else [rank // 2 if how == "2d" else None]
        for half in here:
            x = (
                inputs[2 * micro + half]
                if half is not None
                else inputs[2 * micro : 2 * micro + 2].flatten(0, 1)
            )
            x = distribute_tensor(x, mesh, [Shard(0)]) if how == "by hand" else x
            out = block(x)
            out = out.full_tensor() if how == "by hand" else out
            opt.backward(out.square().mean())
            infos.append(opt.step())
    infos.append(opt.end_epoch())
    told = torch.tensor([(i.loss, i.grad_norm) for i in infos if i.updated], dtype=torch.float64)
    return [*map(full, block.parameters()), told]


@pytest.mark.parametrize(
    ("world", "how"), [(2, "by hand"), (4, "by hand"), (2, "by plan"), (4, "2d")]
)
def test_tensor_parallel_training_equals_that_of_one_process(world, how):
    expected, results = train_block(0), ranks.run(world, train_block, how)
    assert len(expected[-1]) == 3
    for values in results:
        assert_all_bit_equal(values, results[0])
    for got, want in zip(results[0], expected, strict=True):
        assert_close(got, want, num_roundings=100, magnitude=1.0)
