"""`python -m cortiq_kernels` is `cortiq`."""

import sys

from cortiq_kernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
