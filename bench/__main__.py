"""`python -m bench` is `carbon-compile bench`: the same options, in a checkout that isn't installed too."""

import sys

from carbon_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
