"""A builder that is served for real, and the browser that looks at it."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.needs import needs

PATIENCE = 60
"""Seconds for anything: nothing here takes one, but a machine may have much else to do."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of an application that a thread serves on a free port."""
    uvicorn = needs("uvicorn")
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listening]}, name="builder", daemon=True
    )
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium; a test that needs it is skipped without, and fails in CI."""
    playwright = needs("playwright.sync_api")
    program = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if program is None:
        message = "Chromium is not installed (apt install chromium)"
        if os.environ.get("CI"):
            pytest.fail(f"CI lacks a component it should have: {message}", pytrace=False)
        pytest.skip(message)
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()


class Page:
    """One tab on the builder, and what a user does there."""

    def __init__(self, context: Any, address: str) -> None:
        self.complaints: list[str] = []
        self.tab = context.new_page()
        self.tab.set_default_timeout(1000 * PATIENCE)
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("console", self._heard)
        self.tab.goto(address)
        self.tab.wait_for_selector("body[data-loaded=true]")
        self.settle()

    def _heard(self, message: Any) -> None:
        # A refused request is logged by the browser; the tests ask for some of those.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def settle(self) -> None:
        """Wait for the answer to the last change."""
        self.tab.wait_for_selector("body[data-state=ready]")

    def config(self) -> Any:
        """The JSON that is shown."""
        import json

        self.settle()
        return json.loads(self.tab.locator("#output").text_content())

    def wait_for(self, key: str, value: Any) -> None:
        """Wait until the JSON that is shown says so: keys are typed faster than shown."""
        deadline = time.monotonic() + PATIENCE
        while (shown := self.config().get(key)) != value:
            assert time.monotonic() < deadline, f"{key} is {shown!r}, not {value!r}"
            self.tab.wait_for_timeout(50)

    def open_text(self, text: str) -> None:
        """Paste into the dialog and open."""
        self.tab.click("#open-button")
        self.tab.fill("#open-path", "")
        self.tab.fill("#open-text", text)
        self.tab.click("#open-do")

    def use_builtin(self, name: str) -> None:
        """Take a built-in template."""
        self.tab.click("#templates-button")
        self.tab.get_by_role("button", name=f"Use {name}", exact=True).click()
        self.tab.wait_for_selector("#templates-dialog", state="hidden")
        self.settle()

    def use_builtin_over(self, name: str) -> None:
        """Take a built-in template in place of what is not saved."""
        self.tab.click("#templates-button")
        self.tab.get_by_role("button", name=f"Use {name}", exact=True).click()
        self.tab.click("#ask-do")
        self.tab.wait_for_selector("#templates-dialog", state="hidden")
        self.settle()

    def save_as(self, path: str) -> None:
        """Save to a file of the root."""
        self.tab.click("#save-button")
        self.tab.fill("#save-path", path)
        self.tab.click("#save-do")
        self.tab.wait_for_selector("#save-dialog", state="hidden")
