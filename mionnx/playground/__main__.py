"""`python -m mionnx.playground FOLDER`: the ready playground of the small Llama that ships, with its lessons."""

import sys

from mionnx.model import MIModel
from mionnx.playground.folder import playground

TITLE = "World Llama: where a small model keeps its capitals"


def main() -> None:
    """Write the playground of the shipped Llama into a folder that is named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("python -m mionnx.playground FOLDER")
    print(playground(MIModel.from_pretrained("world-llama"), sys.argv[1], title=TITLE))


if __name__ == "__main__":
    main()
