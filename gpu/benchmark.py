"""The races: each checks what every rival computes, then times them in turn.

Bytes a parameter: the update 28 where the norm rode on the last accumulation, 32 in windows of one;
accumulation with the norm 12; with bf16 parameters, fp32 sums and remainders 28. Plain PyTorch: 48
and 12; with fp32 masters beside bf16 parameters 54.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gpu.half_workload import HalfTraining, OursHalf, Separate
from gpu.outcomes import FAIL, NO_TIME, PASS
from gpu.race import Rival, measure_copy, race
from gpu.setting import Found, Setting
from gpu.workload import Contender, Ours, Plain, Training, Wrapped
from stepclock_ext import ops

__all__ = ["PARTS"]

NUM_PARAMETERS = 1_000_000_000
NUM_TENSORS = 128
# What a race holds at its largest: both sides' tensors, the check, torch's temporaries.
BYTES_EACH = 56
# Whether the norm rode on the last accumulation, and what is then moved.
UPDATES = (
    (True, "update of an accumulated window", 28),
    (False, "update of a window of one", 32),
)
PLAIN = {"fused": "unscale + clip + AdamW(fused)", "foreach": "unscale + clip + AdamW(foreach)"}


class Races:
    """Collects the races of a stage, and who was left out of one and why."""

    def __init__(self, setting: Setting, sizes: Sequence[int]) -> None:
        self.setting, self.sizes = setting, sizes
        self.copy = measure_copy(setting.device, 10**6 if setting.is_small else 4 * 10**9)
        self.races: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        self.is_cut = False

    def attempt(self, name: str, make: Callable[[], Any]) -> Any | None:
        """What `make` returns; None where it raises, and `name` is then left out."""
        try:
            made = make()
            self.setting.device.synchronize()
            return made
        except Exception as e:
            self.left_out[name] = f"{type(e).__name__}: {e}"
            return None

    def run(self, name: str, rivals: Sequence[Rival]) -> None:
        """Times `rivals`, if there is time."""
        if not self.setting.has_time(8.0):
            self.races[name], self.is_cut = {"rows": [], "outcome": NO_TIME}, True
            return
        rounds = 3 if self.setting.is_small else 20
        run = partial(race, self.setting.device, list(rivals), rounds, self.copy["gb_per_s"])
        rows = self.attempt(name, run)
        self.races[name] = {"rows": rows or [], "outcome": PASS if rows else FAIL}

    def found(self) -> Found:
        outcome = FAIL if self.left_out else NO_TIME if self.is_cut else PASS
        found: Found = {"outcome": outcome, "copy": self.copy, "races": self.races}
        found |= {"tensors": len(self.sizes), "parameters": sum(self.sizes)}
        if self.left_out:
            errors = "; ".join(f"{name}: {error}" for name, error in self.left_out.items())
            found["error"] = f"left out: {errors}"
        return found


def large_sizes(setting: Setting) -> list[int]:
    """As many parameters as are asked for, or as fit."""
    if setting.is_small:
        return [2_500] * 4
    fitting = int(0.9 * setting.device.free_bytes()) // BYTES_EACH
    return [min(NUM_PARAMETERS, fitting) // NUM_TENSORS] * NUM_TENSORS


def small_sizes(setting: Setting) -> list[int]:
    """Tensors that cost their launches and nothing else."""
    return [500] * (20 if setting.is_small else 2_000)


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal but for the order of operations."""
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def update_once(contender: Contender) -> list[Tensor]:
    """The parameters after one update of the start."""
    contender.training.reset()
    contender.prepare()
    contender.update()
    return [p.detach() for p in contender.training.params]


def fp32(setting: Setting, sizes: Sequence[int], *, with_wrapper: bool) -> Found:
    """Accumulated windows, windows of one, and the accumulation itself."""
    races, training = Races(setting, sizes), Training(sizes, setting.device.torch)
    plain = {name: Plain(training, way) for way, name in PLAIN.items()}
    ours = _checked(races, training, plain)
    setting.device.release()
    for is_summed, title, bytes_each in UPDATES:
        num = sum(sizes)
        mine = [
            Rival(f"{name}, {bytes_each} bytes", each.prepare, each.update, bytes_each * num)
            for name, each in ours[is_summed].items()
        ]
        races.run(title, [*mine, *_plain_rivals(plain, num)])
    _accumulate(races, training, ours[True])
    if with_wrapper:
        _wrapped(races, training, plain)
    return races.found()


def _plain_rivals(plain: dict[str, Plain], num: int) -> list[Rival]:
    return [Rival(f"{n}, 48 bytes", p.prepare, p.update, 48 * num) for n, p in plain.items()]


def _checked(
    races: Races, training: Training, plain: dict[str, Plain]
) -> dict[bool, dict[str, Ours]]:
    """Ours, with the norm there and without, as far as they compute what plain PyTorch does."""
    expected = [p.clone() for p in update_once(plain[PLAIN["fused"]])]
    ours: dict[bool, dict[str, Ours]] = {True: {}, False: {}}

    def check(make: Callable[[], Contender]) -> Contender:
        contender = make()
        assert_near(update_once(contender), expected)
        return contender

    foreach = PLAIN["foreach"]
    if races.attempt(foreach, lambda: check(lambda: plain[foreach])) is None:
        del plain[foreach]
    for backend, (is_summed, made) in product(races.setting.backends, ours.items()):
        label = f"{backend} ({28 if is_summed else 32} bytes)"
        make = partial(Ours, training, backend, is_summed=is_summed)
        contender = races.attempt(label, partial(check, make))
        if contender is not None:
            made[backend] = contender
    return ours


def _accumulate(races: Races, training: Training, ours: dict[str, Any]) -> None:
    """One micro step's gradient added to the sums, with its norm."""
    moved, sums, grads = 12 * sum(training.sizes), training.sums, training.source
    rivals = []
    for backend, each in ours.items():

        def run(each: Ours = each) -> None:
            ops.accumulate_(sums, grads, each.layout, slots=each.slots)

        def check(run: Callable[[], None] = run, each: Ours = each) -> bool:
            training.refill()
            run()
            doubled = torch.stack([total.double().square().sum() for total in sums]).sum()
            ratio = each.slots.sum().item() / doubled.item()
            assert abs(ratio - 1.0) < 1e-12, f"its sum of squares is {ratio} times the right one"
            assert all(torch.equal(t, g + g) for t, g in zip(sums, grads, strict=True))
            return True

        if races.attempt(f"{backend} accumulate", check):
            rivals.append(Rival(f"{backend}, with norm, 12 bytes", training.refill, run, moved))
    rivals.append(
        Rival(
            "torch._foreach_add_, 12 bytes",
            training.refill,
            lambda: torch._foreach_add_(sums, grads),
            moved,
        )
    )
    races.run("accumulation", rivals)


def _wrapped(races: Races, training: Training, plain: dict[str, Plain]) -> None:
    """ClockedOptimizer.step() with all that it does on the host, beside the plain loops."""
    num, rivals = sum(training.sizes), []
    expected = update_once(Plain(training, "fused"))
    start_seed = torch.Generator(training.device)
    for backend in races.setting.backends:

        def make(backend: str = backend) -> Wrapped:
            wrapped = Wrapped(training, backend)
            start_seed.manual_seed(0)
            with torch.no_grad():
                for p in wrapped.params:
                    p.normal_(generator=start_seed)
            wrapped.prepare()
            wrapped.update()
            assert_near([p.detach() for p in wrapped.params], expected)
            return wrapped

        name = f"ClockedOptimizer.step(), {backend}"
        wrapped = races.attempt(name, make)
        if wrapped is not None:
            rivals.append(Rival(f"{name}, 32 bytes", wrapped.prepare, wrapped.update, 32 * num))
    races.run("step() of the wrapper", [*rivals, *_plain_rivals(plain, num)])


def bf16(setting: Setting, sizes: Sequence[int]) -> Found:
    """bf16 parameters, fp32 sums and int16 remainders, against fp32 masters."""
    races, num = Races(setting, sizes), sum(sizes)
    training = HalfTraining(sizes, setting.device.torch)
    separate = Separate(training)
    remainders = [torch.empty_like(p, dtype=torch.int16) for p in training.params]
    separate.prepare()
    separate.update()
    rivals = []
    for backend in setting.backends:

        def make(backend: str = backend) -> OursHalf:
            ours = OursHalf(training, remainders, backend)
            ours.reset()
            ours.update()
            for row, master in enumerate(separate.masters):
                assert_near([ours.worth(row)], [master.detach()])
            return ours

        ours = races.attempt(backend, make)
        if ours is not None:
            rivals.append(Rival(f"{backend}, 28 bytes", ours.prepare, ours.update, 28 * num))
    rivals.append(Rival("separate passes, 54 bytes", separate.prepare, separate.update, 54 * num))
    setting.device.release()
    races.run("update of bf16 parameters with remainders", rivals)
    return races.found()


PARTS: dict[str, Callable[[Setting], Found]] = {
    "fp32": lambda setting: fp32(setting, large_sizes(setting), with_wrapper=False),
    "bf16": lambda setting: bf16(setting, large_sizes(setting)),
    "small": lambda setting: fp32(setting, small_sizes(setting), with_wrapper=True),
}
