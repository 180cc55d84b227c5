"""The built site in Chromium, in light and dark mode."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builder.pages import browser
from tests.docs.pages import DOCS
from tests.support.needs import needs

SCREEN, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site, unless ``ZEROTUNE_SITE`` names a built one."""
    if given := os.environ.get("ZEROTUNE_SITE"):
        return Path(given)
    needs("furo")
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    subprocess.run([*command, str(DOCS), str(built)], check=True, timeout=1200)
    return built


@pytest.fixture(scope="module")
def chromium():
    with browser() as launched:
        yield launched


@pytest.fixture
def tab(chromium):
    context = chromium.new_context(viewport=SCREEN, reduced_motion="reduce")
    yield context.new_page()
    context.close()


def pages(site):
    """Return all pages, but only one API page of each kind."""
    found = sorted(site.glob("*.html"))
    kinds = ("index", "zerotune", "zerotune.errors", "zerotune.plan", "zerotune.training.Trainer")
    return [*found, *(site / "api" / f"{name}.html" for name in kinds)]


def test_axe_finds_no_accessibility_violation(tab, site):
    axe = needs("axe_playwright_python.sync_playwright").Axe()
    faults = []
    for page in pages(site):
        tab.goto(page.as_uri())
        for scheme, only in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            tab.emulate_media(color_scheme=scheme)
            found = axe.run(tab, options={"resultTypes": ["violations"], **only}).response
            assert found["passes"], page.name
            faults += [
                (page.name, scheme, each["id"], [node["html"][:120] for node in each["nodes"][:3]])
                for each in found["violations"]
            ]
    assert faults == []


def test_only_wide_tables_scroll_sideways_and_they_do_so_by_keyboard(tab, site):
    tab.set_viewport_size(PHONE)
    for page in pages(site):
        tab.goto(page.as_uri())
        wide = tab.evaluate("""() => [document.documentElement.scrollWidth, innerWidth]""")
        assert wide[0] <= wide[1], f"{page.name} is {wide[0]} px wide"
    tab.goto((site / "fits.html").as_uri())
    table = tab.get_by_role("group", name=re.compile("All weights")).first
    table.focus()
    tab.keyboard.press("ArrowRight")
    tab.wait_for_function(
        "() => [...document.querySelectorAll('.table-wrapper')].some((one) => one.scrollLeft > 0)"
    )


def test_attributes_are_described_completely_and_only_once(site):
    for page in site.glob("api/*.html"):
        # A colon in the first line would make napoleon take the words before it for a type.
        assert ">Type<span" not in page.read_text(), page.name
    page = (site / "api" / "zerotune.plan.ModelFacts.html").read_text()
    assert "Number of frames in each latent frame" in page
    assert "<strong>frames_per_latent</strong>" not in page, "also among the parameters"
    assert "<strong>frames</strong>" in page, "no parameter of a method is left"


def test_every_internal_link_has_a_target(site):
    anchors = {}
    for page in site.rglob("*.html"):
        anchors[page] = set(re.findall(r'\bid="([^"]+)"', page.read_text()))
    broken = []
    for page, _ in anchors.items():
        for link in re.findall(r'href="([^"]+)"', page.read_text()):
            if re.match(r"[a-z]+:", link) or page.name in ("genindex.html", "search.html"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if path.endswith("/") or target.suffix != ".html":
                continue
            if target not in anchors or (anchor and anchor not in anchors[target]):
                broken.append(f"{page.name}: {link}")
    assert broken == []
