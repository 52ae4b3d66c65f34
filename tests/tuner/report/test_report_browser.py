"""The page in headless Chromium: no complaint, no request, no blank or cut figure."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

OPEN_EVERYTHING = "document.querySelectorAll('details').forEach(item => { item.open = true; })"

# A mark is visible if it has a box and a stroke or fill that is not the page's background.
FIGURES = """
(() => {
  const background = getComputedStyle(document.body).backgroundColor;
  const hidden = color => color === 'none' || color === background || color === 'rgba(0, 0, 0, 0)';
  const isVisible = mark => {
    const box = mark.getBoundingClientRect();
    const style = getComputedStyle(mark);
    if (mark.closest('defs, clipPath') || box.width + box.height === 0) return false;
    return !hidden(style.fill) || (!hidden(style.stroke) && parseFloat(style.strokeWidth) > 0);
  };
  return [...document.querySelectorAll('svg')].map(svg => {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')];
    const isCut = text => {
      const inner = text.getBoundingClientRect();
      return inner.left < box.left - 1 || inner.right > box.right + 1
        || inner.top < box.top - 1 || inner.bottom > box.bottom + 1;
    };
    return {
      label: svg.getAttribute('aria-label'),
      width: box.width,
      height: box.height,
      numMarks: [...svg.querySelectorAll('path, rect, use, line')].filter(isVisible).length,
      cutTexts: texts.filter(isCut).map(text => text.textContent),
      smallestText: Math.min(...texts.map(text => text.getBoundingClientRect().height)),
    };
  });
})()
"""

# Token text must stay inside its box in the tree, whatever font the page gets.
OVERFLOWING_TOKENS = """
[...document.querySelectorAll('svg.tree g')].filter(node => {
  const box = node.querySelector('rect').getBoundingClientRect();
  return [...node.querySelectorAll('text')].some(text => {
    const inner = text.getBoundingClientRect();
    return inner.left < box.left || inner.right > box.right;
  });
}).map(node => node.textContent)
"""

# Contrast of WCAG 2 between every text and the nearest background that is not transparent.
LOWEST_CONTRAST = """
(() => {
  const channels = color => color.match(/[0-9.]+/g).map(Number);
  const luminance = color => {
    const [r, g, b] = channels(color).slice(0, 3).map(value => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let node = element; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if ((channels(color)[3] ?? 1) > 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  let lowest = { contrast: 21, text: '' };
  for (const element of document.querySelectorAll('body *:not(svg *)')) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own) continue;
    const [a, b] = [getComputedStyle(element).color, behind(element)].map(luminance);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < lowest.contrast) lowest = { contrast, text: element.textContent.trim() };
  }
  return lowest;
})()
"""


@pytest.fixture(scope="module")
def full_path(full_html: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "full.html"
    path.write_text(full_html, encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
def test_the_page_is_sound(browser_page: Any, full_path: Path, width: int, dark: bool) -> None:
    browser_page.open(full_path, width=width, dark=dark)
    browser_page.evaluate(OPEN_EVERYTHING)
    figures = browser_page.evaluate(FIGURES)
    assert len(figures) == 32
    for figure in figures:
        assert figure["width"] > 100, figure
        assert figure["height"] > 50, figure
        assert figure["numMarks"] >= 3, figure
        assert figure["cutTexts"] == [], figure
        assert figure["smallestText"] >= 7, figure
    assert browser_page.evaluate(OVERFLOWING_TOKENS) == []
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= width
    lowest = browser_page.evaluate(LOWEST_CONTRAST)
    assert lowest["contrast"] >= 4.5, lowest
    assert browser_page.complaints() == []
    assert browser_page.requested_urls() == [full_path.as_uri()]


def test_a_report_without_numbers_is_sound(
    browser_page: Any, bare_html: str, tmp_path: Path
) -> None:
    path = tmp_path / "bare.html"
    path.write_text(bare_html, encoding="utf-8")
    browser_page.open(path, width=390)
    assert "not measured" in browser_page.evaluate("document.body.innerText")
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser_page.complaints() == []
    assert browser_page.requested_urls() == [path.as_uri()]


def test_colours_follow_the_scheme(browser_page: Any, full_path: Path) -> None:
    fills = []
    for dark in (False, True):
        browser_page.open(full_path, dark=dark)
        fills.append(
            browser_page.evaluate(
                "[getComputedStyle(document.body).backgroundColor,"
                " getComputedStyle(document.querySelector('svg.plot text')).fill]"
            )
        )
    assert fills[0][0] != fills[1][0]
    assert fills[0][1] != fills[1][1]


def test_contents_lead_to_their_sections(browser_page: Any, full_path: Path) -> None:
    browser_page.open(full_path)
    browser_page.evaluate("document.querySelector('nav a[href=\"#costs\"]').click()")
    assert browser_page.evaluate("document.querySelector(':target').id") == "costs"


def test_the_check_would_see_an_outside_request(
    browser_page: Any, full_html: str, tmp_path: Path
) -> None:
    path = tmp_path / "leak.html"
    image = '<img src="http://127.0.0.1:9/pixel.png">'
    path.write_text(full_html.replace("</main>", f"{image}</main>"), encoding="utf-8")
    browser_page.open(path)
    assert any("Content Security Policy" in str(entry) for entry in browser_page.complaints())

    start = full_html.index("<meta http-equiv")
    without_policy = full_html[:start] + full_html[full_html.index("<meta name=") :]
    path.write_text(without_policy.replace("</main>", f"{image}</main>"), encoding="utf-8")
    browser_page.open(path)
    assert "http://127.0.0.1:9/pixel.png" in browser_page.requested_urls()


def test_the_check_would_see_a_blank_figure(
    browser_page: Any, full_html: str, tmp_path: Path
) -> None:
    path = tmp_path / "blank.html"
    blank = '<svg width="200" height="200"><path d="M0 0L9 9" fill="none"></path></svg>'
    path.write_text(full_html.replace("</main>", f"{blank}</main>"), encoding="utf-8")
    browser_page.open(path)
    assert browser_page.evaluate(FIGURES)[-1]["numMarks"] == 0
