"""Paged: any class of ``torch.optim`` whose states are in the pages of a store."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tierstore.layout.dtensors import local_tensor
from tierstore.layout.encodings import MASTER
from tierstore.layout.parameters import STEPPED, PagedParameter, master_dtype
from tierstore.layout.records import RECORD_DATA_BYTES_MAX
from tierstore.optim.base import PagedOptimizer
from tierstore.optim.class_steps import ClassSteps
from tierstore.optim.classes import (
    ELEMENTWISE,
    Class,
    Kept,
    group_values,
    initial_value,
    kept_at,
    kept_by,
    require_apart,
    require_options,
    require_same_class,
    require_usable,
    shape_options,
    signature,
)
from tierstore.paging.sweep import SteppedPages
from tierstore.store import TierStore


class Paged(PagedOptimizer):
    """A class of ``torch.optim``, or of a package, whose states are in the pages of a store.

    Example::

        named = model.named_parameters()
        optimizer = tierstore.Paged(named, torch.optim.AdamW, store=store, lr=3e-4)

    Results equal the class bit for bit. Parameters of lower precision have float32 masters. Their
    results equal the class over float32 copies. Hyperparameters, param groups, schedulers and state
    dicts are as in the class.

    Args:
        params: parameters, ``named_parameters()`` or param groups, as in ``torch.optim``. Names
            identify the state on disk: pass named parameters if the run may be resumed.
        cls: the class. Its states are tensors and numbers, and dicts and lists of them.
        store: holds the states; None keeps them in memory.
        elementwise: True: each element of a parameter is stepped by itself. Pages and ranks may
            then cut parameters anywhere. None: True for the classes of ``torch.optim`` that are
            tested (docs/reference/torch-classes.md). Other classes see whole parameters. FSDP2 and
            tensor parallelism do not have whole parameters.
        partition, gradient, nonfinite, missing: see PagedOptimizer.
        options: arguments of the class, such as ``lr``.

    Raises:
        TypeError: ``cls`` is not a class of optimizers, or does not take an option.
        ValueError: the class cannot be in pages, or refuses an option.
    """

    def __init__(
        self,
        params: ParamsT,
        cls: Callable[..., torch.optim.Optimizer],
        *,
        store: TierStore | None = None,
        elementwise: bool | None = None,
        partition: str = "auto",
        gradient: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        nonfinite: str = "raise",
        missing: str = "zeros",
        **options: Any,
    ) -> None:
        require_usable(cls)
        self._class = cls
        self._options = options
        self._is_listed = cls in ELEMENTWISE
        self._is_elementwise = self._is_listed if elementwise is None else elementwise
        self._small: dict[Any, tuple[Kept, frozenset[str]]] = {}
        self._kept: dict[Any, Kept] = {}
        # This optimizer steps a page. During the step its group and state hold views of the page.
        self._stepper = _stepper(cls, options)
        [group] = self._stepper.param_groups  # Classes add keys to the group, such as counts.
        defaults = {**self._stepper.defaults, **group_values(group)}
        require_options(cls, defaults)
        super().__init__(
            params,
            defaults,
            store=store,
            partition=partition,
            gradient=gradient,
            nonfinite=nonfinite,
            missing=missing,
        )

    # ------------------------------------------------------------------------------ what is kept

    def paged_parameter(
        self, group: Mapping[str, Any], name: str, tensor: torch.Tensor, **placing: Any
    ) -> PagedParameter:
        """Return a parameter with the states that the class keeps for it."""
        kept = self._kept_for(group, tensor)
        if kept.kinds.keys() != self.kinds_of(group).keys():
            raise ValueError(
                f"{self._class.__name__} keeps the numbers {sorted(kept.kinds)} for {name!r}, and "
                f"{sorted(self.kinds_of(group))} for the first parameter of its group: give it a "
                "group of its own"
            )
        # On a CPU, the fused kernels of torch round differently at the ends of a tensor.
        is_cut = self._is_elementwise and not (group.get("fused") and tensor.device.type == "cpu")
        if not is_cut and local_tensor(tensor).shape != tensor.shape:
            raise ValueError(
                f"{self._class.__name__} sees whole parameters, but a rank has a part of {name!r}: "
                "use DDP. If it steps each element by itself, pass elementwise=True"
            )
        if not is_cut and placing["partition"] == "flat":
            raise ValueError(
                f"{self._class.__name__} sees whole parameters, but partition='flat' cuts {name!r} "
                "over ranks: use 'by_parameter' or 'auto'"
            )
        if not is_cut and math.prod(tensor.shape) * 4 > RECORD_DATA_BYTES_MAX:
            raise ValueError(
                f"{name!r} of shape {list(tensor.shape)} takes more than one record of a page, but "
                f"{self._class.__name__} sees whole parameters: step it with another optimizer"
            )
        return PagedParameter(
            name=name,
            tensor=tensor,
            states=kept.states,
            initial={state: self._initial(state, group) for state in kept.states},
            shapes=kept.shapes,
            empty=kept.empty,
            elementwise=is_cut,
            cost=None if is_cut else _cost(tensor, kept),
            **placing,
        )

    def scalars_of(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the numbers that the class keeps for a parameter, before the first step."""
        kinds = self.kinds_of(group)
        found = {name: self._initial(name, group) for name in kinds}
        return {**found, STEPPED: 0.0}

    def _initial(self, name: str, group: Mapping[str, Any]) -> float:
        of_constructor = ("initial_accumulator_value",)  # In Adagrad it applies to all groups.
        fixed = {key: self.defaults[key] for key in of_constructor if key in self.defaults}
        return initial_value(name, {**group, **fixed}, self._class)

    def kinds_of(self, group: Mapping[str, Any]) -> Mapping[str, torch.dtype | type]:
        """Return the dtypes or types of the scalars that the class keeps."""
        params = group["params"]
        return self._kept_for(group, params[0]).kinds if params else {}

    def layout_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states, which determine the pages of a param group and follow from options."""
        is_cut = self._is_elementwise
        kinds = {(t.ndim if is_cut else t.shape, t.dtype): t for t in group["params"]}
        kept = [self._kept_for(group, of) for of in kinds.values()]
        states = [sorted(of.names) for of in kept]
        shapes = [sorted(of.shapes.items()) for of in kept]
        found = super().layout_of(group)
        return {**found, "fused": group.get("fused"), "states": states, "shapes": shapes}

    def check_group(self, group: dict[str, Any], number: int) -> None:
        """Refuse options that pages do not support."""
        require_options(self._class, group)

    def check_loaded(self, group: Mapping[str, Any], saved: Mapping[str, Any], number: int) -> None:
        """Refuse hyperparameters of another class."""
        where = f"the saved group of the parameters of param group {number}"
        require_same_class(self._class, self.defaults, saved, where, own=group)
        require_options(self._class, saved)
        taken = {**group, **self.unpacked(group_values(saved), group), **self.not_loaded(group)}
        own, others = self.layout_of(group), self.layout_of(taken)
        for key in ("states", "shapes"):
            if own[key] != others[key]:
                raise ValueError(
                    f"the options of {where} make {self._class.__name__} keep the {key} "
                    f"{others[key]}, but pages hold {own[key]}: make the optimizer with these "
                    "options"
                )

    @property
    def rule(self) -> str:
        """Name of the class."""
        return self._class.__name__

    def not_loaded(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that select the implementation."""
        return {key: group[key] for key in ("foreach", "fused") if key in group}

    def check_resumed(
        self, group: Mapping[str, Any], saved: Mapping[str, Any], number: int
    ) -> None:
        """Refuse the run of another class."""
        self.check_loaded(group, saved, number)

    def stepped(self, states: Mapping[str, Any]) -> bool:
        """Return whether states are of a parameter that was stepped.

        A state dict before the first step has zeros, but a class may not start from zeros.
        """
        tensors = [value for value in states.values() if isinstance(value, torch.Tensor)]
        # Ranks must agree, but one part may have zeros where another part has none.
        is_cut = any(local_tensor(tensor).shape != tensor.shape for tensor in tensors)
        if self._is_listed or is_cut:
            return bool(states)
        values = (value for name, value in states.items() if name != MASTER)
        return any(
            bool(local_tensor(value).any()) if isinstance(value, torch.Tensor) else bool(value)
            for value in values
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; see PagedOptimizer."""
        kept = super().__getstate__()
        del kept["_stepper"]  # Classes lose attributes in a copy.
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy from __getstate__()."""
        self._stepper = _stepper(state["_class"], state["_options"])
        super().__setstate__(state)

    def _kept_for(self, group: Mapping[str, Any], tensor: torch.Tensor) -> Kept:
        dtype = master_dtype(tensor.dtype)
        key = (*signature(group, self.defaults), tensor.ndim, dtype)
        if key not in self._small:
            try:
                if not self._is_listed:
                    require_apart(self._class, self._options, group, tensor.ndim)
                self._small[key] = kept_by(self._class, self._options, group, tensor.ndim, dtype)
            except Exception as error:
                error.add_note(f"in trial steps of small tensors to find what {self.rule} keeps")
                raise
        small, changing = self._small[key]
        if self._is_elementwise:
            if small.shapes:
                raise ValueError(
                    f"{self._class.__name__} keeps states whose shapes differ from the parameter, "
                    f"{sorted(small.shapes)}: it cannot be elementwise=True"
                )
            return small
        at = (key, shape_options(group, changing), tensor.shape)
        if at not in self._kept:
            self._kept[at] = kept_at(
                *(self._class, self._options, group, tensor.shape, dtype, small)
            )
        return self._kept[at]

    # ------------------------------------------------------------------------------------- steps

    def step_pages(self, pages: SteppedPages) -> None:
        """Step the pages of a sweep, and the scalars of the parameters in ``pages.present``."""
        steps = [
            ClassSteps(
                self._stepper,
                self._made,
                group,
                partial(self._kept_for, group),
                joins=self._is_listed and not group.get("fused"),
            )
            for group in self.param_groups
        ]
        scalars = self.store.pages.scalars
        advanced = {
            parameter.name: of.advanced(parameter.tensor, scalars[parameter.name])
            for of, group in zip(steps, self._attached.groups, strict=True)
            for parameter in group.parameters
            if parameter.name in pages.present
        }
        for of, attached in zip(steps, self._attached.groups, strict=True):
            has_gradient = any(p.name in pages.present for p in attached.parameters)
            if not (has_gradient or self._is_listed):
                of.step_nothing()
        for page in pages:
            steps[page.group].step_page(page, scalars, advanced)
        for name, values in advanced.items():
            scalars[name].update(values)
        for group, of in zip(self.param_groups, steps, strict=True):
            group.update(of.changed)

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self._class(groups, **self._options)


def _stepper(cls: Class, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    empty = torch.zeros((1, 1), dtype=torch.float32, device="cpu", requires_grad=True)
    return cls([empty], **options)


def _cost(tensor: torch.Tensor, kept: Kept) -> int:
    """Return the relative cost of a step of a whole parameter, with the cube of square states."""
    squares = (shape[0] ** 3 for shape in kept.shapes.values() if len({*shape}) < len(shape))
    return tensor.numel() * (1 + len(kept.states)) + sum(squares)
