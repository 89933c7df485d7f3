#!/usr/bin/env bash
# Drafters on an H200, about a minute and a half: the bits of no drafts (30 cases), then a table of tokens a second.
# In the repository root of a checkout of main; no carry needed beyond what the other GPU tests need.
export PYTHONPATH=$PWD/src:$PWD/tests:$PWD/tests/gpu PYTHONUNBUFFERED=1
python3 -m pytest -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_drafters_gpu.py 2>&1 | tail -25
python3 tests/gpu/test_drafters_gpu.py 2>&1 | grep -E "tokens/s|Error" 
