"""The page in Chromium, where there is one: phones, wide screens, light and dark."""

import os
import shutil

import pytest

from subulp.lab.report import write_report
from tests.lab.report.support import LM, lm_records, lm_summary, write_run
from tests.lab.report.test_page import ctr_run

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH; test_page checks the page without one"
)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    options = ["--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--no-sandbox")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    long = {"master": 0.0, "a-variant-of-a-name-that-is-much-too-long-for-a-phone" * 2: 0.1}
    runs = [
        write_run(folder / "ended", summary=lm_summary()),
        write_run(folder / "names", {**LM, "steps": 9}, lm_records(long), lm_summary(long)),
        ctr_run(folder / "ctr"),
    ]
    write_report(runs, folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1600])
def test_the_page_renders(browser, page_file, width, scheme, tmp_path):
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    page = context.new_page()
    # A busy machine takes long over a large page.
    page.set_default_timeout(120_000)
    messages, requests = [], []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_file.as_uri())
    for opened in (False, True):
        if opened:
            page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not messages
    assert all(url == page_file.as_uri() or url.startswith("data:") for url in requests)

    light = sum(rgb(page, "backgroundColor")) > 3 * 128
    assert light == (scheme == "light")
    assert contrast(rgb(page, "backgroundColor"), rgb(page, "color")) > 7
    figures = page.evaluate(
        "[...document.querySelectorAll('figure > svg')].map(s => s.getBoundingClientRect().height)"
    )
    assert len(figures) >= 10
    assert min(figures) > 60
    # By the screenful: Chromium may refuse to paint all of a tall page at once.
    screens = [page.screenshot(path=tmp_path / "top.png")]
    page.locator("figure > svg").last.scroll_into_view_if_needed()
    screens.append(page.screenshot(path=tmp_path / "figure.png"))
    assert all(len(screen) > 10_000 for screen in screens)
    assert screens[0] != screens[1]
    context.close()


def rgb(page, name):
    text = page.evaluate(f"getComputedStyle(document.body).{name}")
    return [int(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]]


def contrast(first, second):
    """WCAG's contrast ratio."""

    def luminance(colour):
        parts = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)
