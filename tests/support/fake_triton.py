"""Triton without Triton: kernels run as Python, one program after another, over plain memory.

Masked lanes of a load are poison, and a store outside of its tensor is an error. Scalars are
float32, int32, or int64 from 2^31 on. All operations are rounded as on a GPU, except:

- ``div_rn`` and ``sqrt_rn`` flush subnormal numbers, as Triton 3.5 compiles them and 3.9 does not;
- ``fma`` rounds twice, to float64 and then to float32: one result in about 2^29 differs;
- a product and a sum are joined wherever they meet, in every other launch, unless it has
  enable_fp_fusion=False; a compiler chooses;
- a NaN has the sign and the payload that the CPU gives it;
- conversions of floats that an integer type cannot hold are as on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_program = 0


class _Pointer:
    """An address, or one for each element."""

    def __init__(self, tensor: torch.Tensor, places: torch.Tensor | None = None) -> None:
        assert tensor.is_contiguous()
        self.flat = tensor.view(-1)
        self.places = places
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, places: torch.Tensor) -> _Pointer:
        assert self.places is None
        assert places.dtype == torch.int64, "an offset of 32 bits overflows"
        return _Pointer(self.flat, places)

    def inside(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the places that a mask selects."""
        assert self.places is not None
        assert self.places.shape == mask.shape
        found = self.places[mask]
        assert not len(found) or 0 <= int(found.min()) <= int(found.max()) < len(self.flat)
        return found


def _load(pointer: _Pointer, mask: torch.Tensor, other: float | None = None) -> torch.Tensor:
    dtype = pointer.flat.dtype
    if other is None:
        other = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    found = torch.full(mask.shape, other, dtype=dtype)
    found[mask] = pointer.flat[pointer.inside(mask)]
    return found


def _store(pointer: _Pointer, value: Any, mask: torch.Tensor | None = None) -> None:
    if pointer.places is None:
        pointer.flat[0] = value
        return
    assert mask is not None
    assert value.dtype == pointer.flat.dtype, "an implicit conversion"
    pointer.flat[pointer.inside(mask)] = value.expand(mask.shape)[mask]


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    for operand in (a, b, c):
        assert operand.dtype in (torch.float32, torch.int32)  # Whole numbers are converted.
    return (a.double() * b.double() + c.double()).float()


class _Fusion(TorchFunctionMode):
    """Rounds a product of float32 and the sum or difference that takes it once."""

    def __init__(self) -> None:
        super().__init__()
        self._factors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kind = function.__name__.strip("_").removeprefix("r")
        if kind in ("add", "sub") and not kwargs:
            a, b = args if function.__name__ != "__rsub__" else args[::-1]
            for found, x, y in self._factors:
                if found is a:
                    return _fma(x, y, b if kind == "add" else -b)
                if found is b:
                    return _fma(x if kind == "add" else -x, y, a)
        made = function(*args, **(kwargs or {}))
        if kind == "mul" and made.dtype == torch.float32:
            x, y = (torch.as_tensor(arg, dtype=torch.float32) for arg in args)
            self._factors.append((made, x, y))
        return made


def _max(values: torch.Tensor, axis: int | None) -> torch.Tensor:
    assert values.dtype == torch.int32, "a GPU drops NaNs"
    return values.max() if axis is None else values.amax(axis)


def _full(shape: tuple[int, ...], value: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(value).to(dtype).expand(shape)


def _asm(asm: str, _: str, args: Sequence[torch.Tensor], **_of_compiler: Any) -> torch.Tensor:
    # torch's root on a CPU is not always the nearest number.
    operation: Any = {"div.rn.f32": np.divide, "sqrt.rn.f32": np.sqrt}[asm.split()[0]]
    return torch.from_numpy(operation(*(arg.numpy() for arg in args)))


def _flushed(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.abs() < torch.finfo(torch.float32).tiny, values * 0, values)


class _Kernel:
    """A function of Triton; kernel[grid](...) runs its programs.

    Attributes:
        programs: those to run; None: all.
        launches: how many.
        options: of the last launch, for the compiler.
    """

    def __init__(self, function: Callable[..., Any], do_not_specialize: Collection[str]) -> None:
        self.function = function
        parameters = inspect.signature(function).parameters
        assert parameters.keys() >= set(do_not_specialize)
        self.constants = {
            name for name, found in parameters.items() if found.annotation == "tl.constexpr"
        }
        self.programs: Iterable[int] | None = None
        self.launches = 0
        self.options: dict[str, Any] = {}

    def __call__(self, *args: Any) -> Any:
        """Call it from another kernel."""
        return self.function(*args)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            global _program
            self.options = {name: constants.pop(name) for name in constants.keys() & _OPTIONS}
            assert set(constants) == self.constants, "a constant by position, or another by name"
            own = [_argument(arg) for arg in args]
            self.launches += 1
            for _program in range(grid[0]) if self.programs is None else self.programs:
                is_joined = self.options.get("enable_fp_fusion", self.launches % 2)
                with _Fusion() if is_joined else contextlib.nullcontext():
                    self.function(*own, **constants)

        return launch


_OPTIONS = {"enable_fp_fusion"}


def _jit(function: Any = None, *, do_not_specialize: Collection[str] = ()) -> Any:
    if function is None:
        return functools.partial(_jit, do_not_specialize=do_not_specialize)
    return _Kernel(function, do_not_specialize)


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Pointer(value)
    # One element each, since torch does not promote by tensors of no dimension.
    if isinstance(value, float):
        return torch.tensor([value], dtype=torch.float32)
    is_short = -(2**31) <= value < 2**31
    return torch.tensor([value], dtype=torch.int32 if is_short else torch.int64)


_language = ModuleType("triton.language")
vars(_language).update(
    **{
        name: getattr(torch, name)
        for name in ("int8", "int16", "int32", "int64", "uint8", "bfloat16")
    },
    float32=torch.float32,
    constexpr=lambda value: value,
    program_id=lambda axis: torch.tensor([_program], dtype=torch.int32),
    arange=lambda start, stop: torch.arange(start, stop, dtype=torch.int32),
    load=_load,
    store=_store,
    fma=_fma,
    max=_max,
    full=_full,
    where=torch.where,
    abs=torch.abs,
    floor=torch.floor,
    minimum=lambda a, b: a.clamp(max=b),
    maximum=lambda a, b: a.clamp(min=b),
    cdiv=lambda a, b: (a + b - 1) // b,
    cast=lambda value, dtype, bitcast: value.view(dtype),
    sqrt_rn=lambda x: _flushed(_asm("sqrt.rn.f32", "", [_flushed(x)])),
    div_rn=lambda a, b: _flushed(_asm("div.rn.f32", "", [_flushed(a), _flushed(b)])),
    inline_asm_elementwise=_asm,
)


# Each imports only modules before it.
_MODULES = ("muon.kernels.gpu", "muon.kernels.gpu_encodings", "muon.kernels.gpu_encoded")


def load(name: str, old: str = "", new: str = "") -> ModuleType:
    """Return a module with kernels, made anew over the stand-in.

    Args:
        name: of the module.
        old: text that occurs once in it or in the modules before it; empty for none.
        new: what replaces the text.
    """
    triton = ModuleType("triton")
    vars(triton).update(jit=_jit, cdiv=lambda a, b: -(-a // b), language=_language, __path__=[])
    count = 0
    with mock.patch.dict(sys.modules, {"triton": triton, "triton.language": _language}):
        for each in _MODULES[: _MODULES.index(name) + 1]:
            spec = importlib.util.find_spec(each)
            assert spec is not None
            assert spec.origin is not None
            source = Path(spec.origin).read_text()
            if old:
                count += source.count(old)
                source = source.replace(old, new)
            module = sys.modules[each] = ModuleType(each)
            exec(compile(source, spec.origin, "exec"), vars(module))
    assert not old or count == 1, f"{count} times: {old}"
    return module
