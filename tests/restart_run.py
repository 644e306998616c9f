"""One rank of a job under torchrun: runs that save every 3 updates, and go on from there.

Arguments: a folder for checkpoints and results. When the job first begins, every run comes into the
middle of a window, and there rank 1 kills itself. When it begins again, each goes on to its end.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from joint_run import JointRun

from stepclock_ext.checkpoint import latest_checkpoint

REDUCERS = ["own", "zero1", "fsdp"]
END = 8  # updates
SAVE_EVERY = 3
DIES_IN = 5  # the window after so many updates


def main(folder):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    has_died = (folder / "died").exists()
    runs = [JointRun(rank, world, kind, dtype=torch.bfloat16) for kind in REDUCERS]
    for kind, run in zip(REDUCERS, runs, strict=True):
        run.seed()
        go_on(run, folder / kind, stops=not has_died)
    if rank == 1 and not has_died:
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()


def go_on(run, folder, *, stops):
    """Trains to the end, or stops in the middle of a window."""
    latest = latest_checkpoint(folder)
    if latest is not None:
        run.load(latest)
        (folder / f"resumed.{run.rank}").write_text(latest.name)
    while run.opt.clock.update_step < END:
        info = run.micro_step()
        if info.updated and info.update_step % SAVE_EVERY == 0:
            run.save(folder, save_total_limit=1)
        if stops and info.update_step == DIES_IN and not info.updated:
            return
    torch.save(run.values(), folder / f"values.{run.rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
