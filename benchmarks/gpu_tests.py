"""A pytest plugin that records passed tests, so that the next run leaves them out.

    PYTHONPATH=benchmarks python -m pytest -p gpu_tests --passed FILE tests/kernels/test_gpu.py

Failed tests and their reports are written to a file with the suffix .failed.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, help="file of the tests that have passed, a line each")


def passed(config: pytest.Config) -> set[str]:
    file: Path | None = config.getoption("--passed")
    return set(file.read_text().splitlines()) if file is not None and file.exists() else set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = passed(config)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def write(file: Path, text: str) -> None:
    with file.open("a") as lines:
        lines.write(f"{text}\n")


class Writer:
    """In the process that hears of all tests: the workers of a run on several processes write nothing."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            write(self.file, report.nodeid)
        if report.failed:
            write(self.file.with_suffix(".failed"), f"{report.nodeid}\n{report.longreprtext}\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and passed(session.config):
            session.exitstatus = pytest.ExitCode.OK  # all have passed before


def pytest_configure(config: pytest.Config) -> None:
    file: Path | None = config.getoption("--passed")
    if file is not None and not hasattr(config, "workerinput"):
        file.with_suffix(".failed").unlink(missing_ok=True)
        config.pluginmanager.register(Writer(file))
