"""Print the name of each test that fails at once: pytest lists them only at the end of a run.

A plugin of pytest (`tests/conftest.py` loads it). A run that is broken off, or that a limit of time ends,
would otherwise show letters only.
"""

from __future__ import annotations

import pytest


class _Printer:
    """Writes to the terminal of one run."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            # "???" is xdist's word for a worker that ended.
            self._print("FAILED" if report.when in ("call", "???") else "ERROR", report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._print("ERROR", report)

    def _print(self, what: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message if crash else str(report.longrepr)
        self._terminal.ensure_newline()
        self._terminal.write_line(f"{what} {report.nodeid}: {why.strip().partition(chr(10))[0]}", red=True)
        self._terminal.flush()  # what follows may end the run


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Print where there is a terminal: a worker of xdist has none, and its controller gets its reports."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(_Printer(terminal))
