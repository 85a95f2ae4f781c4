"""`python -m tracformer`: the command line, where its script is not on the path, and
under torchrun.
"""

import sys

from tracformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
