"""Every rank begins with the same parameters, in a group that this process is in."""

from datetime import timedelta
from math import inf

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import clocked_sgd, parameter
from tensors import DTYPES, dtype_name

from stepclock_ext import ClockedOptimizer, LossScale, ReducerOptions
from stepclock_ext.parameter_agreement import hash_tensor

SOON = {"timeout": 10.0, "group_timeout": 3.0}  # where ranks may wait for each other for ever
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


def message(make):
    """Its ValueError as a text; None where it raises none."""
    try:
        make()
    except ValueError as e:
        return str(e)
    return None


# ---- The same parameters -----------------------------------------------------------------------


def start_apart(rank, seeds, options):
    torch.manual_seed(seeds[rank])
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model[1].running_mean.fill_(rank)  # buffers are no parameters
    model.register_buffer("mask", torch.tensor([rank == 0]))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return message(lambda: ClockedOptimizer(inner, model=model, process_group=options)), [
        p.detach() for p in model.parameters()
    ]


@pytest.mark.parametrize(
    ("seeds", "who"), [([0, 1], [1]), ([0, 0, 5, 0], [2]), ([0, 1, 0, 1], [1, 3])]
)
def test_ranks_that_begin_apart_are_refused_on_all_of_them(seeds, who):
    for said, _ in ranks.run(len(seeds), start_apart, seeds, ReducerOptions()):
        assert said == (
            "ClockedOptimizer: every rank must begin with the same parameters, got others than "
            f"rank 0 on ranks {who}, first in '0.weight'; seed every rank alike, load the same "
            "state, or pass ReducerOptions(broadcast_parameters=True)"
        )


def test_buffers_may_differ():
    assert [said for said, _ in ranks.run(2, start_apart, [3, 3], ReducerOptions())] == [None] * 2


@pytest.mark.parametrize("shard", [False, True])
def test_broadcast_parameters_gives_all_ranks_those_of_rank_0(shard):
    options = ReducerOptions(broadcast_parameters=True, shard_states=shard)
    results = ranks.run(4, start_apart, [3, 1, 2, 9], options)
    alone = start_apart(0, [3], None)[1]
    for said, params in results:
        assert said is None
        assert all(map(torch.equal, params, alone))


def broadcast_one(rank, dtype):
    values = torch.arange(24).reshape(2, 3, 2, 2).to(dtype) * (1 if rank == 0 else -1)
    params = [
        torch.nn.Parameter(values.contiguous(memory_format=torch.channels_last)),
        torch.nn.Parameter(values[0, 0].t()),
        torch.nn.Parameter(values[1, 1, 1, 1]),
        torch.nn.Parameter(values[:0]),
    ]
    before = [p.stride() for p in params]
    clocked_sgd(*params, process_group=ReducerOptions(broadcast_parameters=True))
    assert [p.stride() for p in params] == before
    return [p.detach() for p in params]


@each_dtype
def test_every_dtype_and_layout_is_broadcast(dtype):
    first, second = ranks.run(2, broadcast_one, dtype)
    assert all(map(torch.equal, first, second))
    assert first[0].flatten()[-1] == 23


def start_with(rank, shapes, options):
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes[rank]]
    return message(lambda: clocked_sgd(*params, process_group=options))


@pytest.mark.parametrize("broadcasts", [False, True])
def test_another_number_of_parameters_is_refused_on_all_ranks(broadcasts):
    options = ReducerOptions(broadcast_parameters=broadcasts)
    for said in ranks.run(2, start_with, [[3], [3, 4]], options, **SOON):
        assert "got [1, 2] parameters on ranks 0 to 1" in said


@pytest.mark.parametrize("broadcasts", [False, True])
@pytest.mark.parametrize("shapes", [[[3], [4]], [[(2, 3)], [(3, 2)]]], ids=["size", "shape"])
def test_other_shapes_are_refused_on_all_ranks(shapes, broadcasts):
    options = ReducerOptions(broadcast_parameters=broadcasts)
    for said in ranks.run(2, start_with, shapes, options, **SOON):
        assert "first in 'group 0, parameter 0'" in said


# ---- The hash ----------------------------------------------------------------------------------


@each_dtype
def test_the_hash_tells_values_and_their_order(dtype):
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    swapped, other = values.clone(), values.clone()
    swapped[[17, 900]] = swapped[[900, 17]]
    other[-1] = -other[-1]
    hashes = [hash_tensor(t) for t in (values, swapped, other, values[:-1], values.flip(0))]
    assert len(set(hashes)) == 5
    assert all(0 <= number < 2**64 for number in hashes)
    assert hash_tensor(values.clone()) == hashes[0]


def test_the_hash_of_many_blocks_tells_where_a_value_lies():
    values = torch.zeros(2**20 + 5)
    hashes = set()
    for place in (0, 5, 2**20 - 1, 2**20, 2**20 + 4):
        values[place] = 1.0
        hashes.add(hash_tensor(values))
        values[place] = 0.0
    assert len(hashes) == 5


def test_the_hash_is_of_values_and_not_of_their_layout():
    values = torch.randn(4, 3, 2, 2)
    assert hash_tensor(values.contiguous(memory_format=torch.channels_last)) == hash_tensor(values)
    assert hash_tensor(torch.zeros(0)) == hash_tensor(torch.zeros(0, 3)) == 0
    assert hash_tensor(torch.tensor(1.0)) != hash_tensor(torch.tensor(2.0))


# ---- Options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "options", "says"),
    [
        (TypeError, {"bucket_cap_mb": "25"}, "bucket_cap_mb must be a number, got '25'"),
        (TypeError, {"bucket_cap_mb": True}, "bucket_cap_mb must be a number, got True"),
        (ValueError, {"bucket_cap_mb": 0}, "bucket_cap_mb must be positive, got 0; 25 is usual"),
        (ValueError, {"bucket_cap_mb": -1.0}, "bucket_cap_mb must be positive, got -1.0"),
        (ValueError, {"bucket_cap_mb": inf}, "bucket_cap_mb must be positive, got inf"),
        (ValueError, {"bucket_cap_mb": float("nan")}, "bucket_cap_mb must be positive, got nan"),
        (TypeError, {"shard_states": 1}, "shard_states must be True or False, got 1"),
        (TypeError, {"broadcast_parameters": None}, "broadcast_parameters must be True or False"),
        (TypeError, {"timeout": 30}, r"must be a timedelta, got 30; pass timedelta\(seconds"),
        (ValueError, {"timeout": timedelta()}, "timeout must be positive, got 0:00:00"),
    ],
)
def test_options_are_checked_at_once(error, options, says):
    with pytest.raises(error, match=f"ReducerOptions: .*{says}"):
        ReducerOptions(**options)


@pytest.mark.parametrize("group", [ReducerOptions(), "world"])
def test_a_group_needs_torch_distributed(group):
    with pytest.raises(
        RuntimeError, match=r"initialised; call torch.*init_process_group\(\) first"
    ):
        clocked_sgd(parameter(1.0), process_group=group)


SHARDED = {"process_group": ReducerOptions(shard_states=True)}


def refused_beside(rank, case):
    """What is said where an optimizer, a group or a gradient cannot go with the options."""
    p, options = parameter(1.0, 1.0), {"process_group": ReducerOptions()}
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding.weight.data.zero_()
    inner, options = {
        "LBFGS": (torch.optim.LBFGS([p]), options),
        "Adagrad": (torch.optim.Adagrad([p]), SHARDED),
        "holes": (torch.optim.SGD([torch.nn.Parameter(torch.zeros(4, 6)[:, :3])]), SHARDED),
        "no group": (torch.optim.SGD([p]), {"process_group": "world"}),
        "sparse": (torch.optim.SGD(embedding.parameters()), options),
    }[case]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        opt = ClockedOptimizer(inner, **options)
        opt.backward(embedding(torch.tensor([1])).sum())
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("LBFGS", "process_group must be None with LBFGS, and model no DDP or FSDP2"),
        (
            "Adagrad",
            "must go with Adam, AdamW, SGD, got Adagrad; use one of these, or leave it out",
        ),
        ("holes", "shard_states=True must go with parameters without holes in their memory"),
        ("no group", "must be a ProcessGroup, ReducerOptions or None, got 'world'"),
        ("sparse", "gradients must be dense with process_group=, got a sparse one of shape (4, 2)"),
    ],
)
def test_what_does_not_go_with_a_group_is_refused(case, says):
    assert all(says in said for said in ranks.run(2, refused_beside, case))


def start_with_options(rank, name, values):
    options = {"process_group": ReducerOptions(), name: values[rank % 2]}
    return message(lambda: clocked_sgd(parameter(1.0), **options))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gradient_accumulation_steps", [1, 2]),
        ("max_grad_norm", [1.0, None]),
        ("loss_scale", [8.0, LossScale(8.0)]),
        ("tail", ["drop", "flush"]),
    ],
)
def test_an_option_that_differs_is_refused_on_all_ranks(name, values):
    for rank, said in enumerate(ranks.run(4, start_with_options, name, values)):
        assert f"{name} must be the same on all ranks, got {values[rank % 2]!r} on " in said
        assert "ranks [1, 3] have others than rank 0" in said


# ---- Groups of some ranks ----------------------------------------------------------------------


def train_in_a_subgroup(rank, is_local, members, shard):
    """What the members come to; the others go on with something else."""
    if is_local and rank not in members:
        return None
    group = dist.new_group(members, use_local_synchronization=is_local)
    w = parameter(0.0, 0.0)
    options = ReducerOptions(group, shard_states=shard, broadcast_parameters=True)
    if rank not in members:
        return message(lambda: clocked_sgd(w, process_group=options))
    opt = clocked_sgd(w, process_group=options)
    for slope in (1.0, 2.0):
        opt.backward(2 * slope * (1 + rank) * w.mean())
        opt.step()
    return w.tolist()


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("members", [[0, 1], [1, 3], [2, 1, 0]])
@pytest.mark.parametrize("shard", [False, True])
def test_a_part_of_the_ranks_trains_alone(is_local, members, shard):
    results = ranks.run(4, train_in_a_subgroup, is_local, members, shard, **SOON)
    mean = sum(1 + rank for rank in members) / len(members)
    for rank, result in enumerate(results):
        if rank in members:
            assert result == [-3 * mean] * 2
        else:
            assert result is None if is_local else "must hold this process" in result


def train_in_two_groups(rank):
    """Two pairs that train side by side, each with its own wrapper."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    w = parameter(0.0)
    opt = clocked_sgd(w, process_group=pairs[rank // 2])
    for _ in range(1 + rank // 2):
        opt.backward(w * rank)
        opt.step()
    return w.item()


def test_two_groups_train_side_by_side():
    assert ranks.run(4, train_in_two_groups) == [-0.5, -0.5, -5.0, -5.0]


def train_alone(rank, shard):
    group = [dist.new_group([0]), dist.new_group([1])][rank]
    w = parameter(0.0)
    opt = clocked_sgd(w, process_group=ReducerOptions(group, shard_states=shard))
    opt.backward(w * (1 + rank))
    return opt.step().updated, w.item()


@pytest.mark.parametrize("shard", [False, True])
def test_a_group_of_one_trains_alone(shard):
    assert ranks.run(2, train_alone, shard) == [(True, -1.0), (True, -2.0)]
