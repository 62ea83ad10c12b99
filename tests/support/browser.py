# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A real browser without a window: Chromium with its driver, both from the system's packages."""

import contextlib
import shutil
import tempfile

import pytest


@contextlib.contextmanager
def browser(width, height):
    """Starts Chromium and yields selenium's driver; skips the test with a reason where there is none.

    Args:
        width: of the page, in CSS pixels; also less than the 500 that a window of Chromium cannot go below.
        height: of the page.
    """
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install -r requirements/dev.txt")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs Chromium and its driver (on Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Root needs --no-sandbox; the other switches keep Chromium from asking the network.
    for switch in (
        *("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-quic", "no-first-run"),
        *("disable-background-networking", "disable-component-update", "disable-sync"),
    ):
        options.add_argument(f"--{switch}")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options.add_argument(f"--user-data-dir={profile}")
        started = webdriver.Chrome(options, webdriver.ChromeService(driver))
        try:
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            started.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            yield started
        finally:
            started.quit()
