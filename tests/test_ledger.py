"""The memory ledger: bytes of each part, against cases, arithmetic and real tensors."""

import dataclasses

import pytest
import torch
from helpers import clocked_sgd

from stepclock_ext import EMA, ClockedOptimizer
from stepclock_ext.memory import ActivationFit, MemoryLedger, estimate_activation_bytes

MILLION = 1_000_000
HUGE = 2_476_250_368  # elements; as a 32-bit size it would be negative
BF16 = {"optimizer": "adamw", "dtype": torch.bfloat16}
OF_8 = {"gradient_accumulation_steps": 8}
MIXED = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def meta(*shape, dtype=torch.float32, requires_grad=True):
    tensor = torch.empty(*shape, dtype=dtype, device="meta")
    return torch.nn.Parameter(tensor, requires_grad=requires_grad)


def million_bf16():
    return [meta(1000, 500, dtype=torch.bfloat16), meta(500_000, dtype=torch.bfloat16)]


@pytest.mark.parametrize("steps", [4, 64])
def test_a_million_bf16_parameters_with_the_fused_rule(steps):
    """Parameters 2 MB, fp32 sums 4, fp32 moments 8, no gradients; remainders 2 more."""
    ledger = MemoryLedger.of(million_bf16(), gradient_accumulation_steps=steps)
    assert ledger == MemoryLedger(
        parameter_bytes=2 * MILLION, accumulator_bytes=4 * MILLION, moment_bytes=8 * MILLION
    )
    assert ledger.total_bytes == 14 * MILLION
    masters = MemoryLedger.of(
        million_bf16(), gradient_accumulation_steps=steps, master_weights=True
    )
    assert (masters.master_bytes, masters.moment_bytes) == (2 * MILLION, 8 * MILLION)
    assert masters.total_bytes == 16 * MILLION


@pytest.mark.parametrize("steps", [4, 64])
def test_a_million_bf16_parameters_with_the_optimizers_own_step(steps):
    """Case 57: 2 + 2 + 4 + 4 MB; 20 MB with fp32 masters and moments; the same for any K > 1."""
    options = {"gradient_accumulation_steps": steps, "fused": False}
    ledger = MemoryLedger.of(million_bf16(), **options)
    assert ledger == MemoryLedger(
        parameter_bytes=2 * MILLION,
        gradient_bytes=2 * MILLION,
        accumulator_bytes=4 * MILLION,
        moment_bytes=4 * MILLION,
    )
    assert ledger.total_bytes == 12 * MILLION
    masters = MemoryLedger.of(million_bf16(), master_weights=True, **options)
    assert (masters.master_bytes, masters.moment_bytes) == (4 * MILLION, 8 * MILLION)
    assert masters.total_bytes == 20 * MILLION


def test_more_elements_than_32_bits_count():
    """Case 42: 9 905 001 472 bytes for the fp32 accumulator."""
    half = MemoryLedger.of([meta(HUGE, dtype=torch.float16)], gradient_accumulation_steps=2)
    assert half.accumulator_bytes == 9_905_001_472
    full = MemoryLedger.of([meta(HUGE)], gradient_accumulation_steps=2)
    assert full.gradient_bytes == 9_905_001_472  # the gradient itself is the accumulator
    assert full.accumulator_bytes == 0


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ({"optimizer": "sgd"}, 8),
        ({"optimizer": "SGD", "momentum": True}, 12),
        ({"optimizer": "adamw"}, 16),
        ({"optimizer": "adam", "amsgrad": True}, 20),
        ({"optimizer": "adamw", "ema": True}, 20),
        ({"optimizer": "adamw", **OF_8}, 16),
        ({"optimizer": "adamw", "accumulate_dtype": torch.float64, "fused": False}, 24),
        ({"optimizer": "adamw", "dtype": torch.float64, "master_weights": True}, 32),
        ({"optimizer": "adamw", "dtype": torch.float64, "accumulate_dtype": torch.float32}, 32),
        ({"optimizer": "adamw", "fused": False, "master_weights": True}, 16),
        (BF16, 2 + 2 + 4),
        ({**BF16, "ema": True}, 2 + 2 + 4 + 4),
        ({**BF16, **OF_8, "accumulate_dtype": torch.bfloat16}, 2 + 2 + 4),
        ({**BF16, "accumulate_dtype": torch.float32}, 2 + 4 + 8),
        ({**BF16, "master_weights": True}, 2 + 2 + 2 + 8),
        ({**BF16, "master_weights": True, "fused": False}, 2 + 2 + 4 + 8),
        ({**BF16, "dtype": torch.float16, "master_weights": True}, 2 + 2 + 4 + 8),
        ({**BF16, **OF_8, "optimizer": "sgd"}, 2 + 4),
        ({**BF16, **OF_8, "amsgrad": True, "ema": True}, 2 + 4 + 12 + 4),
    ],
)
def test_bytes_a_parameter(options, bytes_each):
    assert MemoryLedger.of(7_000_000_000, **options).total_bytes == 7_000_000_000 * bytes_each


@pytest.mark.parametrize(
    ("options", "kept"),
    [  # bytes of parameters, gradients, sums, masters, moments
        ({}, (4, 0, 4, 0, 8)),
        ({**OF_8}, (4, 0, 4, 0, 8)),
        ({"optimizer": "sgd", "fused": False}, (4, 0, 4, 0, 0)),
        ({"dtype": torch.float64, "master_weights": True}, (8, 0, 8, 0, 16)),
        (BF16, (2, 0, 4, 0, 8)),
        ({**BF16, **OF_8}, (2, 0, 4, 0, 8)),
        ({**BF16, "master_weights": True}, (2, 0, 4, 2, 8)),
        ({**BF16, "dtype": torch.float16, "master_weights": True}, (2, 0, 4, 4, 8)),
        ({**BF16, "accumulate_dtype": torch.bfloat16}, (2, 0, 2, 0, 4)),
        ({**BF16, "fused": False}, (2, 2, 4, 0, 4)),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_reduction_of_our_own_keeps_sums_in_buckets_and_no_gradients(options, kept, num_ranks):
    """On any number of ranks, as each holds everything; in windows of one micro step as of 8."""
    names = ("parameter", "gradient", "accumulator", "master", "moment")
    expected = {f"{name}_bytes": MILLION * size for name, size in zip(names, kept, strict=True)}
    ledger = MemoryLedger.of(MILLION, process_group=True, world_size=num_ranks, **options)
    assert ledger == MemoryLedger(**expected)


@pytest.mark.parametrize(
    ("options", "masters", "moments"),
    [
        ({}, 0, 8),
        ({"amsgrad": True}, 0, 12),
        ({"optimizer": "sgd", "momentum": True}, 0, 4),
        ({**BF16, **OF_8, "master_weights": True}, 2, 8),
        ({**BF16, "dtype": torch.float16, "master_weights": True}, 4, 8),
    ],
)
def test_sharded_states_are_moments_and_masters_by_world_size(options, masters, moments):
    """Parameters and sums are whole on every rank, which gets its share of the sums on top."""
    whole = MemoryLedger.of(800, process_group=True, ema=True, **options)
    shards = {"process_group": True, "shard_states": True, "ema": True}
    shared = MemoryLedger.of(800, world_size=8, **shards, **options)
    assert (shared.master_bytes, shared.moment_bytes) == (100 * masters, 100 * moments)
    assert (shared.ema_bytes, shared.accumulator_bytes) == (100 * 4, 800 * 4 + 100 * 4)
    names = ("master_bytes", "moment_bytes", "ema_bytes", "accumulator_bytes")
    assert dataclasses.replace(shared, **{name: getattr(whole, name) for name in names}) == whole
    assert MemoryLedger.of(800, world_size=1, **shards, **options) == whole


def test_a_share_is_rounded_up_for_each_parameter():
    """Of 3 ranks: ceil(10 / 3) + ceil(1 / 3) + 0 = 5 elements; what is frozen has no state."""
    params = [meta(2, 5), meta(1), meta(0), meta(30, requires_grad=False)]
    shards = {"process_group": True, "shard_states": True, "world_size": 3}
    assert MemoryLedger.of(params, **shards) == MemoryLedger(
        parameter_bytes=4 * 41, accumulator_bytes=4 * 11 + 4 * 5, moment_bytes=8 * 5
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_parameters_count_once_and_frozen_ones_are_only_kept(device):
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10))
        model.register_buffer("mask", torch.zeros(6, dtype=torch.int64))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    assert MemoryLedger.of(model) == MemoryLedger(
        parameter_bytes=4 * 120, gradient_bytes=4 * 110, moment_bytes=8 * 110, buffer_bytes=48
    )
    w = meta(5)
    assert MemoryLedger.of([w, w]) == MemoryLedger.of(iter([w]))


@each_optimizer
def test_the_ledger_is_what_the_tensors_of_a_run_take(make):
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))
    inner = make(model.parameters())
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=2)
    for _ in range(3):  # an update, and a window that is open
        opt.backward(model(torch.randn(4, 30)).square().mean())
        opt.step()
    params = list(model.parameters())
    moments = [v for p in params for v in opt.state.get(p, {}).values()]
    ledger = MemoryLedger.of(model, optimizer=inner, gradient_accumulation_steps=2)
    assert ledger.parameter_bytes == sum(p.nbytes for p in params)
    assert ledger.gradient_bytes == sum(p.grad.nbytes for p in params)
    assert ledger.moment_bytes == sum(v.nbytes for v in moments if v is not None and v.dim())
    assert ledger.buffer_bytes == sum(b.nbytes for b in model.buffers())


@each_optimizer
@pytest.mark.parametrize("dtypes", [*([dtype] for dtype in MIXED), MIXED], ids=str)
@pytest.mark.parametrize("masters", [False, True], ids=["no masters", "masters"])
@pytest.mark.parametrize("sums", [None, torch.float32], ids=["own sums", "fp32 sums"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_ledger_is_what_a_wrapper_holds_after_an_update(make, dtypes, masters, sums, steps):
    """Its gradients are counted at the last backward; step counters are left out."""
    sums = None if dtypes == [torch.float64] else sums  # refused there
    sizes = [(), (7, 5), (0,), (20_011,)]
    params = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for dtype in dtypes for n in sizes]
    options = {"gradient_accumulation_steps": steps, "accumulate_dtype": sums}
    inner, ema = make(params), EMA(0.9)
    opt = ClockedOptimizer(inner, master_weights=masters, ema=ema, **options)
    for number in range(1, 2 * steps + 1):
        opt.backward(sum(p.double().square().sum() for p in params))
        grads = [p.grad for p in params if p.grad is not None]
        assert opt.step().updated == (number % steps == 0)
    moments = [t for state in inner.state.values() for key, t in state.items() if key != "step"]
    saved = opt.state_dict()["stepclock"]
    assert MemoryLedger.of(
        params, optimizer=inner, master_weights=masters, ema=True, **options
    ) == (
        MemoryLedger(
            parameter_bytes=num_bytes(params),
            gradient_bytes=num_bytes(grads),
            accumulator_bytes=num_bytes(opt._buffers.values()),
            master_bytes=num_bytes((saved["masters"] or {}).values()),
            moment_bytes=num_bytes(moments),
            ema_bytes=num_bytes(saved["ema"]["averages"].values()),
        )
    )


def num_bytes(tensors):
    """Of all that is there; a momentum buffer may not be."""
    return sum(t.nbytes for t in tensors if t is not None)


def test_the_table_shows_what_a_peak_does_not_explain():
    ledger = MemoryLedger.of(MILLION, activation_bytes=3_000_000)
    assert ledger.rows() == [
        ("parameters", 4_000_000),
        ("gradients", 4_000_000),
        ("moments", 8_000_000),
        ("activations", 3_000_000),
    ]
    assert ledger.unexplained_bytes(20_000_000) == 1_000_000
    *_, total, measured, rest = ledger.table(measured_bytes=20_000_000).splitlines()
    assert total.split() == ["total", "19,000,000"]
    assert measured.split() == ["measured", "peak", "20,000,000"]
    assert rest.split() == ["unexplained", "1,000,000", "5.0", "%", "of", "the", "peak"]
    assert ledger.unexplained_bytes(18_000_000) == -1_000_000


def test_activations_are_estimated_or_fitted():
    sizes = {"batch_size": 2, "num_layers": 3, "sequence_length": 5, "hidden_size": 7}
    assert estimate_activation_bytes(**sizes, k=8) == 2 * 3 * 5 * 7 * 8
    assert estimate_activation_bytes(**sizes) == 2 * 3 * 5 * 7 * 14
    fit = ActivationFit.through((16, 2_600), (4, 1_400))
    assert fit == ActivationFit(1_000, 100)
    assert [fit.fixed_bytes + fit.activation_bytes(batch) for batch in (4, 16)] == [1_400, 2_600]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MemoryLedger.of([]), ValueError, "must have parameters, got none"),
        (lambda: MemoryLedger.of(0), ValueError, "number of parameters must be 1 or more, got 0"),
        (lambda: MemoryLedger.of(1.5), TypeError, "must be an integer, got 1.5"),
        (lambda: MemoryLedger.of(1, optimizer="lion"), ValueError, "adamw, got lion"),
        (lambda: MemoryLedger.of(1, momentum=True), ValueError, "must go with sgd, got adamw"),
        (lambda: MemoryLedger.of(1, gradient_accumulation_steps=0), ValueError, "got 0"),
        (lambda: MemoryLedger.of(1, world_size=0), ValueError, "world_size must be 1 or more"),
        (lambda: MemoryLedger.of(1, world_size=2.0), TypeError, "must be an integer, got 2.0"),
        (
            lambda: MemoryLedger.of(1, shard_states=True, world_size=8),
            ValueError,
            "shard_states must go with .*, got process_group=False; pass process_group=True",
        ),
        (lambda: MemoryLedger.of(1, activation_bytes=-1), ValueError, "0 or more, got -1"),
        (
            lambda: MemoryLedger.of(1, accumulate_dtype=torch.float64),
            ValueError,
            "accumulate_dtype must be torch.float32 for .* got torch.float64; pass fused=False",
        ),
        (
            lambda: MemoryLedger.of(1, dtype=torch.float16, accumulate_dtype=torch.bfloat16),
            ValueError,
            "must be torch.float32 or torch.float16 for .* got torch.bfloat16; ",
        ),
        (lambda: ActivationFit.through((4, 10), (4, 10)), ValueError, "must differ"),
        (lambda: ActivationFit.through((4, 10), (8, 9)), ValueError, "larger peak"),
        (
            lambda: estimate_activation_bytes(
                batch_size=1, num_layers=1, sequence_length=1, hidden_size=1, k=34
            ),
            ValueError,
            "k must be from 8 to 20, got 34",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_ledger_of_an_unknown_optimizer_says_which_are_known():
    opt = clocked_sgd(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="must be one of sgd, adam, adamw, got ClockedOptimizer;"):
        MemoryLedger.of(1, optimizer=opt)
