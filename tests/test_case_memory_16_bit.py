"""Case 57 for 16-bit parameters: accumulators, states, gradients in flight, and nothing else."""

import gc
import weakref

import pytest
import torch
from helpers import each_backend, given
from tensors import BACKENDS, HALVES, dtype_name
from test_memory import _live_bytes as live_bytes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepclock_ext import ClockedOptimizer

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
NUM_TENSORS, NUM_ELEMENTS = 10, 100_000  # 1e6 parameters; each is above what waits in flight


def parameters(dtype, sizes=(NUM_ELEMENTS,) * NUM_TENSORS):
    return [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]


def chain_loss(params):
    """Gradients arrive one after the other, as in a deep model."""
    x = torch.ones_like(params[0]).detach()
    for p in params:
        x = x * p
    return x.mean()


def adamw(params, **options):
    return ClockedOptimizer(torch.optim.AdamW(params, lr=2.0**-10), **options)


def run_windows(opt, params, count):
    for _ in range(count * opt.gradient_accumulation_steps):
        opt.backward(chain_loss(params))
        opt.step()


def num_bytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def watch_gradients(params):
    """Bytes of gradients alive whenever one arrives; made before the wrapper, to see them first."""
    alive, counts = [], []

    def count(p):
        alive.append((weakref.ref(p.grad.untyped_storage()), num_bytes([p.grad])))
        counts.append(sum(size for ref, size in alive if ref() is not None))

    for p in params:
        p.register_post_accumulate_grad_hook(count)
    return alive, counts


@each_backend
@each_half
@pytest.mark.parametrize("micro_steps", [1, 2, 4])
def test_no_gradient_stays_in_grad_during_or_after_a_window(backend, dtype, micro_steps):
    params = parameters(dtype, [3, 1000, 70_001])
    opt = adamw(
        params,
        gradient_accumulation_steps=micro_steps,
        accumulate_dtype=torch.float32,
        backend=backend,
    )
    for _ in range(2 * micro_steps):
        opt.backward(given(*((p, torch.ones(p.shape)) for p in params)))
        assert [p.grad for p in params] == [None] * 3
        opt.step()
        assert [p.grad for p in params] == [None] * 3


@each_backend
@each_half
def test_of_large_gradients_only_the_ones_in_flight_are_alive(backend, dtype):
    params = parameters(dtype)
    alive, counts = watch_gradients(params)
    opt = adamw(params, gradient_accumulation_steps=3, backend=backend)
    run_windows(opt, params, 2)
    assert len(counts) == 6 * NUM_TENSORS
    assert max(counts) <= 2 * num_bytes(params[:1])  # of ten
    assert [ref() for ref, _ in alive] == [None] * len(alive)


@each_half
def test_where_they_lie_in_grad_all_of_them_are_alive(dtype):
    params = parameters(dtype)
    _, counts = watch_gradients(params)
    opt = adamw(params, gradient_accumulation_steps=3, accumulate_dtype=dtype)
    run_windows(opt, params, 1)
    assert max(counts) >= num_bytes(params)


@each_backend
@each_half
def test_small_gradients_wait_for_one_another_in_at_most_128_kib(backend, dtype):
    params = parameters(dtype, [1000] * 300)
    alive, counts = watch_gradients(params)
    opt = adamw(params, gradient_accumulation_steps=2, backend=backend)
    run_windows(opt, params, 2)
    assert max(counts) <= 2 * 65536 + 2 * 1000 * 2 < num_bytes(params) / 4
    assert [ref() for ref, _ in alive] == [None] * len(alive)


def addresses(opt, params):
    return [opt.accumulated(p).data_ptr() for p in params]


@each_backend
@each_half
def test_accumulators_are_allocated_once(backend, dtype):
    params = parameters(dtype, [3, 1000, 70_001])
    opt = adamw(params, gradient_accumulation_steps=2, backend=backend)
    first = None
    for window in range(54):
        for _ in range(2):
            loss = given(*((p, torch.ones(p.shape)) for p in params))
            opt.backward(loss * float("inf") if window in range(2, 52) else loss)
            first = first or addresses(opt, params)
            assert addresses(opt, params) == first
            opt.step()
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (4, 50)


def num_tensors():
    gc.collect()
    return sum(type(obj) in (torch.Tensor, torch.nn.Parameter) for obj in gc.get_objects())


@each_backend
@pytest.mark.parametrize(("micro_steps", "skipped"), [(4, True), (64, False)])
def test_more_windows_make_no_tensor_that_stays(backend, micro_steps, skipped):
    dtype = torch.bfloat16 if micro_steps == 4 else torch.float16
    params = parameters(dtype, [3, 700])
    opt = adamw(params, gradient_accumulation_steps=micro_steps, backend=backend)
    grads = [torch.ones(p.shape, dtype=dtype) for p in params]
    bad = [torch.full_like(grad, float("inf")) for grad in grads]

    def run(windows, grads):
        for _ in range(windows):
            for _ in range(micro_steps):
                for p, grad in zip(params, grads, strict=True):
                    p.grad = grad
                opt.step()

    run(2, grads)
    before = num_tensors()
    run(50 if micro_steps == 4 else 5, bad if skipped else grads)
    assert num_tensors() == before


@each_backend
@pytest.mark.parametrize(("micro_steps", "masters"), [(4, False), (64, False), (64, True)])
def test_a_million_bf16_parameters_take_14_mb_and_2_more_with_masters(
    backend, masters, micro_steps
):
    before = live_bytes()
    params = parameters(torch.bfloat16)
    opt = adamw(
        params,
        gradient_accumulation_steps=micro_steps,
        master_weights=masters,
        max_grad_norm=1.0,
        backend=backend,
    )
    sums = []
    for _ in range(micro_steps):
        opt.backward(given(*((p, torch.ones(p.shape)) for p in params)))
        sums = [opt.accumulated(p) for p in params]
        opt.step()
    mega = 10**6
    assert num_bytes(params) == 2 * mega
    assert num_bytes(sums) == 4 * mega
    moments = [opt.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
    assert num_bytes(moments) == 8 * mega
    saved = opt.state_dict()["stepclock"]["masters"]
    assert num_bytes(saved.values() if masters else []) == (2 * mega if masters else 0)
    expected = (16 if masters else 14) * mega
    assert expected <= live_bytes() - before <= expected + 20_000  # slots, counters, layouts


class Allocations(TorchDispatchMode):
    """Sizes in bytes of the storages that operations make, and what of them is alive at most."""

    def __init__(self):
        super().__init__()
        self.sizes, self.live, self.peak, self._known = [], 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given_storages = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)
        }
        for t in tree_leaves(out):
            if not torch.is_tensor(t):
                continue
            storage = t.untyped_storage()
            if storage._cdata not in given_storages | self._known:
                self._watch(storage, storage._cdata, storage.nbytes())
        return out

    def _watch(self, storage, key, size):
        self.sizes.append(size)
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key, size):
        self._known.discard(key)
        self.live -= size


@needs_cpu
@each_half
@pytest.mark.parametrize("masters", [False, True])
def test_later_windows_allocate_nothing_of_the_size_of_a_parameter_but_gradients(dtype, masters):
    params = parameters(dtype)
    opt = adamw(
        params,
        gradient_accumulation_steps=3,
        max_grad_norm=1e-3,
        master_weights=masters,
        backend="cpu",
    )
    run_windows(opt, params, 1)
    for _ in range(3):
        loss = given(*((p, torch.ones(NUM_ELEMENTS)) for p in params))
        with Allocations() as allocated:
            opt.backward(loss)
        large = [size for size in allocated.sizes if size >= NUM_ELEMENTS]
        assert large == [2 * NUM_ELEMENTS] * NUM_TENSORS  # 16 bits each: one gradient a parameter
        assert allocated.peak <= 4 * 2 * NUM_ELEMENTS  # of ten
        with Allocations() as allocated:
            info = opt.step()
        assert [size for size in allocated.sizes if size >= NUM_ELEMENTS] == []
    assert info.updated
