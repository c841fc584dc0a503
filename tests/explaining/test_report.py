"""The report: one file that needs nothing else, in a real browser, in light and dark, by keyboard alone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import specache_compile as sc
from conftest import tiny_llama
from specache_compile.explaining.outline import changes, folded, only_changed, rows_of
from specache_compile.explaining.report import memory_bars, timeline
from specache_compile.explaining.times.step_time import BETWEEN

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def explained() -> sc.Explanation:
    return sc.explain(tiny_llama(num_hidden_layers=3), prompt_length=3000, batch_size=2, device="L4")


@pytest.fixture(scope="module")
def page_file(explained: sc.Explanation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    explained.save(path)
    return path


class Tags(HTMLParser):
    """Every tag with its attributes, and whether they close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "rect", "line", "br"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.stack.pop() == tag


def test_the_page_refers_to_nothing_outside_itself(page_file: Path) -> None:
    text = page_file.read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.stack
    ids = [attributes["id"] for _, attributes in tags.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in tags.seen:
        assert tag not in ("link", "img", "iframe", "object")
        assert "src" not in attributes
        assert not attributes.get("href") or str(attributes["href"]).removeprefix("#") in ids
    assert "url(" not in text
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|@import", text)


def test_every_figure_of_the_page_says_that_it_is_computed(explained: sc.Explanation, page_file: Path) -> None:
    titles = re.findall(r"<h2 id=\"(\w+)\">([^<]*)</h2>", page_file.read_text())
    assert len(titles) == 5
    for name, title in titles:
        assert name in ("sites", "graphs") or "computed, not measured" in title
    for phase, value in explained.hashes.items():
        assert f'id="phase-{phase}"' in page_file.read_text()
        assert value in page_file.read_text()


def test_the_bars_are_the_bytes(explained: sc.Explanation) -> None:
    bars = {title: (total, parts) for title, total, parts in memory_bars(explained)}
    total, parts = bars["device, specache"]
    assert total == explained.device_bytes + explained.weight_bytes == sum(part.bytes for part in parts)
    longest = max(total for total, _ in bars.values())
    for total, parts in bars.values():
        assert sum(part.percent for part in parts) == pytest.approx(100 * total / longest)


def test_the_timeline_is_the_step(explained: sc.Explanation) -> None:
    drawn = timeline(explained)
    scale = drawn["width"] / (explained.step().seconds - BETWEEN)
    assert max(bar.x + bar.width for bar in drawn["bars"]) == pytest.approx(drawn["width"], rel=0.01)
    for place, stream in enumerate(drawn["streams"]):
        lane = [bar for bar in drawn["bars"] if bar.y == 22 + place * (drawn["lane"] + 14)]
        busy = sum(max(s.end - s.start, 0.3 / scale) for s in explained.spans if s.kernel.stream == stream)
        assert sum(bar.width for bar in lane) == pytest.approx(busy * scale, rel=0.01)


def test_layers_that_are_alike_are_shown_once_and_changes_are_marked(explained: sc.Explanation) -> None:
    graphs = explained.traces["decode"].graphs
    final = folded(rows_of(graphs["clean_up"]))
    titles = [section.title for section in final]
    assert titles[0] == "before the layers"
    assert titles[-1] == "after the layers"
    assert any("-2" in title for title in titles)
    assert len(final) < 5
    calls = len(explained.graph("decode").graph.nodes) - len(
        explained.graph("decode").graph.find_nodes(op="placeholder")
    )
    assert len(rows_of(graphs["clean_up"])) == calls
    changed = only_changed(folded(changes(rows_of(graphs["own_cache"]), rows_of(graphs["rewrite_attention"]))))
    rows = [row for section in changed for row in section.rows]
    assert any(row.change == "-" and "scaled_dot_product_attention" in row.call for row in rows)
    assert any(row.change == "+" and "decode_attention" in row.call and row.kind == "tier" for row in rows)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright to drive a browser: pip install playwright"
    )
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with api.sync_playwright() as driver:
        path = found or driver.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium here: apt install chromium, or playwright install chromium")
        launched = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any, page_file: Path) -> Iterator[Any]:
    """The page in a browser; errors and any request but that for the page itself fail the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url != page_file.as_uri() else None)
    page.goto(page_file.as_uri())
    yield page
    assert problems == []
    page.close()


def luminance(color: str) -> float:
    """Relative luminance of "rgb(r, g, b)" (WCAG 2)."""
    parts = [int(number) / 255 for number in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(page: Any, scheme: str) -> None:
    """The contrast of every kind of text with the page is at least 4.5 to 1."""
    page.emulate_media(color_scheme=scheme)
    behind = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (behind > 0.5) == (scheme == "light")
    for selector in ("body", ".soft", "a", "th", "td", "summary"):
        front = luminance(page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).color"))
        lighter, darker = max(front, behind), min(front, behind)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, selector
    page.click("#theme")
    assert (luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.5) != (scheme == "light")


def test_the_search_opens_what_it_finds(page: Any, explained: sc.Explanation) -> None:
    page.keyboard.press("/")
    page.keyboard.type("specache.prefetch")
    shown = page.locator("details.final li.hit:visible")
    assert shown.count() > 0
    assert all("prefetch" in text for text in shown.all_inner_texts())
    page.keyboard.press("Enter")
    assert re.match(r"1 of \d+ nodes found", page.inner_text("#found"))
    page.fill("#search", "there is no such node")
    assert page.inner_text("#found").strip() == "0 nodes found."


def test_the_timeline_is_walked_by_keyboard(page: Any) -> None:
    page.focus("#steps")
    seen = []
    for key in ("Home", "ArrowRight", "ArrowRight", "End"):
        page.keyboard.press(key)
        seen.append(page.inner_text("#launch"))
    assert len(set(seen)) > 1
    assert page.locator("rect.here").count() == 1
    page.locator("#zoom").fill("10")
    assert page.get_attribute("#steps", "width") == "12000"


def test_graphs_fold_and_walk_by_keyboard(page: Any) -> None:
    phase = page.locator("#phase-decode")
    assert phase.get_attribute("open") is None
    phase.locator("> summary").press("Enter")
    assert phase.get_attribute("open") is not None
    section = phase.locator("details.final details.section").nth(1)
    section.locator("> summary").press("Enter")
    section.locator("li").first.focus()
    for _ in range(40):
        page.keyboard.press("ArrowDown")
    name = page.evaluate("document.activeElement.dataset.name")
    feeds = page.evaluate("[...document.querySelectorAll('li.feeds')].map((row) => row.dataset.name)")
    inputs = page.evaluate("document.activeElement.dataset.inputs.split(' ')")
    assert name
    assert feeds
    assert set(feeds) <= set(inputs)


def test_nothing_hangs_over_the_edge(page: Any) -> None:
    for width in (1280, 600):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), width
