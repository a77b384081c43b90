# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import pytest
from checkpoints import ace_config, save_family, tiny_llama
from click.testing import CliRunner
from lines import layers, made_line, report_of, spectrum
from PIL import Image, ImageStat
from playwright.sync_api import Page

from mergekit_ace.cli import main
from mergekit_ace.report.page import draw_pictures, write_page

VIEWS = {
    "laptop, light": (1280, 800, "light"),
    "phone, dark": (390, 844, "dark"),
}


@pytest.fixture
def visit(browser):
    """Open a page and wait until it is drawn; nothing may go wrong or be fetched."""
    contexts, problems = [], []

    def open_page(path: Path, view: str = "laptop, light") -> Page:
        width, height, scheme = VIEWS[view]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
        )
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
    """Of a heterogeneous family, so that every picture is there."""
    folder = tmp_path_factory.mktemp("page")
    lines = layers(12, [1.0, 4.0, 0.5])
    refined = made_line(
        "model.layers.3.mlp.down_proj.weight",
        [1.0, 400.0, 0.5],
        heterogeneous=True,
        refined=True,
        gamma=3.0,
        log_variance=11.0,
        amplification=1.5,
        spectrum=spectrum(2, refined=True),
    )
    vector = made_line("model.norm.weight", [0.1, 0.1, 0.0], rule="mean", shape=[20])
    path = folder / "report.html"
    coefficients = {"coefficients": [0.1, 0.5, -0.2]}
    models = {"models": ["org/expert-0", "org/expert-1", "<b>three"]}
    everything = [line | coefficients | models for line in (*lines, refined, vector)]
    write_page(report_of(everything), path, "</script> is no end & <b>shown</b>")
    return path


PICTURES = """tau relative-size gamma similarity coefficients spectra stable-rank
    histograms""".split()


def luminance(color: str) -> float:
    numbers = [float(n) for n in color[color.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_on_the_page(report_page, visit, view):
    page = visit(report_page, view)
    assert page.title() == "ACE-Merging: expert-0, expert-1, <b>three"
    assert "</script> is no end & <b>shown</b>" in page.inner_text("header")
    assert "@inproceedings{xu2026ace," in page.inner_text("section:has(#cite)")
    assert page.locator(".summary li").count() >= 3
    assert [p.get_attribute("id") for p in page.locator(".plotly-graph-div").all()] == [
        f"plot-{name}" for name in PICTURES
    ]
    for name in PICTURES:
        plot = page.locator(f"#plot-{name}")
        assert plot.locator("svg.main-svg").count() >= 1, name
        caption = page.locator(f"section:has(#{name}) figcaption").inner_text()
        assert "Good" in caption, name
        titles = plot.locator(".xtitle, .ytitle").all_text_contents()
        assert len(titles) >= 2, name
        assert all(titles), name
    # nothing is cut off or has to be scrolled sideways, but for the table in its own frame
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    page.get_by_role("link", name="All tensors").click()
    assert page.evaluate("scrollY") > 0
    light = view.endswith("light")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) > 128) == light
    for now_light in (light, not light):
        page.emulate_media(color_scheme="light" if now_light else "dark")
        picture = Image.open(BytesIO(page.locator("#plot-tau").screenshot())).convert("L")
        assert (ImageStat.Stat(picture).median[0] > 128) == now_light
        darkest, brightest = picture.getextrema()  # words stand out from the ground
        assert brightest - darkest > 128


def column(page: Page, number: int) -> list[str]:
    cells = page.locator(f"#table tbody tr:not([hidden]) td:nth-child({number + 1})")
    return cells.all_inner_texts()


def test_what_clicks_do(report_page, visit):
    page = visit(report_page)
    titles = page.locator("#table thead th").all_inner_texts()
    by_name = titles.index("tensor")
    assert page.locator("#table tbody tr").count() == 14
    heading = page.get_by_role("button", name="tensor")
    heading.click()
    names = column(page, by_name)
    assert names[:3] == [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
    ]
    assert names.index("model.layers.10.mlp.up_proj.weight") > names.index(
        "model.layers.9.mlp.up_proj.weight"
    )
    heading.click()
    assert column(page, by_name) == names[::-1]
    page.get_by_role("button", name="amplification").click()
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("amplification")
    page.get_by_role("button", name="amplification").click()
    assert column(page, by_name)[0] == "model.layers.3.mlp.down_proj.weight"
    assert column(page, by_name)[-1] == "model.norm.weight"  # no number: last either way
    page.get_by_label("Only tensors with").fill("down")
    assert column(page, by_name) == ["model.layers.3.mlp.down_proj.weight"]
    assert "1 of 14 shown" in page.inner_text("#shown")
    plot = page.locator("#plot-similarity")
    assert plot.locator(".updatemenu-item-text").first.text_content().startswith("cosine")
    plot.locator(".updatemenu-header").click()
    plot.get_by_text("overlap of leading outputs").click()
    page.wait_for_function(
        "document.getElementById('plot-similarity').data.map(t => t.visible).join() "
        "=== 'false,false,true'"
    )
    page.locator("#plot-tau .legendtoggle").first.click()
    page.wait_for_function("document.getElementById('plot-tau').data[0].visible === 'legendonly'")


def test_what_is_drawn_are_the_numbers_of_the_report():
    lines = layers(5, [1.0, 4.0])
    lines[2]["tau"] = [7.0, 0.0]
    pictures = {picture.name: picture.figure for picture in draw_pictures(report_of(lines))}
    assert list(pictures["tau"].data[0].y) == [1, 1, 7, 1, 1]
    assert list(pictures["tau"].data[1].x) == [0, 1, 3, 4]  # no point at log 0
    assert list(pictures["tau"].data[1].y) == [4, 4, 4, 4]
    assert list(pictures["gamma"].data[0].y) == [0.01] * 5
    assert pictures["similarity"].data[0].z[0] == [1.0, 0.0]
    histogram = pictures["histograms"].data[0]
    assert sum(histogram.y) == pytest.approx(1)
    assert histogram.x[0] == pytest.approx(-0.49)  # the middle of the first of 50 bins


def test_the_report_of_a_merge_as_a_page(tmp_path, mergekit_yaml, visit):
    paths = save_family(tiny_llama(), tmp_path, scales=[0.02, 0.3])
    report = tmp_path / "ace.jsonl"
    mergekit_yaml(ace_config(paths, parameters={"report": str(report)}))
    out = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["report", str(report), str(out)])
    assert result.exit_code == 0, result.output
    page = visit(out)
    rows = page.locator("#table tbody tr").count()
    assert rows == len(report.read_text().splitlines())
    assert page.locator("#plot-tau").count() == 1
    assert page.locator("#plot-similarity").count() == 0  # a merge does not look that closely


def test_a_page_that_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_page(report_of(layers(1, [1.0])), tmp_path / "none" / "r.html", "")
    report = tmp_path / "r.jsonl"
    skipped = {"method": "ace", "shape": [], "layout": "", "models": [], "skipped": "why"}
    report.write_text(json.dumps({"tensor": "a", **skipped}) + "\n")
    result = CliRunner().invoke(main, ["report", str(report), str(tmp_path / "r.html")])
    assert result.exit_code == 1
    assert "nothing to show" in result.output
    assert not (tmp_path / "r.html").exists()
    result = CliRunner().invoke(main, ["report", str(report), str(report)])
    assert "the page would replace" in result.output
    assert json.loads(report.read_text())["tensor"] == "a"


HOSTILE = ["<!--<script>a", "</script><b>b", "<img src=x onerror=alert(1)>", "&lt;c&amp;\u2028"]


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory) -> Path:
    """Names of models and of tensors that would be HTML."""
    lines = layers(4, [1.0, 4.0, 2.0, 3.0])
    for number, line in enumerate(lines):
        line["models"] = [f"org/{name.replace('/', '')}" for name in HOSTILE]
        line["tensor"] = f"model.layers.{number}.{HOSTILE[number]}.weight"
        line["coefficients"] = [0.1, 0.2, 0.3, 0.4]
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    write_page(report_of(lines), path, HOSTILE[0])
    return path


def test_names_that_would_be_html_are_text(hostile_page, visit):
    page = visit(hostile_page)  # no error, nothing fetched, no dialog
    for name in HOSTILE:
        assert name.replace("/", "") in page.title() + "\u2028"
    page.get_by_role("button", name="tensor").click()
    cells = column(page, 0)
    for number, name in enumerate(HOSTILE):
        shown = f"model.layers.{number}.{name}.weight"
        assert shown.replace("\u2028", " ") in [cell.replace("\u2028", " ") for cell in cells]
    legend = page.locator("#plot-tau .legendtext").all_text_contents()
    assert legend[:3] == [name.replace("/", "") for name in HOSTILE[:3]]
    assert page.locator("img").count() == 0
    assert page.locator("main b").count() == 0
