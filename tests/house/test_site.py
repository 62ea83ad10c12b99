# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The documentation's site is built without a warning, needs no network, and can be read on a phone."""

import re
import subprocess
import sys

import pytest

from support.browser import browser
from support.documentation import ROOT

pytestmark = pytest.mark.program(
    *("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "docs", "examples/README.md"),
    *("requirements/docs.txt", "tests/support/browser.py"),
)

# Boxes that end beyond the edge of the page, and are not in a box that scrolls by itself. The theme scrolls the whole
# article sideways if it must, and a phone takes the window for wider than it is: neither is what a reader wants.
CUT_OFF = """
const width = document.documentElement.clientWidth;
const scrolls = box => box.tagName != "ARTICLE"
    && (/auto|scroll/.test(getComputedStyle(box).overflowX) || scrolls(box.parentElement));
return [...document.querySelectorAll("article *")]
    .filter(box => box.getBoundingClientRect().right > width + 1 && !scrolls(box.parentElement))
    .map(box => box.outerHTML.slice(0, 100));
"""
# Of each drawing, what mermaid took it for.
DRAWINGS = """
return [...document.querySelectorAll("pre.mermaid")]
    .map(box => box.querySelector("svg")?.getAttribute("aria-roledescription"));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site."""
    pytest.importorskip("myst_parser", reason="pip install -r requirements/docs.txt")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, *"-m sphinx -q -W --keep-going -c docs .".split(), str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_nothing_comes_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert site / "index.html" in pages and site / "docs" / "start" / "first_run.html" in pages
    for page in pages:
        fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert fetched and [address for address in fetched if "//" in address] == [], page


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_in_a_browser(site, width):
    with browser(width, 844) as driver:
        drawn = 0
        for page in sorted(site.rglob("*.html")):
            driver.get(page.as_uri())
            if "mermaid.js" in page.read_text():
                kinds = drawings(driver)
                assert set(kinds) <= {"flowchart-v2", "stateDiagram"}, f"{page.name}: {kinds}"
                drawn += len(kinds)
            assert driver.execute_script(CUT_OFF) == [], page.name
            missing = "return [...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
            assert driver.execute_script(missing) == [], page.name
            # Warnings, such as that of a slow machine, are not ours.
            said = driver.get_log("browser")
            assert [line for line in said if line["level"] == "SEVERE"] == [], page.name
        assert drawn == sum(page.read_text().count('<pre class="mermaid">') for page in site.rglob("*.html")) > 0


def drawings(driver):
    """Waits until mermaid has drawn, and lists what it took the drawings for: "error" where it did not understand."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 60).until(lambda driver: all(driver.execute_script(DRAWINGS)))
    return driver.execute_script(DRAWINGS)


def test_search(site):
    from selenium.webdriver.support.ui import WebDriverWait

    with browser(1280, 844) as driver:
        driver.get(f"{(site / 'search.html').as_uri()}?q=wait_for_parameters")
        found = "return [...document.querySelectorAll('#search-results li a')].map(link => link.textContent)"
        WebDriverWait(driver, 60).until(lambda driver: "Options" in driver.execute_script(found))
