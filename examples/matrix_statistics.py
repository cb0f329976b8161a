"""Statistics of the matrices of Muon, taken by a hook: how degenerate and how large updates are.

Run this file to train a small model and to append the figures of every tenth step to a file, one
line of JSON for each matrix::

    python examples/matrix_statistics.py statistics.jsonl
"""

import json
import math
import sys
from pathlib import Path

import torch

import muon

DEAD = 1e-3


class MatrixStatistics(muon.UpdateHook):
    """Figures of the matrices that this rank orthogonalizes, in steps with ``is_on``.

    stable_rank: ||X||_F^2 / s^2 of the input X of Newton-Schulz, with an estimate s of its largest
    singular value: at least the stable rank, and at most 1.6 times as much. NaN for zeros.
    update_ratio: Frobenius norm of the update, times its learning rate, over the norm of the
    weights before it.
    dead_rows: share of the outputs whose row of X has a norm below a thousandth of the root mean
    square of all rows: no gradient reaches them.

    Pass it behind hooks that change the update.
    """

    def __init__(self) -> None:
        self.is_on = False
        # Tensors, so that the step does not wait for a device.
        self._found: dict[tuple[str, tuple[int, ...]], dict[str, torch.Tensor]] = {}

    def before_orthogonalization(
        self, name: str, starts: tuple[int, ...], matrix: torch.Tensor
    ) -> None:
        """Measure the input of Newton-Schulz."""
        if self.is_on and matrix.numel():
            wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
            squares = torch.linalg.vector_norm(wide, dim=1, dtype=torch.float64) ** 2  # (rows,)
            self._found[name, starts] = {
                "stable_rank": squares.sum() / largest_square(wide, squares.argmax()),
                "dead_rows": (squares <= DEAD**2 * squares.mean()).double().mean(),
            }

    def before(self, update: muon.WeightUpdate) -> None:
        """Measure the update; ranks that share a matrix add up their parts."""
        if self.is_on:
            ratio = float(update.lr) * update.norm(update.updates) / update.norm(update.weights)
            if (update.name, update.starts) in self._found:
                self._found[update.name, update.starts]["update_ratio"] = ratio

    def take(self) -> dict[tuple[str, tuple[int, ...]], dict[str, float]]:
        """Return what was measured, and forget it: (parameter, first element) -> figures."""
        found, self._found = self._found, {}
        return {place: {key: float(t) for key, t in of.items()} for place, of in found.items()}

    def append_lines(self, path: str, step: int) -> None:
        """Append what was measured to a file, and forget it; null is for NaN and infinity."""
        with Path(path).open("a", encoding="utf-8") as file:
            for (name, starts), figures in self.take().items():
                finite = {key: x if math.isfinite(x) else None for key, x in figures.items()}
                line = {"parameter": name, "starts": starts, "step": step, **finite}
                file.write(json.dumps(line) + "\n")


def largest_square(matrix: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Estimate the square of the largest singular value, from below.

    By one power iteration of the Gram matrix A = X X^T, begun at its column of the row given, and
    the quotient v^T A v / v^T v.
    """

    def unit(vector: torch.Tensor) -> torch.Tensor:
        return (vector / torch.linalg.vector_norm(vector, dtype=torch.float64)).to(vector.dtype)

    begin = matrix @ unit(matrix.index_select(0, row.view(1))[0])  # (rows,): A e
    vector = matrix @ unit(matrix.T @ unit(begin))  # (rows,): A A e
    square: torch.Tensor = torch.linalg.vector_norm(matrix.T @ unit(vector), dtype=torch.float64)
    return square**2


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    inputs = torch.randn(512, 64)
    targets = inputs[:, :8].norm(dim=1, keepdim=True)
    hook = MatrixStatistics()
    optimizer = muon.Muon(muon.param_groups(model), hooks=[hook], ns_dtype="auto")
    for step in range(1, 51):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        hook.is_on = step % 10 == 0
        optimizer.step()
        hook.append_lines(sys.argv[1], step)
