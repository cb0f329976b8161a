"""Routing: the update rule of each parameter of a model."""

from __future__ import annotations

import logging
import operator
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import nn

from muon import newton_schulz
from muon.checks import algorithm_of, check_matrices
from muon.matrices import Declaration, declared, matrices_of
from muon.routing_rules import Use, rules_by_place, uses_named, uses_of

logger = logging.getLogger("muon")

# A choice of the user, by name of a parameter and parameter.
_Choice = Callable[[str, nn.Parameter], bool]


class ParamGroups(list[dict[str, Any]]):
    """Param groups for ``muon.Muon``. They print as a table of parameters, groups and rules.

    ``rules`` maps the name of each parameter to the rule that decided; see ``param_groups``.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]] = (), *, rules: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(groups)
        self.rules = dict(rules or {})

    def __str__(self) -> str:
        table = Table(box=SIMPLE, title="param groups")
        for column in ("group", "algorithm", "lr", "weight decay", "parameter", "shape"):
            table.add_column(column)
        table.add_column("GFLOP", justify="right")  # GFLOP of Newton-Schulz in a step.
        table.add_column("rule")
        for index, group in enumerate(self):
            # An optimizer removes the names from "params".
            names = group.get("param_names")
            named = zip(names, group["params"], strict=True) if names else group["params"]
            for position, (name, tensor) in enumerate(named):
                shape = _by(tensor.shape) or "scalar"
                flops = ""
                if algorithm_of(group, index) == "muon":
                    inner = Counter(m.shape for m in matrices_of(tensor.shape, declared(group)))
                    steps = group.get("ns_steps", newton_schulz.STEPS)
                    total = sum(n * newton_schulz.flops(one, steps) for one, n in inner.items())
                    flops = f"{total / 1e9:.3g}"
                    if declared(group):
                        held = ", ".join(f"{count} of {_by(one)}" for one, count in inner.items())
                        shape = f"{shape}: {held}"
                heading = [""] * 4
                if position == 0:
                    algorithm = algorithm_of(group, index)
                    rates = [
                        f"{group[key]:g}" if key in group else "default"
                        for key in ("lr", "weight_decay")
                    ]
                    heading = [str(index), algorithm, *rates]
                table.add_row(*heading, name, shape, flops, self.rules.get(name, ""))
        # The console is as wide as the table, so that no name is cut.
        width = Console(width=sys.maxsize).measure(table).maximum
        console = Console(width=width, no_color=True, highlight=False, markup=False, emoji=False)
        with console.capture() as capture:
            console.print(table)
        return capture.get()


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    adamw_lr: float | None = None,
    weight_decay: float | None = None,
    adamw_weight_decay: float | None = None,
    adamw_names: str | Collection[str] = (),
    conv: str = "adamw",
    matrices: Mapping[str | type[nn.Module], Declaration] | None = None,
    head: str | Collection[str] | None = None,
    is_muon: Callable[[str, nn.Parameter], bool | None] | None = None,
    no_decay: Callable[[str, nn.Parameter], bool] | str | Collection[str] = (),
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    momentum: float | None = None,
) -> ParamGroups:
    """Route the parameters of a model: hidden matrices to Muon, all other parameters to AdamW.

    The first of these rules that applies to a parameter decides. ``print(groups)`` shows a table
    with the rule of each parameter.

    - ``adamw_names``: AdamW for the names given.
    - ``is_muon``: the algorithm that this function chooses.
    - ``matrices``: Muon for parameters whose matrices are declared.
    - ``embedding``: AdamW for weights of embeddings.
    - ``head``: AdamW for weights of output layers.
    - ``vector``: AdamW for parameters with at most one dimension larger than 1: biases, norms,
      class tokens, magnitudes of ``weight_norm``.
    - ``table``: AdamW for parameters whose own name is not the name of a weight (with "weight",
      "proj", "kernel", or as "wq", "w1"): positional tables, queries, biases of experts, A_log.
    - ``input``: AdamW for patch embeddings, and for the first layer if it is a convolution.
    - ``kernel``: AdamW for parameters with more than two dimensions.
    - ``router``: AdamW for matrices with fewer rows than columns in a module named "gate" or
      inside one with "router" in its name.
    - ``matrix``: Muon for all others.

    Frozen parameters are left out. A tied parameter appears once. A rule applies to it if it
    applies under any of its names. Names and patterns may include or omit the parts that wrappers
    of the model add (``torch.compile``, DDP, checkpoint wrappers). A name without these parts
    matches both wrapped and other layers.

    Two-dimensional parameters of the rule ``table`` are also logged, like parameters of ``kernel``.

    Args:
        model: the model, after ``requires_grad`` was set.
        lr: learning rate of Muon groups; None, here and below: the default of the optimizer.
        adamw_lr: learning rate of AdamW groups.
        weight_decay: weight decay of Muon groups.
        adamw_weight_decay: weight decay of AdamW groups.
        adamw_names: names of more parameters for AdamW, or one name.
        conv: action for parameters of the rule ``kernel``, such as convolutions and stacks of
            experts. "adamw": route them to AdamW and log their number as a warning of the logger
            ``muon``. "refuse": raise.
        matrices: the matrices that parameters hold, in the form of the key ``matrices`` of a group
            (see ``muon.matrices``). Keys are patterns of names such as ``"*.qkv.weight"`` (see
            ``fnmatch``), or classes of modules, for their parameters of two or more dimensions.
            The first match applies. Example: ``{"*.experts.*_proj": (("stack",),)}``.
        head: names of the output layers (modules or parameters). All their parameters go to AdamW.
            ``()``: the model has no output layer. None: find them. These are the layers that end a
            module with a common name of a head, such as "lm_head", "score" or "classifier", outside
            of numbered layers; the last layer of the model if it is named "fc", or is a Linear
            layer as wide as an embedding has entries; the result of ``get_output_embeddings()``.
        is_muon: gets name and parameter. Returns True for Muon, which needs two dimensions, False
            for AdamW, or None to leave the choice to the rules. It is called with each name of a
            tied parameter. False for one name overrides True for another.
        no_decay: parameters with weight decay 0, in separate groups: a function of name and
            parameter, or patterns of names such as ``"*.bias"`` (see ``fnmatch``). A function
            applies if it is true for any name of a tied parameter.
        betas: betas of AdamW groups.
        eps: eps of AdamW groups.
        momentum: momentum of Muon groups.

    Returns:
        A Muon group, an AdamW group, then the same without weight decay, then a Muon group for each
        declaration of matrices. Groups without parameters are left out. Parameters have names.

    Raises:
        ValueError: a name in ``adamw_names`` or ``head``, a pattern in ``no_decay``, or a rule in
            ``matrices`` matches nothing in the model; a declaration does not fit its parameter;
            ``is_muon`` is True for a parameter that does not have two dimensions; ``conv`` is
            "refuse" and the model has parameters of the rule ``kernel``; or no parameter requires
            a gradient.
    """
    if conv not in ("adamw", "refuse"):
        raise ValueError(f"conv must be 'adamw' or 'refuse', got {conv!r}")
    uses = uses_of(model)
    for_adamw: set[nn.Parameter] = set()
    for name in [adamw_names] if isinstance(adamw_names, str) else adamw_names:
        found = uses_named(uses, name, operator.eq)
        if not found:
            raise ValueError(f"the model has no parameter {name!r}, named in adamw_names")
        for_adamw.update(use.parameter for use in found)
    place_rules = rules_by_place(model, uses, head)
    declarations = _declarations(matrices or {}, uses)
    is_no_decay = no_decay if callable(no_decay) else _pattern_choice(no_decay, uses)

    uses_by_parameter: dict[nn.Parameter, list[Use]] = {}
    for use in uses:
        if use.parameter.requires_grad:
            uses_by_parameter.setdefault(use.parameter, []).append(use)
    if not uses_by_parameter:
        raise ValueError("the model has no parameter that requires a gradient")

    options: dict[str, dict[str, Any]] = {
        "muon": {"lr": lr, "weight_decay": weight_decay, "momentum": momentum},
        "adamw": {"lr": adamw_lr, "weight_decay": adamw_weight_decay, "betas": betas, "eps": eps},
    }
    kinds: list[tuple[str, bool, Declaration]] = [
        (algorithm, without_decay, ()) for without_decay in (False, True) for algorithm in options
    ]
    for declaration in dict.fromkeys(declarations.values()):
        kinds += [("muon", without_decay, declaration) for without_decay in (False, True)]
    groups: dict[tuple[str, bool, Declaration], dict[str, Any]] = {}
    for algorithm, without_decay, declaration in kinds:
        given = {key: value for key, value in options[algorithm].items() if value is not None}
        group = {"params": [], "algorithm": algorithm, **given}
        if without_decay:
            group["weight_decay"] = 0.0
        if declaration:
            group["matrices"] = declaration
        groups[algorithm, without_decay, declaration] = group
    rules = {}
    for parameter, named in uses_by_parameter.items():
        name = named[0].name
        answers = [] if is_muon is None else [is_muon(use.name, parameter) for use in named]
        choices = [answer for answer in answers if answer is not None]
        if parameter in for_adamw:
            algorithm, rules[name] = "adamw", "adamw_names"
        elif choices:
            algorithm, rules[name] = "muon" if all(choices) else "adamw", "is_muon"
        elif parameter in declarations:
            algorithm, rules[name] = "muon", "matrices"
        else:
            holding = (rule for rule, holds in place_rules.items() if any(map(holds, named)))
            rules[name] = next(holding, "matrix")
            algorithm = "muon" if rules[name] == "matrix" else "adamw"
        declaration = declarations.get(parameter, ()) if algorithm == "muon" else ()
        if algorithm == "muon" and parameter.ndim != 2 and not declaration:
            raise ValueError(
                f"is_muon is True for parameter {name!r} of shape {tuple(parameter.shape)}: Muon "
                "needs two-dimensional parameters, or matrices= that declares what they hold"
            )
        if declaration:
            check_matrices(name, parameter.shape, {"matrices": declaration})
        without_decay = any(is_no_decay(use.name, parameter) for use in named)
        groups[algorithm, without_decay, declaration]["params"].append((name, parameter))
    firsts = [named[0] for named in uses_by_parameter.values()]
    kernels = [use for use in firsts if rules[use.name] == "kernel"]
    if kernels and conv == "refuse":
        raise ValueError(
            f"parameters with more than two dimensions: {len(kernels)}; {_first_of(kernels)}. Muon "
            "needs two-dimensional parameters. Declare the matrices that they hold with matrices=, "
            "name them in adamw_names, or pass conv='adamw'"
        )
    _report(
        "parameters with more than two dimensions",
        kernels,
        firsts,
        advice="matrices= declares the matrices that they hold; adamw_names= ends this warning",
    )
    _report(
        "matrices whose own name is not the name of a weight",
        [use for use in firsts if rules[use.name] == "table" and use.parameter.ndim == 2],
        firsts,
        advice="is_muon= routes them to Muon; adamw_names= ends this warning",
    )
    return ParamGroups((group for group in groups.values() if group["params"]), rules=rules)


def _pattern_choice(patterns: str | Collection[str], uses: Collection[Use]) -> _Choice:
    """Return a choice: whether a pattern matches any name of a parameter."""
    fitting: set[nn.Parameter] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = {use.parameter for use in uses_named(uses, pattern, fnmatchcase)}
        if not found:
            raise ValueError(
                f"no_decay has the pattern {pattern!r}, which fits no parameter of the model. A "
                "pattern fits whole names: '*.bias'"
            )
        fitting |= found
    return lambda _, parameter: parameter in fitting


def _declarations(
    matrices: Mapping[str | type[nn.Module], Declaration], uses: Collection[Use]
) -> dict[nn.Parameter, Declaration]:
    """Return parameter -> declaration, from the first rule that matches the parameter."""
    found: dict[nn.Parameter, Declaration] = {}
    is_mapping = isinstance(matrices, Mapping)
    if not is_mapping or not all(isinstance(rule, str | type) for rule in matrices):
        raise ValueError(
            "matrices must map patterns of names, or classes of modules, to cuts, such as "
            f"{{'*.qkv.weight': (('split', 0, (4096, 1024, 1024)),)}}, got {matrices!r}"
        )
    for rule, declaration in matrices.items():
        if isinstance(rule, str):
            fitting = uses_named(uses, rule, fnmatchcase)
        else:
            fitting = [u for u in uses if isinstance(u.module, rule) and u.parameter.ndim > 1]
        if not fitting:
            name = repr(rule) if isinstance(rule, str) else rule.__qualname__
            raise ValueError(
                f"matrices has the rule {name}, which fits no parameter of the model. A pattern "
                "fits whole names: '*.qkv.weight'; a class fits modules of it"
            )
        cuts = declared({"matrices": declaration})
        if not cuts:
            raise ValueError(f"matrices has no cuts for {rule!r}: leave the rule out, or give some")
        for use in fitting:
            found.setdefault(use.parameter, cuts)
    return found


def _report(what: str, routed: Collection[Use], uses: Collection[Use], *, advice: str) -> None:
    """Log parameters that are routed to AdamW and may be most of the model."""
    if routed:
        logger.warning(
            "%s, routed to AdamW: %d, %.0f%% of elements; %s. %s",
            what,
            len(routed),
            100
            * sum(use.parameter.numel() for use in routed)
            / max(1, sum(use.parameter.numel() for use in uses)),
            _first_of(routed),
            advice,
        )


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _first_of(uses: Collection[Use]) -> str:
    first = next(iter(uses))
    return f"the first is {first.name!r} of shape {tuple(first.parameter.shape)}"
