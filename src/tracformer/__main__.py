"""`python -m tracformer`: the command line without its script, as torchrun needs it."""

import sys

from tracformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
