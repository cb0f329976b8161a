from __future__ import annotations

import pytest

from tests.support import system_calls


@pytest.fixture(scope="session")
def watched_calls() -> None:
    """Skips tests where this process may not watch the system calls of its children."""
    if reason := system_calls.why_not():
        pytest.skip(reason)
