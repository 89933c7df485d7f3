#!/usr/bin/env bash
# Two H200s of one host: what passes from GPU to GPU. From the repository's root of a checkout; logs under $OUT.
# About 220 s, and at most 280 s. Parts, the most important first, or those that are named: loads ipc nixl nccl kv_test copies weights rl_test gloo
#   loads: the same fetches between two processes without engines, and what takes how long of them (30 s)
#   ipc, nixl, nccl, gloo: a pair of engines of 8b, prompts of 4,000; goals: fetches at 0.7 of the link, a first token
#     within 1.15; medians of what takes how long of a load, in ms, end the table: mapped, ordered (launched), asked,
#     told (answered), copied, ended; behind its order: the scheduler told, its step. Each load is in the log
#   copies: blocks out of the other GPU's memory, by copy engines and by kernels, for runs of several lengths; then NCCL's rates
#   weights: new weights of 8b by NCCL from a trainer's process; goal: 0.5 s
#   rl_test, kv_test: the tests that need two GPUs; one behind the other, for one reads the free memory of a GPU.
#     kv_test starts 14 engines, of 4 s each where kernels are kept, five of them in processes of their own: 80 s, or 110
# A part that fails is run once more, if there is time, with what NCCL and UCX say of themselves in its log.
# Table last. PY names the interpreter; nixl needs nixl_cu12 or nixl_cu13 on its path.
set -u
PY=${PY:-python3}; OUT=${OUT:-/tmp}; LIMIT=${LIMIT:-280}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# multicast over NVLink may leave GPUs that others share out of service
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
WANTED=" ${*:-loads ipc nixl nccl kv_test copies} "
declare -A told
part() { # name, seconds, command: what its log ends with is kept for the table
  local name=$1 seconds=$2 rc left; shift 2
  case "$WANTED" in *" $name "*) ;; *) return 0;; esac
  left=$((LIMIT - SECONDS)); [ "$seconds" -gt "$left" ] && seconds=$left
  [ "$seconds" -lt 15 ] && { told[$name]="no time was left"; return 0; }
  timeout -k 5 "$seconds" "$@" > "$OUT/two_$name.txt" 2>&1; rc=$?
  told[$name]="rc $rc after $SECONDS s"
  [ $rc -eq 0 ] || [ $rc -eq 124 ] || [ $rc -eq 137 ] && return 0
  left=$((LIMIT - SECONDS)); [ "$left" -gt 45 ] && left=45
  [ "$left" -lt 25 ] && return 0
  cp "$OUT/two_$name.txt" "$OUT/two_$name.first.txt"
  NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$OUT/two_$name.nccl.%p.txt" NCCL_CUMEM_ENABLE=0 UCX_LOG_LEVEL=info UCX_PROTO_INFO=y \
    timeout -k 5 "$left" "$@" > "$OUT/two_$name.txt" 2>&1
  told[$name]="${told[$name]}; once more: rc $? after $SECONDS s"
}
$PY -c 'import torch; print("GPUs:", torch.cuda.device_count(), "peer access:", torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1))'
nvidia-smi topo -m 2>/dev/null | head -4 | cut -c1-80
T="$PY -m pytest -q -n 0 -p no:cacheprovider -o addopts= -m gpu -rsfE"
pair() { # part, way, options
  local name=$1; shift
  part "$name" 60 $PY bench/pair.py --marks --shape "${SHAPE:-8b}" --length "${LENGTH:-4000}" "$@"
}
part loads 45 $PY bench/h200/peer_loads.py ipc nixl nccl
pair ipc p2p:ipc --hits  # the first one compiles what all of them run
pair nixl nixl
pair nccl p2p:nccl
part kv_test 150 $T --durations=0 --durations-min=1 -o faulthandler_timeout=60 tests/gpu/test_connectors_gpu.py -k "P_4_D_2 and not (nccl and LBNHC)"
part copies 40 $PY bench/h200/peer_copies.py
part weights 60 $PY bench/weights.py nccl --model "${SHAPE:-8b}" --rounds 4
part rl_test 60 $T tests/gpu/test_rl_weights_gpu.py -k "W5_weights_of_another_process and nccl"
pair gloo p2p
for name in loads ipc nixl nccl kv_test copies weights rl_test gloo; do
  [ -n "${told[$name]:-}" ] || continue
  echo "=== $name: ${told[$name]}"
  grep -v '^{' "$OUT/two_$name.txt" 2>/dev/null | tail -18 | cut -c1-240
done
