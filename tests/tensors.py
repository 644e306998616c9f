"""Lists of tensors that the kernels are tried on, and what of the kernels is there to try."""

from functools import lru_cache

import torch

from stepclock_ext import backends, ops

# Nothing, one, a register's tail, exact blocks of the kernels and of a chunk, many chunks.
SIZES = [0, 1, 255, 256, 257, 1023, 1024, 1025, 16383, 16384, 16385, 100_003]
HALVES = [torch.bfloat16, torch.float16]
REALS = [torch.float32, torch.float64, *HALVES]
DTYPES = [*REALS, torch.complex64, torch.complex128]
BACKENDS = [name for name in ("reference", "cpu") if backends()[name].available]


def dtype_name(value):
    """A test's id for a dtype; anything else names itself."""
    return str(value).partition(".")[2] if isinstance(value, torch.dtype) else None


def random_list(sizes, dtype, *, seed=0, unaligned=False):
    """Normal values in tensors of `sizes`; unaligned ones begin one element into their memory."""
    first = int(unaligned)
    listed = [torch.empty(size + first, dtype=dtype)[first:] for size in sizes]
    for tensor, values in zip(listed, _random_list(tuple(sizes), dtype, seed), strict=True):
        tensor.copy_(values)
    return listed


@lru_cache(maxsize=64)
def _random_list(sizes, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return [torch.randn(size, dtype=wide, generator=generator).to(dtype) for size in sizes]


def square_list(sizes, dtype, *, seed=0, unaligned=False):
    """As `random_list`, never negative: second moments. A complex one has two of them a value."""
    tensors = random_list(sizes, dtype, seed=seed, unaligned=unaligned)
    for tensor in tensors:
        ops.real_view(tensor).square_()
    return tensors


def interleaved_sizes():
    """215 sizes, every third of them 0."""
    return [0 if i % 3 == 2 else 1 + 7 * i for i in range(215)]


def clones(tensors):
    """Copies in memory of their own, with the same strides."""
    return [torch.empty_like(t).copy_(t) for t in tensors]


def layout_of(backend, tensors):
    """Their layout on the backend of that name."""
    return ops.Layout.of(ops.make_backend(backend), tensors)


def memory_order(tensor):
    """The real numbers of a dense tensor as they lie in memory, fp64."""
    real = ops.real_view(tensor)
    return real.as_strided((real.numel(),), (1,), real.storage_offset()).to(torch.float64)


def coefficient_stats(coefficient):
    """Stats that hold `coefficient`."""
    return torch.tensor([0.0, coefficient, 1.0], dtype=torch.float64)
