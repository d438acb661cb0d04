"""Reports in a real browser: no complaints, nothing fetched, every figure drawn, on a desk, a phone and paper."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import Browser, wait_for

from elastictrainer.report import write_comparison, write_plots, write_pngs, write_report

RUN_FIGURES = {"accuracy", "loss", "selection", "budget", "steps", "memory", "overheads"}
COMPARISON_FIGURES = {
    "accuracy", "frontier", "by-budget-time", "by-budget-flops", "by-importance", "memory",
    "accuracy-2", "frontier-2", "memory-2", "by-model-1",
}  # fmt: skip

# Of every figure: the drawing that is shown, its marks (not its axes and words) that take up room, and what is cut off.
DRAWN = """
[...document.querySelectorAll("figure")].map((figure) => {
  const shown = [...figure.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().width > 0);
  const marks = shown.flatMap((svg) => [...svg.querySelectorAll("circle, rect.bar, rect.point, path.line, path.heat")]);
  const visible = marks.map((mark) => mark.getBoundingClientRect()).filter((b) => b.width > 0.4 || b.height > 0.4);
  const outside = shown.flatMap((svg) => [...svg.querySelectorAll("text")].filter((text) => {
    const t = text.getBoundingClientRect(), f = figure.getBoundingClientRect();
    return t.left < f.left - 1 || t.right > f.right + 1;
  })).map((text) => text.textContent);
  const beyond = shown.flatMap((svg) => [...svg.querySelectorAll("path.band, .reference")].filter((mark) => {
    const m = mark.getBoundingClientRect(), s = svg.getBoundingClientRect();
    return m.left < s.left - 1 || m.right > s.right + 1 || m.top < s.top - 1 || m.bottom > s.bottom + 1;
  })).map((mark) => mark.outerHTML);
  return { id: figure.id, drawings: shown.length, marks: visible.length, outside: outside.concat(beyond) };
})
"""


@pytest.fixture(scope="module")
def run_page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs[4], tmp_path_factory.mktemp("page") / "run.html")


@pytest.fixture(scope="module")
def comparison_page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(runs, tmp_path_factory.mktemp("page") / "comparison.html", remarks=["one & <two>"])


def check(browser: Browser, figures: set[str]) -> None:
    drawn = {figure["id"]: figure for figure in browser.evaluate(DRAWN)}
    assert figures <= set(drawn)
    for name, figure in drawn.items():
        if name.startswith("energy") and figure["drawings"] == 0:
            continue  # where no meter is, the page says so
        assert figure["drawings"] == 1, f"{name}: {figure['drawings']} drawings are shown"
        assert figure["marks"] > 0, f"{name} is empty"
        assert not figure["outside"], f"{name}: outside the figure: {figure['outside']}"
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize(("width", "height", "phone"), [(1280, 900, False), (700, 900, False), (360, 740, True)])
def test_a_run(browser: Browser, run_page: Path, width: int, height: int, phone: bool) -> None:
    browser.size(width, height, phone=phone)
    browser.open(run_page)
    check(browser, RUN_FIGURES)


@pytest.mark.parametrize(("width", "height", "phone"), [(1280, 900, False), (700, 900, False), (360, 740, True)])
def test_a_comparison(browser: Browser, comparison_page: Path, width: int, height: int, phone: bool) -> None:
    browser.size(width, height, phone=phone)
    browser.open(comparison_page)
    check(browser, COMPARISON_FIGURES)
    assert browser.evaluate("document.querySelector('aside').textContent").endswith("one & <two>")


def test_on_paper_everything_is_there(browser: Browser, run_page: Path, comparison_page: Path) -> None:
    for page, figures in ((run_page, RUN_FIGURES), (comparison_page, COMPARISON_FIGURES)):
        browser.media("")
        browser.open(page)
        assert browser.pdf().startswith(b"%PDF")
        browser.media("print")
        check(browser, figures)
        hidden = (
            "[...document.querySelectorAll('.csv, .save, #tip')].every((e) => e.getBoundingClientRect().width === 0)"
        )
        assert browser.evaluate(hidden)
        # What is folded on a screen is open on paper, and closed again afterwards.
        folded = "[...document.querySelectorAll('details')].map((d) => d.open)"
        browser.size(690, 1000)  # A4 within its margins
        browser.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert all(browser.evaluate(folded))
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "cut off at the paper's edge"
        browser.size(1280, 900)
        browser.evaluate("dispatchEvent(new Event('afterprint'))")
        assert not any(browser.evaluate(folded))


def test_names_stay_text(browser: Browser, hostile: Path, tmp_path: Path) -> None:
    pages = [write_report(hostile), write_comparison([hostile], tmp_path / "c.html", remarks=["<script>x</script>"])]
    for page in pages:
        browser.open(page)
        browser.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert browser.errors == []
        assert browser.evaluate("document.title") != "owned"
        assert browser.evaluate("document.querySelectorAll('img, iframe').length") == 0
        scripts = "[...document.scripts].filter((s) => s.type !== 'application/json').length"
        assert browser.evaluate(scripts) == 1
        assert "onerror=document.title='owned'" in browser.evaluate("document.body.textContent")


def test_what_is_under_the_pointer_is_said(browser: Browser, run_page: Path) -> None:
    browser.open(run_page)
    say = """((selector, dx, dy) => {
      const box = document.querySelector(selector).getBoundingClientRect();
      const at = { clientX: box.left + dx * box.width, clientY: box.top + dy * box.height, bubbles: true };
      document.querySelector(selector).dispatchEvent(new PointerEvent("pointermove", at));
      return document.getElementById("tip").hidden ? null : document.getElementById("tip").textContent;
    })"""
    assert "epoch 1" in browser.evaluate(f"{say}('#accuracy .wide circle', 0.5, 0.5)")
    over_a_cell = browser.evaluate(f"{say}('#selection .wide svg', 0.6, 0.4)")
    assert "plan " in over_a_cell
    assert "weight" in over_a_cell or "bias" in over_a_cell


def test_tables_sort_and_are_saved(browser: Browser, comparison_page: Path, tmp_path: Path) -> None:
    browser.downloads(tmp_path)
    browser.open(comparison_page)
    values = """[...document.querySelectorAll('#outcome tbody tr')].map((r) => r.children[7].dataset.value)"""
    click = "[...document.querySelectorAll('#outcome th button')][7].click()"
    browser.evaluate(click)
    first = [float(value) for value in browser.evaluate(values)]
    assert first == sorted(first, reverse=True)
    browser.evaluate(click)
    assert [float(value) for value in browser.evaluate(values)] == first[::-1]
    browser.evaluate("document.querySelector('#outcome .csv').click()")
    lines = wait_for(tmp_path / "comparison.csv").read_text().splitlines()
    assert len(lines) == 1 + len(first)
    assert lines[0].startswith("run,policy,importance")


def test_a_figure_is_saved_as_svg_and_png(browser: Browser, comparison_page: Path, tmp_path: Path) -> None:
    browser.downloads(tmp_path)
    browser.open(comparison_page)
    browser.evaluate("document.querySelectorAll('#frontier .save button').forEach((b) => b.click())")
    image = wait_for(tmp_path / "frontier.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 5000
    drawing = ElementTree.fromstring(wait_for(tmp_path / "frontier.svg").read_text())
    words = {element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {"The frontier", "full", "elastic magnitude"} <= words
    # It needs nothing of the page: no class, no variable.
    assert "class=" not in ElementTree.tostring(drawing, encoding="unicode")
    assert browser.errors == []


def test_figures_as_png_files_show_what_the_drawings_show(
    browser: Browser, comparison_page: Path, tmp_path: Path
) -> None:
    """Twice as large, and not cut off: there is colour, and the paper's white all around."""
    from PIL import Image

    drawn = [path for path in write_plots(comparison_page, tmp_path) if path.stem in ("frontier", "memory")]
    for path, drawing in zip(write_pngs(drawn), drawn):
        root = ElementTree.fromstring(drawing.read_text())
        image = Image.open(path).convert("RGB")
        assert image.size == tuple(2 * round(float(root.attrib[side])) for side in ("width", "height"))
        edge = {image.getpixel((x, y)) for x in (0, image.width - 1) for y in range(image.height)}
        assert edge == {(255, 255, 255)}
        assert len(image.getcolors(2**24)) > 10


def test_figures_as_files_are_drawings_that_stand_alone(
    browser: Browser, comparison_page: Path, tmp_path: Path
) -> None:
    drawn = write_plots(comparison_page, tmp_path / "figures")
    assert {path.stem for path in drawn} >= COMPARISON_FIGURES
    listed = "".join(f"<img src={json.dumps(path.name)}>" for path in drawn)
    page = tmp_path / "figures" / "all.html"
    page.write_text(f"<!doctype html><html data-ready='yes'><body>{listed}</body></html>")
    browser.open(page)
    assert browser.evaluate("[...document.images].every((i) => i.complete && i.naturalWidth > 300)")
    for path in drawn:
        text = path.read_text()
        assert "var(" not in text
        ElementTree.fromstring(text)
