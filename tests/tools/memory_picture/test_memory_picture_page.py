# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The page of ``compile.memory_picture`` in a real browser: it draws, tells values under the pointer, and zooms."""

import time

import pytest

from deepspeed.compile.tools.memory_picture import data

from support.browser import browser

pytestmark = pytest.mark.program("deepspeed/compile/tools/memory_picture", "tests/support/browser.py")

DESK, PHONE = (1280, 900), (390, 844)
# The x axis of the picture that Plotly holds now.
RANGE = "return document.querySelector('.js-plotly-plot')._fullLayout.xaxis.range"


@pytest.fixture(scope="module", name="browser")
def started_browser():
    with browser(*DESK) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Draws a step of a made-up course, and two of them over each other."""
    draw_html = pytest.importorskip(
        "deepspeed.compile.tools.memory_picture.draw_html", reason="Plotly draws the page: requirements/dev.txt"
    )
    folder = tmp_path_factory.mktemp("pages")
    held = {name: [(1 + number) * 2**20 * min(index, 20 - index) for index in range(21)]
            for number, name in enumerate(data.CATEGORIES)}  # fmt: skip
    phases = {"forward": [(0.0, 0.7)], "backward": [(0.7, 1.4)], "step": [(1.4, 2.0)], "gather": [(1.8, 2.0)]}
    about = {"model": "Some<Model>", "rank": 0, "world": 2, "what": "step 3"}
    step = data.StepMemory([index / 10 for index in range(21)], held, phases, about=about)
    draw_html.draw(step, folder / "one.html")
    draw_html.draw_two(step, step, ["before", "after"], folder / "two.html")
    return folder


def show(browser, page, size):
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    wait(lambda: browser.find_elements("css selector", ".js-plotly-plot .scatterlayer .trace"))


def wait(for_what):
    for _ in range(100):
        found = for_what()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("the page did not do that within ten seconds")


def errors(browser):
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_hover_tells_values_and_a_drag_zooms(browser, pages, size):
    from selenium.webdriver import ActionChains

    show(browser, pages / "one.html", size)
    assert browser.title == "Some<Model>, rank 0 of 2: peak 360.00 MiB in the backward"
    text = browser.find_element("tag name", "body").text
    for said in (
        browser.title,
        "The peak is made of: the rest 80.00 MiB",
        "memory in MiB",
        *data.CATEGORIES,
        "gather",
    ):
        assert said in text
    # Nothing is wider than the screen.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    panel = browser.find_element("css selector", ".js-plotly-plot .nsewdrag")
    ActionChains(browser).move_to_element(panel).perform()
    hover = wait(lambda: browser.find_elements("css selector", ".hoverlayer .legend"))[0].text
    assert "gradients waiting : 60.000 MiB" in hover and "all : 360.000 MiB" in hover
    whole = browser.execute_script(RANGE)
    ActionChains(browser).move_to_element(panel).click_and_hold().move_by_offset(60, 0).release().perform()
    wait(lambda: browser.execute_script(RANGE) != whole)
    begin, end = browser.execute_script(RANGE)
    assert whole[0] < begin < end < whole[1]
    assert errors(browser) == []


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_two_steps_lie_over_each_other(browser, pages, size):
    show(browser, pages / "two.html", size)
    lines = browser.find_elements("css selector", ".scatterlayer .trace .lines path")
    # One panel for all memory and one for each category, each with a line of either step.
    assert len(lines) == 2 * (1 + len(data.CATEGORIES))
    names = [element.text for element in browser.find_elements("css selector", ".legendtext")]
    assert names == ["before", "after"]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    assert errors(browser) == []
