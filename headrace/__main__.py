"""`python -m headrace` and the `headrace` console script."""

import sys

from headrace.frontend.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
