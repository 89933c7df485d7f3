#!/usr/bin/env bash
set -u
T0=$(date +%s); LIMIT_ALL=${1:-390}
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=$PWD/src:/tmp/site HF_HUB_DISABLE_PROGRESS_BARS=1
mkdir -p /tmp/log
left() { echo $((LIMIT_ALL - $(date +%s) + T0)); }
go() { local n=$1 g=$2; shift 2; CUDA_VISIBLE_DEVICES=$g timeout -k 3 $(left) "$@" > /tmp/log/$n.txt 2>&1; }
T="python3 -m pytest -q -p no:cacheprovider -o addopts= -m gpu -rfE --dist loadgroup"
B="python3 -m octavo bench reproducibility --device cuda --dtype bfloat16 --tokens 2048 --kv-cache-memory-bytes"
Z="python3 tests/gpu/fuzz_engines.py --count 100000 --seconds $((LIMIT_ALL - 80)) --drafts 4"
go fuzz_a 0 $Z --first 810000 --models octavo-tiny-hybrid,q3n-h &
go fuzz_b 0 $Z --first 820000 --models mamba2-h,granite-h &
go fuzz_c 1 $Z --first 830000 --models lfm2-h,jamba-h,deepseek3 &
go fuzz_d 1 $Z --first 840000 --models octavo-tiny-hybrid,mamba2-h,q3n-h &
( sleep 3; go fp8 0 $B 4G --kv-cache-dtype fp8 ) &
( sleep 3; go int8 1 $B 4G --kv-cache-dtype int8 ) &
( sleep 3; go hybrid8 0 $B 8G --model octavo-tiny-hybrid --kv-cache-dtype fp8 ) &
( sleep 5; go race 1 python3 tests/gpu/race_check.py compute-sanitizer "prompt attention" "decode attention" ) &
( sleep 5; go recorded 0 $T -n 0 tests/gpu/test_recorded_bits_gpu.py ) &
( go attention 1 $T -n 5 tests/gpu/test_elementwise_gpu.py tests/gpu/test_fused_rope_decode_gpu.py tests/gpu/test_decode_attention_gpu.py tests/gpu/test_prefill_attention_gpu.py tests/gpu/test_latent_gpu.py ; go families 1 $T -n 6 tests/gpu/test_families_gpu.py ) &
( go backends 0 $T -n 5 tests/gpu/test_hybrid_backends_gpu.py tests/gpu/test_speculation_gpu.py ) &
wait
tar czf $OUT/logs.tgz -C /tmp log
for f in attention backends recorded families; do echo "== $f: $(tail -1 /tmp/log/$f.txt | cut -c1-160)"; grep -E "^(FAILED|ERROR)|^E  " /tmp/log/$f.txt | head -8 | cut -c1-200; done
echo "== race: $(tail -3 /tmp/log/race.txt | cut -c1-300)"
for n in fuzz_a fuzz_b fuzz_c fuzz_d; do echo "== $n: $(tail -2 /tmp/log/$n.txt | cut -c1-250)"; grep -iE "differ|error" /tmp/log/$n.txt | grep -v " 0 differ" | head -5 | cut -c1-250; done
for n in fp8 int8 hybrid8; do log=/tmp/log/$n.txt
  echo "=== $n: $(grep -c 'different: 0 logits, 0 log-probabilities, 0 tokens' "$log") clean; $(grep -v '^{' "$log" | tail -1 | cut -c1-150)"
  grep -E 'different: |NOT MET|Error|^octavo: ' "$log" | grep -v 'different: 0 logits, 0 log-probabilities, 0 tokens' | cut -c1-180 | head -8; done
echo "total $(( $(date +%s) - T0 ))"
