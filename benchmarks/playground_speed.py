"""How fast a playground answers in headless Chromium: opening, an intervention, a lens, generation.

Each model's folder is written and served on localhost, with the headers that threads need. An intervention is an edge
cut in the middle layer at "The capital of France is"; before anything is timed its logits are compared with those of
`forward`, which sums in another order where weights are blocks. Times are medians as the page sees them, worker and
messages included; a token is a share of a generation of at most 8, prompt included; the second opening is a reload,
from the browser's cache.

    python benchmarks/playground_speed.py [--model world-llama --model smollm2=int4] [--runs 9] [--save]
"""

import argparse
import tempfile
import threading
from os import getloadavg
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from tables import present

from mionnx import HookPoint, HookSpec, Intervention, KnockoutSpec, MIModel, create_knockout_mask
from mionnx.playground import playground, serve

PROMPT, NEW = "The capital of France is", 8
MODELS = ("world-llama", "smollm2=int4")
HEAD = (
    *("model", "folder, MB", "difference of logits, of the largest", "opening, s", "again, s"),
    *("intervention, ms", "with all patterns, ms", "with a lens too, ms", "a token, ms"),
)
OPEN = """async () => {
  const { open } = await import("./engine/engine.js");
  const begun = performance.now();
  window.lab = await open("./");
  return performance.now() - begun;
}"""
RUN = """async ([text, interventions, want, runs]) => {
  const tokens = await lab.encode(text), times = [];
  let found;
  for (let i = 0; i < runs; i++) {
    const begun = performance.now();
    found = await lab.run({ tokens, interventions, want });
    times.push(performance.now() - begun);
  }
  return [times, Array.from(found.logits)];
}"""
GENERATE = """async ([text, interventions, count, runs]) => {
  const tokens = await lab.encode(text), times = [];
  for (let i = 0; i < runs; i++) {
    const begun = performance.now();
    let made = 0;
    await lab.generate({ tokens, interventions, count, onToken: () => made++ });
    times.push((performance.now() - begun) / made);
  }
  return times;
}"""


def measured(name: str, runs: int, browser: Any) -> list[str]:
    """A row of the table."""
    source, _, dtype = name.partition("=")
    model = MIModel.from_pretrained(source, **({"dtype": dtype} if dtype else {}))
    with tempfile.TemporaryDirectory() as scratch:
        folder = playground(model, Path(scratch) / "site")
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        server = serve(folder)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            times = timed(model, f"http://localhost:{server.server_address[1]}/", runs, browser)
        finally:
            server.shutdown()
            server.server_close()
    return [name.replace("=", ", "), f"{size / 1e6:.1f}", *times]


def timed(model: MIModel, address: str, runs: int, browser: Any) -> list[str]:
    """Difference and times of one folder."""
    scores = str(HookPoint.AttnScores(model.num_layers // 2))
    mask = create_knockout_mask(KnockoutSpec().edge(4, 3), model.num_heads, len(model.tokenize(PROMPT)))
    expected = model.forward(PROMPT, HookSpec().intervene(scores, Intervention.Knockout(mask))).output()[0, -1]
    cut = [{"hook": scores, "kind": "knockout", "value": {"edges": [[4, 3]]}}]
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(600_000)
    page.goto(f"{address}manifest.json")  # a page of the same address without the page's own work
    opened = [page.evaluate(OPEN)]
    page.reload()
    opened.append(page.evaluate(OPEN))
    logits = np.array(page.evaluate(RUN, [PROMPT, cut, {}, 2])[1])
    wants: list[dict[str, Any]] = [{}, {"patterns": True}, {"patterns": True, "lens": True}]
    found = [median(page.evaluate(RUN, [PROMPT, cut, want, runs])[0]) for want in wants]
    found.append(median(page.evaluate(GENERATE, [PROMPT, cut, NEW, runs])))
    context.close()
    difference = f"{np.abs(logits - expected).max():.1e} of {np.abs(expected).max():.0f}"
    return [difference, *(f"{one / 1000:.1f}" for one in opened), *(f"{one:.1f}" for one in found)]


def main() -> None:
    """Measure every model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="NAME or NAME=DTYPE; may be repeated")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    begun, load = perf_counter(), getloadavg()[0]
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=options.chromium, args=flags)
        rows = [measured(name, options.runs, browser) for name in options.model or MODELS]
        version = browser.version
        browser.close()
    took = f"{perf_counter() - begun:.0f} s in all, beside other work of load {load:.1f}"
    title = f"headless Chromium {version}, WebAssembly, two threads, {PROMPT!r}; {took}"
    present("playground_speed", "How fast a playground answers", title, [(HEAD, rows)], options.save)


if __name__ == "__main__":
    main()
