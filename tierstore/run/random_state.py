"""The state of the random generators that training uses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """The global random generators of Python, numpy and torch, to register with a store.

    ``store.register(random=tierstore.RandomState())`` commits the generators of ``random``,
    ``numpy.random``, ``torch`` on the CPU, and ``torch.cuda`` on each GPU that this process sees:
    dropout, shuffling and augmentation use them. A separate generator (``torch.Generator``,
    ``numpy.random.default_rng()``) belongs to the state of the object that uses it.

    Each rank gets its own generators back. A run on another number of ranks keeps the seeds of the
    program.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators as values that a commit can hold."""
        numpy_state: Any = np.random.get_state()
        name, keys, *rest = numpy_state
        return {
            "python": random.getstate(),
            "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set all generators to a state of state_dict(). GPUs that are absent here are skipped."""
        random.setstate(state_dict["python"])
        name, keys, *rest = state_dict["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state_dict["torch"])
        for device, state in enumerate(state_dict["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
