"""Runs the example of the bridge's README: what it prints, and what the page shows."""

import io
import json
import os
import re
from contextlib import redirect_stdout

from repository import REPOSITORY

if __name__ == "__main__":
    os.chdir(REPOSITORY)
    page = (REPOSITORY / "mionnx" / "transformer_lens" / "README.md").read_text()
    code, shown = re.search(r"```py\n(.*?)```\n\n```\n(.*?)```", page, re.S).groups()
    with redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    print(json.dumps({"printed": printed.getvalue(), "shown": shown}))
