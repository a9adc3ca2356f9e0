"""Runs a headless Chromium with the playground open, and records errors of the page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_MS = 20_000


@dataclass
class Playground:
    """Open page, whose controls are located by their labels."""

    page: Any
    origin: str
    requests: list[str] = field(default_factory=list)
    """URLs that the page requested, or tried to."""
    complaints: list[str] = field(default_factory=list)
    """Errors of scripts, violations of the policy and dialogs."""

    def fill(self, label: str, text: str) -> None:
        self.page.get_by_label(label, exact=True).fill(text)

    def press(self, button: str) -> None:
        self.page.get_by_role("button", name=button, exact=True).click()

    def ask(self, text: str) -> Any:
        """Send a message, and return the article of the response, which may be incomplete."""
        num_before = self.answers.count()
        self.fill("Message", text)
        self.press("Send")
        answer = self.answers.nth(num_before)
        answer.wait_for()
        return answer

    def ask_whole(self, text: str) -> Any:
        """Send a message, and return the article of its complete response."""
        answer = self.ask(text)
        self.wait_for_end()
        return answer

    def wait_for_end(self) -> None:
        self.page.locator('[aria-busy="false"]').nth(self.answers.count() - 1).wait_for()

    @property
    def answers(self) -> Any:
        return self.page.locator("article.assistant")

    @property
    def error(self) -> str:
        text: str = self.page.get_by_role("alert").inner_text()
        return text

    def check(self) -> None:
        """Fail if the page reported an error, or requested something from another host."""
        assert not self.complaints
        assert {f"{urlsplit(url).scheme}://{urlsplit(url).netloc}" for url in self.requests} == {self.origin}


@contextmanager
def open_chromium(*flags: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # not in the development environment

    chromium = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert chromium is not None, "no Chromium here: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", *flags])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_playground(browser: Any, origin: str, **options: Any) -> Iterator[Playground]:
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    playground = Playground(page, origin)
    page.on("request", lambda request: playground.requests.append(request.url))
    page.on("pageerror", lambda error: playground.complaints.append(str(error)))
    page.on("console", lambda message: _note(playground, message))
    page.on("dialog", lambda dialog: _refuse(playground, dialog))
    page.add_init_script(
        "document.addEventListener('securitypolicyviolation', (event) =>"
        " console.error('violation: ' + event.violatedDirective))"
    )
    try:
        page.goto(f"{origin}/playground")
        yield playground
    finally:
        context.close()


def _note(playground: Playground, message: Any) -> None:
    # Chromium itself logs refused requests, which the page also shows.
    if message.type == "error" and "the server responded with a status of" not in message.text:
        playground.complaints.append(message.text)


def _refuse(playground: Playground, dialog: Any) -> None:
    playground.complaints.append(f"dialog: {dialog.message}")
    dialog.dismiss()
