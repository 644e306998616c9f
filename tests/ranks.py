"""Runs a function on several ranks: processes that talk over gloo on loopback.

`run` takes its ranks from a pool that lives as long as the test session, since importing torch
takes seconds and a call takes milliseconds. `spawn` starts processes of their own for a test that
kills some. All are forked from one server, which has imported torch and has no thread.
"""

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["RankError", "Ranks", "run", "spawn"]

MAX_RANKS = 4
TESTS = str(Path(__file__).resolve().parent)
# Each is imported once, in the server. torch._dynamo is what an optimizer's first step imports.
PRELOADED = [
    "stepclock_ext",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
]
GRACE = 3.0  # seconds in which the other ranks end once one has failed
DUMP = 2.0  # seconds in which a stuck rank has begun to write its stack
FAILED = 1  # exit code of a spawned rank whose function raised


class RankError(RuntimeError):
    """Some ranks raised, died or were stuck.

    Attributes:
        errors: rank -> its traceback, or how it died or where it was stuck; the first to fail
            comes first.
    """

    def __init__(self, errors):
        self.errors = dict(errors)
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in self.errors.items()))


# ---- in the ranks -------------------------------------------------------------------------


def _serve(pipe):
    """Runs jobs until the caller closes the pipe or sends the last one."""
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    sys.path[:0] = [] if TESTS in sys.path else [TESTS]
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    torch.set_num_threads(1)
    succeeded, last = True, False
    while not last:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            break
        succeeded, last, answer = _answer(job)
        pipe.send_bytes(answer)
    os._exit(0 if succeeded else FAILED)  # gloo's threads may hang in a regular exit


def _end_with_the_caller():
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(FAILED)


def _answer(job):
    """Whether the job's function returned, whether it was the last job, and the pickled answer."""
    last = False
    try:
        head, call = pickle.loads(job)
        last = head["last"]
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.filters.extend(head["filters"])
            with _group(head):
                outcome = _call(head["rank"], *pickle.loads(call))
        return outcome[0], last, pickle.dumps(outcome)
    except BaseException:
        return False, last, pickle.dumps((False, traceback.format_exc(), time.monotonic()))


def _call(rank, function, args, kwargs):
    """Whether it returned, its result or traceback, and when: before the others can notice."""
    torch.manual_seed(0)
    try:
        return True, function(rank, *args, **kwargs), time.monotonic()
    except BaseException:
        return False, traceback.format_exc(), time.monotonic()


@contextlib.contextmanager
def _group(head):
    """The default process group, and SIGUSR1 as the signal to write the stack."""
    folder, rank = Path(head["folder"]), head["rank"]
    with open(folder / f"stack.{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(folder / "store"), head["world_size"]),
                rank=rank,
                world_size=head["world_size"],
                timeout=datetime.timedelta(seconds=head["group_timeout"]),
            )
            dist.barrier()  # no rank closes its connections while another still opens them
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            faulthandler.unregister(signal.SIGUSR1)


# ---- in the caller ------------------------------------------------------------------------


class Ranks:
    """One call of a function on processes, from its start to the last answer.

    As a context it kills, on leaving, the processes that are still there.
    """

    def __init__(self, workers):
        self._workers = workers
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._outcomes = {}  # rank -> (whether it returned, result or error text, when)

    def _send(self, function, args, kwargs, *, group_timeout, last):
        call = pickle.dumps((function, args, kwargs))
        head = {
            "folder": self._folder.name,
            "world_size": len(self._workers),
            "group_timeout": group_timeout,
            "filters": warnings.filters[:],
            "last": last,
        }
        for rank, (_, pipe) in enumerate(self._workers):
            with contextlib.suppress(OSError):  # it died; its answer says so
                pipe.send_bytes(pickle.dumps((head | {"rank": rank}, call)))

    def _collect(self, timeout, *, grace):
        """Waits for answers until the timeout, shortened to `grace` once a rank has failed."""
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        waiting = [pipe for pipe, rank in pipes.items() if rank not in self._outcomes]
        end = time.monotonic() + timeout
        while waiting and (ready := connection.wait(waiting, max(0.0, end - time.monotonic()))):
            for pipe in ready:
                waiting.remove(pipe)
                outcome = self._outcomes[pipes[pipe]] = self._receive(pipes[pipe])
                if not outcome[0]:
                    end = min(end, time.monotonic() + grace)
        return [pipes[pipe] for pipe in waiting]

    def _receive(self, rank):
        process, pipe = self._workers[rank]
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process.join(GRACE)
            return False, f"died with exit code {process.exitcode}", time.monotonic()

    def _stacks(self, stuck):
        """Rank -> where it is stuck, for the ranks without an answer."""
        for rank in stuck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        files = {rank: Path(self._folder.name, f"stack.{rank}") for rank in stuck}
        end = time.monotonic() + DUMP
        while time.monotonic() < end and not all(map(_has_text, files.values())):
            time.sleep(0.02)
        time.sleep(0.05 if stuck else 0)  # the rest of the stack
        read = {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
        return {rank: f"stuck\n{text or 'before its first line'}" for rank, text in read.items()}

    def _errors(self, stuck):
        failed = [(at, rank, text) for rank, (ok, text, at) in self._outcomes.items() if not ok]
        return {rank: text for _, rank, text in sorted(failed)} | self._stacks(stuck)

    def kill(self, rank):
        """Ends the rank's process with SIGKILL and waits for its end."""
        process, _ = self._workers[rank]
        process.kill()
        process.join()

    def wait(self, timeout=60.0):
        """What became of each rank: rank -> (exit code, result or error text).

        The exit code is 0 where the function returned, 1 where it raised and -9 after `kill`.

        Raises:
            RankError: a rank is not done after the timeout, in seconds; the others may have
                failed as well.
        """
        if stuck := self._collect(timeout, grace=timeout):
            raise RankError(self._errors(stuck))
        for process, _ in self._workers:
            process.join()
        codes = [process.exitcode for process, _ in self._workers]
        return {rank: (code, self._outcomes[rank][1]) for rank, code in enumerate(codes)}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        _end(self._workers)
        self._folder.cleanup()


def _has_text(file):
    return file.exists() and file.stat().st_size > 0


_pool = []  # (process, pipe) of each worker; those of a failed run are replaced


def run(world_size, function, *args, timeout=60.0, group_timeout=30.0, **kwargs):
    """Results of `function(rank, *args, **kwargs)` on each rank, in the order of the ranks.

    Each rank has the default process group, one thread, seed 0 and the caller's filters of
    warnings. Tensors come back as plain copies.

    Args:
        world_size: 1 to 4.
        function: at the top level of a module; arguments and results are picklable.
        timeout: seconds until all ranks must be done.
        group_timeout: of the process group, in seconds; its start is under it too.
    Raises:
        RankError: a rank raised, died or was stuck.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"run: world_size must be 1 to {MAX_RANKS}, got {world_size}")
    _pool.extend(_start(world_size - len(_pool)))
    ranks = Ranks(_pool[:world_size])
    errors = {-1: "interrupted"}
    try:
        ranks._send(function, args, kwargs, group_timeout=group_timeout, last=False)
        errors = ranks._errors(ranks._collect(timeout, grace=GRACE))
    finally:
        if errors:
            _end(_pool)
            _pool.clear()
        ranks._folder.cleanup()
    if errors:
        raise RankError(errors)
    return [ranks._outcomes[rank][1] for rank in range(world_size)]


def spawn(world_size, function, *args, group_timeout=30.0, **kwargs):
    """Starts `function(rank, *args, **kwargs)` on processes of their own; for a `with` statement.

    Args: as for `run`.
    Returns:
        Ranks, to kill some and to wait for the rest.
    """
    ranks = Ranks(_start(world_size))
    ranks._send(function, args, kwargs, group_timeout=group_timeout, last=True)
    return ranks


def _start(count):
    """New workers: (process, pipe) each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    workers = []
    for _ in range(count):
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()  # multiprocessing ends daemons at exit
        theirs.close()
        workers.append((process, pipe))
    return workers


def _end(workers):
    for process, pipe in workers:
        process.kill()
        pipe.close()
    for process, _ in workers:
        process.join()
