#!/usr/bin/env bash
# One H200, about 200 s and at most 440 s, or two, at most 560 s: `host` and file hits against recomputation, copies beside decoding (8b in the default layout, then
# 0.6b in a block-outermost one), the same bits from host memory, states among them, blocks between sides that
# differ (by `p2p`, and `nixl` both ways), and blocks by NCCL (one GPU: refused in time; two: the same bits,
# and the rate of fetches beside the link's).
# Table last. Run in the repository root; PY names the interpreter.
set -u
PY=${PY:-python3}; OUT=${OUT:-/tmp}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
timeout 110 $PY -m octavo bench connectors --shape 8b --length 2000 --rows 64 > "$OUT/connectors_default.txt" 2>&1; a=$?
timeout 50 $PY -m octavo bench connectors --shape 0.6b --length 2000 --rows 64 --kv-cache-layout BLHNC > "$OUT/connectors_blhnc.txt" 2>&1; b=$?
timeout 45 $PY -m octavo bench reproducibility --shape 0.6b --tokens 2000 --axis "host memory" > "$OUT/connectors_bits.txt" 2>&1; c=$?
timeout 45 $PY -m octavo bench reproducibility --model octavo-tiny-hybrid --tokens 2000 --axis "host memory" > "$OUT/connectors_states.txt" 2>&1; e=$?
timeout -s INT -k 10 80 $PY -m pytest -q -n 0 -o addopts= -m gpu -rsfE tests/gpu/test_connectors_gpu.py -k "not T_2" > "$OUT/connectors_nccl.txt" 2>&1; d=$?
timeout -s INT -k 10 110 $PY -m pytest -q -n 0 -o addopts= -m gpu -rsfE tests/gpu/test_connectors_gpu.py -k T_2 > "$OUT/connectors_sides.txt" 2>&1; g=$?
f=-; if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
  timeout 120 $PY bench/pair.py --shape 8b --length 4000 p2p:nccl nixl p2p > "$OUT/connectors_pair.txt" 2>&1; f=$?
  grep -v '^{' "$OUT/connectors_pair.txt" | tail -13
fi
echo "exit codes: 8b default layout $a, 0.6b BLHNC $b, bits $c, of states $e, NCCL $d, a pair $f, sides that differ $g"
tail -6 "$OUT/connectors_sides.txt" | cut -c1-200
tail -6 "$OUT/connectors_nccl.txt" | cut -c1-200
tail -4 "$OUT/connectors_bits.txt" | cut -c1-200
tail -4 "$OUT/connectors_states.txt" | cut -c1-200
for name in connectors_default connectors_blhnc; do grep -v '^{' "$OUT/$name.txt" | tail -20; done
