"""The whole wrapper on the CUDA kernels, which run on the simulator; settled late, as on a GPU."""

import pytest
import torch
from simulated import SimulatedBackend
from test_late_settlement import MAKERS, everything, run, start
from tolerance import assert_all_bit_equal, assert_close

SETTINGS = {
    "fp32": {"max_grad_norm": 0.5, "averages": True},
    "bf16 masters": {"dtype": torch.bfloat16, "master_weights": True, "averages": True},
    "fp16 masters": {"dtype": torch.float16, "master_weights": True, "loss_scale": 8.0},
    "stochastic": {"dtype": torch.bfloat16, "rounding": "stochastic"},
}


class LateSimulation(SimulatedBackend):
    """As a GPU: its ops run on while the host goes on."""

    settles_late = True


@pytest.fixture(scope="module")
def simulation():
    return LateSimulation()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_run_on_the_simulated_gpu_is_the_run_on_the_cpu(simulation, make, settings):
    results = []
    for simulated in (False, True):
        params, opt = start(make, late=False, sizes=(3, 2049, 1), **settings)
        if simulated:
            opt._backend = simulation
            opt._build_pass()
        infos = run(params, opt, 6)
        assert [info.skipped for info in infos] == [False, False, False, True, True, False]
        results.append((everything(params, opt), infos))
    (now, infos), (later, late_infos) = results
    if opt._clip.max_grad_norm is None:  # a coefficient of 1 / weight, whatever the norm's last bit
        assert_all_bit_equal(later, now)
    for got, want in zip(later, now, strict=True):
        assert_close(got, want, num_roundings=64, dtype=settings.get("dtype"))
    for got, want in zip(late_infos, infos, strict=True):
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-12, nan_ok=True)
        assert (got.lr, got.micro_step, got.update_step) == (
            want.lr,
            want.micro_step,
            want.update_step,
        )
