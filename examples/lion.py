"""Lion over paged state: how to build an optimizer on a TierStore.

Lion (https://arxiv.org/abs/2302.06675) keeps one running average per parameter and steps by the
sign of a blend of average and gradient. Run this file to train with state on disk; run it again
to resume::

    python examples/lion.py /path/to/a/new/directory
"""

import sys
from typing import Any

import torch

import tierstore


class Lion(torch.optim.Optimizer):
    """Lion with its averages, and masters of low-precision parameters, in a store."""

    def __init__(
        self,
        named_parameters: Any,
        store: tierstore.TierStore,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(named_parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.store = store
        store.pages.attach([paged_group(group) for group in self.param_groups])

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step every chunk that has a gradient."""
        with self.store.pages.sweep() as pages:
            for page in pages:
                for shard in page.shards:
                    for chunk in shard.chunks:
                        lion_(chunk, self.param_groups[page.group])


def paged_group(group: dict[str, Any]) -> tierstore.pages.PagedGroup:
    """Describe the states to keep. An elementwise parameter may span pages."""
    parameters = [
        tierstore.pages.PagedParameter(
            name=name, tensor=tensor, states={"exp_avg": torch.float32}, elementwise=True
        )
        for name, tensor in zip(group["param_names"], group["params"], strict=True)
    ]
    return tierstore.pages.PagedGroup(parameters=parameters, hyperparameters=group)


def lion_(chunk: tierstore.pages.ChunkView, group: dict[str, Any]) -> None:
    """Apply the rule to one chunk of a parameter, in place."""
    if chunk.grad is not None:
        beta1, beta2 = group["betas"]
        grad, average = chunk.grad.float(), chunk.states["exp_avg"]  # the chunk's shape
        chunk.master.mul_(1 - group["lr"] * group["weight_decay"])
        chunk.master.sub_(average.lerp(grad, 1 - beta1).sign_() * group["lr"])
        average.lerp_(grad, 1 - beta2)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    inputs = torch.randn(512, 64)
    targets = inputs[:, :8].norm(dim=1, keepdim=True)
    store = tierstore.TierStore(sys.argv[1], page_bytes="64KiB", host_memory="1MiB", resume=True)
    with store:
        optimizer = Lion(model.named_parameters(), store, lr=3e-4)
        start = store.restore()  # 0 in a new directory.
        for step in range(start + 1, start + 201):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.4f}")
