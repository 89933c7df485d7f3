"""The mock engine at a pace: the environment variable PACE says how many seconds a step takes."""

from __future__ import annotations

import os
import sys

from mock_engine import main

if __name__ == "__main__":
    main(["--step-seconds", os.environ["PACE"], *sys.argv[1:]])
