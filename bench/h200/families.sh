#!/usr/bin/env bash
# Hybrid families on an H200. From the repository root; one part per call (each ends by itself), or "all" for 1 and 2.
#   bash families.sh 1   every hybrid family of tests/gpu/families.py, float32 = the CPU's tokens, bfloat16 alone = in a batch (about 90 s)
#   bash families.sh 2   octavo bench reproducibility on octavo-tiny-hybrid, all axes (about 90 s)
#   bash families.sh 3   octavo bench engine --shape mamba2: start, single, decode64, decode512, prefill (about 120 s)
#   bash families.sh 4   octavo bench engine --shape gdn: the same (51 GB of dummy weights; about 150 s)
set -u
OUT=${OUT:-/tmp/families_out}; mkdir -p "$OUT"
PY=${PY:-python3}; [ -x .venv/bin/python ] && PY=.venv/bin/python
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
part=${1:-all}
if [ "$part" = 1 ] || [ "$part" = all ]; then
  timeout 240 "$PY" -m pytest -q -m gpu -n 10 --dist loadgroup tests/gpu/test_families_gpu.py \
    -k "Qwen3-Next or Qwen3.5 or LFM or Granite or Bamba or Nemotron or Mamba or Falcon or Jamba" > "$OUT/hybrids.log" 2>&1
  echo "hybrid families: $(tail -1 "$OUT/hybrids.log")"; grep -E "^(FAILED|ERROR)|^E  " "$OUT/hybrids.log" | cut -c1-200 | head -30
fi
if [ "$part" = 2 ] || [ "$part" = all ]; then
  for dtype in bfloat16 float32; do
    timeout 200 "$PY" -m octavo bench reproducibility --model octavo-tiny-hybrid --device cuda --dtype $dtype --tokens 2000 > "$OUT/repro_$dtype.log" 2>&1
    echo "octavo-tiny-hybrid $dtype: rc $?"; grep -v "^{" "$OUT/repro_$dtype.log" | cut -c1-170 | tail -30
  done
fi
for shape in mamba2 gdn; do
  n=3; [ $shape = gdn ] && n=4
  if [ "$part" = $n ]; then
    for work in start single decode64 decode512 prefill; do
      timeout 170 "$PY" -m octavo bench engine --shape $shape --device cuda --workload $work > "$OUT/$shape.$work.log" 2>&1
      echo "$shape $work: rc $?; $(grep -E "tok/s|start  " "$OUT/$shape.$work.log" | head -1 || tail -1 "$OUT/$shape.$work.log")"
    done
  fi
done
