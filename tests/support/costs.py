"""Processor time of each test: names the tests that break the rule of the mark ``long``."""

from __future__ import annotations

from collections.abc import Generator

import psutil
import pytest

# A test above this is marked `long` or made smaller. Seconds of processor time, of all processes.
LONG_S = 3.0

# A test that made other processes: what they used until the test ended counts.
_PROPERTY = "processor_s"


class Costs:
    """A plugin of pytest: measures tests, and lists those above ``LONG_S`` without the mark.

    The time includes child processes, such as ranks that tests share. Fixtures of a session or a
    module are not counted, because the first test that uses them would pay for all.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._used_before_s = self._fixtures_s = 0.0
        self._costs: dict[str, float] = {}

    def pytest_collection_finish(self) -> None:
        """Measure the first test from here."""
        self._used_before_s = self._used_s()

    def _used_s(self) -> float:
        """Return the processor time of this process and its descendants, in seconds."""
        total = 0.0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                total += sum(process.cpu_times()[:4])  # Those that it waited for are the last two.
            except psutil.NoSuchProcess:
                continue  # Ended since it was listed; its parent has its time.
        return total

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        """Count what fixtures of several tests used."""
        if fixturedef.scope == "function":
            return (yield)
        before = self._used_s()
        try:
            return (yield)
        finally:
            self._fixtures_s += self._used_s() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Forget the fixtures of the test before."""
        self._fixtures_s = 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give the last report of a test its processor time, which xdist then carries."""
        report = yield
        if call.when == "teardown":  # What a test patched, as calls of the system, is there again.
            used_s = self._used_s()
            cost = used_s - self._used_before_s - self._fixtures_s
            self._used_before_s = used_s
            report.user_properties.append((_PROPERTY, cost))
            report.user_properties.append(("long", item.get_closest_marker("long") is not None))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what the processes of tests report."""
        properties = dict(report.user_properties)
        if report.when == "teardown" and not properties.get("long", True):
            self._costs[report.nodeid] = properties[_PROPERTY]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List the tests that took too long, the longest first."""
        above = {name: cost for name, cost in self._costs.items() if cost > LONG_S}
        if above:
            terminalreporter.section(f"above {LONG_S:g} s of processor time without the mark long")
            for name, cost in sorted(above.items(), key=lambda entry: -entry[1]):
                terminalreporter.write_line(f"{cost:6.1f} s  {name}")
