"""Engine workloads from a checkout: `python bench/engine.py --shape tiny --workload all`."""

from octavo.benchmark import main

if __name__ == "__main__":
    raise SystemExit(main())
