"""Muon: a torch.optim.Optimizer whose state lives in the pages of a TierStore."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

import tierstore
from muon import newton_schulz, normuon
from muon.advice import warn_of_slow_bfloat16
from muon.blocks import at_step
from muon.checks import (
    algorithm_of,
    check_hyperparameters,
    check_in_checkpoint,
    check_matrices,
    check_rule,
    loaded_from,
)
from muon.coefficients import Coefficients
from muon.encoded import encodings_of, moments_dtype, momentum_dtype
from muon.hooks import UpdateHook
from muon.keys import (
    DEFAULTS,
    KEYS,
    defaults,
    form,
    not_loaded,
    of_arguments,
    with_dtypes,
    with_numbers,
)
from muon.matrices import Declaration, declared, matrices_of, unit_of
from muon.memory import matrix_bytes
from muon.param_groups import cycle_betas
from muon.pipeline import Pipeline, compute_device
from muon.qk_clip import QKClip, Scale, largest
from muon.rules import Extras


class Muon(tierstore.PagedOptimizer):
    """Muon for matrices, and AdamW for groups with ``algorithm="adamw"``.

    Arguments have the meanings and defaults of ``torch.optim.Muon``, but a step refuses gradients
    that are not finite; see ``nonfinite``. For float32 parameters with contiguous gradients, the
    results equal ``torch.optim.Muon`` bit for bit, except for large matrices on a CPU, which round
    differently (see ``orthogonalize_``). Steps of AdamW differ from ``torch.optim.AdamW`` in the
    last bits, which are the same on each CPU and GPU; see docs/reference/torch-optim.md. Parameters
    of lower precision have a float32 master, to which the rule is applied.

    Args:
        params: parameters, ``named_parameters()`` or param groups, as in ``torch.optim``;
            ``muon.param_groups(model)`` makes groups. Names identify the state on disk: pass
            named parameters if the run may be resumed. A group with ``algorithm="adamw"`` or
            ``use_muon=False`` takes lr, betas, eps and weight_decay with the defaults of
            ``torch.optim.AdamW``. Any other group is a Muon group: its parameters have two
            dimensions, or hold several matrices, which its key ``matrices`` declares (see
            ``muon.matrices``). A parameter that is in a group twice is stepped once, and warns.
        store: holds the state; None keeps all state in memory.

    Update:
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: defaults
            of Muon groups, as in ``torch.optim.Muon``; AdamW groups have other defaults.
            ``ns_coefficients`` may also be the name of a table, such as "polar_express_1.01";
            ``adjust_lr_fn`` has further scales, see ``muon.scales.adjust_lr``.
            docs/reference/param-groups.md has all keys of groups.
        cautious_wd: decay only the elements of a parameter that the update does not move away from
            zero (https://arxiv.org/abs/2510.12402). An AdamW group has its own key for this.
        ns_norm: "scaled": each matrix is scaled by a power of two before its norm is computed.
            Gradients times a power of two then give the same update bit for bit, also if their
            squares would overflow or vanish, and ``eps`` does not matter. None: as
            ``torch.optim.Muon``.
        hooks: called around the update of each matrix; see ``muon.UpdateHook``.
        qk_clip: the attention heads that ``step(qk_logits=)`` is about.

    Memory:
        master: the form in which pages keep the float32 masters of bfloat16 parameters, also of
            AdamW groups. None: float32. "remainder": 16 bits beside the parameter, which is part of
            the master and rounds halves away from zero; no bit is lost. "24bit": 8 bits, so that
            masters are rounded to 16 significant bits.
        momentum_dtype: dtype of the momentum. None: the dtype of each parameter. torch.int8: fourth
            powers with a scale for each 256 columns; bfloat16 for parameters with fewer than 128.
        moments_dtype: dtype of the moments of AdamW groups. None: float32. torch.bfloat16 and
            torch.int8 round them at random, up or down. In 8 bits, each 256 columns have a scale;
            parameters with fewer than 128 columns, or of one dimension, keep float32.

    Device and gradients:
        ns_dtype: dtype of Newton-Schulz, or "auto": bfloat16, or float32 where rank 0 measures
            that it is much faster. A resumed run keeps its dtype. The first step warns if a CPU
            without instructions for bfloat16 computes it, unless the matrices are small.
        ns_batched: compute small matrices of one shape in batches of a fixed number, which zeros
            fill. Meant for a GPU; rounds differently from one matrix at a time.
        ns_method: "gram": large matrices that are at least twice as long as wide are iterated on
            X X^T, with fewer operations that round differently. Meant for a GPU. None: only on a
            CPU; see ``muon.orthogonalize_``.
        gradient: returns the gradient of a parameter, placed as the parameter is, in float64,
            float32, bfloat16 or float16, or None if it has none. It replaces ``.grad``, for
            gradients that another library keeps, or that are summed in float32. A step calls it
            several times for a parameter, and gets the same tensor each time. ``zero_grad()`` and
            ``torch.amp.GradScaler`` see ``.grad`` only.
        nonfinite: what step() does if a gradient on any rank has an element that is NaN or
            infinite. "raise": raise ``tierstore.NonFiniteGradientError``. "skip": warn, and do
            not step. "allow": step, as ``torch.optim`` does.

    Ranks:
        partition: which rank owns parameters, and their state, that several ranks hold whole.
            "by_parameter": one rank owns each parameter. "flat": each rank owns an equal range of
            all elements. "auto": "by_parameter" for Muon groups, "flat" for AdamW groups. Shards
            of DTensors are owned by the ranks that hold them.
        gather_memory: most bytes that one rank may hold of matrices in flight between ranks: an
            int, or a string such as "1GiB".
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
        if isinstance(hooks, UpdateHook) or not all(isinstance(h, UpdateHook) for h in hooks):
            raise ValueError(f"hooks must be a sequence of muon.UpdateHook, got {hooks!r}")
        if not isinstance(qk_clip, QKClip | None):
            raise ValueError(f"qk_clip must be a muon.QKClip, got {qk_clip!r}")
        self._hooks = tuple(hooks)
        self._qk_clip = qk_clip
        self._gather_memory = tierstore.pages.parse_bytes(gather_memory)
        self._may_be_slow = True
        self._qk_logits: Mapping[str, Sequence[float] | torch.Tensor] | None = None
        self._scales: dict[str, list[Scale]] = {}
        super().__init__(
            params,
            given,
            store=store,
            partition=partition,
            gradient=gradient,
            nonfinite=nonfinite,
            missing=missing,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in ``torch.optim``. The next step lays out its pages.

        Raises:
            TypeError: the group is not a dict, or its parameters are not tensors.
            ValueError: as in the constructor. The optimizer is unchanged.
        """
        super().add_param_group(param_group)
        # Schedulers read this to decide whether to cycle the betas or the momentum of all groups.
        if param_group["algorithm"] == "muon":
            self.defaults.pop("betas", None)
        elif len(self.param_groups) == 1:
            self.defaults["betas"] = KEYS["betas"].defaults["adamw"]

    def _is_cycled_without_muon(self, group: Mapping[str, Any]) -> bool:
        """True if a scheduler that was made for AdamW groups only cycles a new Muon group."""
        cycles_betas = "betas" in self.defaults and any(
            "max_momentum" in other for other in self.param_groups
        )
        is_muon = algorithm_of(group, len(self.param_groups)) == "muon"
        return cycles_betas and is_muon and "max_momentum" in group

    def fill_group(self, param_group: dict[str, Any], number: int) -> None:
        """Append a group to ``param_groups`` with all its keys."""
        if self._new_names is None and self._is_cycled_without_muon(param_group):
            raise ValueError(
                "the Muon group has the key max_momentum, and its scheduler cycles betas, which "
                "Muon groups do not have: make OneCycleLR after the first Muon group is added, or "
                "with cycle_momentum=False"
            )
        algorithm = param_group.setdefault("algorithm", algorithm_of(param_group, number))
        for name, value in defaults(algorithm, self.defaults).items():
            param_group.setdefault(name, value)
        others = self.defaults.keys() - param_group.keys()
        super().fill_group(param_group, number)
        for name in others:  # torch.optim adds all defaults, of both algorithms.
            del param_group[name]
        if param_group.get("ns_dtype") == "auto":
            param_group["ns_dtype"] = torch.bfloat16  # Until the parameters are checked.
            check_hyperparameters(param_group, number)
            self._check_matrices(number)
            param_group["ns_dtype"] = self._fastest_ns_dtype(
                param_group["params"], declared(param_group)
            )

    @property
    def bytes_exchanged(self) -> int:
        """Bytes of matrices and updates that this rank has sent to other ranks."""
        return self._pipeline.bytes_sent

    @tierstore.pages.not_compiled
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        qk_logits: Mapping[str, Sequence[float] | torch.Tensor] | None = None,
    ) -> Any:
        """Do one step with the gradients in ``.grad``. Gradients are not modified.

        Args:
            closure: evaluates the model and returns the loss. It may fill ``qk_logits``.
            qk_logits: for attention layers of ``qk_clip``, the largest attention logit of each head
                on this rank, before the softmax; -inf for a head that the rank does not have. All
                ranks pass it, or none. If the largest logit over the ranks exceeds the threshold,
                the head is scaled after its update; see ``muon.QKClip``. Parameters without a
                gradient are not scaled.

        Returns:
            The result of the closure, or None.

        Raises:
            tierstore.NonFiniteGradientError: a gradient is not finite, and ``nonfinite`` is
                "raise". Nothing was changed. Exception: with gradients on a GPU and a store with
                a commit, the store has failed, and the step was not committed.
            ValueError: ranks that hold the same elements have different gradients: reduce
                gradients before the step. Or see ``missing``. Or ``qk_logits`` does not fit
                ``qk_clip``, or has a NaN. Nothing was changed.
            StorageError, CorruptionError: pages could not be read or written. If a page was
                stepped already, the store has failed: restore() returns to the last commit.

        Warns:
            UserWarning: in the first step after restore(), the lr of a group differs from the
                committed lr; or in the first step, the CPU that computes it is slow in bfloat16.
        """
        self._qk_logits = qk_logits  # The closure may fill it.
        try:
            return super().step(closure)
        finally:
            self._qk_logits, self._scales = None, {}

    @property
    def window(self) -> int:
        """Number of pages that are stepped at once."""
        return self.store.pages.window_max

    def prepare_groups(self) -> None:
        """Normalize param groups after a scheduler has written to them."""
        cycle_betas(self.param_groups)

    def check_group(self, group: dict[str, Any], number: int) -> None:
        """Check the hyperparameters of a group; see ``muon.checks.check_hyperparameters``."""
        check_hyperparameters(group, number)
        # The value may have changed.
        if group.get("block_grid") is not None and number < len(self._attached.groups):
            self._check_matrices(number)

    def prepare_step(self) -> None:
        """Warn about slow Newton-Schulz before the first step; agree on the scales of QK-clip."""
        if self._may_be_slow:
            self._may_be_slow = False
            warn_of_slow_bfloat16(self.store, self.param_groups)
        self._scales = self._qk_scales(self._qk_logits)

    def step_pages(self, pages: tierstore.pages.SteppedPages) -> None:
        """Step the pages of a sweep."""
        step = self.store.step
        groups = [at_step(with_numbers(group), step) for group in self.param_groups]
        self._pipeline.open(pages, self.param_groups, self._options())
        scalars = self.store.pages.scalars
        steps = {
            name: values["step"] + 1.0 for name, values in scalars.items() if name in pages.present
        }
        extras = Extras(hooks=self._hooks, scales=self._scales)
        self._pipeline.step_pages(pages, groups, steps, self.window, extras)
        for name, count in steps.items():
            scalars[name]["step"] = count

    def flops_by_rank(self) -> list[int]:
        """Return the floating-point operations of Newton-Schulz of each rank in the last step.

        Computed without other ranks. Nominal: 20 r^2 c + 10 r^3 for a matrix of r rows and c
        columns, r <= c, and five iterations, even if fewer operations are done.
        """
        return self._pipeline.flops_by_rank()

    def _options(self) -> str:
        """Describe the options that all ranks must share and that are not hyperparameters."""
        threshold = None if self._qk_clip is None else self._qk_clip.threshold
        hooks = ", ".join(type(hook).__name__ for hook in self._hooks)
        return f"the hooks [{hooks}] and a QK-clip of threshold {threshold}"

    def _qk_scales(
        self, qk_logits: Mapping[str, Sequence[float] | torch.Tensor] | None
    ) -> dict[str, list[Scale]]:
        """Return parameter name -> scales of QK-clip in this step."""
        if qk_logits is None:
            return {}
        if self._qk_clip is None:
            raise ValueError("step(qk_logits=) needs Muon(qk_clip=muon.QKClip.of(model))")
        plain = {
            layer: torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
            for layer, values in qk_logits.items()
        }
        ranks = self.store.pages.ranks
        if ranks is not None:  # A step without logits gathers nothing: use another name for it.
            ranks.roll_call("step(qk_logits=)")
        logits = plain if ranks is None else largest(ranks.gather(plain))
        return self._qk_clip.scales(logits, self._attached.find)

    def _rule_of(self, group: Mapping[str, Any]) -> str | None:
        return group.get("algorithm")

    @property
    def keys(self) -> Collection[str]:
        """The known keys of param groups."""
        return KEYS.keys() - {"params", "param_names"}

    def scalars_of(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the step count of parameters of AdamW."""
        return {} if group["algorithm"] == "muon" else {"step": 0.0}

    def layout_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that determine the pages of a param group."""
        return form(group)

    def check_loaded(self, group: Mapping[str, Any], saved: Mapping[str, Any], number: int) -> None:
        """Check the hyperparameters in a checkpoint for the parameters of a group."""
        check_in_checkpoint(group, saved, number)

    def check_resumed(
        self, group: Mapping[str, Any], saved: Mapping[str, Any], number: int
    ) -> None:
        """Check that a run, possibly a converted one, is of the rule of the group."""
        check_rule(group, saved, number)

    def loaded(self, group: dict[str, Any], saved: dict[str, Any], number: int) -> dict[str, Any]:
        """Return the hyperparameters that a param group gets from a group of a state dict."""
        return loaded_from(group, saved, number)

    def unpacked(self, saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Return saved hyperparameters with names of dtypes replaced by dtypes."""
        return with_dtypes(saved)

    def not_loaded(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a group that restore() does not change."""
        return not_loaded(group)

    def memory_of_rule(self) -> dict[str, dict[str, int]]:
        """Return the bytes of Newton-Schulz of the largest batch."""
        found = matrix_bytes(self.store, self.param_groups)
        return {place: {"matrices of Newton-Schulz": nbytes} for place, nbytes in found.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Return the content of a copy of the optimizer, with copies of the states."""
        kept = super().__getstate__()
        del kept["_pipeline"]  # A copy gets a new store.
        return kept

    def _use_store(self, store: tierstore.TierStore) -> None:
        super()._use_store(store)
        self._pipeline = Pipeline(store, self._gather_memory)

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

    def _check_matrices(self, number: int) -> None:
        """Check that the matrices that a Muon group declares fit its parameters."""
        group = self.param_groups[number]
        for name, parameter in zip(self._names(number), group["params"], strict=True):
            check_matrices(name, parameter.shape, group)

    def paged_parameter(
        self, group: Mapping[str, Any], name: str, tensor: torch.Tensor, **placing: Any
    ) -> tierstore.pages.PagedParameter:
        """Return the PagedParameter of a parameter of a group."""
        is_muon = group["algorithm"] == "muon"
        if is_muon:
            check_matrices(name, tensor.shape, group)
            states = {"momentum_buffer": momentum_dtype(tensor, group)}
            if normuon.is_used(group):
                states[normuon.STATE] = torch.float32
        else:
            states = dict.fromkeys(("exp_avg", "exp_avg_sq"), moments_dtype(tensor, group))
        matrices = matrices_of(tensor.shape, declared(group)) if is_muon else ()
        return tierstore.pages.PagedParameter(
            name=name,
            tensor=tensor,
            states=states,
            shapes=dict.fromkeys(states.keys() & {normuon.STATE}, normuon.shape_for(tensor.shape)),
            encodings=encodings_of(tensor, group),
            elementwise=not is_muon,
            unit=unit_of(tensor.shape, declared(group)) if is_muon else None,
            cost=sum(newton_schulz.cost(m.shape) for m in matrices) if is_muon else None,
            **placing,
        )
