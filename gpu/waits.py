"""Ten updates during which the host may not wait for the device."""

from __future__ import annotations

from functools import partial

import torch

from gpu.outcomes import PASS
from gpu.setting import Found, Setting, run_each
from gpu.workload import given_loss, normal_list
from stepclock_ext import ClockedOptimizer

__all__ = ["run"]

SIZES = [3, 70_001, 1_000]
WARM_UPS, UPDATES = 2, 10


def run(setting: Setting) -> Found:
    """fp32, and bf16 with masters, in windows of one and of two."""
    checks = {
        f"{str(dtype).removeprefix('torch.')}, windows of {steps}": partial(
            update_without_waits, setting, dtype, steps
        )
        for dtype in (torch.float32, torch.bfloat16)
        for steps in (1, 2)
    }
    found = run_each(setting, checks)
    return found | ({"outcome": setting.passed} if found["outcome"] == PASS else {})


def update_without_waits(setting: Setting, dtype: torch.dtype, steps: int) -> None:
    """Raises where torch says that the host had to wait."""
    device = setting.device.torch
    values = normal_list(SIZES, device, seed=0)
    params = [torch.nn.Parameter(value.to(dtype, copy=True)) for value in values]
    grads = [g.to(dtype) for g in normal_list(SIZES, device, seed=1)]
    opt = ClockedOptimizer(
        torch.optim.AdamW(params, lr=1e-2),
        gradient_accumulation_steps=steps,
        max_grad_norm=1.0,
        master_weights=dtype in (torch.bfloat16, torch.float16),
        backend=setting.backend,
    )

    def update() -> None:
        for _ in range(steps):
            opt.backward(given_loss(params, grads))
            opt.step()

    for _ in range(WARM_UPS):
        update()
    with setting.device.forbid_waits():
        for _ in range(UPDATES):
            update()
    setting.device.synchronize()
    done = opt.clock.update_step
    assert done == WARM_UPS + UPDATES, f"{done} updates of {WARM_UPS + UPDATES}"
    moved = [not torch.equal(p, v.to(dtype)) for p, v in zip(params, values, strict=True)]
    assert all(moved), f"parameters that moved: {moved}"
