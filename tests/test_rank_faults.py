"""A rank that is killed, is slow or ends early: an error that names it, and never a hang."""

import re
import time

import pytest
import ranks
import torch
from torch.nn.parallel import DistributedDataParallel

from stepclock_ext import ClockedOptimizer, ReducerOptions

TIMEOUT = 3.0  # of the group, in seconds
KINDS = ["own", "zero1", "ddp"]


def make_run(kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    net = DistributedDataParallel(model) if kind == "ddp" else model
    options = ReducerOptions(shard_states=kind == "zero1")
    given = {"model": net} if kind == "ddp" else {"process_group": options}
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    return net, ClockedOptimizer(adamw, gradient_accumulation_steps=2, **given)


def run_micro_step(net, opt):
    opt.backward(net(torch.ones(3)).sum())
    return opt.step()


def train_until_told(rank, kind, folder, *, stops):
    """Both ranks run 3 windows; then one stops in the 4th, after a file says that it is there."""
    net, opt = make_run(kind)
    for _ in range(6):
        run_micro_step(net, opt)
    if rank == 1:
        run_micro_step(net, opt)
        (folder / "there").touch()
        time.sleep(stops)
    start = time.monotonic()
    try:
        run_micro_step(net, opt)
        run_micro_step(net, opt)
    except RuntimeError as error:
        return str(error), time.monotonic() - start, opt.clock.update_step
    return "no error", time.monotonic() - start, opt.clock.update_step


def wait_for(file, seconds=60.0):
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"{file} did not come"
        time.sleep(0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_when_a_rank_is_killed_the_others_name_it_and_the_update(kind, tmp_path):
    arguments = (train_until_told, kind, tmp_path)
    with ranks.spawn(3, *arguments, stops=600.0, group_timeout=30.0) as run:
        wait_for(tmp_path / "there")
        time.sleep(0.3)  # the others have come to the end of their window by now
        run.kill(1)
        start = time.monotonic()
        ended = run.wait(60)
        assert time.monotonic() - start < 30

    assert ended[1][0] == -9
    for rank in (0, 2):
        said, _, updates = ended[rank][1]
        assert "update 4" in said
        assert re.search(r"ranks? 1 did not come", said), said
        assert "restart from the last checkpoint" in said
        assert updates == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_late_beyond_the_timeout_is_named(kind, tmp_path):
    arguments = (train_until_told, kind, tmp_path)
    with ranks.spawn(2, *arguments, stops=4 * TIMEOUT, group_timeout=TIMEOUT) as run:
        ended = run.wait(60)

    said, seconds, updates = ended[0][1]
    assert "update 4" in said
    assert re.search(r"rank 1 did not come", said), said
    assert f"within {TIMEOUT:g} s" in said
    assert seconds < TIMEOUT + 5
    assert updates == 3
    assert ended[1][1][0] != "no error"


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_late_within_the_timeout_is_waited_for(kind, tmp_path):
    arguments = (train_until_told, kind, tmp_path)
    with ranks.spawn(2, *arguments, stops=1.0, group_timeout=30.0) as run:
        ended = run.wait(60)

    assert [ended[rank][1][0] for rank in (0, 1)] == ["no error", "no error"]
    assert ended[0][1][2] == ended[1][1][2] == 4


def end_early(rank, kind, lengths):
    """An epoch of other lengths on each rank, and one of equal length after it."""
    net, opt = make_run(kind)
    try:
        for epoch in range(2):
            for _ in range(lengths[rank] if epoch == 0 else 3):
                run_micro_step(net, opt)
            opt.end_epoch()
    except RuntimeError as error:
        return str(error)
    return [p.detach().clone() for p in net.parameters()], opt.clock.state_dict()


@pytest.mark.parametrize("kind", ["own", "zero1"])
@pytest.mark.parametrize("lengths", [(2, 6), (6, 2), (1, 6), (5, 2), (0, 3), (7, 6)])
def test_our_reduction_goes_on_when_a_loader_ends_early(kind, lengths):
    first, second = ranks.run(2, end_early, kind, lengths)

    assert all(map(torch.equal, first[0], second[0]))
    assert first[1] == second[1]
    windows = -(-max(lengths) // 2)
    assert first[1]["update_step"] == windows + 2
    assert first[1]["epoch"] == 2
    assert first[1]["weight_seen"] == sum(lengths) + 6


@pytest.mark.parametrize("lengths", [(2, 6), (5, 2)])
def test_under_ddp_a_loader_that_ends_early_is_named_within_the_timeout(lengths):
    with ranks.spawn(2, end_early, "ddp", lengths, group_timeout=TIMEOUT) as run:
        start = time.monotonic()
        ended = run.wait(60)
        assert time.monotonic() - start < 40

    early = lengths.index(2)
    assert "the end of epoch 1" in ended[early][1]
    assert f"rank {1 - early} " in ended[early][1]
    assert isinstance(ended[1 - early][1], str)


def fail_in_backward(rank, fails_at):
    """An error of one rank's own, in a window's first or last micro step."""
    net, opt = make_run("own")
    run_micro_step(net, opt)
    run_micro_step(net, opt)
    for index in range(2):
        loss = net(torch.ones(3)).sum()
        if rank == 1 and index == fails_at:
            net.weight.register_hook(_raise)
            with pytest.raises(MemoryError):
                opt.backward(loss)
            if fails_at == 0:
                opt.discard()
                return "discarded"
            with pytest.raises(RuntimeError, match="other ranks must not have gradients"):
                opt.discard()
            return "refused"
        opt.backward(loss)
        try:
            opt.step()
        except RuntimeError as error:
            return str(error)
    return "no error"


def _raise(grad):
    raise MemoryError("out of memory")


@pytest.mark.parametrize(("fails_at", "said"), [(0, "discarded"), (1, "refused")])
def test_a_backward_that_fails_on_one_rank_is_an_error_on_the_others(fails_at, said):
    with ranks.spawn(2, fail_in_backward, fails_at, group_timeout=TIMEOUT) as run:
        ended = run.wait(60)

    assert ended[1][1] == said
    assert "update 2" in ended[0][1]
