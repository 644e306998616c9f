"""DistributedDataParallel reduces: off inside a window, on for its last micro step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .gradient_mean import average_gradients_
from .parameters import register_hook
from .ranks import Ranks
from .reductions import Engine

__all__ = ["DdpReduction"]


class DdpReduction(Engine):
    """DDP's own reducer, told when to work, and what it leaves out.

    A window that ends early (a tail) was not reduced by DDP: its gradients are averaged here, past
    any communication hook, and so are those of parameters that DDP does not know. With
    ``static_graph=True`` the very first micro step is reduced as well, since DDP learns the graph
    from it: to a mean, more may be added.

    Args:
        ddp: the model, or the parts of it that are wrapped.
        ranks: the processes of DDP.

    """

    def __init__(self, ddp: Sequence[DistributedDataParallel], ranks: Ranks) -> None:
        super().__init__(ranks)
        self._ddp = list(ddp)
        known = [(module, _reduced_by(module)) for module in self._ddp]
        self._known = {key for _, keys in known for key in keys}
        self._strict = {
            key
            for module, keys in known
            if not (module.find_unused_parameters or module.static_graph)
            for key in keys
        }
        self._is_last = False
        self._needs_first = {id(m) for m in self._ddp if m.static_graph}
        self._params: list[Tensor] = []
        self._names: Sequence[str] = ()
        self._watched: dict[int, int] = {}
        self._arrived: set[int] = set()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def bind(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        """The parameters of the wrapper, one a row."""
        self._params, self._names = list(params), names
        self.rest = [p for p in params if id(p) not in self._known]
        for handle in self._handles:
            handle.remove()
        self._watched = {
            id(p): row for row, p in enumerate(params) if p.requires_grad and id(p) in self._strict
        }
        me = weakref.ref(self)

        def arrive(p: Tensor) -> None:
            if (owner := me()) is not None and owner._is_last:
                owner._arrived.add(id(p))

        self._handles = [register_hook(p, arrive) for p in params if id(p) in self._watched]

    def expect(self, *, is_last: bool) -> None:
        """Before the forward of a micro step: whether it is the last of its window."""
        self._is_last = is_last
        self._arrived.clear()
        for module in self._ddp:
            module.require_backward_grad_sync = is_last or id(module) in self._needs_first

    def end_micro_step(self) -> None:
        """After the backward of a micro step.

        Raises:
            RuntimeError: DDP waits for a parameter that took no part.
        """
        self._needs_first.clear()
        # A no_sync() of the user's around the forward, or around the last step(), is followed.
        if not self._is_last or not all(m.require_backward_grad_sync for m in self._ddp):
            return
        self._is_reduced = True
        missing = self._watched.keys() - self._arrived
        if missing and self._arrived:
            names = sorted(self._names[self._watched[key]] for key in missing)
            raise RuntimeError(
                "ClockedOptimizer: under DDP every parameter must take part in the last micro step "
                f"of a window, got none of {', '.join(names[:5])}; build DDP with "
                "find_unused_parameters=True, or pass process_group= in place of DDP"
            )

    def backward_nothing(self, loss: Tensor) -> None:
        """A micro step without items, which DDP reduces: its gradients are zero."""
        leaves = _leaves(loss)
        zeros = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in leaves]
        if leaves:
            torch.autograd.backward(leaves, zeros)
        for module in self._ddp:
            if id(module) in self._needs_first:
                _end_first_backward(module)

    @property
    def num_averaged(self) -> int:
        return self.ranks.size

    @property
    def reduces_now(self) -> bool:
        """The micro step that runs is one that DDP reduces."""
        return self._is_last or bool(self._needs_first)

    @property
    def hides_gradients(self) -> bool:
        """Gradients of an open window lie in ``.grad``."""
        return False

    def complete(self, num_rounds: int, what: str, *, is_complete: bool) -> None:
        """Averages what DDP has not."""
        left = self.rest if self._is_reduced else self._params
        if left:
            average_gradients_(left, self.ranks, what)

    def clear(self) -> None:
        """A new window."""
        self._is_reduced = False


def _reduced_by(module: DistributedDataParallel) -> set[int]:
    """What DDP reduces: it has looked at ``requires_grad`` once, when it was built."""
    named, ignored = module.module.named_parameters(), module.parameters_to_ignore
    return {id(p) for name, p in named if p.requires_grad and name not in ignored}


def _end_first_backward(module: Any) -> None:
    """What the first backward of a static graph sets going at its loss, where there was none."""
    if not module._static_graph_delay_allreduce_enqueued:
        module._static_graph_delay_allreduce_enqueued = True
        module.reducer._delay_all_reduce()


def _leaves(loss: Tensor) -> list[Tensor]:
    """The leaves that a loss depends on."""
    found: dict[int, Tensor] = {}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        waiting.extend(parent for parent, _ in node.next_functions)
    return list(found.values())
