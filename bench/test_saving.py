"""A checkpoint against ``torch.save`` of the same tensors and fsync: 10 M parameters with AdamW.

Bytes: model 4 a parameter, moments 8, and in a window, as here, accumulators 4. Target: 1.3 times.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from interleave import Race, Rival

from stepclock_ext import ClockedOptimizer
from stepclock_ext.checkpoint import load_checkpoint, save_checkpoint

NUM_LAYERS = 10
WIDTH = 1000
ROUNDS = 9


def _make_run() -> tuple[torch.nn.Module, ClockedOptimizer]:
    """A model and its optimizer inside a window."""
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
    model = torch.nn.Sequential(*layers)
    opt = ClockedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-4), gradient_accumulation_steps=2
    )
    for _ in range(3):
        opt.backward(model(torch.randn(4, WIDTH)).square().mean())
        opt.step()
    return model, opt


def _save_plainly(path: Path, tensors: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _check_loads(path: Path, model: torch.nn.Module, opt: ClockedOptimizer) -> None:
    saved = torch.load(path, weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(saved["model"][name], value)
    load_checkpoint(path, model=model, optimizer=opt)


def test_save_against_torch_save_and_fsync(benchmark: Any, tmp_path: Path) -> None:
    model, opt = _make_run()
    ours = tmp_path / "ours.pt"
    plain = tmp_path / "plain.pt"
    save_checkpoint(ours, model=model, optimizer=opt)
    _check_loads(ours, model, opt)
    tensors = {"model": model.state_dict(), "optimizer": opt.state_dict()}
    num_bytes = 16 * NUM_LAYERS * WIDTH * WIDTH
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    rivals = [
        Rival(
            "save_checkpoint",
            nothing,
            lambda: save_checkpoint(ours, model=model, optimizer=opt),
            num_bytes,
        ),
        Rival("torch.save + fsync", nothing, lambda: _save_plainly(plain, tensors), num_bytes),
    ]
    Race(rivals, ROUNDS).run(benchmark)
    assert ours.stat().st_size < 1.01 * plain.stat().st_size
