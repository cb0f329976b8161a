"""The base class of Muon and Paged: an optimizer over the pages of a store, without a rule."""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tierstore.compiling import not_compiled
from tierstore.errors import StoreFailedError, TierstoreError
from tierstore.layout.other_rules import RULE
from tierstore.layout.parameters import STEPPED, PagedGroup, PagedParameter
from tierstore.optim.attached import AttachedGroups
from tierstore.optim.modes import without_callers_modes
from tierstore.optim.param_groups import drop_duplicates, in_words
from tierstore.optim.restored import scheduled_keys, warn_of_other_rates, warn_of_other_values
from tierstore.optim.rule import Rule
from tierstore.optim.state import PagedState
from tierstore.optim.state_dicts import check_keys, match, pack
from tierstore.store import TierStore
from tierstore.units import format_bytes

# A copy of an optimizer gets new ones. torch.optim does not copy hooks either.
_NOT_COPIED = ("store", "step", "_attached", "_state")

# The unwrapped function does not import the compiler; see not_compiled().
_add_param_group = not_compiled(inspect.unwrap(torch.optim.Optimizer.add_param_group))


class PagedOptimizer(Rule):
    """An optimizer whose states are in the pages of a store.

    A subclass defines the rule, see ``Rule``: ``paged_parameter()`` declares the content of pages,
    ``step_pages()`` steps them. The rest is here: param groups, names, state dicts, resume,
    clipping, read-ahead.

    Args:
        params: parameters, ``named_parameters()`` or param groups, as in ``torch.optim``. Names
            identify the state on disk: pass named parameters if the run may be resumed.
        defaults: defaults for the keys of param groups.
        store: holds the state; None keeps all state in memory.
        partition: ownership of parameters that several ranks hold whole: "by_parameter",
            "flat", or "auto"; see ``PagedParameter.partition``.
        gradient: returns the gradient of a parameter in place of ``.grad``; see
            ``PagedParameter.gradient``.
        nonfinite: what step() does if a gradient on any rank has an element that is NaN or
            infinite: "raise", "skip" or "allow"; see ``Pages.sweep()``.
        missing: what step() does if a rank has no gradient of a parameter, and another rank has:
            "zeros" or "raise"; see ``Pages.sweep()``.

    Raises:
        ValueError: an argument has an unknown value, or a parameter cannot be paged.
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        store: TierStore | None = None,
        partition: str = "auto",
        gradient: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        nonfinite: str = "raise",
        missing: str = "zeros",
    ) -> None:
        for name, value, known in (
            ("partition", partition, ("auto", "by_parameter", "flat")),
            ("nonfinite", nonfinite, ("raise", "skip", "allow")),
            ("missing", missing, ("zeros", "raise")),
        ):
            if value not in known:
                *first, last = map(repr, known)
                raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")
        if gradient is not None and not callable(gradient):
            raise ValueError(f"gradient must be a function of a parameter, got {gradient!r}")
        self._gradient_rules = {"nonfinite": nonfinite, "missing": missing}
        self._placing = {
            "partition": None if partition == "auto" else partition,
            "gradient": gradient,
        }
        self._owns_store = store is None
        self._use_store(TierStore(None) if store is None else store)
        self._prefetches = store is not None
        self._prefetched = False
        self._reads_hook: weakref.finalize[..., Any] | None = None  # Removes the hook.
        self._restored_rates: list[float] = []  # lr of each attached group, until the next step.
        # The names in the groups so far. None after the constructor has added all groups. With
        # thousands of groups, collecting the names for every group would take seconds.
        self._new_names: set[str] | None = set()
        super().__init__(params, defaults)
        self._new_names = None

    # ---------------------------------------------------------------------------------- groups

    @property  # type: ignore[override]
    def state(self) -> PagedState:
        """The states, as a mapping over the pages; see PagedState.

        Assignment replaces the states of all parameters, as ``optimizer.state = {}`` does in
        ``torch.optim``.
        """
        return self._state

    @state.setter
    def state(self, values: Mapping[Any, Any]) -> None:
        # The constructor of torch.optim assigns an empty mapping before it adds groups.
        if values is not self._state and "param_groups" in self.__dict__:
            self._state.replace(values)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in ``torch.optim``. The next step lays out its pages.

        Raises:
            TypeError: the group is not a dict, or its parameters are not tensors.
            ValueError: as in the constructor. The optimizer is unchanged.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a param group must be a dict, got {param_group!r}")
        if isinstance(param_group["params"], Iterator):  # It can be read only once.
            param_group["params"] = list(param_group["params"])
        # As in torch.optim, the dict itself becomes the group and gets missing keys.
        count, given = len(self.param_groups), dict(param_group)
        try:
            self.fill_group(param_group, count)
            self.check_group(param_group, count)
            self._check_parameters([count])
        except BaseException:
            del self.param_groups[count:]
            param_group.clear()
            param_group.update(given)
            raise
        if self._attached.groups:
            self._attached.expect(param_group)

    def fill_group(self, param_group: dict[str, Any], number: int) -> None:
        """Append a group to ``param_groups`` with all its keys."""
        drop_duplicates(param_group)
        _add_param_group(self, param_group)

    def _check_parameters(self, numbers: Collection[int]) -> None:
        """Check that the parameters of groups can be stepped and paged, under unique names."""
        names = self._new_names
        if names is None:
            others = (n for n in range(len(self.param_groups)) if n not in numbers)
            names = {name for number in others for name in self._names(number)}
        tensors = set[torch.Tensor]()
        for number in numbers:
            params = self.param_groups[number]["params"]
            for name, parameter in zip(self._names(number), params, strict=True):
                if name in names or parameter in tensors:
                    raise ValueError(
                        f"parameter {name!r} occurs twice: names must be unique. A parameter "
                        "without a name is named by its position"
                    )
                names.add(name)
                tensors.add(parameter)
            self._paged_group(number)  # Raises for a parameter that cannot be stepped or paged.

    def paged_groups(self) -> list[PagedGroup]:
        """Return all groups in the form of the store. New groups as they would be attached now."""
        return [self._paged_group(number) for number in range(len(self.param_groups))]

    def _paged_group(self, number: int) -> PagedGroup:
        """Return a group in the form of the store. A new group as it would be attached now.

        The description of a new group is recomputed each time, because the model may still be
        converted.
        """
        if number < len(self._attached.groups):
            return self._attached.groups[number]
        group = self.param_groups[number]
        named = zip(self._names(number), group["params"], strict=True)
        optimizer = weakref.ref(self)  # The store keeps the group, but must not keep the optimizer.

        def check(saved: Mapping[str, Any], *, is_own: bool = False) -> None:
            if (alive := optimizer()) is not None:
                (alive.check_resumed if is_own else alive.check_loaded)(group, saved, number)

        return PagedGroup(
            parameters=[self.paged_parameter(group, n, p, **self._placing) for n, p in named],
            hyperparameters=group,
            rule=self.rule,
            check=check,
            check_commit=partial(check, is_own=True),
        )

    def _names(self, number: int) -> list[str]:
        """Return the names of the parameters of a group.

        Raises:
            ValueError: ``param_names`` was edited and differs in length from ``params``.
        """
        group = self.param_groups[number]
        count, given = len(group["params"]), len(group.get("param_names") or group["params"])
        if given != count:
            raise ValueError(
                f"param group {number} has {count} parameters but {given} param_names: give each "
                "parameter a name"
            )
        return [self._name(number, index) for index in range(count)]

    def _name(self, number: int, index: int) -> str:
        """Return the name of one parameter: its given name, or its position."""
        names = self.param_groups[number].get("param_names")
        return str(names[index]) if names else f"{number}.{index}"

    # ------------------------------------------------------------------------------------ steps

    @not_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step with the gradients in ``.grad``. Gradients are not modified.

        Args:
            closure: evaluates the model and returns the loss.

        Returns:
            The result of the closure, or None.

        Raises:
            tierstore.NonFiniteGradientError: a gradient is not finite, and ``nonfinite`` is
                "raise". Nothing was changed. Exception: with gradients on a GPU and a store with
                a commit, the store has failed, and the step was not committed.
            ValueError: ranks that hold the same elements have different gradients: reduce
                gradients before the step. Or see ``missing``. Nothing was changed.
            StorageError, CorruptionError: pages could not be read or written. If a page was
                stepped already, the store has failed: restore() returns to the last commit.

        Warns:
            UserWarning: in the first step after restore(), the lr of a group differs from the
                committed lr.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.prepare_groups()
        with without_callers_modes(), self.store.pages.calling("step()"):
            self._attach_groups()
            for number, group in enumerate(self.param_groups):
                self.check_group(group, number)
            if self._restored_rates:
                warn_of_other_rates(self.param_groups, self._restored_rates)
                self._restored_rates = []
            self.prepare_step()
            sweep = self.store.pages.sweep(self.window, **self._gradient_rules)
            try:
                with sweep as pages:
                    self.step_pages(pages)
            finally:  # An interrupt may come before __exit__() has begun to end the sweep.
                sweep.gen.close()
        self._prefetched = False
        return loss

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients down so that their total norm is at most ``max_norm``.

        Performs the operations of ``torch.nn.utils.clip_grad_norm_`` on the gradients of a step,
        including gradients that the function ``gradient`` returns.

        Args:
            max_norm: the largest norm.
            norm_type: order of the norm; ``math.inf`` for the largest magnitude.
            error_if_nonfinite: if the norm is NaN or infinite, raise RuntimeError and scale
                nothing.

        Returns:
            The norm before scaling, of shape ().

        Raises:
            ValueError: param groups were edited; see step().
        """
        self._attached.require_same(self.param_groups)
        parameters = [p for group in self.paged_groups() for p in group.parameters]
        gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
        with without_callers_modes():
            norm = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            factors = {g.device: factor.to(g.device) for g in gradients}
            for gradient in gradients:
                gradient.mul_(factors[gradient.device])
        return norm

    @not_compiled
    def prefetch(self) -> None:
        """Start to read the state that the next step needs first; see Pages.prefetch()."""
        if self._attached.groups:  # Before the first step no state exists.
            self._prefetched = True
            self.store.pages.prefetch()

    def _attach_groups(self) -> None:
        """Check that attached groups were not edited; attach the groups that the store lacks.

        Raises:
            ValueError: a group was edited; see AttachedGroups.require_same(). Nothing was changed.
        """
        if self.store.pages.group_count != len(self._attached.groups):
            raise ValueError(
                "another optimizer uses this store: give each optimizer its own store and "
                "directory, or all groups to one optimizer"
            )
        self._attached.require_same(self.param_groups)
        numbers = range(len(self._attached.groups), len(self.param_groups))
        if not numbers:
            return
        for number in numbers:
            self.check_group(self.param_groups[number], number)
        self._check_parameters(numbers)
        paged = [self._paged_group(number) for number in numbers]
        self.store.pages.attach(paged)
        self._attached.extend(paged, self.param_groups)
        self._begin_scalars()
        if self._prefetches:
            self._hook_reads()

    def _begin_scalars(self, committed: int = 0) -> None:
        """Set the scalars of a new optimizer for parameters without any, and the types of all.

        Args:
            committed: number of groups with states. Conversions write no STEPPED for them.
        """
        for number, group in enumerate(self._attached.groups):
            if initial := dict(self.scalars_of(group.hyperparameters)):
                if STEPPED in initial:
                    initial[STEPPED] = float(number < committed)
                kinds = self.kinds_of(group.hyperparameters)
                for parameter in group.parameters:
                    found = self.store.pages.scalars.setdefault(parameter.name, dict(initial))
                    found.update(_ints(kinds, found))

    def _hook_reads(self) -> None:
        """Start the reads of the next step when one small parameter gets its gradient.

        Only one has the hook: FSDP2 copies gradients of hooked parameters to pageable host memory,
        and waits for each. It is the last of the smallest parameters: its gradient comes first.
        """
        tensors = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if tensors:
            if self._reads_hook is not None:
                self._reads_hook()
            smallest = min(reversed(tensors), key=torch.Tensor.numel)
            hook = smallest.register_post_accumulate_grad_hook(_prefetcher(weakref.ref(self)))
            self._reads_hook = weakref.finalize(self, hook.remove)

    # ----------------------------------------------------------------------------------- states

    @not_compiled
    def restore(
        self,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        rewind: bool = False,
        keep_hyperparameters: bool = False,
    ) -> int:
        """Restore the last committed step: see ``TierStore.restore()``.

        Groups that this process added after that step keep their parameters and hyperparameters.
        Their states start afresh.

        Args:
            checkpoint: start a new run from this checkpoint; see ``TierStore.restore()``. The
                parameters need names.
            rewind: continue from the step of the checkpoint in this run. The run may have steps;
                see ``TierStore.restore()``.
            keep_hyperparameters: param groups keep the values of this program, such as another
                weight decay, except values that a scheduler has set: the lr, momentum or betas.

        Returns:
            The step, or 0 for a new run.

        Warns:
            UserWarning: values of param groups in the program differ from the committed values.
                The committed values are used.

        Raises:
            ValueError: for example, no object is registered with the store for a committed state.
                Nothing was changed.
            RunMismatchError, CheckpointError: the run or checkpoint does not fit the model.
                Nothing was changed.
        """
        self.prepare_groups()
        unchanged = [self.not_loaded(group) for group in self.param_groups]
        given = [dict(group) for group in self.param_groups]
        with self.store.pages.calling("restore(rewind=True)" if rewind else "restore()"):
            # A failed store restores the groups that it has. The next step attaches the others.
            with contextlib.suppress(StoreFailedError):
                self._attach_groups()
            step = self.store.restore(checkpoint, rewind=rewind)
        self._begin_scalars(self.store.pages.groups_written)
        for group, before, values in zip(self.param_groups, given, unchanged, strict=True):
            group.update({**self.unpacked(group, before), **values})
            for name in self.not_loaded(group).keys() - values.keys():
                del group[name]
            group.pop(RULE, None)
        # Groups that were attached after the commit come last.
        restored = self.param_groups[: self.store.pages.groups_written]
        states = self.store.committed.states.values()
        is_scheduled = any(isinstance(s, Mapping) and "_last_lr" in s for s in states)
        if keep_hyperparameters:
            for group, values in zip(restored, given, strict=False):
                names = values.keys() - scheduled_keys(group, is_scheduled=is_scheduled)
                group.update({name: values[name] for name in names})
        elif step:
            warn_of_other_values(restored, given, self.keys, is_scheduled=is_scheduled)
        rates = [float(group.get("lr", 0.0)) for group in restored]
        self._restored_rates = rates if step else []
        return step

    @not_compiled
    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of ``torch.optim``, also before the first step.

        Tensors have the shape of their parameter. They are copies, or mappings of page files. A
        mapping costs no memory and does not change; see ``Pages.read_states()``. Parameters of low
        precision have an additional entry "master". Entries of ``optimizer.state`` that do not
        belong to a parameter are included. All ranks call this together and get the same entries.
        States of a DTensor are DTensors with its placements. After the first step, a rank that owns
        all elements of its own tensors, as with FSDP2, may call this alone.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self.prepare_groups()
        with self.store.pages.calling("state_dict()"):
            self._attach_groups()
            states, scalars = self.store.pages.read_states(), self.store.pages.scalars
        shown = {}
        for group in self._attached.groups:
            kinds = self.kinds_of(group.hyperparameters)
            for name in [p.name for p in group.parameters if p.name in scalars]:
                values = scalars[name].items()
                shown[name] = {s: _as(kinds.get(s), v) for s, v in values if s != STEPPED}
        # As in torch.optim, a parameter without a step has no states. If no parameter has a step,
        # all have states: they serve as targets for loading.
        counts = {name: of[STEPPED] for name, of in scalars.items() if STEPPED in of}
        if any(counts.values()):
            states = {name: of for name, of in states.items() if counts.get(name, 1.0)}
        groups = self._attached.groups
        packed_states, packed_groups = pack(self.param_groups, groups, states, shown)
        packed_states |= self.state.others
        state_dict: dict[str, Any] = {"state": packed_states, "param_groups": packed_groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    @not_compiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the state by a state dict in the format of ``torch.optim``.

        Accepts state dicts of ``torch.optim`` optimizers with the same rule, over the same
        parameters in the same order. Accepts whole tensors for states of a DTensor. Each state
        keeps its current dtype. Tensors that state_dict() returned are not written again if no
        state has changed since. Names of parameters do not change. All ranks call this together.

        Raises:
            ValueError: the groups, or the states of a parameter, differ from this optimizer's.
                Nothing was changed.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.prepare_groups()
        check_keys(state_dict)
        groups, states, others = match(
            state_dict, self.param_groups, self._paged_group, self.loaded, self._shown_scalars
        )
        with self.store.pages.calling("load_state_dict()"):
            self._attach_groups()
            paged, scalars = self._apart(states)
            self.store.pages.write_states(paged, scalars)
        self.state.others = others
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @not_compiled
    def reset_state(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Reset the states of some parameters, or of all, as in a new optimizer.

        All ranks call this together.

        Args:
            params: the parameters, the same on all ranks; None: all.

        Raises:
            ValueError: a tensor is not a parameter of this optimizer. Nothing was changed.
        """
        if isinstance(params, torch.Tensor):
            raise TypeError("params must be an iterable of parameters, got a tensor")
        tensors = [*self.state.parameters] if params is None else [*params]
        try:
            described = [self._described(tensor) for tensor in tensors]
        except KeyError as error:
            raise ValueError("reset_state() needs parameters of this optimizer") from error
        with self.store.pages.calling("reset_state()"):
            self._write_states({parameter.name: {} for _, parameter in described})

    def memory(self) -> str:
        """Return the use of each memory on this rank, one line of text for each memory.

        Counts parameters of the optimizer, and their gradients, states and matrices. Example of
        ``print(optimizer.memory())`` after a step or ``restore()``:

            GPU 17.1 GiB: parameters 15.0 GiB, pages in a step 1.3 GiB, ...
            host 63.8 GiB: pages that rest there 47.5 GiB, gradients that leave 15.0 GiB, ...
            NVMe 101.4 GiB: files of pages 101.4 GiB

        Raises:
            StoreClosedError: the store is closed.
        """
        found = self.store.pages.memory()
        if not self.store.pages.group_count:
            return "nothing is laid out before the first step or restore()"
        for place, parts in self.memory_of_rule().items():
            found[place] |= parts
        lines = []
        for place, parts in found.items():
            if parts:
                ordered = sorted(parts.items(), key=lambda part: -part[1])
                texts = [f"{what} {format_bytes(size)}" for what, size in ordered]
                total = format_bytes(sum(parts.values()))
                lines.append(f"{place} {total}: {', '.join(texts)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return one line with the class, the parameters and groups, and the store."""
        own = vars(self)  # The constructor may have raised.
        groups = own.get("param_groups", [])
        text = in_words(groups, map(self._rule_of, groups))
        return f"{type(self).__name__}({text}; {own.get('store')!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the content of a copy of the optimizer, with copies of the states.

        Raises:
            TypeError: the caller has passed the store, or the store has several ranks.
        """
        if not self._owns_store or self.store.pages.ranks is not None:
            raise TypeError(
                f"a {type(self).__name__} optimizer with a store, or on several ranks, cannot be "
                "pickled or copied: use state_dict(), or resume the run"
            )
        kept = {
            key: value
            for key, value in self.__dict__.items()
            if key not in _NOT_COPIED and not key.startswith("_optimizer_")
        }
        states = self.store.pages.read_states() if self._attached.groups else {}
        copied = deepcopy((states, dict(self.store.pages.scalars)))
        return {**kept, "_copied": (*copied, self.state.others)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy from __getstate__(), with a new store."""
        states, scalars, others = state.pop("_copied")
        defaults = state["defaults"].copy()
        super().__setstate__(state)
        self.defaults = defaults  # Without the entries that torch's __setstate__() adds.
        self._use_store(TierStore(None))
        self.state.others = others
        if states:
            self._attach_groups()
            self.store.pages.write_states(states, scalars)

    def _use_store(self, store: TierStore) -> None:
        self.store = store
        self._attached = AttachedGroups(self.layout_of)
        self._state = PagedState(self)

    def _write_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all states of some parameters, each with its scalars."""
        if not (self._attached.groups or any(states.values())):
            return  # No parameter has a state.
        self._attach_groups()
        paged, scalars = self._apart(states)
        self.store.pages.write_states(paged, scalars, names=states.keys())

    def _apart(
        self, states: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, float]]]:
        """Return separately the states of parameters in pages, and their scalars."""
        paged, scalars = {}, {}
        for group in self._attached.groups:
            initial = self.scalars_of(group.hyperparameters)
            kinds = self.kinds_of(group.hyperparameters)
            for name in [p.name for p in group.parameters if p.name in states]:
                given = {**initial, STEPPED: float(self.stepped(states[name])), **states[name]}
                if initial:
                    numbers = {scalar: float(given[scalar]) for scalar in initial}
                    scalars[name] = {**numbers, **_ints(kinds, numbers)}
                paged[name] = {s: v for s, v in states[name].items() if s not in initial}
        return paged, scalars

    def _shown_scalars(self, group: Mapping[str, Any]) -> list[str]:
        return [name for name in self.scalars_of(group) if name != STEPPED]

    def _described(
        self, tensor: torch.Tensor
    ) -> tuple[dict[str, torch.dtype | type | None], PagedParameter]:
        """Return the scalars of a parameter with their kinds, and its PagedParameter.

        Raises:
            KeyError: no group has the tensor.
        """
        number, index = self._state.position(tensor)
        group, paged = self.param_groups[number], self._attached.find(tensor)
        if paged is None:
            name = self._name(number, index)
            paged = self.paged_parameter(group, name, tensor, **self._placing)
        kinds = self.kinds_of(group)
        return {name: kinds.get(name) for name in self._shown_scalars(group)}, paged


def _ints(
    kinds: Mapping[str, torch.dtype | type], scalars: Mapping[str, float]
) -> dict[str, float]:
    """Return the scalars that state dicts have as ints, as ints where they are whole."""
    return {
        name: int(scalars[name])
        for name, kind in kinds.items()
        if kind is int and name in scalars and float(scalars[name]).is_integer()
    }


def _as(kind: torch.dtype | type | None, value: float) -> Any:
    """Return a scalar in the form of a state dict."""
    if isinstance(kind, type):
        return kind(value)
    return torch.tensor(value, dtype=kind or torch.float32, device="cpu")  # ()


def _prefetcher(optimizer: weakref.ref[PagedOptimizer]) -> Callable[[torch.Tensor], None]:
    """Return a parameter hook that prefetches with the first gradient of each step."""

    def prefetch(parameter: torch.Tensor) -> None:
        alive = optimizer()
        if alive is not None and not alive._prefetched:
            # step() raises the same error. The program may train the model without the store.
            with contextlib.suppress(TierstoreError):
                alive.prefetch()

    return prefetch
