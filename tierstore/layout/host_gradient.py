"""The gradient of a parameter on a GPU, in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from typing_extensions import override

_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class HostGradient(torch.Tensor):
    """A ``.grad`` that is in host memory.

    It has shape, dtype and device of the gradient that it replaces, and no memory there. A further
    backward() adds to what is on the host. All else that computes with it raises RuntimeError.

    Args:
        name: of the parameter.
        gradient: on the device.
        host: of its shape and dtype.
        wait: blocks until ``gradient`` was copied to ``host``.
    """

    _name: str
    _host: torch.Tensor
    _wait: Callable[[], None]

    @staticmethod
    def __new__(  # noqa: D102
        cls, name: str, gradient: torch.Tensor, host: torch.Tensor, wait: Callable[[], None]
    ) -> HostGradient:
        made: HostGradient = torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # Its address would be 0.
        made._name, made._host, made._wait = name, host, wait
        return made

    @property
    def host(self) -> torch.Tensor:
        """The gradient; blocks until it has arrived."""
        self._wait()
        return self._host

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"<gradient of {self._name!r} in host memory, {list(self.shape)} {self.dtype}>"

    @override
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickle")

    @override
    def share_memory_(self) -> NoReturn:
        """Refuse, as there is no memory."""
        self._refuse("share_memory_()")

    @override
    def __dlpack__(self, **options: Any) -> NoReturn:
        self._refuse("__dlpack__()")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Add a gradient, as autograd does, or refuse."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and function in _ADDITIONS and isinstance(args[0], cls) and not kwargs:
            # Blocks the backward: the sum is computed here, of a copy that is not page-locked.
            args[0].host.add_(args[1].cpu())
            return args[0]
        next(_gradients([*args, *(kwargs or {}).values()]))._refuse(str(function))

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"the gradient of {self._name!r} is in host memory, and {what} does not reach it "
            "there: clip with optimizer.clip_grad_norm_(), discard with "
            "zero_grad(set_to_none=True), or open the store with free_gradients=True"
        )


def _gradients(arguments: Sequence[Any]) -> Iterator[HostGradient]:
    """Yield the HostGradients among arguments, and in lists of them."""
    for argument in arguments:
        if isinstance(argument, HostGradient):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _gradients(argument)
