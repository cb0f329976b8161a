"""Muon: a torch.optim.Optimizer whose state lives in the pages of a TierStore."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

import tierstore
from muon import newton_schulz, normuon
from muon.advice import (
    scheduled_keys,
    warn_of_other_rates,
    warn_of_other_values,
    warn_of_slow_bfloat16,
)
from muon.attached import AttachedGroups
from muon.blocks import at_step
from muon.checks import (
    algorithm_of,
    check_hyperparameters,
    check_in_checkpoint,
    check_matrices,
)
from muon.coefficients import Coefficients
from muon.encoded import encodings_of, moments_dtype, momentum_dtype
from muon.hooks import UpdateHook
from muon.keys import DEFAULTS, KEYS, defaults, not_loaded, of_arguments, with_dtypes, with_numbers
from muon.matrices import Declaration, declared, matrices_of, unit_of
from muon.memory import memory_text
from muon.modes import without_callers_modes
from muon.param_groups import cycle_betas, drop_duplicates
from muon.pipeline import Pipeline, compute_device
from muon.qk_clip import QKClip, Scale, largest
from muon.rules import Extras
from muon.state import PagedState
from muon.state_dicts import check_keys, match, pack

# A copy of an optimizer gets its own; torch.optim copies no hooks either.
_NOT_COPIED = ("store", "step", "_attached", "_pipeline", "_state")


class Muon(torch.optim.Optimizer):
    """Muon for matrices, and AdamW for groups with ``algorithm="adamw"``.

    Arguments have the meanings and defaults of ``torch.optim.Muon``, but a step refuses gradients
    that are not finite; see ``nonfinite``. For float32 parameters
    with contiguous gradients, results equal those of ``torch.optim.Muon`` and
    ``torch.optim.AdamW(foreach=False)`` bit for bit, except for large matrices on a CPU, which
    round differently (see ``orthogonalize_``). Parameters of lower precision have a float32
    master, to which the rule is applied.

    Args:
        params: parameters, ``named_parameters()`` or param groups, as in ``torch.optim``;
            ``muon.param_groups(model)`` makes groups. Names identify the state on disk: pass
            named parameters if the run may be resumed. A group with ``algorithm="adamw"`` or
            ``use_muon=False`` takes lr, betas, eps and weight_decay with the defaults of
            ``torch.optim.AdamW``; any other group is a Muon group of two-dimensional parameters, or
            of parameters that hold several matrices, which its key ``matrices`` declares: see
            ``muon.matrices``. A parameter that is in a group twice is stepped once, with a warning.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: defaults
            of Muon groups, as in ``torch.optim.Muon``; AdamW groups have defaults of their own.
            ``ns_coefficients`` may also be the name of a table, such as "polar_express_1.01";
            ``adjust_lr_fn`` has further scales, see ``muon.scales.adjust_lr``.
            docs/reference/param-groups.md has all keys of groups.
        momentum_dtype: dtype of the momentum; None: the dtype of each parameter. torch.int8: fourth
            powers with a scale for each 256 columns; bfloat16 for parameters with less than 128.
        master: the form in which pages keep the float32 masters of bfloat16 parameters, of AdamW
            groups too. None: float32. "remainder": 16 bits beside the parameter, which is part of
            the master and rounds halves away from zero; no bit is lost. "24bit": 8 bits, so that
            masters are rounded to 16 significant bits.
        moments_dtype: dtype of the moments of AdamW groups. None: float32. torch.bfloat16 and
            torch.int8 round them at random, up or down. In 8 bits, each 256 columns have a scale;
            parameters with less than 128 columns, or of one dimension, keep float32.
        store: holds the state; None keeps all state in memory.
        partition: which rank owns parameters, and their state, that several ranks hold whole.
            "by_parameter": one rank owns each parameter. "flat": each rank owns an equal range of
            all elements. "auto": "by_parameter" for Muon groups, "flat" for AdamW groups. Shards
            of DTensors are owned by the ranks that hold them.
        gather_memory: the most bytes of matrices in flight between ranks that one rank may hold:
            an int, or a string such as "1GiB".
        ns_dtype: dtype of Newton-Schulz, or "auto": bfloat16, or float32 where rank 0 measures
            that it is much faster. A resumed run keeps its dtype. The first step warns if a CPU
            without instructions for bfloat16 computes it, unless the matrices are small.
        ns_batched: compute small matrices of one shape in batches of a fixed number, filled up with
            zeros. Meant for a GPU; rounds differently than one by one.
        ns_norm: "scaled": each matrix is scaled by a power of two before its norm is computed, so
            that gradients times a power of two give the same update bit for bit, also if their
            squares would overflow or vanish, and ``eps`` does not matter. None: as
            ``torch.optim.Muon``.
        ns_method: "gram": large matrices that are twice as long as wide, or more, are iterated on
            X X^T, with fewer operations that round differently. Meant for a GPU. None: so only on
            a CPU; see ``muon.orthogonalize_``.
        cautious_wd: decay only the elements of a parameter that the update does not move away from
            zero (https://arxiv.org/abs/2510.12402). An AdamW group has a key of its own for it.
        hooks: called around the update of each matrix; see ``muon.UpdateHook``.
        qk_clip: the attention heads that ``step(qk_logits=)`` is about.
        gradient: returns the gradient of a parameter, placed as the parameter is, in float64,
            float32, bfloat16 or float16, or None if it has none, in place of ``.grad``: for
            gradients that another library keeps, or that are summed up in float32. A step calls it
            several times for a parameter, and gets the same tensor each time. ``zero_grad()`` and
            ``torch.amp.GradScaler`` are about ``.grad`` alone.
        nonfinite: what step() does if a gradient on any rank has an element that is NaN or
            infinite. "raise": raise ``tierstore.NonFiniteGradientError``. "skip": warn, and do
            not step. "allow": step, as ``torch.optim`` does.
        missing: what step() does if a rank has no gradient of a parameter, and another rank has.
            "zeros": its gradient counts as zeros. "raise": raise ValueError.

    Raises:
        ValueError: a hyperparameter is out of range or cannot be used, or the algorithm of a group
            does not support a parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = DEFAULTS["lr"],
        weight_decay: float = DEFAULTS["weight_decay"],
        momentum: float = DEFAULTS["momentum"],
        nesterov: bool = DEFAULTS["nesterov"],
        ns_coefficients: Coefficients = DEFAULTS["ns_coefficients"],
        eps: float = DEFAULTS["eps"],
        ns_steps: int = DEFAULTS["ns_steps"],
        adjust_lr_fn: str | None = DEFAULTS["adjust_lr_fn"],
        *,
        momentum_dtype: torch.dtype | None = DEFAULTS["momentum_dtype"],
        master: str | None = DEFAULTS["master"],
        moments_dtype: torch.dtype | None = DEFAULTS["moments_dtype"],
        store: tierstore.TierStore | None = None,
        partition: str = "auto",
        gather_memory: int | str = "2GiB",
        ns_dtype: torch.dtype | str = DEFAULTS["ns_dtype"],
        ns_batched: bool = DEFAULTS["ns_batched"],
        ns_norm: str | None = DEFAULTS["ns_norm"],
        ns_method: str | None = DEFAULTS["ns_method"],
        cautious_wd: bool = DEFAULTS["cautious_wd"],
        hooks: Sequence[UpdateHook] = (),
        qk_clip: QKClip | None = None,
        gradient: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        nonfinite: str = "raise",
        missing: str = "zeros",
    ) -> None:
        given = {"algorithm": "muon", **of_arguments(locals())}
        if partition not in ("auto", "by_parameter", "flat"):
            raise ValueError(
                f"partition must be 'auto', 'by_parameter' or 'flat', got {partition!r}"
            )
        if nonfinite not in ("raise", "skip", "allow"):
            raise ValueError(f"nonfinite must be 'raise', 'skip' or 'allow', got {nonfinite!r}")
        if missing not in ("zeros", "raise"):
            raise ValueError(f"missing must be 'zeros' or 'raise', got {missing!r}")
        self._gradient_rules = {"nonfinite": nonfinite, "missing": missing}
        if isinstance(hooks, UpdateHook) or not all(isinstance(h, UpdateHook) for h in hooks):
            raise ValueError(f"hooks must be a sequence of muon.UpdateHook, got {hooks!r}")
        if not isinstance(qk_clip, QKClip | None):
            raise ValueError(f"qk_clip must be a muon.QKClip, got {qk_clip!r}")
        self._hooks = tuple(hooks)
        self._qk_clip = qk_clip
        if gradient is not None and not callable(gradient):
            raise ValueError(f"gradient must be a function of a parameter, got {gradient!r}")
        self._gradient = gradient
        self._owns_store = store is None
        self._gather_memory = tierstore.pages.parse_bytes(gather_memory)
        self._partition = None if partition == "auto" else partition
        self._use_store(tierstore.TierStore(None) if store is None else store)
        self._prefetches = store is not None
        self._prefetched = False
        self._reads_hook: weakref.finalize[..., Any] | None = None  # Removes the hook.
        self._may_be_slow = True
        self._restored_rates: list[float] = []  # Of each attached group, until the next step.
        # The names in the groups so far, until all groups of the constructor are added: collecting
        # them anew for every group would take seconds with thousands of groups.
        self._new_names: set[str] | None = set()
        super().__init__(params, given)
        self._new_names = None

    @property  # type: ignore[override]
    def state(self) -> PagedState:
        """The states, as a mapping over the pages; see PagedState.

        Assignment replaces the states of all parameters, as ``optimizer.state = {}`` does in
        ``torch.optim``.
        """
        return self._state

    @state.setter
    def state(self, values: Mapping[Any, Any]) -> None:
        # The constructor of torch.optim assigns an empty mapping before there are groups.
        if values is not self._state and "param_groups" in self.__dict__:
            self._state.replace(values)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in ``torch.optim``; its pages are laid out at the next step.

        Raises:
            TypeError: the group is not a dict, or has something else than tensors.
            ValueError: as in the constructor. The optimizer is unchanged.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a param group must be a dict, got {param_group!r}")
        if isinstance(param_group["params"], Iterator):  # Which can be read once.
            param_group["params"] = list(param_group["params"])
        if self._new_names is None and self._is_cycled_without_muon(param_group):
            raise ValueError(
                "the Muon group has the key max_momentum, and its scheduler cycles betas, which "
                "Muon groups do not have: make OneCycleLR after the first Muon group is added, or "
                "with cycle_momentum=False"
            )
        # As in torch.optim, the dict is the group and gets the keys that it lacks.
        count, given = len(self.param_groups), dict(param_group)
        try:
            self._fill_group(param_group, count)
        except BaseException:
            del self.param_groups[count:]
            param_group.clear()
            param_group.update(given)
            raise
        if self._attached.groups:
            self._attached.expect(param_group)
        # Schedulers find here whether they cycle the betas of all groups or their momentum.
        if param_group["algorithm"] == "muon":
            self.defaults.pop("betas", None)
        elif count == 0:
            self.defaults["betas"] = KEYS["betas"].defaults["adamw"]

    def _is_cycled_without_muon(self, group: Mapping[str, Any]) -> bool:
        """True if a scheduler that was made for AdamW groups alone cycles a new Muon group."""
        cycles_betas = "betas" in self.defaults and any(
            "max_momentum" in other for other in self.param_groups
        )
        is_muon = algorithm_of(group, len(self.param_groups)) == "muon"
        return cycles_betas and is_muon and "max_momentum" in group

    def _fill_group(self, param_group: dict[str, Any], number: int) -> None:
        """Append a group to ``param_groups`` with all its keys, and check it."""
        algorithm = param_group.setdefault("algorithm", algorithm_of(param_group, number))
        for name, value in defaults(algorithm, self.defaults).items():
            param_group.setdefault(name, value)
        others = self.defaults.keys() - param_group.keys()
        super().add_param_group(param_group)  # Which takes all defaults, of both algorithms.
        for name in others:
            del param_group[name]
        drop_duplicates(param_group)  # torch.optim has warned of them.
        measured = param_group.get("ns_dtype") == "auto"
        if measured:
            param_group["ns_dtype"] = torch.bfloat16  # Until the parameters are checked.
        check_hyperparameters(param_group, number)
        self._check_parameters([number])
        if measured:
            param_group["ns_dtype"] = self._fastest_ns_dtype(
                param_group["params"], declared(param_group)
            )

    @property
    def bytes_exchanged(self) -> int:
        """Bytes of matrices and updates that this rank has sent to other ranks."""
        return self._pipeline.bytes_sent

    @tierstore.pages.not_compiled
    def prefetch(self) -> None:
        """Start reading the state that the next step needs first; see Pages.prefetch()."""
        if self._attached.groups:  # Before the first step there is no state.
            self._prefetched = True
            self.store.pages.prefetch()

    @tierstore.pages.not_compiled
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        qk_logits: Mapping[str, Sequence[float] | torch.Tensor] | None = None,
    ) -> Any:
        """Do one step with the gradients in ``.grad``, which are not modified.

        Args:
            closure: evaluates the model and returns the loss. It may fill ``qk_logits``.
            qk_logits: for attention layers of ``qk_clip`` the largest attention logit of each head
                that this rank saw, before the softmax: a head that it does not have has -inf. All
                ranks pass it, or none. Heads above the threshold in the largest over the ranks are
                scaled after their update; see ``muon.QKClip``. Parameters without a gradient are
                not scaled.

        Returns:
            The result of the closure, or None.

        Raises:
            tierstore.NonFiniteGradientError: a gradient is not finite, and ``nonfinite`` is
                "raise". Nothing was changed; or, for gradients on a GPU and a store with a
                commit, the store has failed before it committed the step.
            ValueError: ranks that hold the same elements have different gradients: reduce
                gradients before the step. Or see ``missing``. Or ``qk_logits`` does not fit
                ``qk_clip``, or has a NaN. Nothing was changed.
            StorageError, CorruptionError: pages could not be read or written. If a page was
                stepped already, the store is failed, and restore() returns to the last commit.

        Warns:
            UserWarning: this is the first step after restore(), and the lr of a group is not the
                committed one; or this is the first step, and the CPU that computes it is slow in
                bfloat16.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        cycle_betas(self.param_groups)
        with without_callers_modes(), self.store.pages.calling("step()"):
            self._attach_groups()
            for number, group in enumerate(self.param_groups):
                check_hyperparameters(group, number)
                if group.get("block_grid") is not None:  # It may have been changed.
                    for parameter in self._attached.groups[number].parameters:
                        check_matrices(parameter.name, parameter.tensor.shape, group)
            self._warn()
            step = self.store.step + 1
            groups = [at_step(with_numbers(group), step) for group in self.param_groups]
            scales = self._qk_scales(qk_logits)
            extras = Extras(hooks=self._hooks, scales=scales)
            window = self.store.pages.window_max
            with self.store.pages.sweep(window, **self._gradient_rules) as pages:
                self._pipeline.open(pages, self.param_groups, self._options())
                scalars = self.store.pages.scalars
                steps = {
                    name: values["step"] + 1.0
                    for name, values in scalars.items()
                    if name in pages.present
                }
                self._pipeline.step_pages(pages, groups, steps, window, extras)
                for name, count in steps.items():
                    scalars[name]["step"] = count
        self._prefetched = False
        return loss

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients down so that their norm together is at most ``max_norm``.

        The operations are those of ``torch.nn.utils.clip_grad_norm_``, on the gradients that a step
        takes: also those that ``gradient`` gives.

        Args:
            max_norm: the largest norm.
            norm_type: order of the norm; ``math.inf`` for the largest magnitude.
            error_if_nonfinite: raise RuntimeError if the norm is NaN or infinite, and scale
                nothing.

        Returns:
            The norm before, of shape ().

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

    def flops_by_rank(self) -> list[int]:
        """Return the floating-point operations of Newton-Schulz of each rank in the last step.

        Computed without other ranks. Nominal: 20 r^2 c + 10 r^3 for a matrix of r rows and c
        columns, r <= c, and five iterations, also where fewer operations are done.
        """
        return self._pipeline.flops_by_rank()

    def _options(self) -> str:
        """Describe the options that all ranks must have, and no hyperparameter tells."""
        threshold = None if self._qk_clip is None else self._qk_clip.threshold
        hooks = ", ".join(type(hook).__name__ for hook in self._hooks)
        return f"the hooks [{hooks}] and a QK-clip of threshold {threshold}"

    def _qk_scales(
        self, qk_logits: Mapping[str, Sequence[float] | torch.Tensor] | None
    ) -> dict[str, list[Scale]]:
        """Return by name of a parameter what QK-clip scales in this step."""
        if qk_logits is None:
            return {}
        if self._qk_clip is None:
            raise ValueError("step(qk_logits=) needs Muon(qk_clip=muon.QKClip.of(model))")
        plain = {
            layer: torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
            for layer, values in qk_logits.items()
        }
        ranks = self.store.pages.ranks
        if ranks is not None:  # Of another name than a step without logits, which gathers nothing.
            ranks.roll_call("step(qk_logits=)")
        logits = plain if ranks is None else largest(ranks.gather(plain))
        return self._qk_clip.scales(logits, self._attached.find)

    @tierstore.pages.not_compiled
    def restore(
        self,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        rewind: bool = False,
        keep_hyperparameters: bool = False,
    ) -> int:
        """Restore the last committed step: see ``TierStore.restore()``.

        Groups that were added after that step, in this process, keep their parameters and
        hyperparameters, and their states begin anew.

        Args:
            checkpoint: start a new run from this checkpoint; see ``TierStore.restore()``. The
                parameters need names.
            rewind: go on from the step of the checkpoint in this run, which may have steps; see
                ``TierStore.restore()``.
            keep_hyperparameters: param groups keep the values of this program, such as another
                weight decay, but for what a scheduler has set: the lr, and momentum or betas.

        Returns:
            The step, or 0 for a new run.

        Warns:
            UserWarning: the program gave param groups other values than were committed, and the
                committed ones count.

        Raises:
            ValueError: a committed state is of no object that is registered with the store, for
                example. Nothing was changed.
            RunMismatchError, CheckpointError: the run or checkpoint does not fit the model.
                Nothing was changed.
        """
        cycle_betas(self.param_groups)
        unchanged = [not_loaded(group) for group in self.param_groups]
        given = [dict(group) for group in self.param_groups]
        with self.store.pages.calling("restore(rewind=True)" if rewind else "restore()"):
            # A failed store restores the groups that it has; the next step attaches the others.
            with contextlib.suppress(tierstore.StoreFailedError):
                self._attach_groups()
            step = self.store.restore(checkpoint, rewind=rewind)
        self._begin_counts()
        for group, values in zip(self.param_groups, unchanged, strict=True):
            group.update({**with_dtypes(group), **values})
            for name in not_loaded(group).keys() - values.keys():
                del group[name]
        # Groups that were attached after the commit come last.
        restored = self.param_groups[: self.store.pages.groups_written]
        states = self.store.committed.states.values()
        is_scheduled = any(isinstance(s, Mapping) and "_last_lr" in s for s in states)
        if keep_hyperparameters:
            for group, values in zip(restored, given, strict=False):
                names = values.keys() - scheduled_keys(group, is_scheduled=is_scheduled)
                group.update({name: values[name] for name in names})
        elif step:
            warn_of_other_values(restored, given, is_scheduled=is_scheduled)
        self._restored_rates = [float(group["lr"]) for group in restored] if step else []
        return step

    @tierstore.pages.not_compiled
    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of ``torch.optim``, also before the first step.

        Tensors have the shape of their parameter. They are mappings of page files, which cost no
        memory and do not change, or copies; see ``Pages.read_states()``. Parameters of low
        precision have an additional entry "master". Entries of ``optimizer.state`` that are not of
        a parameter are there, too. All ranks call this together and get the same entries; states of
        a DTensor are DTensors with its placements. After the first step, a rank that owns all
        elements of its own tensors, as with FSDP2, may call this alone.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        cycle_betas(self.param_groups)
        with self.store.pages.calling("state_dict()"):
            self._attach_groups()
            states, scalars = self.store.pages.read_states(), self.store.pages.scalars
        names = [[p.name for p in group.parameters] for group in self._attached.groups]
        packed_states, packed_groups = pack(self.param_groups, names, states, scalars)
        packed_states |= self.state.others
        state_dict: dict[str, Any] = {"state": packed_states, "param_groups": packed_groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    @tierstore.pages.not_compiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the state by a state dict in the format of ``torch.optim``.

        State dicts of ``torch.optim.Muon`` and ``torch.optim.AdamW`` over the same parameters in
        the same order are accepted, and whole tensors for states of a DTensor. Each state keeps
        its current dtype. The tensors that state_dict() returned are not written again if no state
        changed since. Names of parameters stay. All ranks call this together.

        Raises:
            ValueError: the groups, or the states of a parameter, differ from this optimizer's.
                Nothing was changed.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        cycle_betas(self.param_groups)
        check_keys(state_dict)
        groups, states, others = match(state_dict, self.param_groups, self._paged_group)
        with self.store.pages.calling("load_state_dict()"):
            self._attach_groups()
            scalars = {
                name: {"step": float(states[name].pop("step", 0.0))}
                for name in self.store.pages.scalars
            }
            self.store.pages.write_states(states, scalars)
        self.state.others = others
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @tierstore.pages.not_compiled
    def reset_state(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Set the states of some parameters, or of all, to those of a new optimizer.

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

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the optimizer needs, with copies of the states.

        Raises:
            TypeError: the store was given by the caller, or has several ranks.
        """
        if not self._owns_store or self.store.pages.ranks is not None:
            raise TypeError(
                "a Muon optimizer with a store, or on several ranks, cannot be pickled or copied: "
                "use state_dict(), or resume the run"
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
        """Make a copy, with a store of its own, from __getstate__()."""
        states, scalars, others = state.pop("_copied")
        defaults = state["defaults"].copy()
        super().__setstate__(state)
        self.defaults = defaults  # Without what __setstate__() adds for optimizers of torch.
        self._use_store(tierstore.TierStore(None))
        self.state.others = others
        if states:
            self._attach_groups()
            self.store.pages.write_states(states, scalars)

    def _use_store(self, store: tierstore.TierStore) -> None:
        self.store = store
        self._pipeline = Pipeline(store, self._gather_memory)
        self._attached = AttachedGroups()
        self._state = PagedState(self)

    def _write_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all states of some parameters, each with a step if the parameter has one."""
        if not (self._attached.groups or any(states.values())):
            return  # No parameter has a state.
        self._attach_groups()
        scalars = {
            name: {"step": float(states[name].get("step", 0.0))}
            for name in self.store.pages.scalars.keys() & states
        }
        paged = {
            name: {state: value for state, value in values.items() if state != "step"}
            for name, values in states.items()
        }
        self.store.pages.write_states(paged, scalars, names=states.keys())

    def _fastest_ns_dtype(
        self, parameters: Sequence[torch.Tensor], declaration: Declaration
    ) -> torch.dtype:
        if not parameters:
            return torch.bfloat16
        device = compute_device(self.store, parameters[0])
        shapes = (m.shape for p in parameters for m in matrices_of(p.shape, declaration))
        shape = max(shapes, key=math.prod)
        ranks = self.store.pages.ranks
        dtype = torch.bfloat16
        if ranks is not None:
            ranks.roll_call("add_param_group()")
        if ranks is None or ranks.rank == 0:
            dtype = newton_schulz.fastest_dtype(shape, device)
        # Measurements of ranks may differ, but all ranks must compute in the same dtype.
        return dtype if ranks is None else ranks.gather(dtype)[0]

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
                        f"parameter {name!r} is there twice: names must be unique. Parameters "
                        "without names are named by their positions"
                    )
                names.add(name)
                tensors.add(parameter)
                if self.param_groups[number]["algorithm"] == "muon":
                    check_matrices(name, parameter.shape, self.param_groups[number])
            self._paged_group(number)  # Raises for a parameter that cannot be paged.

    def _described(
        self, tensor: torch.Tensor
    ) -> tuple[Sequence[str], tierstore.pages.PagedParameter]:
        """Return the scalar states of a parameter, and the parameter as it is paged.

        Raises:
            KeyError: no group has the tensor.
        """
        number, index = self._state.position(tensor)
        scalars = () if self.param_groups[number]["algorithm"] == "muon" else ("step",)
        paged = self._attached.find(tensor)
        if paged is None:
            paged = self._paged_parameter(number, self._name(number, index), tensor)
        return scalars, paged

    def _warn(self) -> None:
        """Warn at the first step, and at the first step after a restore."""
        if self._restored_rates:
            warn_of_other_rates(self.param_groups, self._restored_rates)
            self._restored_rates = []
        if self._may_be_slow:
            self._may_be_slow = False
            warn_of_slow_bfloat16(self.store, self.param_groups)

    def _attach_groups(self) -> None:
        """Attach the groups that the store does not have yet, and check that no other was edited.

        Raises:
            ValueError: one was; see AttachedGroups.require_same(). Nothing was changed.
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
            check_hyperparameters(self.param_groups[number], number)
        self._check_parameters(numbers)
        paged = [self._paged_group(number) for number in numbers]
        self.store.pages.attach(paged)
        self._attached.extend(paged, self.param_groups)
        self._begin_counts()
        if self._prefetches:
            self._hook_reads()

    def _hook_reads(self) -> None:
        """Let the gradient of one small parameter start the reads of the next step.

        One alone: FSDP2 copies gradients of parameters with a hook to pageable host memory, and
        waits for each. Of the smallest parameters the last one, whose gradient comes first.
        """
        tensors = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if tensors:
            if self._reads_hook is not None:
                self._reads_hook()
            smallest = min(reversed(tensors), key=torch.Tensor.numel)
            hook = smallest.register_post_accumulate_grad_hook(_prefetcher(weakref.ref(self)))
            self._reads_hook = weakref.finalize(self, hook.remove)

    def _begin_counts(self) -> None:
        """Count the steps of parameters of AdamW that have no count yet."""
        for group in self._attached.groups:
            if group.hyperparameters["algorithm"] == "adamw":
                for parameter in group.parameters:
                    self.store.pages.scalars.setdefault(parameter.name, {"step": 0.0})

    def memory(self) -> str:
        """Return what is where on this rank, as a line of text for each memory.

        Counted are parameters of the optimizer, their gradients, states and matrices. An example
        for ``print(optimizer.memory())``, after a step or ``restore()``:

            GPU 17.1 GiB: parameters 15.0 GiB, pages in a step 1.3 GiB, ...
            host 63.8 GiB: pages that rest there 47.5 GiB, gradients that leave 15.0 GiB, ...
            NVMe 101.4 GiB: files of pages 101.4 GiB

        Raises:
            StoreClosedError: the store is closed.
        """
        return memory_text(self.store, self.param_groups)

    def paged_groups(self) -> list[tierstore.pages.PagedGroup]:
        """Return all groups as the store has them, or as they would be attached now."""
        return [self._paged_group(number) for number in range(len(self.param_groups))]

    def _paged_group(self, number: int) -> tierstore.pages.PagedGroup:
        """Return a group as the store has it, or as it would be attached now.

        Before it is attached, a group is described anew each time, because the model may still be
        converted.
        """
        if number < len(self._attached.groups):
            return self._attached.groups[number]
        group = self.param_groups[number]
        named = zip(self._names(number), group["params"], strict=True)
        return tierstore.pages.PagedGroup(
            parameters=[self._paged_parameter(number, name, p) for name, p in named],
            hyperparameters=group,
            check=lambda saved: check_in_checkpoint(group, saved, number),
        )

    def _paged_parameter(
        self, number: int, name: str, parameter: torch.Tensor
    ) -> tierstore.pages.PagedParameter:
        """Return a parameter of a group as it is paged."""
        group = self.param_groups[number]
        is_muon = group["algorithm"] == "muon"
        if is_muon:
            states = {"momentum_buffer": momentum_dtype(parameter, group)}
            if normuon.is_used(group):
                states[normuon.STATE] = torch.float32
        else:
            states = dict.fromkeys(("exp_avg", "exp_avg_sq"), moments_dtype(parameter, group))
        matrices = matrices_of(parameter.shape, declared(group)) if is_muon else ()
        return tierstore.pages.PagedParameter(
            name=name,
            tensor=parameter,
            states=states,
            row_states=states.keys() & {normuon.STATE},
            encodings=encodings_of(parameter, group),
            elementwise=not is_muon,
            unit=unit_of(parameter.shape, declared(group)) if is_muon else None,
            partition=self._partition,
            gradient=self._gradient,
            cost=sum(newton_schulz.cost(m.shape) for m in matrices) if is_muon else None,
        )

    def _names(self, number: int) -> list[str]:
        """Return the names of the parameters of a group.

        Raises:
            ValueError: ``param_names`` was edited to another length than ``params``.
        """
        group = self.param_groups[number]
        count, given = len(group["params"]), len(group.get("param_names") or group["params"])
        if given != count:
            raise ValueError(
                f"param group {number} has {count} parameters and {given} param_names: give each "
                "parameter a name"
            )
        return [self._name(number, index) for index in range(count)]

    def _name(self, number: int, index: int) -> str:
        """Return the name of one parameter: the user's, or its position."""
        names = self.param_groups[number].get("param_names")
        return str(names[index]) if names else f"{number}.{index}"


def _prefetcher(optimizer: weakref.ref[Muon]) -> Callable[[torch.Tensor], None]:
    """Return a parameter hook that prefetches with the first gradient of each step."""

    def prefetch(parameter: torch.Tensor) -> None:
        alive = optimizer()
        if alive is not None and not alive._prefetched:
            # step() raises the same. And the model may be trained further without the store.
            with contextlib.suppress(tierstore.TierstoreError):
                alive.prefetch()

    return prefetch
