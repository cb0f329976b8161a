"""The interface of a rule: what a subclass of PagedOptimizer defines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

import torch

from tierstore.layout.parameters import PagedParameter
from tierstore.paging.sweep import SteppedPages


class Rule(torch.optim.Optimizer, ABC):
    """The methods of a subclass of PagedOptimizer: contents of pages, step, hyperparameters.

    A subclass defines ``paged_parameter()`` and ``step_pages()``. The other methods have defaults.
    """

    @abstractmethod
    def paged_parameter(
        self, group: Mapping[str, Any], name: str, tensor: torch.Tensor, **placing: Any
    ) -> PagedParameter:
        """Return a parameter with the states that pages will hold.

        Args:
            group: the param group of the parameter.
            name: the name of the parameter.
            tensor: the parameter.
            placing: further arguments of ``PagedParameter``.

        Raises:
            ValueError: the rule cannot step the parameter.
        """

    @abstractmethod
    def step_pages(self, pages: SteppedPages) -> None:
        """Step the pages of a sweep, and the scalars of the parameters in ``pages.present``.

        Args:
            pages: the sweep, with ``window`` pages valid at once.
        """

    @property
    def window(self) -> int:
        """Number of pages that are stepped at once; see ``Pages.sweep()``."""
        return 1

    def scalars_of(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the scalars of each parameter of a group, such as a step count, by name.

        Returns:
            Name -> value before the first step. A scalar "stepped" is not in state dicts. It is
            1.0 for a parameter with states.
        """
        return {"step": 0.0}

    def kinds_of(self, group: Mapping[str, Any]) -> Mapping[str, torch.dtype | type]:
        """Return how scalars of a group appear in state dicts: as tensors of a dtype, or a type.

        Returns:
            Name -> dtype or type; tensors of float32 if absent. With ``int``, checkpoints also
            have an int: stock DCP does not load a tensor in its place.
        """
        return {}

    def layout_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a param group that determine pages, by key. They may not change."""
        return {"param_names": list(group.get("param_names") or ())}

    def check_group(self, group: dict[str, Any], number: int) -> None:
        """Check the hyperparameters of a group: when the group is added, and before each step.

        Raises:
            ValueError: a hyperparameter cannot be used; the message names the first.
        """

    def check_loaded(self, group: Mapping[str, Any], saved: Mapping[str, Any], number: int) -> None:
        """Check the hyperparameters in a checkpoint for the parameters of a group.

        Raises:
            ValueError: the hyperparameters are of another rule, or cannot be used.
        """

    def check_resumed(
        self, group: Mapping[str, Any], saved: Mapping[str, Any], number: int
    ) -> None:
        """Check the hyperparameters in the last commit of a run before the commit is restored.

        Raises:
            ValueError: the hyperparameters are of another rule.
        """

    def loaded(self, group: dict[str, Any], saved: dict[str, Any], number: int) -> dict[str, Any]:
        """Return the hyperparameters that a param group gets from a group of a state dict.

        Raises:
            ValueError: the hyperparameters are of another rule, or cannot be used.
        """
        self.check_loaded(group, saved, number)
        # Copy, as torch.optim does: a tensor lr must not be shared with the state dict.
        names = {"params", "param_names", *self.not_loaded(group)}
        kept = deepcopy({key: value for key, value in saved.items() if key not in names})
        return self.unpacked(kept, group)

    def unpacked(self, saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Return saved hyperparameters with names of dtypes replaced by dtypes."""
        return {
            key: getattr(torch, value.removeprefix("torch."))
            if isinstance(value, str) and isinstance(group.get(key), torch.dtype)
            else value
            for key, value in saved.items()
        }

    def not_loaded(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a group that neither restore() nor load_state_dict() changes."""
        return {}

    @property
    def rule(self) -> str | None:
        """Name of the rule, if groups do not show it; see ``PagedGroup.rule``."""
        return None

    def _rule_of(self, group: Mapping[str, Any]) -> str | None:
        """Return the name of the rule of a group, for repr()."""
        return self.rule

    @property
    def keys(self) -> Collection[str]:
        """The keys of param groups that the rule knows."""
        return self.defaults.keys()

    def prepare_groups(self) -> None:
        """Normalize param groups after a scheduler has written to them."""

    def prepare_step(self) -> None:
        """Prepare the sweep of a step, after the checks. The step may still be refused."""

    def stepped(self, states: Mapping[str, Any]) -> bool:
        """Return whether loaded states belong to a parameter that was stepped."""
        return bool(states)

    def memory_of_rule(self) -> dict[str, dict[str, int]]:
        """Return the memory of the rule outside of pages: "GPU" or "host" -> what -> bytes."""
        return {}
