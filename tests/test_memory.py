"""No byte a parameter beyond what the plain loop holds, and nothing new from window to window."""

import gc
import weakref

import pytest
import torch

from stepclock_ext import ClockedOptimizer
from stepclock_ext.norm_ride import RIDE_MIN_ELEMENTS

SIZES = (RIDE_MIN_ELEMENTS * 2, 1000, 7)


def _parameters():
    return [torch.nn.Parameter(torch.ones(size)) for size in SIZES]


def _loss(params):
    return sum((p * p).sum() for p in params)


def _live_bytes():
    """Bytes of all storages that a live tensor stands on."""
    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)  # the compiler's fake tensors stand on nothing
    tensors = [obj for obj in gc.get_objects() if type(obj) in plain]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _plain_bytes():
    before = _live_bytes()
    params = _parameters()
    optimizer = torch.optim.AdamW(params)
    for _ in range(2):
        for _ in range(2):
            (_loss(params) / 2).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return _live_bytes() - before


def _run_windows(opt, params, count):
    for _ in range(2 * count):
        opt.backward(_loss(params))
        opt.step()


def test_after_an_update_only_the_chunk_sums_are_held_beside_what_the_plain_loop_holds():
    plain = _plain_bytes()
    before = _live_bytes()
    params = _parameters()
    opt = ClockedOptimizer(torch.optim.AdamW(params), gradient_accumulation_steps=2)
    _run_windows(opt, params, 2)
    slots = opt._pass.accumulator.slots
    assert _live_bytes() - before <= plain + slots.numel() * slots.element_size()
    assert slots.numel() * slots.element_size() < 1e-3 * plain


def test_later_windows_hold_what_the_first_held():
    params = _parameters()
    opt = ClockedOptimizer(
        torch.optim.AdamW(params), gradient_accumulation_steps=2, max_grad_norm=1.0
    )
    _run_windows(opt, params, 1)
    first = _live_bytes()
    _run_windows(opt, params, 5)
    assert _live_bytes() == first


@pytest.mark.parametrize("micro_steps", [1, 2, 3])
def test_gradients_are_freed_by_the_update(micro_steps):
    params = _parameters()
    opt = ClockedOptimizer(
        torch.optim.AdamW(params), gradient_accumulation_steps=micro_steps, max_grad_norm=1.0
    )
    for _ in range(2):
        for _ in range(micro_steps):
            opt.backward(_loss(params))
            alive = [weakref.ref(p.grad.untyped_storage()) for p in params]
            alive += [weakref.ref(p.grad) for p in params]
            opt.step()
    assert [ref() for ref in alive] == [None] * len(alive)


def test_a_riding_gradient_is_freed_as_soon_as_it_is_added():
    params = [torch.nn.Parameter(torch.ones(RIDE_MIN_ELEMENTS)) for _ in range(2)]
    opt = ClockedOptimizer(torch.optim.SGD(params), gradient_accumulation_steps=2)
    opt.backward(_loss(params))
    opt.step()
    sums = [p.grad for p in params]
    fresh = []

    def keep_reference(grad):
        fresh.append(weakref.ref(grad.untyped_storage()))

    for p in params:
        p.register_hook(keep_reference)
    opt.backward(_loss(params))
    assert all(p.grad is total for p, total in zip(params, sums, strict=True))
    assert [ref() for ref in fresh] == [None, None]


def test_skipped_windows_free_their_gradients():
    params = _parameters()
    opt = ClockedOptimizer(torch.optim.AdamW(params), gradient_accumulation_steps=2)
    _run_windows(opt, params, 1)
    first = _live_bytes()
    for _ in range(20):
        opt.backward(_loss(params) * float("inf"))
        opt.step()
    assert opt.clock.skipped_updates == 10
    assert _live_bytes() == first
