"""A state beside the model in some commits of a program that does not commit each step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tierstore


def commit_with(store: tierstore.TierStore, state: Any) -> None:
    """Commit the last step with a state. Later commits have none, and restore() leaves it out."""
    with wanted(store) as kept:
        kept["state"] = state
        store.commit()


@contextlib.contextmanager
def wanted(store: tierstore.TierStore) -> Iterator[dict[str, Any]]:
    """Yield a dict that gets what commit_with() committed, by a restore() in the block."""
    kept: dict[str, Any] = {}
    store.register(kept=kept)
    try:
        yield kept
    finally:
        store.register(kept=None)


def unwanted(store: tierstore.TierStore) -> tierstore.TierStore:
    """Let restore() leave out what commit_with() committed."""
    store.register(kept=None)
    return store


def kept_by(store: tierstore.TierStore) -> Any:
    """Return the state that the committed step has, or None."""
    return store.committed.states.get("kept", {}).get("state")
