"""Lion on pages: an optimizer that torch does not have, with its states in a store.

Lion (https://arxiv.org/abs/2302.06675) keeps one running average per parameter and steps by the
sign of a blend of average and gradient. The class knows nothing of pages. Run this file to train
with state on disk; run it again to resume::

    python examples/lion.py /path/to/a/new/directory
"""

import sys
from typing import Any

import torch

import tierstore


class Lion(torch.optim.Optimizer):
    """Lion over tensors, as for any training loop."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(average.lerp(p.grad, 1 - beta1).sign_() * group["lr"])
                    average.lerp_(p.grad, 1 - beta2)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    inputs = torch.randn(512, 64)
    targets = inputs[:, :8].norm(dim=1, keepdim=True)
    store = tierstore.TierStore(sys.argv[1], page_bytes="64KiB", host_memory="1MiB", resume=True)
    with store:
        named = model.named_parameters()
        # Elementwise: a parameter may be cut over pages and ranks.
        optimizer = tierstore.Paged(named, Lion, store=store, elementwise=True, lr=3e-4)
        start = optimizer.restore()  # 0 in a new directory.
        for step in range(start + 1, start + 201):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.4f}")
