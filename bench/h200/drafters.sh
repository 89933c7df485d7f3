#!/usr/bin/env bash
# Drafters on an H200: 0 kernels compiled behind the start, the bits of no drafts (45 cases, DFlash on flex in a pool of 64 GiB among
# them), then a table of tokens a second. About four minutes where kernels are compiled already; a part that hangs is cut off.
#   bash bench/h200/drafters.sh         all of it; PARTS="first", "bits" or "bench" runs a part
# In the repository root of a checkout of main; no carry needed beyond what the other GPU tests need.
set -u
PY=${PY:-python3}; OUT=${OUT:-/tmp/drafters_out}; PARTS=${PARTS:-"first bits bench"}; mkdir -p "$OUT"
export PYTHONPATH=$PWD/src:$PWD/tests:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
tests() { # log, seconds, flags
  timeout "$2" "$PY" -m pytest -v -p no:cacheprovider -n 0 -m gpu -rP tests/gpu/test_drafters_gpu.py "${@:3}" > "$OUT/$1.log" 2>&1
  echo "$1: rc $? (124: cut off), $(grep -cE "^tests.* PASSED" "$OUT/$1.log") passed" >> "$OUT/$1.log"
}
case "$PARTS" in *first*) tests first 140 -k compile_nothing; esac
case "$PARTS" in *bits*) tests bits 280 -k "not compile_nothing"; esac
case "$PARTS" in *bench*) timeout 90 "$PY" tests/gpu/test_drafters_gpu.py > "$OUT/bench.log" 2>&1; esac
for part in $PARTS; do
  echo "== $part"
  if [ "$part" = bench ]; then grep -E "tokens/s|Error" "$OUT/bench.log" || tail -5 "$OUT/bench.log"
  else grep -qE " PASSED| FAILED" "$OUT/$part.log" || tail -5 "$OUT/$part.log" # nothing ran: why
    grep -E "compiled behind| FAILED| ERROR|^E  |: rc " "$OUT/$part.log" | tail -25; fi | cut -c1-200
done
