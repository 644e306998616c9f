"""Under DDP a window comes to what one process gets from all samples."""

import copy
from math import inf

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import parameter
from slope_scripts import m, run_script
from tolerance import assert_all_bit_equal
from torch.nn.parallel import DistributedDataParallel as DDP

from stepclock_ext import ClockedOptimizer, LossScale, ReducerOptions

each_world = pytest.mark.parametrize("world", [2, 4])
TINY = 1e-6  # MiB: many buckets
VIEW, STATIC = {"gradient_as_bucket_view": True}, {"static_graph": True}
UNUSED = {"find_unused_parameters": True}
KINDS = [{}, VIEW, UNUSED, VIEW | UNUSED, STATIC, VIEW | STATIC]


# ---- Windows: what counts, told by slopes. Rank r plays script r % 2. -------------------------


class Slopes(torch.nn.Module):
    """A loss in which `p` has slope a in all and `q` slope b; without one it takes no part."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.p, self.q = parameter(0.0, 0.0, dtype=dtype), parameter(0.0, dtype=dtype)

    def forward(self, a, b):
        terms = [slope * x.mean() for slope, x in ((a, self.p), (b, self.q)) if slope is not None]
        return sum(terms)

    def moved(self):
        return -self.p.sum().item(), -self.q.item()


def clocked(net, params=None, lr=1.0, **options):
    """SGD with lr 1 under a clock that knows the model."""
    inner = torch.optim.SGD(net.parameters() if params is None else params, lr=lr)
    return ClockedOptimizer(inner, model=net, **options)


def play(rank, scripts, kinds, options):
    """Where a script's micro steps, flushes and ends of epochs move two parameters."""
    told = []
    for kind in kinds:
        net = DDP(Slopes(), bucket_cap_mb=TINY, **kind)
        opt = clocked(net, **options)
        run_script(opt, net, scripts[rank % 2])
        told.append((*net.module.moved(), opt.clock.update_step, opt.clock.skipped_updates))
    return told


END, FLUSH = "end_epoch", "flush"
CARRY, ONES = {"tail": "carry"}, {"gradient_accumulation_steps": 1}
NOTHING = m(0, inf, inf)  # its loss is NaN
ONCE, TWICE = (6.0, 0.0, 1, 0), (12.0, 0.0, 2, 0)  # each window has a mean slope of 6
DYNAMIC = [kind for kind in KINDS if "static_graph" not in kind]
UNUSED_KINDS = [UNUSED, VIEW | UNUSED]
# name: (script of even ranks, script of odd ranks, kinds of DDP, options, result)
WINDOWS = {
    "weights differ": ([m(1, 8), m(1, 16)], [m(3, 8), m(3, 0)], KINDS, {}, ONCE),
    "weight 0 in the first": ([NOTHING, m(2, 8)], [m(1, 4), m(1, 4)], KINDS, {}, ONCE),
    "weight 0 in the last": ([m(2, 8), NOTHING], [m(1, 4), m(1, 4)], KINDS, {}, ONCE),
    "weight 0 in all": ([NOTHING] * 2, [m(1, 4), m(1, 8)], KINDS, {}, ONCE),
    "weight 0 everywhere": ([NOTHING] * 2, [NOTHING] * 2, KINDS, {}, (0.0, 0.0, 0, 0)),
    "plain backward": ([m(None, 4), m(None, 8)], [m(None, 4), m(None, 8)], KINDS, {}, ONCE),
    "two backwards first": ([[m(1, 4), m(1, 8)], m(1, 4)], [m(1, 8), m(4, 6)], DYNAMIC, {}, ONCE),
    "two backwards last": (*[[m(1, 4), [m(1, 4), m(2, 8)]]] * 2, DYNAMIC, {}, ONCE),
    "sum": ([m(1, 1)] * 2, [m(1, 5)] * 2, KINDS, {"reduction": "sum"}, ONCE),
    "flush": ([m(1, 4), FLUSH], [m(1, 8), FLUSH], KINDS, {}, ONCE),
    "flush of nothing": ([FLUSH], [FLUSH], KINDS, {}, (0.0, 0.0, 0, 0)),
    "tails": ([m(1, 6)] * 3 + [END], [m(1, 3), m(1, 9), m(2, 6), END], KINDS, {}, TWICE),
    "tail first": (
        [m(1, 8), END, *[m(1, 6)] * 2],
        [m(1, 4), END, *[m(1, 6)] * 2],
        KINDS,
        {},
        TWICE,
    ),
    "a tail of one": ([END], [m(1, 6), END], DYNAMIC, {}, ONCE),
    "dropped": (
        [m(1, 9), END, *[m(1, 6)] * 2],
        [END, *[m(1, 6)] * 2],
        DYNAMIC,
        {"tail": "drop"},
        ONCE,
    ),
    "carried": ([m(1, 8), END, m(1, 8)], [m(1, 4), END, m(1, 4)], KINDS, CARRY, ONCE),
    "one micro step": ([m(1, 8), m(0, 9)], [m(1, 4), m(2, 6)], KINDS, ONES, TWICE),
    "case 58": (
        [m(1, 1, None), m(1, None, 1)],
        [m(1, 3, None), m(1, None, 3)],
        UNUSED_KINDS,
        {},
        (1.0, 1.0, 1, 0),
    ),
    "early, one rank": (
        [m(1, 6, 4), m(1, 6, None)],
        [m(1, 6, None)] * 2,
        UNUSED_KINDS,
        {},
        (6.0, 1.0, 1, 0),
    ),
    "late, one rank": (
        [m(1, 6, None), m(1, 6, 4)],
        [m(1, 6, None)] * 2,
        UNUSED_KINDS,
        {},
        (6.0, 1.0, 1, 0),
    ),
    "early, in a tail": ([m(1, 6, 4), FLUSH], [m(1, 6, None), FLUSH], KINDS, {}, (6.0, 2.0, 1, 0)),
    "never": (*[[m(1, 6, None)] * 2] * 2, UNUSED_KINDS, {}, ONCE),
}


@each_world
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_counts_every_rank_by_its_weight(world, name):
    even, odd, kinds, options, expected = WINDOWS[name]
    kinds = kinds if world == 2 else kinds[-2:]
    options = {"gradient_accumulation_steps": 2, **options}
    for told in ranks.run(world, play, (even, odd), kinds, options, group_timeout=5):
        assert told == [expected] * len(kinds)


# ---- Beside the usual --------------------------------------------------------------------------


def skip_together(rank):
    """Ten windows of two micro steps or one, in three of which one rank overflows."""
    net = DDP(Slopes())
    opt = clocked(net, gradient_accumulation_steps=2, loss_scale=LossScale(init_scale=1024.0))
    skipped = []
    for window in range(10):
        before = copy.deepcopy(net.state_dict())
        for micro in range(1 if window % 4 == 3 else 2):
            overflows = window % 3 == 1 and (micro, rank) == (0, window % 2)
            opt.backward(net(inf if overflows else 1, 1))
            info = opt.step()
        info = info if info.updated or info.skipped else opt.flush()
        if info.skipped:
            assert_all_bit_equal(net.state_dict().values(), before.values())
        skipped.append(info.skipped)
    return skipped, opt.loss_scale.scale, opt.clock.state_dict(), net.module.moved()


def test_case_60_an_overflow_on_one_rank_skips_on_all_and_halves():
    first, second = ranks.run(2, skip_together, timeout=30)
    assert first == second
    assert first[0] == [window % 3 == 1 for window in range(10)]
    assert first[1:] == (128.0, first[2], (7.0, 7.0))


def sync_by_hand(rank):
    net = DDP(Slopes())
    opt = clocked(net)
    for _ in range(2):
        with net.no_sync():
            net(rank, 1).backward()
        net(4 * rank, 1).backward()
        opt.step()
    return net.module.moved()


def test_a_loop_that_accumulates_by_itself_goes_on_as_it_did():
    assert ranks.run(2, sync_by_hand) == [(5.0, 4.0)] * 2


class Around(torch.nn.Module):
    """The model as a part, since DDP leaves out what has a dot in its name."""

    def __init__(self):
        super().__init__()
        self.inner = Slopes()

    def forward(self, a, b):
        return self.inner(a, b)


def leave_out(rank, why, steps, num_micro):
    """Where the slopes 1 and 3 move a parameter that DDP does not reduce."""
    model, extra = Around(), parameter(0.0)
    left_out = extra if why == "outside" else model.inner.q
    left_out.requires_grad_(why != "frozen")
    if why == "ignored":
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["inner.q"])
    net = DDP(model)
    opt = clocked(net, [*net.parameters(), extra], gradient_accumulation_steps=steps)
    left_out.requires_grad_()
    for _ in range(num_micro):
        opt.backward(net(1, 1 + 2 * rank) + (1 + 2 * rank) * extra)
        opt.step()
    opt.flush()
    return -left_out.item()


@pytest.mark.parametrize("why", ["outside", "frozen", "ignored"])
@pytest.mark.parametrize(("steps", "num_micro"), [(1, 3), (3, 3), (3, 2)])
def test_parameters_that_ddp_does_not_reduce_are_averaged(why, steps, num_micro):
    updates = -(-num_micro // steps)
    assert ranks.run(2, leave_out, why, steps, num_micro) == [2.0 * updates] * 2


def train_in_pairs(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = DDP(Slopes(), process_group=pairs[rank // 2])
    opt = clocked(net, gradient_accumulation_steps=2)
    for _ in range(1 + 2 * (rank // 2)):  # a tail; a window and a tail
        opt.backward(net(10.0**rank, 1))
        opt.step()
    opt.end_epoch()
    return net.module.moved()


def test_a_group_of_some_ranks_trains_by_itself():
    assert ranks.run(4, train_in_pairs) == [(5.5, 1.0)] * 2 + [(1100.0, 2.0)] * 2


def stop_inside(rank, kind, discards):
    """Two windows of three; one is interrupted and goes on in another wrapper, or is repeated."""
    net = DDP(Slopes(), **kind)
    opt = clocked(net, gradient_accumulation_steps=3)
    for micro in range(6):
        if micro == 4 and discards:
            net(99, 99).backward()
            opt.discard()
            opt.backward(net(3 + rank, 1))
            opt.step()
        elif micro == 4:
            state, net = opt.state_dict(), DDP(copy.deepcopy(net.module), **kind)
            opt = clocked(net, gradient_accumulation_steps=3)
            opt.load_state_dict(state)
        opt.backward(net(micro + rank, 1))
        opt.step()
    return net.module.moved(), opt.clock.update_step


@pytest.mark.parametrize("kind", [{}, VIEW])
@pytest.mark.parametrize("discards", [False, True])
def test_a_window_is_saved_and_repeated(kind, discards):
    assert ranks.run(2, stop_inside, kind, discards) == [((6.0, 2.0), 2)] * 2


def refuse(rank, why):
    net = DDP(Slopes(torch.bfloat16))
    options = {
        "fp32": {"accumulate_dtype": torch.float32},
        "group": {"process_group": ReducerOptions()},
    }
    opt = clocked(net, gradient_accumulation_steps=2, **options.get(why, {}))
    for b in (1, None):
        opt.backward(net(1, b))
        opt.step()


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("fp32", "RuntimeError: .*accumulate_dtype must be None"),
        ("group", "ValueError: .*process_group must be None where DDP"),
        ("unused", "RuntimeError: .*got none of q; build DDP with"),
    ],
)
def test_what_cannot_work_is_refused(why, message):
    with pytest.raises(ranks.RankError, match=message):
        ranks.run(2, refuse, why, group_timeout=5)
