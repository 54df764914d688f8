"""`python -m mionnx`."""

from mionnx.cli.main import main

if __name__ == "__main__":
    main()
