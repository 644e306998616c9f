"""The optimizer that others see: a torch Optimizer whose groups and state are the inner ones'."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

__all__ = ["OptimizerFacade"]


class OptimizerFacade(Optimizer):
    """Base of the wrapper: everything that torch reads from an optimizer, from those inside.

    ``Optimizer.__init__`` is not called: it would make groups, state and hooks of its own.

    Attributes:
        optimizers: the inner optimizers.
    """

    optimizers: list[Optimizer]

    def _settle_late(self) -> None:
        """Makes groups and clock those after the last update, if the host waits for that still."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups; for several, all of them one after another."""
        self._settle_late()
        return self._groups

    @property
    def _groups(self) -> list[dict[str, Any]]:
        if len(self.optimizers) == 1:
            return self.optimizers[0].param_groups
        return [group for inner in self.optimizers for group in inner.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state; for several, one dict of all, to read from."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].state
        return {p: state for inner in self.optimizers for p, state in inner.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The first inner optimizer's defaults."""
        return self.optimizers[0].defaults

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Registers on the inner optimizer: called once per update, never on a skip."""
        return self._only_inner("register_step_pre_hook").register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Registers on the inner optimizer: called once per update, never on a skip."""
        return self._only_inner("register_step_post_hook").register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers on the inner optimizer, whose state dict is part of ours."""
        inner = self._only_inner("register_state_dict_pre_hook")
        return inner.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers on the inner optimizer, whose state dict is part of ours."""
        inner = self._only_inner("register_state_dict_post_hook")
        return inner.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers on the inner optimizer, which loads its part."""
        inner = self._only_inner("register_load_state_dict_pre_hook")
        return inner.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers on the inner optimizer, which loads its part."""
        inner = self._only_inner("register_load_state_dict_post_hook")
        return inner.register_load_state_dict_post_hook(hook, prepend)

    def _only_inner(self, method: str) -> Optimizer:
        if len(self.optimizers) > 1:
            raise RuntimeError(
                f"ClockedOptimizer.{method}: this wrapper holds {len(self.optimizers)} optimizers; "
                "register on one of opt.optimizers"
            )
        return self.optimizers[0]
