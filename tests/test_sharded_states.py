"""Sharded states: each rank keeps its share, and training is what it was. Gradients are integers
and weights powers of two, so no sum is rounded: everything is compared bit by bit."""

import copy
import pickle
import re
from functools import lru_cache, partial
from math import inf

import pytest
import ranks
import torch
from helpers import clocked_sgd, given, parameter
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_near, assert_same_state

from stepclock_ext import EMA, ClockedOptimizer, ReducerOptions

each_world = pytest.mark.parametrize("world", [2, 4])
SIZES = [0, 1, 3, 63, 64, 65, 1000]  # shares cut a bucket anywhere
SAMPLES = 8  # of a window: micro steps of all ranks
TINY = 1e-3  # MiB: several buckets

_ADAM = {"weight_decay": 0.1}
MAKERS = {
    "adamw": partial(torch.optim.AdamW, **_ADAM),
    "adam amsgrad": partial(torch.optim.Adam, amsgrad=True, **_ADAM),
    "sgd": torch.optim.SGD,
    "sgd momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "sgd nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}
each_maker = pytest.mark.parametrize("name", MAKERS)


@lru_cache
def slope(sample, row):
    """The gradient of a parameter in a sample."""
    generator = torch.Generator().manual_seed(1000 * sample + row)
    return torch.randint(-8, 9, (SIZES[row],), generator=generator)


def start(dtype):
    """Parameters of SIZES, the third a scalar among them."""
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    values[1] = values[1].reshape(())
    values[6] = values[6].reshape(50, 20).t()
    return [torch.nn.Parameter(value) for value in values]


def build(params, name, **options):
    """A wrapper of two groups, whose rates a scheduler halves."""
    inner = MAKERS[name]([{"params": params[:4], "lr": 0.1}, {"params": params[4:], "lr": 0.01}])
    schedulers = [torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)]
    return ClockedOptimizer(inner, schedulers=schedulers, **{"max_grad_norm": 100.0, **options})


def train(rank, world, name, *, dtype=torch.float32, updates=(0, 3), saved=None, shard=True, **o):
    """Updates of SAMPLES each; rank r takes every world-th one. All that it comes to."""
    params, ema = start(dtype), EMA(0.5)
    group = None if world == 1 else ReducerOptions(bucket_cap_mb=TINY, shard_states=shard)
    o["gradient_accumulation_steps"] = SAMPLES // world
    opt = build(params, name, ema=ema, process_group=group, **o)
    if saved is not None:
        opt.load_state_dict(saved["state"], remap="as_is")
        for p, value in zip(params, saved["params"], strict=True):
            p.data.copy_(value)
    infos = []
    for sample in range(SAMPLES * updates[0] + rank, SAMPLES * updates[1], world):
        slopes = [slope(sample, row).reshape(p.shape) for row, p in enumerate(params)]
        used = [row for row in range(len(params)) if row != 3 or sample >= SAMPLES]
        opt.backward(given(*((params[i], slopes[i]) for i in used)), weight=1 + 2 * (sample % 2))
        infos.append(opt.step())
    shards = opt._pass.shards
    own = [] if shards is None else [s for one in shards.optimizers for s in one.state.values()]
    return {
        "params": [p.detach().clone() for p in params],
        "state": in_order(opt.state_dict()),
        "masters": [opt.master_weight(p) for p in params],
        "averages": [ema.average(p) for p in params],
        "told": [(i.grad_norm, i.clipped_norm, i.lr) for i in infos if i.updated],
        "elements": sum(t.numel() for state in own for t in state.values() if _is_of_slice(t)),
    }


def in_order(state):
    """torch lists states in the order of their first update."""
    return {**state, "state": dict(sorted(state["state"].items()))}


def _is_of_slice(value):
    return isinstance(value, torch.Tensor) and value.dim() == 1


@lru_cache
def alone(name, dtype=torch.float32, updates=(0, 3), **options):
    """The same training by one process."""
    return train(0, 1, name, dtype=dtype, updates=updates, **options)


@lru_cache
def together(world, name):
    """The same training with sharded states."""
    return ranks.run(world, train, world, name)


def assert_same_training(results, expected):
    for got in results:
        for key in ("params", "masters", "averages"):
            assert_all_bit_equal(got[key], expected[key])
        assert got["told"] == expected["told"]


# ---- Training ----------------------------------------------------------------------------------


@each_world
@each_maker
def test_sharded_training_is_that_of_one_process(world, name):
    results = together(world, name)
    assert_same_training(results, alone(name))
    assert len(results[0]["told"]) == 3


@each_world
def test_training_without_shards_is_the_same(world):
    assert_same_training(ranks.run(world, train, world, "adamw", shard=False), alone("adamw"))


@each_world
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["adamw", "sgd momentum"])
def test_masters_are_sharded_as_well(world, dtype, name):
    results = ranks.run(world, train, world, name, dtype=dtype, master_weights=True)
    assert_same_training(results, alone(name, dtype, master_weights=True))


@pytest.mark.parametrize("norm_type", [2.0, inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_norm_is_that_of_all_shares(norm_type, dtype):
    results = ranks.run(2, train, 2, "sgd", dtype=dtype, norm_type=norm_type)
    assert_same_training(results, alone("sgd", dtype, norm_type=norm_type))


def test_another_norm_is_that_of_all_shares_but_for_rounding():
    expected = alone("sgd", torch.float64, norm_type=1.0)
    for result in ranks.run(4, train, 4, "sgd", dtype=torch.float64, norm_type=1.0):
        for got, want in zip(result["told"], expected["told"], strict=True):
            assert_near(got[0], want[0], num_roundings=sum(SIZES))


def alternate(rank):
    p, q = parameter(0.0, 0.0), parameter(0.0, 0.0)
    opt = clocked_sgd(p, q, process_group=ReducerOptions(shard_states=True))
    norms = []
    for slope_p, slope_q in ((3.0, 4.0), (3.0, None), (None, 4.0)):
        opt.backward(sum(x[0] * c for x, c in ((p, slope_p), (q, slope_q)) if c is not None))
        norms.append(opt.step().grad_norm)
    return norms, p.tolist(), q.tolist()


def test_the_norm_counts_no_parameter_of_an_earlier_window():
    assert ranks.run(2, alternate) == [([5.0, 3.0, 4.0], [-6.0, 0.0], [-8.0, 0.0])] * 2


def swap(rank):
    model = torch.nn.Linear(3, 2, bias=False)
    model.weight.data.fill_(8.0)
    ema = EMA(0.5)
    opt = clocked_sgd(model.weight, ema=ema, process_group=ReducerOptions(shard_states=True))
    opt.backward(model.weight.sum() * 4)
    opt.step()
    with ema.swap(model):
        averaged = model.weight.tolist()
    return averaged, model.weight.tolist()


def test_whole_averages_are_swapped_in():
    assert ranks.run(2, swap) == [([[6.0] * 3] * 2, [[4.0] * 3] * 2)] * 2


def replace_memory(rank):
    w = parameter(1.0, 2.0)
    opt = clocked_sgd(w, process_group=ReducerOptions(shard_states=True))
    for _ in range(2):
        opt.backward(w.sum())
        opt.step()
        w.data = w.detach() + 10.0
    return w.tolist()


def test_slices_follow_a_parameter_whose_memory_is_another():
    assert ranks.run(2, replace_memory) == [[19.0, 20.0]] * 2


def round_stochastically(rank, shard, seed):
    torch.manual_seed(seed + rank)  # each rank draws its own data
    w = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    options = ReducerOptions(shard_states=shard)
    opt = clocked_sgd(w, lr=2.0**-10, rounding="stochastic", process_group=options)
    opt.backward(w.sum())
    opt.step()
    return w.detach()


@pytest.mark.parametrize("shard", [False, True])
def test_stochastic_rounding_is_the_same_on_all_ranks(shard):
    first, second = ranks.run(2, round_stochastically, shard, 0)
    assert_bit_equal(first, second)
    assert set(first.tolist()) == {1.0, 1.0 - 2.0**-8}  # the neighbours of 1 - 2^-10
    assert 190 < (first < 1).sum() < 310  # a quarter of them: 250, four deviations are 55
    assert not torch.equal(ranks.run(2, round_stochastically, shard, 9)[0], first)


# ---- Shares ------------------------------------------------------------------------------------


@each_world
@pytest.mark.parametrize(("name", "num_states"), [("adamw", 2), ("adam amsgrad", 3), ("sgd", 0)])
def test_each_rank_holds_its_share_of_the_states(world, name, num_states):
    held = [result["elements"] for result in together(world, name)]
    assert sum(held) == num_states * sum(SIZES)
    assert max(held) <= num_states * (sum(SIZES) + 512) / world  # 512: padding of the buckets


@each_world
@each_maker
def test_the_saved_state_is_that_of_one_process(world, name):
    expected = alone(name)["state"]
    for result in together(world, name):
        state = result["state"]
        for key in ("state", "param_groups"):
            assert_same_state(state[key], expected[key])
        for key in ("masters", "ema", "schedulers"):
            assert_same_state(state["stepclock"][key], expected["stepclock"][key])
        for key in ("update_step", "weight_seen"):
            assert state["stepclock"]["clock"][key] == expected["stepclock"]["clock"][key]


@each_maker
def test_the_bare_optimizer_loads_the_saved_state(name):
    state = copy.deepcopy(together(2, name)[0]["state"])
    params = start(torch.float32)
    bare = MAKERS[name]([{"params": params[:4]}, {"params": params[4:]}], lr=1.0)
    bare.load_state_dict(state)
    assert [group["lr"] for group in bare.param_groups] == [0.1 * 0.5**3, 0.01 * 0.5**3]
    assert_same_state(bare.state_dict()["state"], alone(name)["state"]["state"])
    for p in params:
        p.grad = torch.ones_like(p)
    bare.step()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 1), (1, 4), (4, 4)])
@pytest.mark.parametrize(
    ("name", "dtype"), [("adam amsgrad", torch.float32), ("adamw", torch.bfloat16)]
)
def test_another_number_of_ranks_goes_on_as_the_unbroken_run_does(before, after, name, dtype):
    options = {"dtype": dtype, "master_weights": dtype == torch.bfloat16}
    saved = ranks.run(before, train, before, name, updates=(0, 2), **options)[0]
    results = ranks.run(after, train, after, name, updates=(2, 4), saved=saved, **options)
    expected = alone(name, updates=(0, 4), **options)
    assert_same_training(results, {**expected, "told": expected["told"][2:]})
    assert_same_state(results[0]["state"]["state"], expected["state"]["state"])


def refuse(rank, case):
    """The message; the wrapper trains on."""
    p, q = parameter(0.0, 0.0), parameter(0.0)
    opt = clocked_sgd(p, process_group=ReducerOptions(shard_states=True))
    calls = {
        "hooks": opt.step,
        "deepcopy": lambda: copy.deepcopy(opt),
        "pickle": lambda: pickle.dumps(opt),
        "group": lambda: opt.add_param_group({"params": [q]}),
    }
    if case == "hooks":
        hook = opt.optimizers[0].register_step_pre_hook(lambda *_: None)
        opt.backward(p.sum())
    with pytest.raises(RuntimeError) as caught:
        calls[case]()
    if case == "hooks":
        hook.remove()
        opt.discard()
    opt.backward(p.sum())
    opt.step()
    assert p.tolist() == [-1.0, -1.0]
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "way_out"),
    [
        ("hooks", "must go without step hooks, got some on SGD; remove them, or leave"),
        ("deepcopy", r"must not be copied or pickled.*; save state_dict\(\) on every rank"),
        ("pickle", r"must not be copied or pickled.*; save state_dict\(\) on every rank"),
        ("group", r"must stay as they are.*; build another wrapper, and load this one's"),
    ],
)
def test_what_does_not_go_with_shards_is_refused_and_leaves_no_trace(case, way_out):
    assert all(re.search(way_out, said) for said in ranks.run(2, refuse, case))
