"""Reading and pressing on a playground's page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Locator, Page

LOGITS = "(which) => Array.from(playground.answers[which].logits)"


def idle(page: Page) -> Page:
    """Wait until the page shows what the state says."""
    page.wait_for_selector('body[data-state="idle"]')
    return page


def visit(context: BrowserContext, address: str) -> Page:
    """A page of the context, open and idle; its `troubles` are errors, and requests to elsewhere."""
    page = context.new_page()
    page.troubles = []
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("console", lambda said: page.troubles.append(said.text) if said.type == "error" else None)
    home = address.split("#")[0]
    page.on("request", lambda asked: None if asked.url.startswith((home, "blob:")) else page.troubles.append(asked.url))
    page.on("dialog", lambda dialog: page.troubles.append(dialog.message))
    page.goto(address)
    return idle(page)


def view(page: Page, name: str) -> None:
    """Open one of the views."""
    page.click(f"#tab-{name}")
    idle(page)


def cell(page: Page, name: str) -> Locator:
    """The cells of the view that a screen reader would call so."""
    return page.locator(f'#view td[aria-label^="{name}"]')


def choose(page: Page, name: str, deed: str) -> None:
    """Press a cell, and a deed of its menu."""
    cell(page, name).first.click()
    page.get_by_role("dialog").get_by_role("button", name=deed).click()
    idle(page)
