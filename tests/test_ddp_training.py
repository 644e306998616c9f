"""Training under DDP is that of one process that goes through all samples, and that of DDP's usual
loop; and each window travels once."""

from functools import partial
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from test_ddp import STATIC, TINY, VIEW, Slopes, clocked
from tolerance import assert_all_bit_equal, assert_close
from torch.nn.parallel import DistributedDataParallel as DDP

from stepclock_ext import EMA, ClockedOptimizer

each_world = pytest.mark.parametrize("world", [2, 4])


# ---- Training: as one process that goes through the samples of all ranks -----------------------


def build_model(norm=False):
    torch.manual_seed(0)
    first = [torch.nn.BatchNorm1d(7)] if norm else []
    layers = *first, torch.nn.Linear(7, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
    return torch.nn.Sequential(*layers).double()


def wrap_children(model):
    return torch.nn.Sequential(DDP(model[0]), model[1], DDP(model[2]))


MAKERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
}
WRAPPERS = {
    "view": partial(DDP, bucket_cap_mb=TINY, gradient_as_bucket_view=True),
    "static": partial(DDP, static_graph=True),
    "children": wrap_children,
    "compiled": lambda model: torch.compile(DDP(model), backend="eager"),
}
LENGTHS = [2, 3, 1]  # of windows one after another, in micro steps; then a tail of 3


def train(rank, world, make, wrapper=None):
    """All that training comes to; without a wrapper alone, over all ranks' samples in turn."""
    here = [rank] if wrapper else range(world)
    model, ema = build_model(), EMA(0.5)
    net = WRAPPERS[wrapper](model) if wrapper else model
    inputs, sample, infos = torch.randn(12, 4, 7).double(), 0, []
    options = {"max_grad_norm": 0.1, "ema": ema, "loss_scale": 256.0, "model": net}
    opt = ClockedOptimizer(MAKERS[make](net.parameters()), **options)
    for steps in [*LENGTHS, 9]:
        opt.gradient_accumulation_steps = steps * len(here)
        for _ in range(min(steps, 3)):
            for index in [(sample + r) % 12 for r in here]:
                opt.backward(net(inputs[index]).square().mean(), weight=1 + index % 3)
                infos.append(opt.step())
            sample += world
    infos.append(opt.end_epoch())
    with ema.swap(net):
        averages = [p.detach().clone() for p in net.parameters()]
    told = [(i.loss, i.grad_norm, i.clipped_norm) for i in infos if i.updated]
    told = torch.tensor(told, dtype=torch.float64)
    return [*(p.detach() for p in net.parameters()), *averages, told], opt.clock.weight_seen


CASES = [(2, name, make) for name in WRAPPERS for make in MAKERS]


@pytest.mark.parametrize(
    ("world", "wrapper", "make"), CASES + [(4, name, "adamw") for name in WRAPPERS]
)
def test_training_equals_that_of_one_process(world, wrapper, make):
    expected, weight = train(0, world, make)
    results = ranks.run(world, train, world, make, wrapper)
    for values, seen in results:
        assert_all_bit_equal(values, results[0][0])
        assert seen == weight
    assert len(expected[-1]) == len(LENGTHS) + 1
    for got, want in zip(results[0][0], expected, strict=True):
        assert_close(got, want, num_roundings=20 * world, magnitude=1.0)


def follow_plain_loop(rank, make):
    """The usual loop over DDP, and the wrapper: parameters and buffers of both."""
    nets = [DDP(build_model(norm=True), bucket_cap_mb=TINY) for _ in range(2)]
    inner = MAKERS[make](nets[0].parameters())
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
    opt = ClockedOptimizer(MAKERS[make](nets[1].parameters()), model=nets[1], **options)
    torch.manual_seed(rank)
    for _ in range(3):
        first, second, other = torch.randn(3, 4, 7).double()
        with nets[0].no_sync():
            (nets[0](first).abs().mean() / 2).backward()
        with torch.no_grad():
            nets[0](other)
        (nets[0](second).abs().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(nets[0].parameters(), 0.1)
        inner.step()
        inner.zero_grad()
        opt.backward(nets[1](first).abs().mean())
        opt.step()
        with torch.no_grad():
            nets[1](other)
        opt.backward(nets[1](second).abs().mean())
        opt.step()
    assert opt.clock.micro_step == 6
    return [[*net.parameters(), *net.buffers()] for net in nets]


@pytest.mark.parametrize("make", MAKERS)
def test_training_equals_the_plain_loop_with_buffers_and_evaluation_between(make):
    for plain, clocked_ in ranks.run(2, follow_plain_loop, make):
        for got, want in zip(clocked_, plain, strict=True):
            assert_close(got.double(), want.double(), num_roundings=20, magnitude=1.0)


# ---- What travels ------------------------------------------------------------------------------

ALL_REDUCE = dist.all_reduce


def tenfold(seen, bucket):
    """A comm hook that can be told from DDP's own."""
    seen.append([id(p) for p in bucket.parameters()])
    work = ALL_REDUCE(bucket.buffer().mul_(10 / dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def count_collectives(rank, windows):
    """After each window: buckets that DDP sent, whether they held all once, and our collectives."""
    net, seen, told = DDP(build_model(), bucket_cap_mb=TINY), [], []
    net.register_comm_hook(seen, tenfold)
    opt, everything = clocked(net), sorted(map(id, net.parameters()))
    with mock.patch.object(dist, "all_reduce", wraps=ALL_REDUCE) as ours:
        for steps, num_micro in windows:
            opt.gradient_accumulation_steps = steps
            for _ in range(num_micro):
                opt.backward(net(torch.ones(1, 7).double()).sum())
                opt.step()
            opt.end_epoch()
            sent = sorted(key for bucket in seen for key in bucket)
            sums = opt._processes.ranks.sums
            main = [c for c in ours.call_args_list if c.kwargs.get("group") is sums]
            told.append((len(seen), sent == everything, len(main)))
            seen.clear()
            ours.reset_mock()
    return told


@each_world
def test_each_window_is_reduced_once_by_ddp_and_a_tail_once_by_us(world):
    windows = [(1, 1), (4, 4), (4, 3), (2, 2), (3, 1), (1, 1)]
    full, first, tail = (4, True, 0), (1, True, 0), (0, False, 1)  # DDP begins with one bucket
    expected = [first, full, tail, full, tail, full]
    assert ranks.run(world, count_collectives, windows) == [expected] * world


def hook_gradients(rank, steps):
    net = DDP(Slopes())
    net.register_comm_hook([], tenfold)
    opt = clocked(net, gradient_accumulation_steps=steps)
    for micro in range(steps):
        opt.backward(net(micro + rank, 1))
        opt.step()
    return net.module.moved()


def test_a_comm_hook_has_its_say():
    assert ranks.run(2, hook_gradients, 3) == [(15.0, 10.0)] * 2


def read_gradients(rank, steps, kind):
    """Gradients at the end of backward and in the inner step, as (address, values)."""
    net, seen = DDP(Slopes(), **kind), []
    opt = clocked(net, gradient_accumulation_steps=steps, max_grad_norm=0.25)
    params = list(net.parameters())
    look = lambda *_: seen.append([(p.grad.data_ptr(), p.grad.clone()) for p in params])  # noqa: E731
    opt.optimizers[0].register_step_pre_hook(look)
    for _ in range(2):
        for _ in range(steps):
            opt.backward(net(3 ** (rank % 2), 3 ** (rank % 2)))
            if opt.clock.micro_step_in_window == steps - 1:
                look()
            opt.step()
    return seen


@each_world
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", [{}, VIEW, STATIC])
def test_case_9_and_58_gradients_stay_where_ddp_put_them(world, steps, kind):
    """Slopes are 1 and 3, so that the mean is 2: of p 1 an element, since its mean is taken."""
    for seen in ranks.run(world, read_gradients, steps, kind):
        for summed, clipped in zip(seen[::2], seen[1::2], strict=True):
            for (place, value), (place_then, value_then) in zip(summed, clipped, strict=True):
                assert place == place_then
                assert_close(value_then, value * 0.25 / (steps * 6**0.5), num_roundings=8)
            assert [value.tolist() for _, value in summed] == [[steps] * 2, 2 * steps]


def keep_16_bit(rank):
    net = DDP(Slopes(torch.bfloat16))
    opt = clocked(net, gradient_accumulation_steps=2, master_weights=True)
    opt.backward(net(256 - 255 * rank, 1))
    opt.step()
    assert opt.accumulated(net.module.p) is net.module.p.grad
    opt.backward(net(0, 1))
    opt.step()
    return opt.master_weight(net.module.q).item(), opt.master_weight(net.module.p).sum().item()


def test_16_bit_gradients_stay_in_grad():
    for q, p in ranks.run(2, keep_16_bit):
        assert q == -1.0
        assert_close(torch.tensor(p), torch.tensor(-257 / 4), num_roundings=1, dtype=torch.bfloat16)
