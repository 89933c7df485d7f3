"""`python -m octavo`: the same as the `octavo` command."""

from __future__ import annotations

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
