"""The page, as text and in a headless Chromium."""

from __future__ import annotations

import html
import io
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from gma_bench.report import palette, report

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
HOSTILE = '<script>document.title="owned"</script>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory, records_for_page, writer):
    """A report in a folder whose name has a space, with names that are markup and a failed run."""
    path = tmp_path_factory.mktemp("my results") / "with a space"
    writer(path, records_for_page(HOSTILE))
    report(path, "mini", console=Console(file=io.StringIO()))
    return path / "mini"


@pytest.fixture(scope="module")
def text(folder):
    return (folder / "index.html").read_text()


def test_names_from_records_are_text(text):
    assert HOSTILE not in text
    assert html.escape(HOSTILE, quote=False).replace('"', "&#34;") in text


def test_nothing_is_loaded_from_anywhere(text):
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", text)
    assert "default-src 'none'" in text


def test_every_verdict_leads_to_records_and_commands(text):
    claims = re.findall(r'id="claim-([\w-]+)"', text)
    assert len(claims) == 11
    linked = set(re.findall(r'href="#run-([^"]+)"', text))
    runs = set(re.findall(r'id="run-([^"]+)"', text))
    assert linked
    assert linked <= runs
    for name in ("commit", "data fingerprint", "machine", "versions"):
        assert text.count(f"<dt>{name}</dt>") == len(runs)
    assert text.count("gma-bench run task=") >= len(runs)


def test_it_says_what_it_is(text):
    assert "Not the paper’s size" in text
    assert "the loss is not finite" in text


@pytest.mark.parametrize("colours", ["LIGHT", "DARK"])
def test_contrast_is_wcag_aa(colours):
    """4.5 for text on either background, 3 for curves (1.4.3 and 1.4.11)."""
    found = getattr(palette, colours)
    for ground, name in product(("paper", "sheet"), palette.TEXT):
        assert palette.contrast(found[name], found[ground]) >= 4.5, (name, ground)
    for colour in getattr(palette, f"SERIES_{colours}"):
        # They colour names in tooltips as well, so they are held to the limit for text.
        assert palette.contrast(colour, found["paper"]) >= 4.5, colour


def test_contrast_formula():
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert palette.contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(folder):
    """One launch for all: sort, hover, keys, dialog, dark, phone, paper; and a silent console."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            context = browser.new_context(
                viewport={"width": 1280, "height": 900},
                color_scheme="light",
                reduced_motion="reduce",
            )
            page = context.new_page()
            problems: list[str] = []
            requests: list[str] = []
            page.on("console", lambda message: problems.append(message.text))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("request", lambda request: requests.append(request.url))
            page.goto((folder / "index.html").as_uri())
            assert page.title() == "gma_bench, scale mini"
            _sorts(page)
            _shows_values(page)
            _opens_what_is_behind(page)
            _goes_dark(page)
            _prints(page)
            _fits_a_phone(page)
            _follows_the_system(page)
            assert problems == []
            assert all(url.startswith(("file:", "data:")) for url in requests), requests
            assert "%20" in requests[0]
        finally:
            browser.close()


def _names(page) -> list[str]:
    return page.locator("#table-summary tbody th").evaluate_all("e => e.map(x => x.dataset.value)")


def _sorts(page) -> None:
    head = page.locator("#table-summary thead th").nth(1)
    button = head.get_by_role("button")
    button.click()
    assert head.get_attribute("aria-sort") == "descending"
    values = page.locator("#table-summary tbody td:nth-child(2)").evaluate_all(
        "cells => cells.map(c => c.dataset.value === undefined ? null : Number(c.dataset.value))"
    )
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=True)
    assert values[: len(known)] == known  # what has no value stays last
    assert _names(page)[0] == "Mamba"
    button.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert _names(page)[0] == "most frequent label"


def _shows_values(page) -> None:
    chart = page.locator("#scaling .chart").first
    tip = chart.locator(".tip")
    assert not tip.is_visible()
    chart.locator("> svg").hover(position={"x": 300, "y": 100})
    assert tip.is_visible()
    assert "MHA (explicit)" in tip.inner_text()
    assert "sequence length" in tip.inner_text()
    page.mouse.move(2, 2)
    assert not tip.is_visible()
    chart.press("ArrowRight")
    first = tip.inner_text()
    chart.press("ArrowRight")
    assert tip.is_visible()
    assert tip.inner_text() != first
    chart.press("Escape")
    assert not tip.is_visible()
    legend = chart.locator(".legend button").last
    legend.click()
    assert legend.get_attribute("aria-pressed") == "true"
    legend.click()
    assert legend.get_attribute("aria-pressed") == "false"


def _opens_what_is_behind(page) -> None:
    figure = page.locator("#table-summary .figure").first
    figure.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog#behind")
    assert dialog.is_visible()
    assert "gma-bench run task=listops" in dialog.inner_text()
    assert "data fingerprint" in dialog.inner_text()
    dialog.locator(".copy").first.click()
    playwright_expect = dialog.locator(".copy", has_text=re.compile("Copied|Selected"))
    playwright_expect.first.wait_for(timeout=2000)
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    page.locator(".why summary").first.click()
    link = page.locator(".why .ids a").first
    target = link.get_attribute("href")
    link.click()
    page.wait_for_function("id => document.getElementById(id).open", arg=target[1:])


def _ground(page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def _rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def _goes_dark(page) -> None:
    assert _ground(page) == _rgb(palette.LIGHT["paper"])
    toggle = page.locator("#theme")
    toggle.click()
    assert toggle.get_attribute("aria-pressed") == "true"
    assert _ground(page) == _rgb(palette.DARK["paper"])
    page.reload()
    assert _ground(page) == _rgb(palette.DARK["paper"])  # the choice is kept


def _prints(page) -> None:
    page.emulate_media(media="print")
    assert _ground(page) == _rgb(palette.LIGHT["paper"])  # paper is white, whatever the screen
    assert not page.locator("nav").is_visible()
    page.emulate_media(media="screen")


def _fits_a_phone(page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator("#scaling .chart > svg").first.hover(position={"x": 250, "y": 60})
    box = page.locator("#scaling .chart .tip").first.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


def _follows_the_system(page) -> None:
    page.evaluate("localStorage.clear()")
    page.emulate_media(color_scheme="dark")
    page.reload()
    assert _ground(page) == _rgb(palette.DARK["paper"])
    page.locator("#theme").click()
    assert _ground(page) == _rgb(palette.LIGHT["paper"])


def test_figures_are_drawn_once(folder, monkeypatch):
    """A second report draws nothing again while the records stay as they are."""
    drawing = pytest.importorskip("gma_bench.report.curves")
    before = {p: p.stat().st_mtime_ns for p in (folder / "figures").rglob("*") if p.is_file()}
    assert before
    monkeypatch.setattr(drawing, "draw_all", lambda *_: pytest.fail("drawn again"))
    report(folder.parent, "mini", console=Console(file=io.StringIO()))
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_links_to_the_interpretability_page(tmp_path, writer, records_for_page):
    writer(tmp_path, records_for_page("mine"))
    other = tmp_path / "mini" / "pages" / "gma s0" / "interpretability.html"
    other.parent.mkdir(parents=True)
    other.write_text("<p>there</p>")
    report(tmp_path, "mini", console=Console(file=io.StringIO()))
    page = Path(tmp_path / "mini" / "index.html").read_text()
    assert page.count('href="pages/gma%20s0/interpretability.html"') == 2  # on top and by name
