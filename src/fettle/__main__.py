"""`python -m fettle`: the command line for a Python whose scripts are not on the PATH."""

from fettle.cli import main

if __name__ == "__main__":
    main()
