"""`python -m mionnx`."""

from mionnx.cli import main

if __name__ == "__main__":
    main()
