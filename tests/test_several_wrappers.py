"""Two wrappers in one process: on one group of ranks, and with parameters that both have."""

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import clocked_sgd, parameter
from torch.nn.parallel import DistributedDataParallel

from stepclock_ext import ClockedOptimizer, ReducerOptions


def actor_and_critic(rank, disturbs):
    """Both run backward before either steps; rank 1 has no items for the critic."""
    actor, critic = parameter(0.0), parameter(0.0)
    group = dist.group.WORLD
    opts = [clocked_sgd(w, process_group=group) for w in (critic, actor)]
    for _ in range(2):  # the first window reduces when the ranks meet, the second in backward
        opts[0].backward(critic * 99.0, weight=0 if rank == 1 else 1)
        opts[1].backward(actor * (1.0 - 2.0 * rank))
        if disturbs:  # the user's own collectives are nobody's but theirs
            dist.all_reduce(torch.ones(3))
        for opt in opts:
            opt.step()
    return actor.item(), critic.item()


@pytest.mark.parametrize("disturbs", [False, True])
def test_wrappers_on_one_group_keep_their_gradients_apart(disturbs):
    assert ranks.run(2, actor_and_critic, disturbs) == [(0.0, -198.0)] * 2


def share_a_parameter(rank, group):
    """Norms of two wrappers that have one parameter in common, trained in turns."""
    heads = [parameter(1.0), parameter(1.0)]
    shared = parameter(1.0)
    opts = [clocked_sgd(head, shared, lr=0.0, process_group=group) for head in heads]
    norms = []
    for _ in range(2):
        for opt, head in zip(opts, heads, strict=True):
            opt.backward(3.0 * head + 4.0 * shared)
            norms.append(opt.step().grad_norm)
    return norms


def test_a_shared_parameter_s_gradient_goes_to_the_wrapper_that_ran_backward():
    assert ranks.run(2, share_a_parameter, ReducerOptions()) == [[pytest.approx(5.0)] * 4] * 2


def test_fp32_sums_of_a_shared_parameter_go_to_the_wrapper_that_ran_backward():
    heads = [parameter(1.0, dtype=torch.bfloat16) for _ in range(2)]
    shared = parameter(1.0, dtype=torch.bfloat16)
    opts = [clocked_sgd(h, shared, lr=0.0, gradient_accumulation_steps=2) for h in heads]
    for opt, head in zip(opts, heads, strict=True):
        for _ in range(2):
            opt.backward(3.0 * head + 4.0 * shared)
            info = opt.step()
        assert info.grad_norm == pytest.approx(5.0)


def test_a_plain_backward_between_wrappers_that_share_is_refused():
    head, shared = (parameter(1.0, dtype=torch.bfloat16) for _ in range(2))
    first = clocked_sgd(head, shared, gradient_accumulation_steps=2)
    clocked_sgd(shared, gradient_accumulation_steps=2)
    (3.0 * head + 4.0 * shared).backward()
    with pytest.raises(RuntimeError, match=r"must call opt\.backward\(loss\), got a plain one"):
        first.step()


def step_inside_no_sync(rank, leaves):
    """The usual loop of people whose last micro step is outside of no_sync, or inside as well."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = ClockedOptimizer(sgd, model=model, gradient_accumulation_steps=2)
    for micro in range(6):
        x = torch.full((2,), 1.0 + rank + micro)
        if leaves and micro % 2:
            opt.backward(model(x).sum())
            opt.step()
            continue
        with model.no_sync():
            opt.backward(model(x).sum())
            opt.step()
    return [p.detach().clone() for p in model.parameters()], opt.clock.update_step


@pytest.mark.parametrize("leaves", [True, False])
def test_a_step_inside_no_sync_leaves_no_window_unreduced(leaves):
    first, second = ranks.run(2, step_inside_no_sync, leaves)
    assert all(map(torch.equal, first[0], second[0]))
    assert first[1] == second[1] == 3
    weight = first[0][0]
    torch.manual_seed(0)
    started = torch.nn.Linear(2, 1).weight.detach()
    slopes = sum(1.5 + micro for micro in range(6)) / 2  # the mean over ranks, twice a window
    torch.testing.assert_close(weight, started - 0.1 * slopes)
