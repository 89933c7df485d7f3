"""A trainer's process for tests: sends two sets of weights in turn, for ever: `python loop_sender.py URL TIMEOUT`.

Prints a line when it has imported what it needs, and waits for one before each update; says when each is through.
"""

from __future__ import annotations

import itertools
import sys

from octavo.rl import Sender, WeightSource
from weights_rig import other_weights

sender = Sender(sys.argv[1], "gloo", timeout=float(sys.argv[2]))
sources = [WeightSource(other_weights(seed)) for seed in (1, 2)]
print("ready", flush=True)
for turn in itertools.cycle((0, 1)):
    sys.stdin.readline()
    sender.send(sources[turn], str(turn + 1))
    print("sent", flush=True)
