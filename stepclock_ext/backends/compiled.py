"""Settings of an update as the compiled modules take them; ``_C`` and ``_CUDA`` name them alike."""

from __future__ import annotations

from typing import Any

import torch

from .contract import AdamScalars, Companions, SgdScalars

__all__ = ["DTYPE_CODES", "adam_settings", "companion_settings", "sgd_settings"]

# As `DType` in csrc/contract.h.
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def adam_settings(module: Any, scalars: AdamScalars) -> Any:
    """Everything but `maximize`, which travels apart."""
    return module.AdamScalars(
        lr=scalars.lr,
        beta1=scalars.beta1,
        beta2=scalars.beta2,
        eps=scalars.eps,
        weight_decay=scalars.weight_decay,
        decoupled=scalars.decoupled,
        amsgrad=scalars.amsgrad,
    )


def sgd_settings(module: Any, scalars: SgdScalars, *, has_buffers: bool) -> Any:
    """Likewise; without buffers there is no momentum."""
    return module.SgdScalars(
        lr=scalars.lr,
        momentum=scalars.momentum if has_buffers else 0.0,
        dampening=scalars.dampening,
        weight_decay=scalars.weight_decay,
        nesterov=scalars.nesterov,
        first=scalars.first,
    )


def companion_settings(module: Any, companions: Companions) -> Any:
    """Which companions there are; their tensors are bound apart."""
    return module.Companions(
        has_masters=companions.masters is not None,
        has_averages=companions.averages is not None,
        stochastic=companions.rounding_key is not None,
        gated=companions.is_gated,
        average_weight=companions.average_weight,
        rounding_key=companions.rounding_key or 0,
    )
