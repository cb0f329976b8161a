"""Muon: a torch.optim.Optimizer whose state lives in the pages of a TierStore."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import ParamsT

import tierstore
from muon import newton_schulz
from muon.checks import check_hyperparameters, check_saved, with_dtypes
from muon.pipeline import Pipeline, compute_device
from muon.state import PagedState

_ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    # What torch.optim.AdamW looks for in a checkpoint. Other values are refused, but for
    # those that say how torch computes.
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}

# What the pages were laid out by, and so a state dict does not change in a group.
_FIXED = ("params", "param_names", "algorithm", "momentum_dtype")


class Muon(torch.optim.Optimizer):
    """Muon for matrices and, in groups that say so, AdamW for the rest.

    Arguments have the meanings and defaults of ``torch.optim.Muon``, and float32
    parameters with contiguous gradients get bit for bit what ``torch.optim.Muon`` and
    ``torch.optim.AdamW(foreach=False)`` compute, but for large matrices on a CPU, whose
    update is rounded otherwise (see ``orthogonalize_``). Parameters of lower precision
    have a float32 master, which the rule is applied to.

    Args:
        params: parameters, ``named_parameters()`` or param groups, as in ``torch.optim``;
            ``muon.param_groups(model)`` makes them. The names become the names of the
            state on disk: use named parameters wherever a run is to be resumed. A group
            may have ``algorithm="adamw"`` and then takes lr, betas, eps and weight_decay
            with the defaults of ``torch.optim.AdamW``; else it is a Muon group, of
            two-dimensional parameters.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: weight of the past in the running average of gradients.
        nesterov: whether to look one step ahead.
        ns_coefficients: coefficients of the Newton-Schulz polynomial.
        eps: smallest norm that Newton-Schulz divides by.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: None or "original", or "match_rms_adamw"; see ``torch.optim.Muon``.
        momentum_dtype: dtype of the momentum; None: that of each parameter.
        store: where the state lives; None keeps all of it in memory.
        partition: where several ranks hold parameters whole, who owns them and their state:
            "by_parameter", one rank each; "flat", each rank an equal range of all elements;
            "auto", the first for Muon groups and the second for AdamW groups. DTensors that
            are cut stay with the ranks that have them.
        gather_memory: most bytes that a rank may take for matrices on their way between ranks:
            an int, or a string such as "1GiB".
        ns_dtype: dtype that Newton-Schulz computes in, or "auto": bfloat16, or float32 where
            that is measured to be much faster, on the first of several ranks. A run keeps it.
        ns_batched: whether Newton-Schulz computes several small matrices of one shape at once,
            which is quicker on a GPU. The last bits of an update then depend on which matrices
            are stepped together, and so on ``page_bytes`` and on the number of ranks.
        prefetch_in_backward: call prefetch() with the first gradient of each step.

    Raises:
        ValueError: a hyperparameter out of range, or a parameter that the algorithm of its
            group cannot treat, by name.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = newton_schulz.COEFFICIENTS,
        eps: float = newton_schulz.EPS,
        ns_steps: int = newton_schulz.STEPS,
        adjust_lr_fn: str | None = None,
        *,
        momentum_dtype: torch.dtype | None = None,
        store: tierstore.TierStore | None = None,
        partition: str = "auto",
        gather_memory: int | str = "2GiB",
        ns_dtype: torch.dtype | str = torch.bfloat16,
        ns_batched: bool = False,
        prefetch_in_backward: bool = False,
    ) -> None:
        defaults = {
            "algorithm": "muon",
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "ns_batched": ns_batched,
            "momentum_dtype": momentum_dtype,
        }
        if partition not in ("auto", "by_parameter", "flat"):
            raise ValueError(
                f"partition must be 'auto', 'by_parameter' or 'flat', got {partition!r}"
            )
        self.store = tierstore.TierStore(None) if store is None else store
        self._partition = None if partition == "auto" else partition
        self._pipeline = Pipeline(self.store, tierstore.parse_bytes(gather_memory))
        self._attached: list[tierstore.PagedGroup] = []
        self._prefetches = prefetch_in_backward
        self._prefetched = False
        super().__init__(params, defaults)
        # Read through to the pages. Never falsy, which torch's state-dict helpers take
        # for an optimizer that has to make its state with a step of its own.
        self.state = PagedState(self)  # type: ignore[assignment]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in ``torch.optim``; its pages are laid out at the next step.

        Raises:
            ValueError: as in the constructor. The optimizer is as it was.
        """
        algorithm = param_group.get("algorithm", "muon")
        if algorithm not in ("muon", "adamw"):
            raise ValueError(f"algorithm must be 'muon' or 'adamw', got {algorithm!r}")
        given = set(param_group)
        if algorithm == "adamw":
            for name, value in _ADAMW_DEFAULTS.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)
        try:
            if algorithm == "adamw":
                for name in self.defaults.keys() - _ADAMW_DEFAULTS.keys() - given - {"algorithm"}:
                    del param_group[name]
            measured = param_group.get("ns_dtype") == "auto"
            if measured:
                param_group["ns_dtype"] = torch.bfloat16  # Until the matrices are known to be some.
            check_hyperparameters(param_group)
            self._check_parameters(len(self.param_groups) - 1)
            if measured:
                param_group["ns_dtype"] = self._fastest_ns_dtype(param_group["params"])
        except Exception:
            self.param_groups.pop()
            raise
        if self._prefetches:
            prefetch = _prefetcher(weakref.ref(self))
            for parameter in self.param_groups[-1]["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(prefetch)

    @property
    def bytes_exchanged(self) -> int:
        """What this rank has sent to others of matrices and their updates."""
        return self._pipeline.bytes_sent

    def prefetch(self) -> None:
        """Start to read the state that the next step begins with; see TierStore.prefetch()."""
        if self._attached:  # Before the first step there is none.
            self._prefetched = True
            self.store.prefetch()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step with the gradients in ``.grad``, which are not modified.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The loss, if a closure was given.

        Raises:
            StorageError, CorruptionError: the state could not be paged. Once a page was
                stepped the store is failed, and restore() goes back to the last commit.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_hyperparameters(group)
        self._attach_groups()
        self._pipeline.open(self.param_groups)
        window = self.store.window_max
        with self.store.sweep(window) as pages:
            steps = {
                name: scalars["step"] + 1.0
                for name, scalars in self.store.scalars.items()
                if name in pages.present
            }
            self._pipeline.step_pages(pages, self.param_groups, steps, window)
            for name, step in steps.items():
                self.store.scalars[name]["step"] = step
        self._prefetched = False
        return loss

    def restore(self, checkpoint: str | os.PathLike[str] | None = None) -> int:
        """Go back to the step that the store has committed: parameters, state, groups.

        Args:
            checkpoint: begin a new run with what this checkpoint holds; see
                ``TierStore.restore()``. The parameters need names.

        Returns:
            The step, or 0 for a new run.

        Raises:
            RunMismatchError, CheckpointError: it is of another model; nothing was changed.
        """
        # A store that failed goes back to the groups it has; the next step attaches the others.
        with contextlib.suppress(tierstore.StoreFailedError):
            self._attach_groups()
        fixed = [{key: group[key] for key in _FIXED if key in group} for group in self.param_groups]
        step = self.store.restore(checkpoint)
        for group, values in zip(self.param_groups, fixed, strict=True):
            group.update({**with_dtypes(group), **values})
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of ``torch.optim``, also before the first step.

        Its tensors are mappings of the page files, see ``TierStore.read_states()``: they cost
        no memory and stay as they are. Parameters of low precision have an entry "master"
        beside their other states. All ranks call it together, and have the same entries: those
        of a DTensor are DTensors, placed as it is.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._attach_groups()
        states = self.store.read_states()
        packed_groups = []
        packed_states: dict[int, dict[str, torch.Tensor]] = {}
        index = 0
        for number, group in enumerate(self.param_groups):
            # By name: torch's state-dict helpers know plain values only.
            packed = {
                key: str(value) if isinstance(value, torch.dtype) else value
                for key, value in group.items()
                if key != "params"
            }
            packed["params"] = list(range(index, index + len(group["params"])))
            packed_groups.append(packed)
            for paged in self._paged_group(number).parameters:
                scalars = self._scalar_states(number, paged.name)
                packed_states[index] = {**scalars, **states[paged.name]}
                index += 1
        state_dict: dict[str, Any] = {"state": packed_states, "param_groups": packed_groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the state by one in the format of ``torch.optim``.

        That of ``torch.optim.Muon`` or ``torch.optim.AdamW`` over the same parameters in
        the same order will do, and so will whole tensors for what is a DTensor here. Each
        state keeps the dtype it has here. All ranks call it together.

        Raises:
            ValueError: it is of other groups, or a parameter has other states than it has
                here. Nothing was changed.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, states = self._matched(state_dict)
        self._attach_groups()
        scalars = {
            name: {"step": float(states[name].pop("step", 0.0))} for name in self.store.scalars
        }
        self.store.write_states(states, scalars)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Muon optimizer holds an open store and cannot be pickled or copied: use "
            "state_dict(), or resume the run"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(None)

    def _fastest_ns_dtype(self, parameters: Sequence[torch.Tensor]) -> torch.dtype:
        if not parameters:
            return torch.bfloat16
        device = compute_device(self.store, parameters[0])
        shape = max((parameter.shape for parameter in parameters), key=math.prod)
        ranks = self.store.ranks
        if ranks is None:
            return newton_schulz.fastest_dtype(shape, device)
        # Rank 0 measures for all: measurements may differ, and all must compute alike.
        measured = newton_schulz.fastest_dtype(shape, device) if ranks.rank == 0 else None
        dtype: torch.dtype = ranks.training.gather(measured)[0]
        return dtype

    def _check_parameters(self, number: int) -> None:
        """Check that a group's parameters can be stepped and paged under names of their own."""
        earlier = [name for before in range(number) for name, _ in self._named(before)]
        names, tensors = set(earlier), set[torch.Tensor]()
        for name, parameter in self._named(number):
            if name in names or parameter in tensors:
                raise ValueError(f"parameter {name!r} is there twice: names must be unique")
            names.add(name)
            tensors.add(parameter)
            if self.param_groups[number]["algorithm"] == "muon" and parameter.ndim != 2:
                raise ValueError(
                    f"parameter {name!r} has shape {tuple(parameter.shape)}: Muon needs "
                    "matrices. Put it in a group with algorithm='adamw'"
                )
        self._paged_group(number)  # Refuses what cannot be paged.

    def _scalar_states(self, number: int, name: str) -> dict[str, torch.Tensor]:
        """Return the states of one parameter that lie in no page, as ``torch.optim`` has them."""
        if self.param_groups[number]["algorithm"] == "muon":
            return {}
        step = self.store.scalars.get(name, {"step": 0.0})["step"]
        return {"step": torch.tensor(step)}  # ()

    def _matched(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """Check a state dict; return the hyperparameters by group, the states by name."""
        if not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError(f"not a state dict of an optimizer: its keys are {list(state_dict)}")
        saved_groups = state_dict["param_groups"]
        lengths = [len(group["params"]) for group in self.param_groups]
        saved_lengths = [len(group["params"]) for group in saved_groups]
        if lengths != saved_lengths:
            raise ValueError(
                f"the state dict has groups of {saved_lengths} parameters, this optimizer has "
                f"groups of {lengths}"
            )
        groups = []
        states: dict[str, dict[str, Any]] = {}
        unmatched = dict(state_dict["state"])
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            if saved.get("algorithm", group["algorithm"]) != group["algorithm"]:
                raise ValueError(
                    f"group {number} of the state dict is for {saved['algorithm']!r}, here it "
                    f"is for {group['algorithm']!r}"
                )
            # A copy, as in torch.optim: a tensor lr must not be shared with the state dict.
            groups.append(
                with_dtypes(
                    deepcopy({key: value for key, value in saved.items() if key not in _FIXED})
                )
            )
            for key in ("ns_dtype", "ns_batched"):
                if groups[-1].get(key) is None:  # So torch's helpers fill what stock lacks.
                    groups[-1].pop(key, None)
            check_hyperparameters({**group, **groups[-1]})
            paged = self._paged_group(number).parameters
            for saved_id, parameter in zip(saved["params"], paged, strict=True):
                # torch's helpers put an empty dict where a flattened state dict has no entry.
                saved_states: dict[str, Any] = unmatched.pop(saved_id, {})
                states[parameter.name] = {
                    key: value
                    for key, value in saved_states.items()
                    if not isinstance(value, dict) or value
                }
                has_step = group["algorithm"] == "adamw"
                check_saved(states[parameter.name], parameter, has_step=has_step)
        if unmatched:
            raise ValueError(f"the state dict has states of no parameter: {list(unmatched)[:3]}")
        return groups, states

    def _attach_groups(self) -> None:
        """Give the store the groups that it does not have yet."""
        if self.store.group_count != len(self._attached):
            raise ValueError(
                "another optimizer uses this store: give each optimizer a store and a "
                "directory of its own, or all groups to one optimizer"
            )
        numbers = range(len(self._attached), len(self.param_groups))
        if not numbers:
            return
        paged = [self._paged_group(number) for number in numbers]
        self.store.attach(paged)
        self._attached += paged
        for number in numbers:
            if self.param_groups[number]["algorithm"] == "adamw":
                for name, _ in self._named(number):
                    self.store.scalars[name] = {"step": 0.0}

    def _paged_group(self, number: int) -> tierstore.PagedGroup:
        """Return a group as the store has it, or would have it now.

        Until a group is attached its parameters may still be converted, so nothing is kept.
        """
        if number < len(self._attached):
            return self._attached[number]
        group = self.param_groups[number]
        is_muon = group["algorithm"] == "muon"
        parameters = []
        for name, parameter in self._named(number):
            if is_muon:
                states = {"momentum_buffer": group["momentum_dtype"] or parameter.dtype}
            else:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                states = {"exp_avg": wide, "exp_avg_sq": wide}
            parameters.append(
                tierstore.PagedParameter(
                    name=name,
                    tensor=parameter,
                    states=states,
                    elementwise=not is_muon,
                    partition=self._partition,
                    cost=newton_schulz.cost((*parameter.shape,)) if is_muon else None,
                )
            )
        return tierstore.PagedGroup(
            parameters=parameters,
            hyperparameters=group,
            check=lambda hyperparameters: check_hyperparameters(with_dtypes(hyperparameters)),
        )

    def _named(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and tensor of each parameter of a group."""
        group = self.param_groups[number]
        names = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            yield (names[index] if names else f"{number}.{index}"), parameter


def _prefetcher(optimizer: weakref.ref[Muon]) -> Callable[[torch.Tensor], None]:
    """Return a hook of parameters that prefetches with the first gradient of each step."""

    def prefetch(parameter: torch.Tensor) -> None:
        it = optimizer()
        if it is not None and not it._prefetched:
            with contextlib.suppress(tierstore.StoreClosedError):  # The model goes on without.
                it.prefetch()

    return prefetch
