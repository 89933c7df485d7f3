#!/usr/bin/env bash
# Drafters on an H200, about two minutes: the bits of no drafts (45 cases, DFlash on flex in a pool of 64 GiB among them), 0 kernels compiled behind the
# start, then a table of tokens a second.
# In the repository root of a checkout of main; no carry needed beyond what the other GPU tests need.
export PYTHONPATH=$PWD/src:$PWD/tests:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python3 -m pytest -q -p no:cacheprovider -n 0 -m gpu -rP tests/gpu/test_drafters_gpu.py 2>&1 | grep -E "compiled behind|passed|failed|FAILED|Error" | tail -25
python3 tests/gpu/test_drafters_gpu.py 2>&1 | grep -E "tokens/s|Error" 
