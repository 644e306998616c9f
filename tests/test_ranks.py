"""The harness of the tests with several processes."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run, spawn


def summed(rank, start):
    total = torch.tensor([float(rank + start)])
    dist.all_reduce(total)
    return total


def process_and_draw(rank):
    return os.getpid(), torch.rand(2), torch.get_num_threads(), dist.get_world_size()


def fails(rank, failing):
    if rank in failing:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


def sleeps(rank, sleeping):
    if rank == sleeping:
        time.sleep(60)


def dies(rank):
    os._exit(7)


def warns(rank):
    warnings.warn("beware", stacklevel=1)


def waits_for_the_other(rank, folder):
    dist.barrier()
    (folder / str(rank)).touch()
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_reduce_and_results_come_in_their_order(world_size):
    expected = sum(range(10, 10 + world_size))
    assert run(world_size, summed, start=10) == [torch.tensor([float(expected)])] * world_size


def test_processes_are_kept_and_each_call_starts_from_the_same_seed():
    first, second = run(2, process_and_draw), run(2, process_and_draw)
    for rank in range(2):
        assert first[rank][0] == second[rank][0]
        assert torch.equal(first[rank][1], second[rank][1])
        assert first[rank][2:] == (1, 2)


def test_the_errors_of_all_ranks_come_back_and_the_next_call_works():
    with pytest.raises(RankError, match=r"rank 1: .*\n(.*\n)*ValueError: no luck on 1") as caught:
        run(2, fails, [0, 1])
    assert "no luck on 0" in caught.value.errors[0]
    assert run(2, summed, 0) == [torch.tensor([1.0])] * 2


def test_the_rank_that_failed_first_comes_first():
    with pytest.raises(RankError) as caught:
        run(2, fails, [1])
    assert list(caught.value.errors) == [1, 0]


def test_a_stuck_rank_is_named_with_its_line():
    with pytest.raises(RankError, match=r"in sleeps") as caught:
        run(2, sleeps, 1, timeout=2)
    assert list(caught.value.errors) == [1]
    assert run(2, summed, 0) == [torch.tensor([1.0])] * 2


def test_a_dead_rank_is_named_with_its_exit_code():
    with pytest.raises(RankError, match="rank 0: died with exit code 7"):
        run(1, dies)


def test_a_warning_is_an_error_where_the_caller_says_so():
    with pytest.raises(RankError, match="UserWarning: beware"):
        run(1, warns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(1, warns) == [None]


def test_world_size_is_checked():
    with pytest.raises(ValueError, match="world_size must be 1 to 4, got 5"):
        run(5, summed, 0)


def test_a_spawned_rank_can_be_killed_and_the_other_tells_its_error(tmp_path):
    with spawn(2, waits_for_the_other, tmp_path) as ranks:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        ranks.kill(1)
        outcomes = ranks.wait(10)
    assert outcomes[1] == (-9, "died with exit code -9")
    assert outcomes[0][0] == 1
    assert "RuntimeError" in outcomes[0][1]


def test_spawned_ranks_return_their_results():
    with spawn(2, summed, 0) as ranks:
        assert ranks.wait(30) == {rank: (0, torch.tensor([1.0])) for rank in range(2)}


def test_waiting_for_a_stuck_spawned_rank_raises():
    with (
        spawn(2, sleeps, 0) as ranks,
        pytest.raises(RankError, match=r"rank 0: stuck\n(.*\n)*.*in sleeps"),
    ):
        ranks.wait(2)
