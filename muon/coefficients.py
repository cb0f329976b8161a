"""Coefficients of Newton-Schulz by name, and the coefficients of each step.

A step with (a, b, c) maps every singular value s to a s + b s^3 + c s^5.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import cast

Triple = tuple[float, float, float]

Coefficients = str | Sequence[float] | Sequence[Sequence[float]]
"""A name of TABLES, three numbers for all steps, or three numbers for each step."""

KELLER_JORDAN: Triple = (3.4445, -4.7750, 2.0315)

# Algorithm 1 of https://arxiv.org/abs/2505.16932, for singular values from 1e-3 to 1.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# https://arxiv.org/abs/2506.10935, rounded as in NVIDIA's Emerging-Optimizers.
_CANS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)


def _with_safety(safety: float, table: Sequence[Triple]) -> tuple[Triple, ...]:
    """Return a table for singular values that rounding may have increased by a factor.

    Without it, the largest singular value of a matrix of low rank, rounded up, diverges.
    """
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in table)


TABLES: dict[str, tuple[Triple, ...]] = {
    # https://kellerjordan.github.io/posts/muon/, as in torch.optim.Muon.
    "keller_jordan": (KELLER_JORDAN,),
    # Jiacheng You's, from modded-nanogpt; "quintic" in Emerging-Optimizers.
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # As in the paper, and as in Dao-AILab's Gram Newton-Schulz.
    "polar_express_1.01": (*_with_safety(1.01, _POLAR_EXPRESS[:-1]), _POLAR_EXPRESS[-1]),
    "polar_express_1.05": (*_with_safety(1.05, _POLAR_EXPRESS[:-1]), _POLAR_EXPRESS[-1]),
    "cans_1.01": _with_safety(1.01, _CANS),
    # DeepSeek-V4's: eight steep steps, and two that converge to one.
    "deepseekv4": (*[KELLER_JORDAN] * 8, *[(2.0, -1.5, 0.5)] * 2),
    # https://arxiv.org/abs/2606.00371: without s^5, so each step has a product less.
    "cubic5": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
}

# Each step of these tables is optimal after its previous steps, so their first steps also work.
_MAY_END_EARLY = ("polar_express_1.01", "polar_express_1.05")


def steps_min(coefficients: Coefficients) -> int:
    """Return the smallest number of steps for which coefficients are made."""
    table = _table_of(coefficients)
    return 0 if len(table) == 1 or coefficients in _MAY_END_EARLY else len(table)


def of_steps(coefficients: Coefficients, steps: int) -> list[Triple]:
    """Return the coefficients of each step. The last coefficients of a table are repeated.

    Raises:
        ValueError: the name is unknown.
    """
    table = _table_of(coefficients)
    return [table[min(step, len(table) - 1)] for step in range(steps)]


def _table_of(coefficients: Coefficients) -> Sequence[Triple]:
    if isinstance(coefficients, str):
        if coefficients not in TABLES:
            names = ", ".join(map(repr, TABLES))
            raise ValueError(f"coefficients must be one of {names}, got {coefficients!r}")
        return TABLES[coefficients]
    rows = [coefficients] if isinstance(coefficients[0], Real) else coefficients
    return [cast(Triple, tuple(cast(Sequence[float], row))) for row in rows]
