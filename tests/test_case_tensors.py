"""Cases 40 to 42: empty and 0-dim tensors, strides, and sizes past 32 bits."""

import math

import pytest
import torch
from helpers import assert_close, clip_factor, clocked_sgd, each_backend, given, parameter
from tensors import interleaved_sizes
from tolerance import assert_bit_equal

from stepclock_ext import ClockedOptimizer, ops

# 40: tensors without elements, tensors without dimensions.


@each_backend
@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (math.inf, 4.0), (1.0, 7.0)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_tensor_takes_part_in_no_norm(backend, norm_type, norm, place):
    params = [parameter(0.0), parameter(0.0)]
    params.insert(place, torch.nn.Parameter(torch.empty(0)))
    gradients = [torch.tensor(3.0), torch.tensor(4.0)]
    gradients.insert(place, torch.empty(0))
    opt = clocked_sgd(*params, norm_type=norm_type, max_grad_norm=1.0, backend=backend)
    opt.backward(given(*zip(params, gradients, strict=True)))
    assert_close(opt.step().grad_norm, norm)
    for p, gradient in zip(params, gradients, strict=True):
        assert_close(p, gradient.double() * -clip_factor(norm, 1.0))


@each_backend
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_empty_tensors_among_215_shift_nothing(backend, accumulation, norm_type):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(n)) for n in interleaved_sizes()]
    gradients = [torch.randn(p.shape, generator=generator) for p in params]
    everything = torch.cat(gradients).double()
    norm = torch.linalg.vector_norm(everything, norm_type).item()
    opt = clocked_sgd(
        *params,
        gradient_accumulation_steps=accumulation,
        norm_type=norm_type,
        max_grad_norm=1.0,
        backend=backend,
    )
    for _ in range(accumulation):
        opt.backward(given(*zip(params, gradients, strict=True)))
        info = opt.step()
    assert_close(info.grad_norm, norm, num_roundings=everything.numel())
    for p, gradient in zip(params, gradients, strict=True):
        assert_close(p, gradient.double() * -clip_factor(norm, 1.0))


@each_backend
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 3.0])
def test_nothing_but_empty_tensors_has_norm_0(backend, norm_type):
    params = [torch.nn.Parameter(torch.empty(shape)) for shape in ((0,), (0, 3), (2, 0, 5))]
    opt = clocked_sgd(*params, norm_type=norm_type, max_grad_norm=1.0, backend=backend)
    opt.backward(given(*((p, torch.empty(p.shape)) for p in params)))
    info = opt.step()
    assert info.grad_norm == 0.0
    assert not info.skipped


@each_backend
def test_a_parameter_without_dimensions_accumulates_and_clips(backend):
    p = parameter(0.0)
    inner = torch.optim.AdamW([p], lr=0.1, weight_decay=0.0)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=2, max_grad_norm=1.0, backend=backend)
    for c in (1, 5):
        opt.backward(c * p)
        info = opt.step()
    assert info.grad_norm == 3.0
    assert_close(inner.state[p]["exp_avg"], 0.1 * 3.0 * clip_factor(3.0, 1.0))


# 41: gradients that lie in memory unlike their parameters.


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


IMAGES = {
    "contiguous": lambda: random(4, 3, 5, 5),
    "channels_last": lambda: random(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: random(5, 5, 3, 4).permute(3, 2, 1, 0),
}
SQUARES = {
    "transposed": lambda: random(6, 6).t(),
    "expanded": lambda: random(6, 1).expand(6, 6),
    "sliced": lambda: random(6, 12)[:, ::2],
}


def assert_layout_changes_no_bit(make_grad, make_optimizer, backend, memory_format):
    results = []
    for grad in (make_grad(), make_grad().contiguous()):
        p = torch.nn.Parameter(torch.ones(grad.shape).to(memory_format=memory_format))
        opt = ClockedOptimizer(make_optimizer([p], lr=0.1), max_grad_norm=1.0, backend=backend)
        p.grad = grad
        norm = opt.step().grad_norm
        assert_close(norm, make_grad().double().norm().item(), num_roundings=grad.numel())
        results.append(p.detach().contiguous())
    assert_bit_equal(*results)


each_kind = pytest.mark.parametrize(
    "make_optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop]
)


@each_backend
@each_kind
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("make_grad", IMAGES.values(), ids=IMAGES)
def test_the_layout_of_an_image_gradient_changes_no_bit(
    backend, make_optimizer, memory_format, make_grad
):
    assert_layout_changes_no_bit(make_grad, make_optimizer, backend, memory_format)


@each_backend
@each_kind
@pytest.mark.parametrize("make_grad", SQUARES.values(), ids=SQUARES)
def test_the_layout_of_a_matrix_gradient_changes_no_bit(backend, make_optimizer, make_grad):
    assert_layout_changes_no_bit(make_grad, make_optimizer, backend, torch.contiguous_format)


@each_backend
def test_an_expanded_gradient_is_not_scaled_once_for_each_of_its_copies(backend):
    p = parameter(0.0, 0.0, 0.0)
    opt = ClockedOptimizer(torch.optim.Rprop([p], lr=1.0), max_grad_norm=1.0, backend=backend)
    seen = []
    opt.optimizers[0].register_step_pre_hook(lambda *_: seen.append(p.grad.clone()))
    p.grad = torch.tensor(4.0).expand(3)
    norm = opt.step().grad_norm
    assert_close(norm, 48.0**0.5)
    assert_close(seen[0], [4.0 * clip_factor(48.0**0.5, 1.0)] * 3)


@each_backend
def test_a_gradient_by_bmm_with_strides_of_its_own_accumulates(backend):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 1, 7, generator=generator) for _ in range(3)]
    p = torch.nn.Parameter(torch.zeros(2, 1, 100))
    targets = torch.randn(2, 7, 100, generator=generator)
    opt = clocked_sgd(p, gradient_accumulation_steps=3, backend=backend)
    for batch in batches:
        opt.backward((torch.bmm(batch.transpose(1, 2), p) * targets).sum())
        opt.step()
    expected = sum(torch.bmm(b.double(), targets.double()) for b in batches) / -3
    assert_close(p, expected, num_roundings=24)


@each_backend
@pytest.mark.parametrize("channels", [3, 70])  # 70 * 70 * 16 elements ride
def test_a_channels_last_model_trains_as_a_contiguous_one(backend, channels):
    images = torch.randn(2, channels, 6, 6, generator=torch.Generator().manual_seed(0))
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        conv = torch.nn.Conv2d(channels, channels, 4, dtype=torch.float64)
        conv = conv.to(memory_format=memory_format)
        opt = ClockedOptimizer(
            torch.optim.AdamW(conv.parameters(), lr=0.1),
            gradient_accumulation_steps=2,
            max_grad_norm=0.1,
            backend=backend,
        )
        for micro in range(4):
            x = (images + micro).double().to(memory_format=memory_format)
            opt.backward(conv(x).square().mean())
            opt.step()
        assert conv.weight.is_contiguous(memory_format=memory_format)
        results.append(conv.weight.detach())
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9, check_stride=False)


@each_backend
def test_a_parameter_that_is_no_block_of_memory_is_updated_where_it_lies(backend):
    storage = torch.zeros(4, 6)
    p = torch.nn.Parameter(storage[:, ::2])
    opt = clocked_sgd(p, gradient_accumulation_steps=2, max_grad_norm=1.0, backend=backend)
    gradient = torch.arange(12.0).reshape(4, 3)
    for _ in range(2):
        opt.backward(given((p, gradient)))
        opt.step()
    norm = gradient.double().norm().item()
    assert_close(storage[:, ::2], gradient.double() * -clip_factor(norm, 1.0))
    assert_bit_equal(storage[:, 1::2], torch.zeros(4, 3))


# 42: more than 2**31 elements.


@pytest.mark.parametrize("num_elements", [2_476_250_368, 2**31 - 1, 2**31, 2**32 + 1])
def test_chunks_of_a_very_large_tensor_add_up(num_elements):
    sizes = ops.chunk_sizes(num_elements)
    assert sum(sizes) == num_elements
    assert min(sizes) > 0
    assert len(sizes) == ops.num_chunks(num_elements)


def test_the_layout_of_a_very_large_tensor_counts_past_32_bits():
    large = torch.empty(2_476_250_368, device="meta", dtype=torch.complex64)
    layout = ops.Layout.of(ops.make_backend("reference"), [large, torch.empty(1), large])
    chunks = -(-2 * 2_476_250_368 // ops.CHUNK_ELEMENTS)
    assert layout.num_elements == (2 * 2_476_250_368, 1, 2 * 2_476_250_368)
    assert layout.first_slots == (0, chunks, chunks + 1)
    assert layout.num_slots == 2 * chunks + 1


# Sparse gradients.


@each_backend
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 3.0])
def test_sparse_and_dense_gradients_have_one_norm_and_one_clip(backend, norm_type):
    table, p = torch.nn.Embedding(4, 1, sparse=True), parameter(0.0)
    torch.nn.init.zeros_(table.weight)
    opt = ClockedOptimizer(
        [torch.optim.SGD([table.weight], lr=1.0), torch.optim.SGD([p], lr=1.0)],
        max_grad_norm=1.0,
        norm_type=norm_type,
        loss_scale=8.0,
        backend=backend,
    )
    opt.backward(table(torch.tensor([1, 1, 1])).sum() + 4 * p)
    norm = (3.0**norm_type + 4.0**norm_type) ** (1 / norm_type) if norm_type < math.inf else 4.0
    assert_close(opt.step().grad_norm, norm)
    clip = clip_factor(norm, 1.0)
    assert_close(table.weight, [[0.0], [-3.0 * clip], [0.0], [0.0]])
    assert_close(p, -4.0 * clip)


@each_backend
def test_sparse_gradients_of_two_optimizers_are_scaled_once(backend):
    tables = [torch.nn.Embedding(3, 2, sparse=True) for _ in range(2)]
    for table in tables:
        torch.nn.init.zeros_(table.weight)
    inner = [torch.optim.SGD(table.parameters(), lr=1.0) for table in tables]
    opt = ClockedOptimizer(inner, loss_scale=8.0, max_grad_norm=1.0, backend=backend)
    first, second = (table(torch.tensor([row])) for row, table in enumerate(tables))
    opt.backward(3 * first[0, 0] + 4 * second[0, 1])
    assert opt.step().grad_norm == 5.0
    clip = clip_factor(5.0, 1.0)
    assert_close(tables[0].weight, [[-3.0 * clip, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert_close(tables[1].weight, [[0.0, 0.0], [0.0, -4.0 * clip], [0.0, 0.0]])
