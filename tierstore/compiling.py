"""Functions that torch.compile does not trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return an equivalent function that ``torch.compile`` calls without tracing it.

    Unlike ``torch.compiler.disable``, it does not import the compiler: the import takes seconds.
    While the compiler is not imported, nothing is compiled.
    """
    disabled: Callable[P, T] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            import torch

            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return call
