"""Every optimizer of torch and every configuration of it, wrapped, against the plain loop."""

import pytest
import torch
from parity import CONFIGS, INFO, check_parity
from tensors import BACKENDS, dtype_name

APART = ("LBFGS", "SparseAdam")  # see test_lbfgs.py and test_sparse_embeddings.py
USUAL = {label: config for label, config in CONFIGS.items() if config[0] not in APART}
WAYS = {
    f"{way} {label}": (name, {**kwargs, way: True})
    for label, (name, kwargs) in USUAL.items()
    for way in ("foreach", "fused")
    if way in INFO[name].supported_impls
}
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)


@each_backend
@each_dtype
@pytest.mark.parametrize(("name", "kwargs"), USUAL.values(), ids=USUAL)
def test_the_wrapper_trains_as_the_plain_loop_and_states_are_exchangeable(
    name, kwargs, dtype, backend
):
    check_parity(name, kwargs, dtype, backend)


@each_dtype
@pytest.mark.parametrize(("name", "kwargs"), WAYS.values(), ids=WAYS)
def test_foreach_and_fused_train_as_the_plain_loop_and_states_are_exchangeable(name, kwargs, dtype):
    check_parity(name, kwargs, dtype, "auto")


def test_every_optimizer_of_torch_is_among_those_tested():
    public = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    assert {name for name, _ in CONFIGS.values()} == public - {"Optimizer"}
