"""The playground of world-llama with its lessons, and the pictures of it: the ready folder, under 15 MB, and two PNGs.

    python benchmarks/playground_pictures.py [FOLDER] [--save]

Writes the folder (a temporary one if left out) and opens it in headless Chromium; `--save` writes
benchmarks/results/pictures/playground.png, the lesson "Cut the edge" on a desktop in light colours, and
playground_phone.png, "Two places, one fact" on a phone in dark ones: its next token, and the menu of a cell.
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
LESSONS = ROOT / "mionnx" / "playground" / "examples" / "world-llama.json"
PICTURES = RESULTS / "pictures"
GAP = 24  # pixels between two pictures


def lesson(page: Page, number: int) -> None:
    """Open a lesson, counted from 0, and wait until everything of it is drawn and written."""
    page.locator("#lesson-list button").nth(number).click()
    page.wait_for_selector('body[data-state="idle"]')
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


def pictures(address: str) -> dict[str, bytes]:
    """File name -> PNG."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        large = browser.new_context(viewport={"width": 1280, "height": 1070}, color_scheme="light")
        small = browser.new_context(
            viewport={"width": 390, "height": 780}, color_scheme="dark", has_touch=True, device_scale_factor=1.5
        )
        found = {}
        for name, context, take in (("playground.png", large, desktop), ("playground_phone.png", small, phone)):
            page = context.new_page()
            page.goto(address)
            page.wait_for_selector('body[data-state="idle"]')
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
        folder = asked.folder or Path(scratch) / "site"
        model = MIModel.from_pretrained(ROOT / "models" / "world-llama")
        playground(model, folder, title="world-llama", examples=LESSONS)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder}: {size / 1e6:.1f} MB")
        server = serve(folder)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, png in pictures(f"http://localhost:{server.server_address[1]}/").items():
            print(f"{name}: {len(png) / 1e3:.0f} kB")
            if asked.save:
                (PICTURES / name).write_bytes(png)
        server.shutdown()


if __name__ == "__main__":
    main()
