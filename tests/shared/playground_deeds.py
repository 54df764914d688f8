"""What a reader does on a playground's page by pointing: each deed makes one intervention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground_pages import cell, choose, idle, view

from mionnx import HookSpec

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

FRANCE, GERMANY = "The capital of France is", "The capital of Germany is"


def cut_an_edge(page: Page) -> None:
    view(page, "attention")
    cell(page, "layer 2, head 3").click()
    choose(page, "4 “is” reads 3 “France”", "Cut it in all heads of layer 2")


def cut_an_edge_of_one_head(page: Page) -> None:
    view(page, "attention")
    cell(page, "layer 1, head 3").focus()
    for key in ("ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert idle(page).inner_text("#which-head") == "Layer 2, head 3 · previous token"
    choose(page, "4 “is” reads 3 “France”", "Cut it in head 3 of layer 2")


def zero_a_head_by_keyboard(page: Page) -> None:
    page.focus("#tab-lens")
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    page.locator('#view td[tabindex="0"]').focus()
    for key in ("ArrowDown", "ArrowRight", "Enter", "Enter"):  # layer 1, head 1, its menu, the first deed
        page.keyboard.press(key)
    idle(page)
    assert page.evaluate("document.activeElement.ariaLabel").startswith("head 1 of layer 1")


def scale_an_mlp(page: Page) -> None:
    view(page, "parts")
    choose(page, "MLP of layer 2", "Halve it")
    page.get_by_role("slider").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    idle(page)
    assert page.evaluate("playground.state.entries[0].value") == 0.8


def zero_attention(page: Page) -> None:
    view(page, "parts")
    choose(page, "attention of layer 1", "Zero it")


def zero_a_layer(page: Page) -> None:
    view(page, "parts")
    choose(page, "all of layer 3", "Zero it")


def patch_a_cell(page: Page) -> None:
    page.fill("#second", GERMANY)
    idle(page)
    choose(page, "layer 1, position 3 “France”", "Patch with 3 “Germany”")


def patch_from_the_second_lens(page: Page) -> None:
    page.fill("#second", "Peru has its capital in")
    idle(page)
    page.locator('#view table[aria-label="Lens of the second prompt"] td[aria-label^="layer 1, position 0"]').click()
    page.select_option("#patch-target", "3")
    page.get_by_role("dialog").get_by_role("button", name="Put it into the prompt").click()
    idle(page)


def add_direction(page: Page, more: str, less: str, strength: str) -> None:
    """Make a direction of prompts at one position, and add it at a strength."""
    view(page, "steer")
    page.fill("#steer-more", more)
    page.fill("#steer-less", less)
    page.select_option("#steer-mean", "-1")
    page.select_option("#steer-spot", "[3]")
    page.click("#steer-add")
    idle(page)
    page.get_by_label("strength as a number").fill(strength)
    page.keyboard.press("Enter")
    idle(page)


def steer(page: Page) -> None:
    add_direction(page, "The capital of Germany\nGermany", "The capital of France\nFrance", "1.5")
    assert page.evaluate("playground.state.entries[0].strength") == 1.5


DEEDS = [
    *(cut_an_edge, cut_an_edge_of_one_head, zero_a_head_by_keyboard, scale_an_mlp, zero_attention, zero_a_layer),
    *(patch_a_cell, patch_from_the_second_lens, steer),
]


def exported(page: Page, folder: Path) -> HookSpec:
    with page.expect_download() as found:
        page.click("#download")
    found.value.save_as(folder / "spec.safetensors")
    return HookSpec.load(folder / "spec.safetensors")
