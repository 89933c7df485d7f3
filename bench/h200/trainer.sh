#!/usr/bin/env bash
# A trainer on a GPU, an H200 that nothing else uses. From the repository's root of a checkout; logs under $OUT; about 300 s.
# At most 400 s for `kernels bits recorded sleep` and 300 s for the rest, which fit a command of ten minutes each.
# Give names of parts, or none for all: kernels bits recorded sleep weights_tests weights rl
set -u
OUT=${OUT:-/tmp/rlgpu}; mkdir -p "$OUT"
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}  # the tests' trainers are processes of their own
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
began=$SECONDS
# who runs out of time says what has failed by then
T="python3 -m pytest -q -p no:cacheprovider -o addopts= -m gpu --durations=8"
WANTED=" ${*:-kernels bits sleep weights_tests recorded weights rl} "
wants() { case "$WANTED" in *" $1 "*) return 0;; esac; return 1; }
done_() { echo "=== $1: rc $2, after $((SECONDS - began)) s"; tail -"$3" "$OUT/$1.log" | cut -c1-180; }
# 1: what is right, side by side: each engine has its own, small memory
wants kernels && { timeout 60 python3 tests/gpu/kernel_cases.py backward "attention backward" >"$OUT/kernels.log" 2>&1; echo $? >"$OUT/kernels.rc"; } &
wants bits && { timeout 220 $T -n 8 tests/gpu/test_rl_gpu.py >"$OUT/bits.log" 2>&1; echo $? >"$OUT/bits.rc"; } &
wants recorded && { timeout 120 $T tests/gpu/test_recorded_bits_gpu.py >"$OUT/recorded.log" 2>&1; echo $? >"$OUT/recorded.rc"; } &
wait
for name in kernels bits recorded; do wants $name && done_ $name "$(cat "$OUT/$name.rc")" 16; done
# 2: alone, since some of them read the device's free memory
if wants sleep; then timeout -s INT -k 10 150 $T -s tests/gpu/test_rl_sleep_gpu.py >"$OUT/sleep.log" 2>&1; done_ sleep $? 20; fi
if wants weights_tests; then timeout -s INT -k 10 150 $T tests/gpu/test_rl_weights_gpu.py >"$OUT/weights_tests.log" 2>&1; done_ weights_tests $? 14; fi
# 3: speed, alone
if wants weights; then timeout 90 python3 bench/weights.py ipc disk >"$OUT/weights.log" 2>&1; done_ weights $? 14; fi
if wants weights && [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
  timeout 60 python3 bench/weights.py nccl >"$OUT/nccl.log" 2>&1; done_ nccl $? 6
fi
if wants rl; then timeout 60 python3 bench/rl.py 0.6b 8b --json "$OUT/rl.json" >"$OUT/rl.log" 2>&1; done_ rl $? 10; fi
