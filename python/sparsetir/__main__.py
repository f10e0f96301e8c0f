"""`python -m sparsetir`: the command line."""

import sys

from sparsetir.cli import main

if __name__ == "__main__":
    sys.exit(main())
