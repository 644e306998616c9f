"""Under FSDP2 a window comes to what one process gets from all samples."""

from functools import lru_cache, partial

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import parameter
from slope_scripts import m, run_script
from tolerance import assert_all_bit_equal, assert_close
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stepclock_ext import EMA, ClockedOptimizer

each_world = pytest.mark.parametrize("world", [2, 4])


def full(tensor):
    """The whole tensor. Collective where it is spread; gloo sends no int16, as remainders are."""
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach().clone()
    sent = tensor.int() if tensor.dtype == torch.int16 else tensor
    return sent.full_tensor().detach().to(tensor.dtype, copy=True)


# ---- Windows: what counts, told by slopes. Rank r plays script r % 2. -------------------------


class Slope(torch.nn.Module):
    """A parameter that a loss depends on with a known slope."""

    def __init__(self, size):
        super().__init__()
        self.w = parameter(*[0.0] * size) if size > 1 else torch.nn.Parameter(torch.zeros(1))

    def forward(self, slope):
        return slope * self.w.mean()


class Slopes(torch.nn.Module):
    """A loss in which `p` has slope a in all and `q` slope b; without one it takes no part."""

    def __init__(self):
        super().__init__()
        self.p, self.q = Slope(5), Slope(1)

    def forward(self, a, b):
        terms = [layer(slope) for slope, layer in ((a, self.p), (b, self.q)) if slope is not None]
        return sum(terms)

    def moved(self):
        return tuple(-full(p).sum().round(decimals=5).item() for p in (self.p.w, self.q.w))


def make_mesh(kind):
    return _make_hsdp(dist.group.WORLD) if kind == "hsdp" else None


@lru_cache
def _make_hsdp(group):
    """One mesh a process group: DTensor keeps meshes, and finds their groups again by number."""
    return init_device_mesh("cpu", (2, group.size() // 2), mesh_dim_names=("r", "s"))


def shard_slopes(kind):
    net, mesh = Slopes(), make_mesh(kind)
    for part in (net.p, net.q) if kind != "one group" else ():
        fully_shard(part, mesh=mesh, reshard_after_forward=kind != "kept")
    fully_shard(net, mesh=mesh)
    return net


def clocked(net, lr=1.0, **options):
    return ClockedOptimizer(torch.optim.SGD(net.parameters(), lr=lr), model=net, **options)


def play(rank, scripts, kinds, options):
    """Where a script's micro steps, flushes and ends of epochs move two parameters."""
    told = []
    make_mesh("hsdp")  # before the groups of any wrapper, so that its groups have the same numbers
    for kind in kinds:
        net = shard_slopes(kind)
        opt = clocked(net, **options)
        run_script(opt, net, scripts[rank % 2])
        told.append((*net.moved(), opt.clock.update_step, opt.clock.skipped_updates))
    return told


KINDS = {2: ["one group", "kept"], 4: ["groups", "hsdp"]}  # by world size
END, FLUSH, DISCARD = "end_epoch", "flush", "discard"
NOTHING = m(0, 99, 99)
ONCE, TWICE = (6.0, 0.0, 1, 0), (12.0, 0.0, 2, 0)  # each window has a mean slope of 6
ONES = {"gradient_accumulation_steps": 1}
# name: (script of even ranks, script of odd ranks, options, result)
WINDOWS = {
    "weights differ": ([m(1, 8), m(1, 16)], [m(3, 8), m(3, 0)], {}, ONCE),
    "weight 0 in the first": ([NOTHING, m(2, 8)], [m(1, 4), m(1, 4)], {}, ONCE),
    "weight 0 in the last": ([m(2, 8), NOTHING], [m(1, 4), m(1, 4)], {}, ONCE),
    "weight 0 in all": ([NOTHING] * 2, [m(1, 4), m(1, 8)], {}, ONCE),
    "weight 0 everywhere": ([NOTHING] * 2, [NOTHING] * 2, {}, (0.0, 0.0, 0, 0)),
    "plain backward": ([m(None, 4), m(None, 8)], [m(None, 4), m(None, 8)], {}, ONCE),
    "two backwards first": (*[[[m(1, 4), m(1, 8)], m(2, 6)]] * 2, {}, ONCE),
    "two backwards last": (*[[m(1, 4), [m(1, 4), m(2, 8)]]] * 2, {}, ONCE),
    "sum": ([m(1, 1)] * 2, [m(1, 5)] * 2, {"reduction": "sum"}, ONCE),
    "flush": ([m(1, 4), FLUSH], [m(1, 8), FLUSH], {}, ONCE),
    "flush of nothing": ([FLUSH], [FLUSH], {}, (0.0, 0.0, 0, 0)),
    "flush without weight": ([NOTHING, FLUSH, *[m(1, 6)] * 2], [m(2, 6), FLUSH, *[m(1, 6)] * 2], {},
                             TWICE),
    "tails": ([m(1, 6)] * 3 + [END], [m(1, 3), m(1, 9), m(2, 6), END], {}, TWICE),
    "tail first": ([m(1, 8), END, *[m(1, 6)] * 2], [m(1, 4), END, *[m(1, 6)] * 2], {}, TWICE),
    "dropped": (*[[m(1, 9), END, *[m(1, 6)] * 2]] * 2, {"tail": "drop"}, ONCE),
    "carried": ([m(1, 8), END, m(1, 8)], [m(1, 4), END, m(1, 4)], {"tail": "carry"}, ONCE),
    "discarded": (*[[m(1, 9), DISCARD, m(1, 8), m(1, 4)]] * 2, {}, ONCE),
    "discarded, flushed": (*[[m(1, 9), DISCARD, m(1, 6), FLUSH]] * 2, {}, ONCE),
    "one micro step": ([m(1, 8), m(0, 9)], [m(1, 4), m(2, 6)], ONES, TWICE),
    "case 58": ([m(1, 1, None), m(1, None, 1)], [m(1, 3, None), m(1, None, 3)], {},
                (1.0, 1.0, 1, 0)),
    "early, in a tail": ([m(1, 6, 2), FLUSH], [m(1, 6, 2), FLUSH], {}, (6.0, 2.0, 1, 0)),
    "not in a tail": (*[[m(1, 6, None), FLUSH]] * 2, {}, ONCE),
    "never": (*[[m(1, 6, None)] * 2] * 2, {}, ONCE),
}  # fmt: skip


@each_world
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_counts_every_rank_by_its_weight(world, name):
    even, odd, options, expected = WINDOWS[name]
    options = {"gradient_accumulation_steps": 2, **options}
    for told in ranks.run(world, play, (even, odd), KINDS[world], options, group_timeout=5):
        assert told == [expected] * 2


# ---- Training: as one process that goes through the samples of all ranks -----------------------


class OwnAdamW(torch.optim.AdamW):
    """A user's subclass: it has no fused rule."""


def hooked(params):
    inner = torch.optim.AdamW(params, lr=0.01)
    inner.register_step_post_hook(lambda *_: None)
    return inner


def two_optimizers(params):
    layers = list(params)
    return [torch.optim.SGD(layers[:3], lr=0.1), torch.optim.AdamW(layers[3:], lr=0.01)]


MAKERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "subclass": partial(OwnAdamW, lr=0.01),
    "hooked": hooked,
    "several": two_optimizers,
}


def build_model(dtype=torch.float64):
    """Layers of 5, 3 and 1 rows: of some, a rank has none."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(7, 5), torch.nn.Linear(5, 3), torch.nn.Linear(3, 1)]
    return torch.nn.Sequential(
        layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2]
    ).to(dtype)


def shard(model, layout, policy=None):
    """Spreads the model by one of LAYOUTS."""
    options = {"mp_policy": policy or MixedPrecisionPolicy(), "mesh": make_mesh(layout)}
    if layout in ("groups", "kept", "hsdp"):
        for layer in model[::2]:
            fully_shard(layer, reshard_after_forward=layout != "kept", **options)
    if layout == "beside":
        fully_shard(model[2], **options)
    elif layout == "meshes":
        for layer, mesh in zip(model[::2], [None, make_mesh("hsdp"), None], strict=True):
            fully_shard(layer, **options | {"mesh": mesh})
    else:
        ignored = {model[0].bias, model[4].weight} if layout == "ignored" else None
        fully_shard(model, ignored_params=ignored, **options)
    return model


LAYOUTS = ["one group", "groups", "kept", "hsdp", "ignored", "beside", "meshes"]
LENGTHS = [2, 3, 1]  # of windows one after another, in micro steps; then a tail of 3


def train(rank, world, make, layout=None):
    """All that training comes to; without a layout alone, over all ranks' samples in turn."""
    here, ema = [rank] if layout else range(world), EMA(0.5)
    net = shard(build_model(), layout) if layout else build_model()
    inputs, sample, infos = torch.randn(12, 4, 7).double(), 0, []
    inner = MAKERS[make](net.parameters())
    first = inner[0] if isinstance(inner, list) else inner
    scheduler = torch.optim.lr_scheduler.StepLR(first, step_size=1, gamma=0.5)
    options = {"max_grad_norm": 0.1, "ema": ema, "loss_scale": 256.0, "model": net}
    opt = ClockedOptimizer(inner, schedulers=[scheduler], **options)
    for steps in [*LENGTHS, 9]:
        opt.gradient_accumulation_steps = steps * len(here)
        for _ in range(min(steps, 3)):
            for index in [(sample + r) % 12 for r in here]:
                opt.backward(net(inputs[index]).square().mean(), weight=1 + index % 3)
                infos.append(opt.step())
            sample += world
    infos.append(opt.end_epoch())
    with ema.swap(net):
        averages = [full(p) for p in net.parameters()]
    told = [(i.loss, i.grad_norm, i.clipped_norm, *i.lr) for i in infos if i.updated]
    told = torch.tensor(told, dtype=torch.float64)
    return [*map(full, net.parameters()), *averages, told], opt.clock.weight_seen


CASES = [(2, "groups", make) for make in MAKERS] + [(4, name, "adamw") for name in LAYOUTS]
CASES += [(4, "hsdp", "hooked"), (4, "hsdp", "several"), (2, "ignored", "hooked")]


@pytest.mark.parametrize(("world", "layout", "make"), CASES)
def test_training_equals_that_of_one_process(world, layout, make):
    expected, weight = train(0, world, make)
    results = ranks.run(world, train, world, make, layout)
    for values, seen in results:
        assert_all_bit_equal(values, results[0][0])
        assert seen == weight
    assert len(expected[-1]) == len(LENGTHS) + 1
    for got, want in zip(results[0][0], expected, strict=True):
        assert_close(got, want, num_roundings=20 * world, magnitude=1.0)
