# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import pytest
from commands import command
from lines import layers, made_line, report_of
from PIL import Image, ImageStat
from playwright.sync_api import Page

from mergekit_ace.report.page import draw_pictures, write_page

VIEWS: dict[str, dict] = {
    "laptop, light": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "phone, dark": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
}
PICTURES = ["tau", "similarity", "coefficients"]
HOSTILE = ["<!--<script>a", "</script><b>b", "<img src=x onerror=alert(1)>", "&lt;c&amp;\u2028"]


@pytest.fixture
def visit(browser):
    """Open a page and wait until it is drawn; nothing may go wrong or be fetched."""
    contexts, problems = [], []

    def open_page(path: Path, view: str = "laptop, light") -> Page:
        context = browser.new_context(**VIEWS[view], offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None
        )
        page.on("request", lambda r: problems.append(r.url) if "http" in r.url[:5] else None)
        page.goto(path.as_uri())
        page.wait_for_function(
            "document.querySelectorAll('.plot .main-svg').length && "
            "[...document.querySelectorAll('.plot')].every(p => p.querySelector('.main-svg'))"
        )
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture(scope="module")
def report_page(tmp_path_factory) -> Path:
    """Of names that would be HTML, and with every picture."""
    lines = layers(12, [1.0, 4.0, 0.5])
    lines.append(made_line("model.layers.3.mlp.down_proj.weight", [1, 400, 0.5], amplification=1.5))
    lines += [
        made_line(f"model.layers.{n}.{name}.weight", [1, 2, 3]) for n, name in enumerate(HOSTILE)
    ]
    for line in lines:
        line["coefficients"] = [0.1, 0.5, -0.2]
    lines.append(made_line("model.norm.weight", [0.1, 0.1, 0.0], rule="mean", shape=[20]))
    models = {"models": [f"org/{name.replace('/', '')}" for name in HOSTILE[:3]]}
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(report_of([line | models for line in lines]), path, HOSTILE[1])
    return path


def luminance(color: str) -> float:
    numbers = [float(n) for n in color[color.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_on_the_page(report_page, visit, view):
    page = visit(report_page, view)
    names = [name.replace("/", "") for name in HOSTILE[:3]]
    assert page.title() == f"ACE-Merging: {', '.join(names)}"
    assert HOSTILE[1] in page.inner_text("header")
    assert "@inproceedings{xu2026ace," in page.inner_text("section:has(#cite)")
    assert page.locator(".summary li").count() >= 2
    plots = page.locator(".plotly-graph-div").all()
    assert [plot.get_attribute("id") for plot in plots] == [f"plot-{name}" for name in PICTURES]
    for name, plot in zip(PICTURES, plots, strict=True):
        assert "Good" in page.locator(f"section:has(#{name}) figcaption").inner_text()
        titles = plot.locator(".xtitle, .x2title, .x3title, .ytitle").all_text_contents()
        assert len([*filter(None, titles)]) == len(titles) >= 2, name
    assert page.locator("#plot-tau .legendtext").all_text_contents() == names
    assert page.locator("img, main b").count() == 0
    # nothing is cut off or has to be scrolled sideways, but for the table in its own frame
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    page.get_by_role("link", name="All tensors").click()
    assert page.evaluate("scrollY") > 0
    light = view.endswith("light")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) > 128) == light
    picture = Image.open(BytesIO(page.locator("#plot-tau").screenshot())).convert("L")
    assert (ImageStat.Stat(picture).median[0] > 128) == light
    darkest, brightest = picture.getextrema()  # words stand out from the ground
    assert brightest - darkest > 128


def column(page: Page, number: int) -> list[str]:
    cells = page.locator(f"#table tbody tr:not([hidden]) td:nth-child({number + 1})")
    return cells.all_inner_texts()


def test_what_clicks_do(report_page, visit):
    page = visit(report_page)
    assert page.locator("#table tbody tr").count() == 18
    heading = page.get_by_role("button", name="tensor")
    heading.click()
    names = column(page, 0)
    layers = [int(name.split(".")[2]) for name in names if "up_proj" in name]
    assert layers == sorted(layers)  # 10 behind 9
    for number, name in enumerate(HOSTILE[:3]):
        assert f"model.layers.{number}.{name}.weight" in names
    heading.click()
    assert column(page, 0) == names[::-1]
    for order in ("ascending", "descending"):
        page.get_by_role("button", name="amplification").click()
        assert page.locator(f"th[aria-sort={order}]").inner_text().startswith("amplification")
        assert column(page, 0)[-1] == "model.norm.weight"  # no number: last either way
    assert column(page, 0)[0] == "model.layers.3.mlp.down_proj.weight"
    page.get_by_label("Only tensors with").fill("down")
    assert column(page, 0) == ["model.layers.3.mlp.down_proj.weight"]
    assert "1 of 18 shown" in page.inner_text("#shown")
    page.locator("#plot-tau .legendtoggle").first.click()
    page.wait_for_function("document.getElementById('plot-tau').data[0].visible === 'legendonly'")


def test_what_is_drawn_are_the_numbers_of_the_report():
    lines = layers(5, [1.0, 4.0])
    lines[2]["tau"] = [7.0, 0.0]
    pictures = draw_pictures(report_of(lines))
    assert list(pictures["tau"].data[0].y) == [1, 1, 7, 1, 1]
    assert list(pictures["tau"].data[1].x) == [0, 1, 3, 4]  # no point at log 0
    assert list(pictures["tau"].data[1].y) == [4, 4, 4, 4]
    assert list(pictures["similarity"].data[0].z[0]) == pytest.approx([1.0, 0.0])


def test_a_page_that_cannot_be_written(tmp_path):
    report = tmp_path / "r.jsonl"
    report.write_text(json.dumps(made_line("a", [1.0])) + "\n")
    assert f"{report}, which is read" in command("report", report, report, fails=True)
    assert json.loads(report.read_text())["tensor"] == "a"
    assert "none/r.html" in command("report", report, tmp_path / "none" / "r.html", fails=True)
    report.write_bytes(b"\xff")
    said = command("report", report, tmp_path / "p", fails=True)
    assert "r.jsonl is not the line of a report" in said
