"""torchrun restarts a job whose rank was killed: it ends as if nothing had happened, to the bit."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
from joint_run import JointRun, assert_same
from restart_run import END, REDUCERS, SAVE_EVERY
from tolerance import assert_bit_equal

WORLD = 2
SCRIPT = Path(__file__).with_name("restart_run.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """What a job has left that was killed once."""
    folder = tmp_path_factory.mktemp("job")
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    # torch 2.13 would give the restarted processes the store of the first ones, with addresses in
    # it where nobody listens any more.
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    env = {**os.environ, **store, "GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, "--nproc-per-node", str(WORLD), str(SCRIPT), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exitcode: -9" in done.stderr
    return folder


def undisturbed(rank, kind):
    return JointRun(rank, WORLD, kind, dtype=torch.bfloat16).train(END).values()


@pytest.mark.parametrize("kind", REDUCERS)
def test_a_killed_rank_changes_nothing_in_how_the_run_ends(restarted, kind):
    folder, suffix = restarted / kind, "" if kind == "fsdp" else ".pt"
    for rank, expected in enumerate(ranks.run(WORLD, undisturbed, kind)):
        assert (folder / f"resumed.{rank}").read_text() == f"ckpt_step{SAVE_EVERY}{suffix}"
        values = torch.load(folder / f"values.{rank}", weights_only=True)
        assert_same(values, expected, assert_bit_equal)
