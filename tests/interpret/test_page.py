"""The pictures and the page: complete, self-contained, safe; and driven in a browser."""

from __future__ import annotations

import re
import shutil
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gma_bench.interpret import page, pictures
from gma_bench.interpret.analysis import Analysis
from gma_bench.report.palette import DARK, LIGHT, SERIES_DARK, SERIES_LIGHT, contrast
from tests.interpret.conftest import make_case

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
VALUES = page.Values(
    "interpretability-<i>gma</i>", "mini", "gma", {"name": "<b>text</b>"}, {"nmi": 0.2}
)


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return make_case().analyze()


@pytest.fixture(scope="module")
def drawn(analysis: Analysis, tmp_path_factory: pytest.TempPathFactory) -> list[pictures.Picture]:
    folder = tmp_path_factory.mktemp("drawn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that the font lacks is a warning
        return pictures.draw(
            analysis, folder, companion=softmax_rows(30), companion_about="record x"
        )


def softmax_rows(size: int) -> list[np.ndarray]:
    weights = np.tril(np.ones((2, size, size)))
    return [weights / weights.sum(-1, keepdims=True)] * 2


def test_every_picture_is_drawn_and_says_what_it_shows(
    drawn: list[pictures.Picture], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "drawn0"
    assert [p.name for p in drawn] == [
        "usage",
        "categories",
        "responsibilities",
        "means",
        "affinity",
    ]
    for picture in drawn:
        for name in picture.files:
            assert (folder / name).stat().st_size > 2000
        width, height = struct.unpack(">II", (folder / picture.files[1]).read_bytes()[16:24])
        assert width > 400
        assert height > 200
    assert "record x" in drawn[-1].caption


def test_pictures_are_the_same_each_time(
    analysis: Analysis, drawn: list[pictures.Picture], tmp_path: Path
) -> None:
    alone = pictures.draw(analysis, tmp_path)
    assert [p.svg for p in alone[:-1]] == [p.svg for p in drawn[:-1]]
    assert "softmax attention" not in alone[-1].caption  # none was given, so none is spoken of


@pytest.mark.parametrize(
    ("token", "label"),
    [
        (" the", "the"),
        ("\n", "↵"),
        ("  ", "␣"),
        ("日本", "··"),
        ("$x$", "$x$"),
        ("a" * 40, "a" * 13 + "…"),
    ],
)
def test_labels_are_readable(token: str, label: str) -> None:
    assert pictures.readable(token) == label


def test_numbers() -> None:
    assert page.number(0.93349, 3) == "0.933"
    assert page.number(-0.0004, 6) == "−0.000400"
    assert page.number(3.2e-5, 3) == "3.2e−5"
    assert page.number(0.0, 3) == "0.000"


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(
    analysis: Analysis, drawn: list[pictures.Picture]
) -> None:
    html = page.render(analysis, VALUES, drawn)
    assert not re.search(r'(?:src|href)="(?!data:|#)', html)
    assert not re.search(r"@import|url\(", html)
    assert "<i>gma</i>" not in html
    assert "<b>" not in html
    assert html.count("</script>") == 2
    assert "default-src 'none'" in html


def test_the_figures_stand_beside_the_papers(analysis: Analysis) -> None:
    values = page.Values("run", "mini", "gma", {}, analysis.metrics)
    html = page.render(analysis, values, [])
    row = re.search(r"NMI with token categories</th>(.*?)</tr>", html)
    assert row is not None
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row[1])
    assert cells[0] == f"{analysis.metrics['nmi']:.3f}"
    assert cells[1].startswith(f"{analysis.metrics['nmi_low']:.3f} – ")
    assert cells[3] == "0.244"
    assert "Not the paper’s size" in html
    assert "Not the paper’s size" not in page.render(analysis, page.Values("r", "paper", "gma"), [])


def test_what_the_page_holds_is_what_was_found(analysis: Analysis) -> None:
    import base64

    payload = page.payload(analysis)
    head = payload["layers"][1]["heads"][0]
    top = payload["layers"][1]["top"]
    components = np.frombuffer(base64.b64decode(head["components"]), "<u2").reshape(-1, top)
    shares = (
        np.frombuffer(base64.b64decode(head["responsibilities"]), "<u2").reshape(-1, top) / 65535
    )
    assert (components[:, 0] == analysis.traces[1].winners[0]).all()
    assert shares == pytest.approx(analysis.traces[1].leading[1][0], abs=1e-5)
    assert [payload["words"][i] for i in payload["text"]] == analysis.text.table["shown"].tolist()
    assert payload["starts"] == [60, 90, 120]  # where the document changes


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_text_on_the_page_has_enough_contrast(colours: dict[str, str]) -> None:
    for name in ("ink", "faint", "link"):
        assert contrast(colours[name], colours["paper"]) >= 4.5
    series = SERIES_LIGHT if colours is LIGHT else SERIES_DARK
    parts = zip(channels(series[0]), channels(colours["paper"]), strict=True)
    share = page.SHADE_PERCENT / 100
    shaded = "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in parts)
    assert contrast(colours["ink"], shaded) >= 4.5


def channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


# -- in a browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(params=[(1280, 900), (360, 740)], ids=["wide", "narrow"])
def opened(
    request: pytest.FixtureRequest,
    browser: Browser,
    analysis: Analysis,
    drawn: list[pictures.Picture],
    tmp_path: Path,
) -> Iterator[tuple[Page, list[str]]]:
    folder = tmp_path / "a folder"
    path = page.write(folder / page.NAME, analysis, VALUES, drawn)
    width, height = request.param
    context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
    tab, troubles = context.new_page(), []
    tab.on("console", lambda message: troubles.append(message.text))
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    tab.on(
        "request",
        lambda sent: (
            troubles.append(sent.url) if not sent.url.startswith(("file:", "data:")) else None
        ),
    )
    tab.goto(path.as_uri())
    yield tab, troubles
    context.close()


def test_the_page_is_driven(opened: tuple[Page, list[str]], analysis: Analysis) -> None:
    tab, troubles = opened
    assert tab.locator("#components [role=option]").count() == 12
    _a_click_changes_the_panel(tab, analysis)
    _a_token_shows_its_posterior(tab, analysis)
    _the_keyboard_is_enough(tab)
    _another_layer_has_its_own(tab)
    _the_dark_is_dark(tab)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.locator("b", has_text="$x_1$").count() == 0
    assert troubles == []


def _a_click_changes_the_panel(tab: Page, analysis: Analysis) -> None:
    before = tab.locator("#panel").inner_text()
    usage = analysis.components.query("layer == 0 and head == 0").sort_values(
        "usage", ascending=False
    )
    third = usage.iloc[2]
    tab.locator("#components [role=option]").nth(2).click()
    text = tab.locator("#panel").inner_text()
    assert text != before
    assert f"Component {third['component']}\n" in text
    assert f"Wins {third['tokens_won']} of 141 tokens" in text
    leading, shares = analysis.traces[0].leading
    best = shares[0][leading[0] == third["component"]].max()
    assert tab.locator(".contexts .value").first.inner_text() == f"{best:.3f}"
    assert tab.evaluate("location.hash") == f"#l0h0c{third['component']}"


def _a_token_shows_its_posterior(tab: Page, analysis: Analysis) -> None:
    token = tab.locator(".token").nth(17)
    token.hover()
    first = tab.locator("#posterior button").first
    winner = analysis.traces[0].winners[0][17]
    assert first.locator("span").first.inner_text() == str(winner)
    word = analysis.text.table["shown"][17].strip()
    assert f"“{word}”" in tab.locator("#posterior").inner_text()
    first.click()
    assert tab.locator("#panel h3").inner_text() == f"Component {winner}"


def _the_keyboard_is_enough(tab: Page) -> None:
    chosen = tab.locator("[aria-selected=true]")
    chosen.focus()
    tab.keyboard.press("Home")
    first = chosen.get_attribute("id")
    tab.keyboard.press("ArrowDown")
    assert chosen.get_attribute("id") != first
    assert tab.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    assert chosen.inner_text().split()[0] in tab.locator("#panel h3").inner_text()
    tab.locator(".token.on").focus()
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    assert tab.locator(".token.on").get_attribute("data-token") == "1"
    tab.keyboard.press("ArrowDown")
    assert int(tab.locator(".token.on").get_attribute("data-token") or 0) > 2
    assert tab.locator("[tabindex='0'].token").count() == 1


def _another_layer_has_its_own(tab: Page) -> None:
    tab.select_option("#layer", "1")
    assert tab.locator("#components [role=option]").count() == 20
    tab.select_option("#head", "1")
    tab.select_option("#order", "number")
    names = [row.split()[0] for row in tab.locator("#components [role=option]").all_inner_texts()]
    assert names == [str(k) for k in range(20)]


def _the_dark_is_dark(tab: Page) -> None:
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.locator("#theme").click()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
