"""Gradients that we add over processes come to what one process gets from all samples."""

from math import inf
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import clocked_sgd, given, parameter
from tolerance import assert_all_bit_equal, assert_close
from torch.utils.checkpoint import checkpoint

from stepclock_ext import ClockedOptimizer, LossScale, ReducerOptions

each_world = pytest.mark.parametrize("world", [2, 4])
TINY = 1e-6  # MiB: every parameter is a bucket
SOON = {"timeout": 10.0, "group_timeout": 5.0}  # where ranks may wait for each other for ever


# ---- Windows: what counts, told by slopes. Rank r plays script r % 2. -------------------------


def m(weight, a, b=None):
    """A backward of these slopes; without a weight a plain one."""
    return weight, a, b


def backward(opt, p, q, weight, a, b):
    terms = [slope * x.mean() for slope, x in ((a, p), (b, q)) if slope is not None]
    if weight is None:
        sum(terms).backward()
    else:
        opt.backward(sum(terms), weight=weight)


def play(rank, scripts, options):
    """Where a script's micro steps, flushes and ends of epochs move two parameters."""
    p, q = parameter(0.0, 0.0), parameter(0.0)
    opt = clocked_sgd(p, q, process_group=ReducerOptions(bucket_cap_mb=TINY), **options)
    for event in scripts[rank % 2]:
        if isinstance(event, str):
            getattr(opt, event)()
            continue
        for one in event if isinstance(event, list) else [event]:
            backward(opt, p, q, *one)
        opt.step()
    return -p.sum().item(), -q.item(), opt.clock.update_step, opt.clock.skipped_updates


END, FLUSH = "end_epoch", "flush"
CARRY, ONES = {"tail": "carry"}, {"gradient_accumulation_steps": 1}
NOTHING = m(0, 99)
ONCE = (6.0, 0.0, 1, 0)  # each window of these scripts has a mean slope of 6
# name: (script of even ranks, script of odd ranks, options, result)
WINDOWS = {
    "weights differ": ([m(1, 8), m(1, 16)], [m(3, 8), m(3, 0)], {}, ONCE),
    "weight 0 in the first": ([NOTHING, m(2, 8)], [m(1, 4), m(1, 4)], {}, ONCE),
    "weight 0 in the last": ([m(2, 8), NOTHING], [m(1, 4), m(1, 4)], {}, ONCE),
    "weight 0 in all": ([NOTHING, NOTHING], [m(1, 4), m(1, 8)], {}, ONCE),
    "weight 0 everywhere": ([NOTHING, NOTHING], [NOTHING, NOTHING], {}, (0.0, 0.0, 0, 0)),
    "two backwards at the end": ([m(1, 4), [m(1, 4), m(1, 8)]], [m(1, 8), m(4, 6)], {}, ONCE),
    "two backwards first": ([[m(1, 4), m(1, 8)], m(1, 4)], [m(1, 8), m(4, 6)], {}, ONCE),
    "two backwards of each": ([m(2, 6), [m(1, 8), m(1, 4)]], [m(3, 6), m(1, 6)], {}, ONCE),
    "plain backward": ([m(None, 4), m(None, 8)], [m(None, 4), m(None, 8)], {}, ONCE),
    "plain backward of one": ([m(None, 4), m(None, 8)], [m(1, 4), m(1, 8)], {}, ONCE),
    "plain after ours": ([m(1, 4), [m(1, 4), m(None, 4)]], [m(1, 4), m(1, 8)], {}, ONCE),
    "unused on one rank": ([m(1, 6, 4), m(1, 6)], [m(1, 6), m(1, 6)], {}, (6.0, 1.0, 1, 0)),
    "case 58": ([m(1, 1), m(1, None, 1)], [m(1, 3), m(1, None, 3)], {}, (1.0, 1.0, 1, 0)),
    "sum": ([m(1, 1), m(1, 1)], [m(1, 5), m(1, 5)], {"reduction": "sum"}, ONCE),
    "flush": ([m(1, 6), FLUSH], [m(1, 6), FLUSH], {}, ONCE),
    "flush of one": ([m(2, 8), FLUSH], [m(1, 4), m(1, 4)], {}, ONCE),
    "flush of nothing": ([FLUSH], [FLUSH], {}, (0.0, 0.0, 0, 0)),
    "flush beside a window": ([FLUSH], [m(1, 4), m(1, 8)], {}, ONCE),
    "tails alike": ([m(1, 6), END], [m(1, 6), END], {}, ONCE),
    "a tail of one": ([END], [m(1, 6), END], {}, ONCE),
    "ended early": ([m(1, 6), END], [m(1, 6)] * 5 + [END], {}, (18.0, 0.0, 3, 0)),
    "a tail in a window": ([m(2, 9), END], [m(1, 3), m(1, 3), END], {}, ONCE),
    "a tail is dropped": ([m(1, 99), END], [m(1, 6)] * 2 + [END], {"tail": "drop"}, ONCE),
    "a tail is carried": ([m(1, 8), END, m(1, 8)], [m(1, 4), END, m(1, 4)], CARRY, ONCE),
    "a tail of one is carried": ([m(2, 8), END, m(1, 8)], [END, m(1, 0), FLUSH], CARRY, ONCE),
    "one micro step": ([m(1, 8), m(0, 9)], [m(1, 4), m(2, 6)], ONES, (12.0, 0.0, 2, 0)),
}


@each_world
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_counts_every_rank_by_its_weight(world, name):
    even, odd, options, expected = WINDOWS[name]
    options = {"gradient_accumulation_steps": 2, **options}
    assert ranks.run(world, play, (even, odd), options, **SOON) == [expected] * world


MORE = {
    "two and none": ([[m(1, 9), m(3, 5)]], [NOTHING]),
    "three and one": ([[m(1, 8), m(1, 4), m(1, 6)]], [m(1, 6)]),
    "two and an ended rank": ([[m(1, 8), m(1, 4)], END], [END]),
    "four and two": ([[m(1, 4), m(1, 8)] * 2], [[m(2, 8), m(2, 4)]]),
}


@pytest.mark.parametrize("name", MORE)
def test_a_rank_may_run_any_number_of_backwards_more_than_another(name):
    assert ranks.run(2, play, MORE[name], {}, **SOON) == [ONCE] * 2


# ---- Bits: integers in every layout and dtype, whose sums no rounding touches ------------------


def zoo():
    """Every kind of memory and dtype that a model may hold."""
    generator = torch.Generator().manual_seed(1)

    def integers(*shape, dtype=torch.float32):
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    listed = [
        integers(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        integers(3, 5).t(),
        integers(4, 6)[:, :3],
        integers(),
        integers(0, 3),
        integers(70_001),
        integers(6, dtype=torch.complex64),
        integers(2, 3, dtype=torch.complex128).t(),
        integers(70_001, dtype=torch.float64),
        integers(5, dtype=torch.bfloat16),
        integers(0, dtype=torch.float16),
    ]
    return [torch.nn.Parameter(x) for x in listed]


def slopes(params, sample):
    """Each parameter's gradient in a sample."""
    generator = torch.Generator().manual_seed(sample)
    return [torch.randint(-2, 3, p.shape, generator=generator).to(p.dtype) for p in params]


def move_the_zoo(rank, world, steps, cap):
    params = zoo()
    options = ReducerOptions(bucket_cap_mb=cap)
    opt = clocked_sgd(*params, gradient_accumulation_steps=steps, process_group=options)
    for micro in range(2 * steps):
        gradients = slopes(params, micro * world + rank)
        opt.backward(given(*zip(params, gradients, strict=True)), weight=1 + 2 * (rank % 2))
        opt.step()
    return [p.detach() for p in params]


@each_world
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("cap", [TINY, 25])
def test_sums_are_exact_in_every_layout_and_dtype(world, steps, cap):
    params = zoo()
    expected = [p.detach().to(torch.complex128) for p in params]
    for sample in range(2 * steps * world):
        weight = 1 + 2 * (sample % 2)
        for value, slope in zip(expected, slopes(params, sample), strict=True):
            value -= slope * weight / (2 * world * steps)
    exact = [
        (value if p.dtype.is_complex else value.real).to(p.dtype)
        for value, p in zip(expected, params, strict=True)
    ]
    for moved in ranks.run(world, move_the_zoo, world, steps, cap):
        assert_all_bit_equal(moved, exact)


def add_in_bf16(rank):
    w = parameter(0.0, dtype=torch.bfloat16)
    opt = clocked_sgd(w, lr=4.0, master_weights=True, process_group=dist.group.WORLD)
    gradient = torch.tensor(256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    opt.backward(given((w, gradient)))
    norm = opt.step().grad_norm
    dist.all_reduce(gradient)
    return norm, opt.master_weight(w).item(), gradient.item()


def test_16_bit_gradients_are_added_in_fp32():
    for norm, master, plain_sum in ranks.run(4, add_in_bf16):
        assert (norm, master) == (259 / 4, -259.0)
        assert plain_sum != 259.0  # what an all_reduce of bf16 makes of it


# ---- Training: as one process that goes through the samples of all ranks -----------------------

MAKERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "several": lambda m: [
        torch.optim.SGD(m[0].parameters(), lr=0.1),
        torch.optim.AdamW(m[2].parameters(), lr=0.01),
    ],
}


def train(rank, world, name, dtype, *, alone=False, reentrant=None, **options):
    """Five micro steps with a tail; alone, of all ranks' samples one after another."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    model.to(dtype)
    inputs, here = torch.randn(20, 4, 7, dtype=dtype), range(world) if alone else [rank]
    opt = ClockedOptimizer(
        MAKERS[name](model),
        gradient_accumulation_steps=2 * len(here),
        process_group=None if alone else ReducerOptions(bucket_cap_mb=TINY),
        **options,
    )
    infos = []
    for sample in [micro * world + r for micro in range(5) for r in here]:
        x = inputs[sample].requires_grad_()
        for _ in range(0 if reentrant is None else 2):  # the first layer, in checkpoints as well
            x = checkpoint(model[:2], x, use_reentrant=reentrant)
        opt.backward(model(x).square().mean(), weight=1 + sample % 3)
        infos.append(opt.step())
    infos.append(opt.end_epoch())
    told = [(i.loss, i.grad_norm) for i in infos if i.updated]
    return [p.detach() for p in model.parameters()], told


def check_training(world, name, dtype, **options):
    params, told = train(0, world, name, dtype, alone=True, **options)
    results = ranks.run(world, train, world, name, dtype, **options)
    for got, said in results:
        assert_all_bit_equal(got, results[0][0])
        assert said == results[0][1]
    assert len(told) == 3
    for got, want in zip(results[0][0], params, strict=True):
        assert_close(got, want, num_roundings=10 * world, magnitude=1.0)
    flat = [torch.tensor(numbers, dtype=torch.float64) for numbers in (results[0][1], told)]
    assert_close(*flat, num_roundings=10 * world, dtype=dtype)


@each_world
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_fp64_training_equals_that_of_one_process(world, name, clip):
    check_training(world, name, torch.float64, max_grad_norm=clip)


@each_world
@pytest.mark.parametrize("scale", [None, LossScale(init_scale=1024.0)])
def test_fp32_training_equals_that_of_one_process(world, scale):
    check_training(world, "sgd", torch.float32, max_grad_norm=1.0, loss_scale=scale)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_shared_layer_in_a_checkpoint_counts_with_all_its_gradients(reentrant):
    check_training(2, "sgd", torch.float64, reentrant=reentrant)


# ---- What travels ------------------------------------------------------------------------------


def count_collectives(rank, windows, cap):
    """All-reduces of gradients, by our count and by torch's, and bytes; after every update."""
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (1, 64, 65, 1000)]
    opt = clocked_sgd(*params, process_group=ReducerOptions(bucket_cap_mb=cap))
    counts = []
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        for steps, num_micro in windows:
            opt.gradient_accumulation_steps = steps
            for _ in range(num_micro):
                opt.backward(sum(p.sum() for p in params))
                info = opt.step()
            if num_micro < steps:
                info = opt.end_epoch()
            ours, main = opt._pass.accumulator.reduction, opt._processes.ranks.sums
            seen = sum(call.kwargs.get("group") is main for call in called.call_args_list)
            counts.append((info.updated, ours.num_collectives, seen, ours.num_bytes))
    return counts


@each_world
@pytest.mark.parametrize(("cap", "num_buckets"), [(TINY, 4), (25, 1)])
def test_each_bucket_travels_once_an_update(world, cap, num_buckets):
    windows = [(1, 1), (2, 2), (5, 5), (5, 3), (1, 1), (2, 1)]  # steps, micro steps: two are tails
    padded = 4 * (64 + 64 + 128 + 1024)
    expected = [(True, n * num_buckets, n * num_buckets, n * padded) for n in range(1, 7)]
    assert ranks.run(world, count_collectives, windows, cap) == [expected] * world


def watch_the_backward(rank, norm_type):
    first, last = parameter(1.0), parameter(1.0)
    opt = clocked_sgd(
        first, last, norm_type=norm_type, process_group=ReducerOptions(bucket_cap_mb=TINY)
    )
    seen = []
    for _ in range(2):
        inner = first * 1.0
        inner.register_hook(lambda _: seen.append(opt._pass.accumulator.reduction.num_collectives))
        opt.backward(inner * 1.0 + last)  # autograd comes to the newest first
        opt.step()
    return seen


@pytest.mark.parametrize("norm_type", [2.0, inf, 1.0])
def test_a_bucket_goes_out_while_autograd_works_on_the_next(norm_type):
    """From the second window on; the first tells in which order gradients arrive."""
    assert ranks.run(2, watch_the_backward, norm_type) == [[0, 3], [0, 3]]
