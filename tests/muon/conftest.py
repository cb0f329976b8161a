from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.stock_case import ALGORITHMS, PLACES, StockCase


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def case(algorithm: str, place: str, tmp_path: Path) -> Iterator[StockCase]:
    with ExitStack() as stack:
        yield StockCase(algorithm, place, tmp_path, stack)


@pytest.fixture
def adamw(place: str, tmp_path: Path) -> Iterator[StockCase]:
    with ExitStack() as stack:
        yield StockCase("adamw", place, tmp_path, stack)


@pytest.fixture
def muon_case(place: str, tmp_path: Path) -> Iterator[StockCase]:
    with ExitStack() as stack:
        yield StockCase("muon", place, tmp_path, stack)
