"""Serve a real builder and drive a browser on it."""

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
"""Timeout in seconds: no operation takes one, but the machine may be busy."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application in a thread on a free port; yield its address."""
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
    """Start headless Chromium; without it, skip the test, or fail in CI."""
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
    """A browser tab on the builder, and a user's actions in it."""

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
        # The browser logs refused requests, and some tests provoke them.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def settle(self) -> None:
        """Wait for the answer to the last change."""
        self.tab.wait_for_selector("body[data-state=ready]")

    def config(self) -> Any:
        """Return the JSON that is shown."""
        import json

        self.settle()
        return json.loads(self.tab.locator("#output-json pre").text_content())

    def wait_for(self, key: str, value: Any) -> None:
        """Wait until the shown JSON has this value, since keys are typed faster than shown."""
        deadline = time.monotonic() + PATIENCE
        while (shown := self.config().get(key)) != value:
            assert time.monotonic() < deadline, f"{key} is {shown!r}, not {value!r}"
            self.tab.wait_for_timeout(50)

    def open_text(self, text: str) -> None:
        """Paste text into the dialog and open it."""
        self.tab.click("#open-button")
        self.tab.fill("#open-path", "")
        self.tab.fill("#open-text", text)
        self.tab.click("#open-do")

    def use_builtin(self, name: str) -> None:
        """Use a built-in template."""
        self.tab.click("#templates-button")
        self.tab.get_by_role("button", name=f"Use {name}", exact=True).click()
        self.tab.wait_for_selector("#templates-dialog", state="hidden")
        self.settle()

    def use_builtin_over(self, name: str) -> None:
        """Use a built-in template, discarding unsaved changes."""
        self.tab.click("#templates-button")
        self.tab.get_by_role("button", name=f"Use {name}", exact=True).click()
        self.tab.click("#ask-do")
        self.tab.wait_for_selector("#templates-dialog", state="hidden")
        self.settle()

    def save_as(self, path: str) -> None:
        """Save to a file in the root."""
        self.tab.click("#save-button")
        self.tab.fill("#save-path", path)
        self.tab.click("#save-do")
        self.tab.wait_for_selector("#save-dialog", state="hidden")
