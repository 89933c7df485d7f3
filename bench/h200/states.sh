#!/usr/bin/env bash
# Layers with states on a Hopper GPU, in about four minutes: kernels in the checker's cases, float64, bits over cuts; graphs
# and none; then, with nothing beside, shares of the bytes and of the matrix units, other tiles, and the shape `mamba2`
# end to end with the time of its kernels by family. From the repository root. Tables are last; logs under $OUT.
#   bash bench/h200/states.sh        all of it
#   bash bench/h200/states.sh gdn    the shape `gdn` instead (51 GB of dummy weights)
#   bash bench/h200/states.sh 512    decode512 of `mamba2` (an H200: 113 GB of cache), states of float32 and bfloat16
set -u
OUT=${OUT:-/tmp/states_out}; mkdir -p "$OUT"
PY=${PY:-python3}; [ -x .venv/bin/python ] && PY=.venv/bin/python
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
bench() { # shape, seconds, flags
  timeout "$2" "$PY" -m octavo bench engine --shape "$1" --device cuda "${@:3}" > "$OUT/$1.$4.log" 2>&1
  echo "$1 $4: rc $?"; grep -vE '^\{|^ +[0-9.]+ us' "$OUT/$1.$4.log" | cut -c1-150 | tail -${LINES_SHOWN:-30}
}
case ${1:-all} in
  gdn) for work in start single decode64 decode512 prefill; do bench gdn 170 --workload $work; done; exit ;;
  512) bench mamba2 200 --workload decode512; bench mamba2 200 --workload decode512 --state-dtype bfloat16; exit ;;
esac
timeout 150 "$PY" bench/h200/states.py correct > "$OUT/correct.log" 2>&1 & first=$!
timeout 150 "$PY" bench/h200/states.py engine > "$OUT/engine.log" 2>&1 & second=$!
timeout 150 "$PY" tests/gpu/kernel_cases.py "short convolution" "gated delta rule" Mamba-2 Mamba-1 norm activation \
  > "$OUT/cases.log" 2>&1; echo "kernel cases: rc $?; $(tail -1 "$OUT/cases.log" | cut -c1-200)"
wait $first; echo "correct: rc $?"; wait $second; echo "engine: rc $?"
timeout 90 "$PY" bench/h200/states.py times > "$OUT/times.log" 2>&1; echo "times: rc $?"
bench mamba2 80 --workload single --profile
bench mamba2 50 --workload start
bench mamba2 50 --workload decode64
for part in correct engine times; do # a part that was cut off has no table, but a line for each answer
  if grep -qE "^[^[].*, [0-9]+ s$" "$OUT/$part.log"; then grep -A60 -E "^[^[].*, [0-9]+ s$" "$OUT/$part.log"
  else echo "$part: no table"; grep -E "^\[" "$OUT/$part.log" || tail -5 "$OUT/$part.log"; fi | cut -c1-220
done
