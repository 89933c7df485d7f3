#!/usr/bin/env bash
# One H200 that nothing else uses: blocks between its cache, the host's memory and files. From the repository's root of a
# checkout; logs under $OUT. Names of parts, or none for all (about 300 s): gates gpu hits speed ways bits sides blhnc
#   gates: tests of graphs that wait within, and of a request alone behind its load (25 s)
#   gpu: the same, of other layouts and with drafts, and of copies (60 s, or twice that where kernels are to be compiled);
#     a test of more than 45 s says where it stands
#   hits: a hit in host memory, with layers that wait for their own blocks and without (35 s)
#   speed: `octavo bench connectors` of 8b: hits beside recomputation, copies beside decoding (40 s)
#   ways: copies ordered in other ways beside decoding (40 s); the default's lines are its first and its last
#   bits: of 0.6b and of a model with states, from host memory, alone and among others (40 s)
#   sides: blocks between sides that differ, by p2p, and nixl both ways, and NCCL refused in time (60 s)
#   blhnc: speed of 0.6b in such a layout (25 s)
# Table last. PY names the interpreter. Two GPUs: two_gpus.sh.
set -u
PY=${PY:-python3}; OUT=${OUT:-/tmp}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
WANTED=" ${*:-gates gpu hits speed ways bits sides blhnc} "; codes=""
T="$PY -m pytest -q -n 0 -p no:cacheprovider -o addopts= -m gpu -rsfE --durations=5 -o faulthandler_timeout=45 tests/gpu/test_connectors_gpu.py"
part() { # name, seconds, command
  local name=$1 seconds=$2 rc; shift 2
  case "$WANTED" in *" ${name%%_*} "*) ;; *) return 0;; esac
  timeout -s INT -k 10 "$seconds" "$@" > "$OUT/connectors_$name.txt" 2>&1; rc=$?
  codes="$codes $name $rc after $SECONDS s;"
}
part gates 60 $T -k "O_2 or (a_request_alone and LBNHC-False)"
part gpu 150 $T -k "(a_request_alone and not LBNHC-False) or cross_the_bus"
part hits 80 $PY bench/h200/hits.py --shape 8b
part speed 90 $PY -m octavo bench connectors --shape 8b --length 2000 --rows 64
part ways 90 $PY bench/h200/copies.py --shape 8b
part bits_attention 45 $PY -m octavo bench reproducibility --shape 0.6b --tokens 2000 --axis "host memory" --axis "host memory, alone"
part bits_states 45 $PY -m octavo bench reproducibility --model octavo-tiny-hybrid --tokens 2000 --axis "host memory"
part sides 130 $T -k "T_2 or O_1_C_13 or P_3"
part blhnc 50 $PY -m octavo bench connectors --shape 0.6b --length 2000 --rows 64 --kv-cache-layout BLHNC
echo "exit codes:$codes"
show() { [ -f "$OUT/connectors_$1.txt" ] && { echo "--- $1"; grep -v '^{' "$OUT/connectors_$1.txt" | tail -"$2" | cut -c1-200; }; }
for name in sides gpu gates; do case "$WANTED" in *" $name "*) show $name 12;; esac; done
case "$WANTED" in *" bits "*) show bits_attention 5; show bits_states 4;; esac
for name in blhnc speed; do case "$WANTED" in *" $name "*) show $name 25;; esac; done
case "$WANTED" in *" ways "*) show ways 14;; esac
case "$WANTED" in *" hits "*) show hits 5;; esac
