"""Playgrounds of world-llama and world-bert with their lessons, and pictures of them: folders under 18 MB, three PNGs.

    python benchmarks/playground_pictures.py [FOLDER] [--save]

Writes both folders into FOLDER (a temporary one if left out) and opens them in headless Chromium; `--save` writes
benchmarks/results/pictures/playground.png, the lesson "Cut the edge" on a desktop in light colours,
playground_phone.png, "Two places, one fact" on a phone in dark ones: its next token, and the menu of a cell, and
playground_bert.png, the edge from a mask to a later word cut.
"""

import argparse
import shutil
import threading
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.image import imread, imsave
from playwright.sync_api import Page, sync_playwright
from tables import RESULTS

from mionnx import MIModel
from mionnx.playground import playground, serve

ROOT = Path(__file__).parents[1]
PICTURES = RESULTS / "pictures"
GAP = 24  # pixels between two pictures


def lesson(page: Page, number: int) -> None:
    """Open a lesson, counted from 0, and wait until everything of it is drawn and written."""
    page.locator("#lesson-list button").nth(number).click()
    page.wait_for_selector('body[data-state="idle"]')
    if page.locator("#writing").is_visible():
        page.wait_for_selector("#texts:not(.old)")
        page.wait_for_selector("#stop", state="hidden")
    page.wait_for_timeout(400)  # bars move to their lengths


def desktop(page: Page) -> bytes:
    """The whole page of a lesson on attention."""
    lesson(page, 2)
    return page.screenshot()


def phone(page: Page) -> bytes:
    """Two screens of a phone side by side."""
    lesson(page, 1)
    page.evaluate("document.getElementById('next-card').scrollIntoView()")
    screens = [page.screenshot()]
    page.evaluate("document.getElementById('inside').scrollIntoView()")
    page.locator('#view td[aria-label^="layer 1, position 3"]').first.tap()
    screens.append(page.screenshot())
    return beside(*screens)


def beside(left: bytes, right: bytes) -> bytes:
    """Two PNGs of one size side by side."""
    one, other = (imread(BytesIO(screen)) for screen in (left, right))
    between = np.ones((one.shape[0], GAP, one.shape[2]), one.dtype)
    buffer = BytesIO()
    imsave(buffer, np.concatenate([one, between, other], axis=1), format="png")
    return buffer.getvalue()


def encoder(page: Page) -> bytes:
    """The whole page of an encoder's lesson on an edge to a later word."""
    lesson(page, 1)
    return page.screenshot()


PICTURED = {
    "world-llama": (("playground.png", "large", desktop), ("playground_phone.png", "small", phone)),
    "world-bert": (("playground_bert.png", "large", encoder),),
}


def pictures(model: str, address: str) -> dict[str, bytes]:
    """File name -> PNG."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        large = browser.new_context(viewport={"width": 1280, "height": 1070}, color_scheme="light")
        small = browser.new_context(
            viewport={"width": 390, "height": 780}, color_scheme="dark", has_touch=True, device_scale_factor=1.5
        )
        found = {}
        for name, size, take in PICTURED[model]:
            page = {"large": large, "small": small}[size].new_page()
            page.goto(address)
            page.wait_for_selector('body[data-state="idle"]')
            if page.locator("#writing").is_visible():
                page.set_checked("#auto", True)
            found[name] = take(page)
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    with TemporaryDirectory() as scratch:
        for name in PICTURED:
            folder = (asked.folder or Path(scratch)) / name
            playground(MIModel.from_pretrained(ROOT / "models" / name), folder, title=name)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            print(f"{folder}: {size / 1e6:.1f} MB")
            server = serve(folder)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            for picture, png in pictures(name, f"http://localhost:{server.server_address[1]}/").items():
                print(f"{picture}: {len(png) / 1e3:.0f} kB")
                if asked.save:
                    (PICTURES / picture).write_bytes(png)
            server.shutdown()


if __name__ == "__main__":
    main()
