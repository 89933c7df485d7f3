"""Hits from elsewhere, from a checkout, as `octavo bench connectors`: `python bench/connectors.py --shape tiny`."""

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "connectors", *sys.argv[1:]]))
