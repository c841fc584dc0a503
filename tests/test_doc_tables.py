"""The pages: tables match the code and the results, and the files that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import doc_tables
from doc_tables import PAGES, ROOT, between, main

TEXTS = (*PAGES, ROOT / "CONTRIBUTING.md")


def test_a_changed_table_is_noticed_and_put_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, right = tmp_path / "page.md", f"Before.\n\n{between('devices', doc_tables.devices())}\n\nAfter.\n"
    page.write_text(right)
    assert main(["--check"], [page]) == 0
    page.write_text(right.replace("| 3350 |", "| 3351 |", 1))
    assert main(["--check"], [page]) == 1
    assert "page.md: out of date: devices" in capsys.readouterr().err
    assert main(["--write"], [page]) == 0
    assert page.read_text() == right


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in headings], target


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_the_files_and_tests_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(
        r"`(?:python )?((?:kernels|passes|lowering|specache_compile|tests|benchmarks|examples)/[\w./-]*)", text
    ):
        assert (ROOT / name).exists(), f"{page.name}: {name}"
    for name, what in re.findall(r"`([\w/]+\.py): (\w+)`", text):
        assert re.search(rf"^(?:(?:async )?def|class) {what}\b|^{what}\b", (ROOT / name).read_text(), re.MULTILINE), (
            what
        )
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, f"{page.name}: {name}"


def test_the_readme_is_short() -> None:
    """Three minutes."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_no_page_points_outside_the_repository() -> None:
    """No page contains an absolute path either."""
    for page in TEXTS:
        assert not re.search(r"DESIGN\b|shared/|/tmp/|(?<![\w.)])/\w+/", page.read_text()), page.name
