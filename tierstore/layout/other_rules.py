"""Detection of the rule of a param group of another optimizer: AdamW, Muon, or another rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

AVERAGE, HEAVY_BALL = "average", "heavy-ball"
"""Conventions of Muon's momentum: ``m = mu * m + (1 - mu) * g``, or ``m = mu * m + g``."""

MOMENTUM = "momentum_buffer"

_OTHER_MOMENTUM = {"dampening": "SGD", "centered": "RMSprop", "matrix_eps": "Shampoo"}
"""Key of a group whose momentum_buffer is not Muon's -> the rule of the group."""

RULE = "rule"
"""Key of committed groups of ``tierstore.Paged``: the name of the class."""

LR_RATIO = "adamw_lr_ratio"
"""Key of KellerJordan's groups before 2025. These had either convention."""

# The keys of param groups. Other optimizers with a different convention have some of these keys, so
# only all keys together identify the convention.
_KELLERJORDAN = {"lr", "momentum", "weight_decay", "use_muon"}
_OF_ONE_GROUP = {"lr", "momentum", "nesterov", "ns_steps", "adamw_betas", "adamw_eps"}
_MOONLIGHT = {*_OF_ONE_GROUP, "wd"}
_MOTIF = {*_OF_ONE_GROUP, "weight_decay", "none_grad", "use_muon"}

# Keys of rules that have AdamW's states but a different step.
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


# Key of a rule related to AdamW -> its value in AdamW.
_OF_ADAMW = {
    **{"amsgrad": False, "decoupled_weight_decay": True, "bias_correction": True},
    **{"correct_bias": True, "adam_w_mode": True, "adamw_mode": True},
}


def other_rule(saved: Mapping[str, Any]) -> str | None:
    """Return the reason why a param group with AdamW's states has another rule, or None.

    Args:
        saved: the group, in the form of its optimizer.
    """
    if "algorithm" in saved:
        return None
    is_adamw = saved.get("decoupled_weight_decay") is not None and "amsgrad" in saved
    for rule, keys in _OTHERS.items():
        for key in () if is_adamw else keys:  # A program may add such a key.
            if saved.get(key):
                return f"{key}={saved[key]!r} is of {rule}"
    for key, of_adamw in _OF_ADAMW.items():
        if saved.get(key) is not None and bool(saved[key]) != of_adamw:
            return f"{key}={saved[key]!r} is not AdamW's"
    if is_radam_or_nadam(saved):
        return "decoupled_weight_decay without amsgrad is of RAdam or NAdam"
    return None


def is_radam_or_nadam(saved: Mapping[str, Any]) -> bool:
    """Return whether a group with AdamW's states belongs to RAdam or NAdam of ``torch.optim``."""
    return saved.get("decoupled_weight_decay") is not None and "amsgrad" not in saved


def may_be_adam(saved: Mapping[str, Any]) -> bool:
    """Return whether a group with AdamW's states may belong to Adam, whose decay differs."""
    told = ("algorithm", "decoupled_weight_decay", "adam_w_mode", "adamw_mode", "use_muon")
    return bool(saved.get("weight_decay")) and not any(key in saved for key in told)


def other_momentum(hyperparameters: Mapping[str, Any]) -> str | None:
    """Return a key of a group that shows that its momentum is not Muon's, or None."""
    given = (k for k in _OTHER_MOMENTUM if hyperparameters.get(k) is not None)
    return None if "algorithm" in hyperparameters else next(given, None)


def convention_of(hyperparameters: Mapping[str, Any], states: Collection[str]) -> str | None:
    """Return the momentum convention of a param group, by its keys.

    Args:
        hyperparameters: the hyperparameters of the group, under the names of its optimizer.
        states: the names of the states of its parameters in its optimizer.

    Returns:
        AVERAGE also for groups without Muon's momentum; None if the keys do not decide.
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
    """Refuse a saved group that has the states of an algorithm but a different step.

    Args:
        saved: the group as it was saved.
        algorithm: "adamw" or "muon", the algorithm that continues with the states.
        where: names the group in the error.

    Raises:
        ValueError: the group does not fit; the message gives the evidence.
    """
    expected = {"adamw": "AdamW", "muon": "Muon"}[algorithm]
    if saved.get(RULE, expected) != expected:
        raise ValueError(f"{where} is of {saved[RULE]}, not of {expected}")
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
            f"{where} does not show that its {MOMENTUM} is a running average, as in "
            "torch.optim.Muon: `tierstore convert` makes it one. If no file shows the convention, "
            "pass --momentum-convention"
        )
