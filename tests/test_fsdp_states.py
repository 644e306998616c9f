"""States beside DTensors: each rank holds its part, and they are saved, loaded and cut anew."""

import copy

import pytest
import ranks
import torch
import torch.distributed as dist
from test_fsdp import MAKERS, Slopes, build_model, clocked, full, shard, shard_slopes
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close
from torch.distributed import checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stepclock_ext import EMA, ClockedOptimizer, ReducerOptions


class Run:
    """A wrapper with an average; with bf16 also with masters."""

    def __init__(self, make, layout=None, dtype=torch.float64):
        self.net, self.ema = build_model(dtype), EMA(0.5)
        if layout:
            shard(self.net, layout)
        masters = dtype == torch.bfloat16
        options = {"max_grad_norm": 0.1, "ema": self.ema, "master_weights": masters}
        inner = MAKERS[make](self.net.parameters())
        self.opt = ClockedOptimizer(inner, gradient_accumulation_steps=2, model=self.net, **options)

    def windows(self, seed, num_windows=2):
        """The same data on every rank, so that all ranks together are one process."""
        generator = torch.Generator().manual_seed(seed)
        dtype = next(self.net.parameters()).dtype
        for _ in range(2 * num_windows):
            x = torch.randn(4, 7, generator=generator).to(dtype)
            self.opt.backward(self.net(x).square().mean())
            self.opt.step()
        return self

    def tensors(self):
        """Every tensor that it trains or keeps."""
        own = self.opt.state_dict()
        kept = own["stepclock"]
        values = [*self.net.parameters(), *kept["ema"]["averages"].values()]
        values += [value for _, value in sorted((kept["masters"] or {}).items())]
        for _, state in sorted(own["state"].items()):
            values += [value for _, value in sorted(state.items()) if torch.is_tensor(value)]
        return values

    def values(self):
        return [full(tensor) for tensor in self.tensors()]

    def saved(self):
        return copy.deepcopy((self.net.state_dict(), self.opt.state_dict()))

    def load(self, weights, state, **how):
        self.net.load_state_dict(weights)
        self.opt.load_state_dict(state, **how)
        return self


BF16 = torch.bfloat16
RUNS = [(make, torch.float64) for make in ("adam amsgrad", "sgd", "subclass", "adagrad")]
RUNS += [("adamw", BF16), ("sgd", BF16)]
each_run = pytest.mark.parametrize(("make", "dtype"), RUNS)


def measure_parts(rank, make, dtype):
    """Shapes, what a rank holds of each tensor, and whether all are spread like a parameter."""
    run = Run(make, "groups", dtype).windows(1)
    spread = [tensor for tensor in run.tensors() if tensor.dim()]
    parts = [tensor.to_local().numel() for tensor in spread]
    mine = [p.to_local().numel() for p in run.net.parameters()]
    state = run.opt.state_dict()
    keys = [sorted(values) for values in state["state"].values()]
    is_dtensor = all(isinstance(tensor, DTensor) for tensor in spread)
    return is_dtensor, keys, parts, mine, [tensor.numel() for tensor in spread]


@each_run
def test_states_are_dtensors_of_which_each_rank_holds_its_part(make, dtype):
    results = ranks.run(4, measure_parts, make, dtype)
    alone = Run(make, dtype=dtype).windows(1).opt.state_dict()["state"]
    for is_dtensor, keys, parts, mine, _ in results:
        assert is_dtensor
        assert keys == [sorted(values) for values in alone.values()]
        assert sum(parts) == sum(mine) * len(parts) // len(mine)
    wholes = results[0][-1]
    assert [sum(parts) for parts in zip(*(r[2] for r in results), strict=True)] == wholes


def go_on(rank, make, dtype):
    """Two windows and two more: in one go, and loaded in between."""
    run = Run(make, "groups", dtype).windows(1)
    saved = run.saved()
    unbroken = run.windows(2).values()
    return unbroken, Run(make, "groups", dtype).load(*saved).windows(2).values()


@each_run
def test_a_loaded_wrapper_goes_on_bit_by_bit(make, dtype):
    for unbroken, resumed in ranks.run(2, go_on, make, dtype):
        assert_all_bit_equal(resumed, unbroken)


def load_whole(rank, make, dtype, layout, weights, state):
    """A state of one process, as it is here, and two windows later (bf16 adds up otherwise)."""
    run = Run(make, dtype=dtype)
    run.net.load_state_dict(weights)
    spread = Run(make, layout, dtype)
    for p, whole in zip(spread.net.parameters(), run.net.parameters(), strict=True):
        part = torch.distributed.tensor.distribute_tensor(whole.data, p.device_mesh, p.placements)
        p.data.copy_(part)
    spread.opt.load_state_dict(state, remap="as_is")
    return spread.values(), spread.windows(2).values()


@each_run
def test_the_state_of_one_process_is_cut(make, dtype):
    run = Run(make, dtype=dtype).windows(1)
    saved, now = run.saved(), run.values()
    later = run.windows(2).values()
    for loaded, trained in ranks.run(4, load_whole, make, dtype, "hsdp", *saved):
        assert_all_bit_equal(loaded, now)
        for got, want in zip(trained, later, strict=True) if dtype == torch.float64 else ():
            assert_close(got, want, num_roundings=80, magnitude=1.0)


def save_files(rank, folder):
    run = Run("adamw", "groups", BF16).windows(1)
    checkpoint.save(
        {"state": run.opt.state_dict(), "model": run.net.state_dict()}, checkpoint_id=folder
    )
    return run.values()


def load_files(rank, folder):
    run = Run("adamw", "hsdp" if dist.get_world_size() == 4 else "groups", BF16).windows(5, 1)
    found = {"state": run.opt.state_dict(), "model": run.net.state_dict()}
    checkpoint.load(found, checkpoint_id=folder)
    return run.load(
        found["model"], found["state"], remap="as_is"
    ).values(), run.opt.clock.update_step


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4)])
def test_files_of_torch_are_read_on_another_mesh(before, now, tmp_path):
    written = ranks.run(before, save_files, tmp_path)[0]
    for read, update_step in ranks.run(now, load_files, tmp_path):
        assert update_step == 2
        assert_all_bit_equal(read, written)


def keep_masters(rank):
    """Two updates by 256 and by a half, which bf16 does not add to 256."""
    net, ema = Slopes().to(BF16), EMA(0.5)
    fully_shard(net)
    opt = clocked(net, master_weights=True, ema=ema)
    for slope in (256, 0.5):
        opt.backward(net(5 * slope, slope))
        opt.step()
    with ema.swap(net):
        average = full(net.p.w)
    kept = full(opt.state_dict()["stepclock"]["ema"]["averages"][0])
    return full(net.p.w), full(opt.master_weight(net.p.w)), kept, average


def test_masters_and_averages_are_exact():
    for w, master, kept, average in ranks.run(4, keep_masters):
        assert_bit_equal(w, torch.full((5,), -256.0, dtype=BF16))
        assert_bit_equal(master, torch.full((5,), -256.5))
        assert_bit_equal(kept, torch.full((5,), -192.25))
        assert_bit_equal(average, torch.full((5,), -192.25).to(BF16))


def train_in_bf16(rank, layout):
    """FSDP2's own loop under a policy of mixed precision, and the wrapper: parameters of both."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    nets = [shard(build_model(torch.float32), layout, policy) for _ in range(2)]
    inner = torch.optim.SGD(nets[0].parameters(), lr=0.5)
    opt = clocked(nets[1], lr=0.5, gradient_accumulation_steps=2, max_grad_norm=0.05)
    torch.manual_seed(rank)
    for _ in range(3):
        for is_last, x in enumerate(torch.randn(2, 4, 7)):
            nets[0].set_requires_gradient_sync(bool(is_last))
            (nets[0](x).float().square().mean() / 2).backward()
            opt.backward(nets[1](x).float().square().mean())
            opt.step()
        norm = torch.nn.utils.clip_grad_norm_(nets[0].parameters(), 0.05)
        assert full(norm) > 0.05
        inner.step()
        inner.zero_grad()
    return [[full(p) for p in net.parameters()] for net in nets]


@pytest.mark.parametrize(("world", "layout"), [(2, "groups"), (4, "hsdp"), (4, "kept")])
def test_mixed_precision_is_that_of_the_plain_loop(world, layout):
    for plain, clocked_ in ranks.run(world, train_in_bf16, layout):
        for got, want in zip(clocked_, plain, strict=True):
            assert got.dtype == torch.float32
            assert_close(got, want, num_roundings=40, magnitude=1.0)


def step_muon(rank, is_clocked):
    torch.manual_seed(0)
    net = torch.nn.Linear(7, 5, bias=False)
    fully_shard(net)
    inner = torch.optim.Muon(net.parameters(), lr=0.1)
    opt = ClockedOptimizer(inner, model=net) if is_clocked else inner
    for _ in range(2):
        net(torch.ones(1, 7)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return full(net.weight)


def test_muon_steps_on_dtensors_as_it_does_alone():
    bare, clocked_ = (ranks.run(2, step_muon, is_clocked) for is_clocked in (False, True))
    assert_all_bit_equal(clocked_, bare)


def refuse(rank, why):
    net = shard_slopes("groups").to(BF16)
    if why == "fsdp1":
        net = FullyShardedDataParallel(Slopes(), device_id=torch.device("cpu"))
    options = {
        "fp32": {"accumulate_dtype": torch.float32},
        "group": {"process_group": ReducerOptions()},
    }
    opt = clocked(net, gradient_accumulation_steps=2, **options.get(why, {}))
    if why == "weight":
        opt.backward(net(float("nan"), 1), weight=0)
    opt.backward(net(1, 1))
    opt.step()
    opt.state_dict()


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("fp32", "RuntimeError: .*accumulate_dtype must be None"),
        ("group", "ValueError: .*process_group must be None where DDP or FSDP2"),
        ("fsdp1", "TypeError: .*got FullyShardedDataParallel; use .*fully_shard"),
        ("weight", "RuntimeError: .*a loss of weight 0 must be finite, got nan"),
        ("open", "RuntimeError: .*must be saved between two windows"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel:FutureWarning")
def test_what_cannot_work_is_refused(why, message):
    with pytest.raises(ranks.RankError, match=message):
        ranks.run(2, refuse, why, group_timeout=5)
