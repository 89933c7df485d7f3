"""Engine workloads from a checkout, as `octavo bench engine`: `python bench/engine.py --shape tiny --workload all`."""

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "engine", *sys.argv[1:]]))
