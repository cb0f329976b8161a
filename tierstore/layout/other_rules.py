"""Evidence in the param groups of other optimizers: their rule is AdamW, Muon, or another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

AVERAGE, HEAVY_BALL = "average", "heavy-ball"
"""Conventions of Muon's momentum: ``m = mu * m + (1 - mu) * g``, or ``m = mu * m + g``."""

MOMENTUM = "momentum_buffer"

_OTHER_MOMENTUM = {"dampening": "SGD", "centered": "RMSprop", "matrix_eps": "Shampoo"}
"""Key of the groups of rules whose momentum_buffer is not Muon's -> the rule."""

RULE = "rule"
"""Key of committed groups of ``tierstore.Paged``: the name of the class."""

LR_RATIO = "adamw_lr_ratio"
"""Key of KellerJordan's groups before 2025, which had either convention."""

# The keys of param groups. Other optimizers have some of them and another convention, so that only
# all of them tell one.
_KELLERJORDAN = {"lr", "momentum", "weight_decay", "use_muon"}
_OF_ONE_GROUP = {"lr", "momentum", "nesterov", "ns_steps", "adamw_betas", "adamw_eps"}
_MOONLIGHT = {*_OF_ONE_GROUP, "wd"}
_MOTIF = {*_OF_ONE_GROUP, "weight_decay", "none_grad", "use_muon"}

# Keys of rules with AdamW's states that step otherwise.
_OTHERS = {
    "NAdam": ("momentum_decay",),
    "LAMB": ("grad_averaging", "max_grad_norm", "trust_clip", "always_adapt", "use_nvlamb"),
    "RAdam": ("n_sma_threshold", "n_sma_threshhold", "degenerated_to_sgd", "rectify"),
    "AdaBound": ("final_lr",),
    "AdEMAMix": ("beta3", "t_alpha_beta3", "t_beta3"),
    "Prodigy or D-Adaptation": ("d_coef", "d0", "growth_rate"),
    "ScheduleFree": ("weight_lr_power", "train_mode", "weight_sum"),
    "SOAP": ("precondition_frequency", "shampoo_beta"),
    "Adafactor": ("clip_threshold", "decay_rate", "relative_step", "beta2_decay"),
}


# The value that AdamW's rule has for keys of its relatives.
_OF_ADAMW = {
    **{"amsgrad": False, "decoupled_weight_decay": True, "bias_correction": True},
    **{"correct_bias": True, "adam_w_mode": True, "adamw_mode": True},
}


def other_rule(saved: Mapping[str, Any]) -> str | None:
    """Return why AdamW is not the rule of a param group with AdamW's states; None if it may be.

    Args:
        saved: the group as another optimizer has it.
    """
    if "algorithm" in saved:
        return None
    is_adamw = saved.get("decoupled_weight_decay") is not None and "amsgrad" in saved
    for rule, keys in _OTHERS.items():
        for key in () if is_adamw else keys:  # A program may have such a key of its own.
            if saved.get(key):
                return f"{key}={saved[key]!r} is of {rule}"
    for key, of_adamw in _OF_ADAMW.items():
        if saved.get(key) is not None and bool(saved[key]) != of_adamw:
            return f"{key}={saved[key]!r} is not AdamW's"
    if is_radam_or_nadam(saved):
        return "decoupled_weight_decay without amsgrad is of RAdam or NAdam"
    return None


def is_radam_or_nadam(saved: Mapping[str, Any]) -> bool:
    """Return whether a group with AdamW's states is of RAdam or NAdam of ``torch.optim``."""
    return saved.get("decoupled_weight_decay") is not None and "amsgrad" not in saved


def may_be_adam(saved: Mapping[str, Any]) -> bool:
    """Return whether a group with AdamW's states may also be of Adam, which decays otherwise."""
    told = ("algorithm", "decoupled_weight_decay", "adam_w_mode", "adamw_mode", "use_muon")
    return bool(saved.get("weight_decay")) and not any(key in saved for key in told)


def other_momentum(hyperparameters: Mapping[str, Any]) -> str | None:
    """Return the key of a group that tells that its momentum is not Muon's; None: none does."""
    given = (k for k in _OTHER_MOMENTUM if hyperparameters.get(k) is not None)
    return None if "algorithm" in hyperparameters else next(given, None)


def convention_of(hyperparameters: Mapping[str, Any], states: Collection[str]) -> str | None:
    """Return the convention that the keys of a param group tell.

    Args:
        hyperparameters: of the group, under the names that its optimizer has.
        states: the names of the states of its parameters, likewise.

    Returns:
        AVERAGE also for groups without Muon's momentum; None if the keys do not tell.
    """
    given = {key for key, value in hyperparameters.items() if value is not None}
    keys = given - {"params", "param_names", "names"}
    if MOMENTUM not in states or other_momentum(hyperparameters) is not None:
        return AVERAGE
    if "algorithm" in keys or "adjust_lr_fn" in hyperparameters:  # muon.Muon, torch.optim.Muon.
        return AVERAGE
    if keys in (_MOONLIGHT, _MOTIF):
        return HEAVY_BALL
    if keys == _KELLERJORDAN:
        return AVERAGE
    return None


def refuse_other_rule(saved: Mapping[str, Any], algorithm: str, where: str) -> None:
    """Refuse a saved group whose optimizer has the states of an algorithm and steps otherwise.

    Args:
        saved: the group as it was saved.
        algorithm: "adamw" or "muon", as which its parameters begin.
        where: names the group in the error.

    Raises:
        ValueError: names what speaks against the algorithm.
    """
    expected = {"adamw": "AdamW", "muon": "Muon"}[algorithm]
    if saved.get(RULE, expected) != expected:
        raise ValueError(f"{where} is of {saved[RULE]}, and not of {expected}")
    if algorithm == "adamw":
        why = other_rule(saved)
        if why is not None:
            raise ValueError(
                f"{where} is not of AdamW: {why}. Begin with the weights alone, or train with the "
                "optimizer that saved it"
            )
        return
    if key := other_momentum(saved):
        rule = _OTHER_MOMENTUM[key]
        raise ValueError(f"{where} is not of Muon: {key}={saved[key]!r} is of {rule}")
    if convention_of(saved, [MOMENTUM]) != AVERAGE:
        raise ValueError(
            f"{where} does not tell that its {MOMENTUM} is a running average, as that of "
            "torch.optim.Muon is: `tierstore convert` makes it one, and takes "
            "--momentum-convention where no file tells which it is"
        )
