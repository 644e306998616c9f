"""Who applies the coefficient: a fused rule, a stock fused optimizer, or one pass of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from . import ops
from .companions import ParameterCompanions
from .norm import Measurement
from .parameters import ParameterRows
from .plain_step import (
    apply_in_place,
    hand_over,
    has_own_step,
    has_step_hooks,
    refuse_misfit,
    run_step,
)
from .update_rules import RULES, AdamRule, BoundGroup, Rule
from .window_gradients import WindowGradients

__all__ = ["RulePlan", "Updater"]

_TAKES_SPARSE = (SGD, Adagrad, SparseAdam)


class Updater:
    """Runs one inner optimizer's updates.

    The order of preference, decided anew for each update::

        stock AdamW, Adam, SGD, every row walked   our fused rule (28 bytes a parameter for AdamW)
        another stock optimizer, fused=True        its grad_scale hook
        any other, and any with step hooks         coefficient in place (unless it is 1), step()

    Step hooks see the true gradient, and may change whatever they like before the update. An
    optimizer that steps by itself finds each gradient in ``.grad``, rounded once to the parameter's
    dtype. Where only our rule can do what is asked for (fp32 moments of 16-bit parameters, masters,
    stochastic rounding), it runs between the hooks.
    """

    def __init__(
        self,
        inner: Optimizer,
        group_indices: Sequence[int],
        companions: ParameterCompanions,
        *,
        needs_rule: bool = False,
    ) -> None:
        self.inner = inner
        self.group_indices = list(group_indices)
        self.companions = companions
        self.needs_rule = needs_rule
        self._rule = RULES.get(type(inner))
        self._bound: dict[int, tuple[tuple[int, ...], list[BoundGroup]]] = {}
        self._states: list[Any] = []  # what the inner state held when groups were bound

    def check(self, rows: ParameterRows, gradients: WindowGradients, names: Sequence[str]) -> None:
        """Refuses, before anything moves, gradients the optimizer cannot take.

        Raises:
            TypeError: a sparse gradient for a stock optimizer that takes none, or a dense one for
                SparseAdam.
        """
        kind = type(self.inner)
        takes_dense, takes_sparse = kind is not SparseAdam, kind in _TAKES_SPARSE
        if not kind.__module__.startswith("torch.optim") or (takes_dense and not gradients.odd):
            return
        for row in self._rows_of(rows):
            grad = gradients.grads[row]
            if grad is None or (takes_sparse if grad.is_sparse else takes_dense):
                continue
            found, wanted = ("sparse", "dense") if grad.is_sparse else ("dense", "sparse")
            raise TypeError(
                f"ClockedOptimizer: {kind.__name__} takes no {found} gradients, got one for "
                f"{names[row]!r}; make it {wanted} (Embedding(sparse=...)), or give the parameter "
                "to another optimizer"
            )

    def prepare(
        self,
        rows: ParameterRows,
        gradients: WindowGradients,
        names: Sequence[str],
        update: int,
        is_gated: bool = False,
    ) -> list[RulePlan] | None:
        """What the fused rule will run in this update; None where the inner ``step`` will do it.

        Raises:
            TypeError: a fused optimizer's state does not lie like its parameter any more.
            RuntimeError: the rule cannot run, and nothing else can do what was asked for.
        """
        groups = self._group_rows(rows, gradients)
        runs_rule = self._is_stock_step() and (
            not has_step_hooks(self.inner)
            or self.needs_rule
            or rows.has_wide_state
            or _has_mixed_state(self.inner)
        )
        plans = self._plan_rules(rows, groups, gradients, update, is_gated) if runs_rule else None
        if plans is None:
            if self.needs_rule and any(groups):
                self._refuse_without_rule()
            for group, group_rows in zip(self.inner.param_groups, groups, strict=True):
                if group.get("fused") or isinstance(self._rule, AdamRule):
                    refuse_misfit(self.inner, rows, group_rows, names, fused=group.get("fused"))
        return plans

    def _refuse_without_rule(self) -> None:
        reason = "step() was replaced" if not self._is_stock_step() else "it cannot take them all"
        raise RuntimeError(
            "ClockedOptimizer: master_weights=True and rounding='stochastic' must go with the "
            f"fused update rule of {type(self.inner).__name__}, got parameters or gradients it "
            f"does not run on ({reason}: another device than the backend's, sparse gradients, or "
            "capturable=True); change these, pass backend='reference', or leave the option out"
        )

    def update(
        self,
        rows: ParameterRows,
        gradients: WindowGradients,
        measurement: Measurement,
        plans: list[RulePlan] | None,
    ) -> None:
        """Moves the inner optimizer's parameters once, as `prepare` found. Its step hooks fire."""
        if plans is None:
            groups = self._group_rows(rows, gradients)
            run_step(self.inner, rows, groups, gradients, measurement)
        elif has_step_hooks(self.inner):
            self._update_between_hooks(rows, gradients, measurement, plans)
        else:
            self.update_on_device(plans, measurement.stats)

    def update_on_device(self, plans: list[RulePlan], stats: Tensor) -> None:
        """Runs the rule; `stats` hold the coefficient, and for gated plans decide."""
        self.inner._opt_called = True  # type: ignore[attr-defined]
        self._run(plans, stats)

    def is_bound(self, rows: ParameterRows, gradients: WindowGradients) -> bool:
        """Whether the rule has run on these rows before."""
        groups = zip(self.inner.param_groups, self._group_rows(rows, gradients), strict=True)
        return all(
            not group_rows or self._bound.get(id(group), ((), []))[0] == group_rows
            for group, group_rows in groups
        )

    def is_rule_alone(self, plans: list[RulePlan] | None) -> bool:
        """Whether nothing but the rule will move, and no state is to be made by it."""
        if plans is None or has_step_hooks(self.inner):
            return False
        return not any(plan.bound.first for plan in plans)

    def _run(self, plans: list[RulePlan], stats: Tensor) -> None:
        for plan in plans:
            torch.autograd.graph.increment_version(plan.bound.params)
            plan.rule.run(plan.group, plan.bound, plan.sums, stats, plan.companions)
            plan.bound.layout.release("ACCUMULATOR")
            self.companions.settle(plan.bound)

    def _update_between_hooks(
        self,
        rows: ParameterRows,
        gradients: WindowGradients,
        measurement: Measurement,
        plans: list[RulePlan],
    ) -> None:
        """The rule in the place of ``step()``: torch calls the hooks before and after it."""
        among = [row for plan in plans for row in plan.bound.rows]
        apply_in_place(rows, gradients, measurement, among)
        hand_over(rows, gradients, among)
        seen = {row: _identity(rows.params[row].grad) for row in among}

        def step(inner: Optimizer) -> None:
            for plan in plans:
                self.companions.follow(plan.bound)
                for row, total in zip(plan.bound.rows, plan.sums, strict=True):
                    grad = rows.params[row].grad
                    if grad is None:
                        raise RuntimeError(
                            "ClockedOptimizer: a step hook must leave every gradient in .grad, got "
                            "None for one of them; set it to zero instead"
                        )
                    if grad is not total and _identity(grad) != seen[row]:
                        total.copy_(grad)
            self._run(plans, ops.make_stats(rows.backend.device))

        Optimizer.profile_hook_step(step)(self.inner)

    def _rows_of(self, rows: ParameterRows) -> set[int]:
        return {row for index in self.group_indices for row in rows.group_rows[index]}

    def _group_rows(self, rows: ParameterRows, gradients: WindowGradients) -> list[tuple[int, ...]]:
        """Rows with a gradient, for each group of the inner optimizer."""
        grads = gradients.grads
        if gradients.is_complete:
            return [rows.group_rows[index] for index in self.group_indices]
        return [
            tuple(row for row in rows.group_rows[index] if grads[row] is not None)
            for index in self.group_indices
        ]

    def _is_stock_step(self) -> bool:
        """A fused rule exists, and nobody but torch's schedulers has wrapped ``step``."""
        return self._rule is not None and has_own_step(self.inner)

    def _plan_rules(
        self,
        rows: ParameterRows,
        groups: list[tuple[int, ...]],
        gradients: WindowGradients,
        update: int,
        is_gated: bool,
    ) -> list[RulePlan] | None:
        """What the rule would run for each group; None if any group is not for it."""
        assert self._rule is not None
        odd = set(gradients.odd)
        if odd and any(not odd.isdisjoint(group) for group in groups):
            return None
        plans = []
        self._drop_stale_bounds()
        for group, group_rows in zip(self.inner.param_groups, groups, strict=True):
            if not group_rows:
                continue
            parts = None if group.get("capturable") else self._bind(rows, group, group_rows)
            if parts is None:
                return None
            for bound in parts:
                sums = gradients.of(bound.rows)
                bound.layout.verified["ACCUMULATOR"] = sums  # collect() made them fit
                companions = self.companions.prepare(bound, update, is_gated)
                plans.append(RulePlan(self._rule, group, bound, sums, companions))
        return plans

    def _drop_stale_bounds(self) -> None:
        """Forgets bound groups where a parameter's state dict was replaced, or one was added."""
        now = self.inner.state.values()
        if len(now) != len(self._states) or not all(map(is_, now, self._states)):
            self._bound.clear()

    def _bind(
        self, rows: ParameterRows, group: dict[str, Any], group_rows: tuple[int, ...]
    ) -> list[BoundGroup] | None:
        """The group's state tensors, checked; reused while they are the same objects."""
        assert self._rule is not None
        bound_rows, parts = self._bound.get(id(group), ((), []))
        keys = self._rule.keys(group)
        if bound_rows == group_rows and all(part.is_current(keys) for part in parts):
            return parts
        self._bound.pop(id(group), None)
        fresh = self._rule.bind(self.inner, group, rows, group_rows)
        if fresh is not None:
            self._bound[id(group)] = (group_rows, fresh)
            self._states = list(self.inner.state.values())
        return fresh


@dataclass(frozen=True, eq=False)
class RulePlan:
    """One call of a rule's kernel."""

    rule: Rule
    group: dict[str, Any]
    bound: BoundGroup
    sums: list[Tensor]
    companions: ops.Companions


def _has_mixed_state(inner: Optimizer) -> bool:
    """A state has another dtype than its parameter, which only a rule of ours can take."""
    return any(
        isinstance(value, Tensor) and value.dtype != p.dtype and key != "step"
        for p, state in inner.state.items()
        for key, value in state.items()
    )


def _identity(grad: Tensor | None) -> tuple[int, int]:
    """Which tensor it is, and how often it was written."""
    return (0, 0) if grad is None else (id(grad), grad._version)
