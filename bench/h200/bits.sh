#!/usr/bin/env bash
# The same bits as ever, on one H200 or over several: side by side, for what they take is mostly a processor's.
# From the repository's root of a checkout; logs under $OUT. About 400 s, and at most $LIMIT (560 s).
#   recorded: 200 recorded requests of small models, with default settings and graphs (150 s alone)
#   families: every family with default settings, float32 beside the CPU's tokens, bfloat16 alone and in a batch
#   trainer: a trainer's forward beside the engine's log-probabilities, 20,000 tokens of 0.6b and of 8b among them
#   AXES: octavo bench reproducibility in bfloat16, all axes, of the bundled models and of 0.6b; of the hybrid in two parts, of 8b in three
# Named parts, or all: recorded families trainer tiny hybrid_a hybrid_b 0.6b 8b_a 8b_b 8b_c. Table last.
# By name alone: narrow, all axes over caches of 8 bits, by paged and by flex; fuzz, random engines beside plain ones (tests/gpu/fuzz_engines.py), four processes by models, from seeds FIRST (0) on.
# By name alone, as many a call as there are GPUs, LIMIT=195: all axes of the shapes mamba2 and gdn, SHAPE_PART. Parts: beside (20,000 tokens: other
# requests), hits (4,096: the cache, and A, B, A 1,000 times), drafts (4,096: drafts, preemption, host memory, everything),
# blocks (4,096: sizes of blocks, no graphs), chunks (20,000: steps of 7, 64, 100 and 512 tokens).
set -u
PY=${PY:-python3}; OUT=${OUT:-/tmp}; LIMIT=${LIMIT:-560}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 HF_HUB_DISABLE_PROGRESS_BARS=1
WANTED=" ${*:-recorded families trainer tiny hybrid_a hybrid_b 0.6b 8b_a 8b_b 8b_c} "
WANTED=${WANTED/ fuzz / fuzz_a fuzz_b fuzz_c fuzz_d }
WANTED=${WANTED/ narrow / narrow_fp8 narrow_int8 narrow_hybrid narrow_flex }
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); [ "${GPUS:-0}" -gt 0 ] || GPUS=1
T="$PY -m pytest -q -p no:cacheprovider -o addopts= -m gpu -rfE"
B="$PY -m octavo bench reproducibility --device cuda --dtype bfloat16"
names=()
part() { # name, which GPU, command: begun, in the background
  local name=$1 gpu=$(($2 % GPUS)); shift 2
  case "$WANTED" in *" $name "*) ;; *) return 0;; esac
  names+=("$name")
  CUDA_VISIBLE_DEVICES=$gpu timeout -k 5 "$LIMIT" "$@" > "$OUT/bits_$name.txt" 2>&1 &
}
axes() { # those of a file's line, as options
  local name; while read -r name; do printf -- '--axis\n%s\n' "$name"; done
}
mapfile -t A < <(printf '%s\n' restart "batch size" order neighbours "mixed steps" siblings logprobs "chunk size" "prefix hit" "host memory" | axes)
mapfile -t C < <(printf '%s\n' "host memory, alone" preemption speculation | axes)
mapfile -t D < <(printf '%s\n' "oracle's drafts" "blocks of 16" "blocks of 48" "blocks of 64" "blocks of 528" "kernel block" "odd kernel block" "step in flight" "graph or eager" everything | axes)
mapfile -t E < <(printf '%s\n' restart "batch size" order neighbours "mixed steps" siblings logprobs "chunk size" "prefix hit" "host memory" "host memory, alone" preemption speculation "oracle's drafts" "blocks of 16" "blocks of 32" "blocks of 128" "kernel block" | axes)
mapfile -t F < <(printf '%s\n' "border hit" "A, B, A" "last states" "chunks of 7" "chunks of 64" "chunks of 100" "chunks of 512" "step in flight" "graph or eager" everything | axes)
M=--kv-cache-memory-bytes  # each its own part of the GPU's memory: an engine takes all that is free else
part 8b_a 0 $B --shape 8b $M 16G "${A[@]}"
part 8b_b 1 $B --shape 8b $M 16G "${C[@]}"
part 8b_c 1 $B --shape 8b $M 16G "${D[@]}"
part 0.6b 0 $B --shape 0.6b $M 12G
part recorded 1 $T -n 0 tests/gpu/test_recorded_bits_gpu.py
part tiny 0 $B $M 4G
part narrow_fp8 0 $B $M 4G --kv-cache-dtype fp8
part narrow_int8 1 $B $M 4G --kv-cache-dtype int8
part narrow_hybrid 0 $B --model octavo-tiny-hybrid $M 8G --kv-cache-dtype fp8 "${E[@]}"
part narrow_flex 1 $B $M 4G --kv-cache-dtype fp8 --attention-backend flex "${A[@]}"
part hybrid_a 1 $B --model octavo-tiny-hybrid $M 8G "${E[@]}"
part hybrid_b 1 $B --model octavo-tiny-hybrid $M 8G "${F[@]}"
part families 0 $T -n 8 --dist loadgroup tests/gpu/test_families_gpu.py
part trainer 1 $T -n 4 tests/gpu/test_rl_gpu.py
FUZZ="$PY tests/gpu/fuzz_engines.py --count 100000 --seconds $((LIMIT > 90 ? LIMIT - 60 : LIMIT / 3))"
FIRST=${FIRST:-0} # each part draws its own cases
part fuzz_a 0 $FUZZ --first "$FIRST" --models octavo-tiny,qwen3-h
part fuzz_b 1 $FUZZ --first $((FIRST + 100000)) --models octavo-tiny-hybrid,q3n-h
part fuzz_c 2 $FUZZ --first $((FIRST + 200000)) --models mamba2-h,granite-h
part fuzz_d 3 $FUZZ --first $((FIRST + 300000)) --models lfm2-h,jamba-h,deepseek3
for shape in mamba2 gdn; do # each alone on a GPU: an engine takes what is free
  R="$B --shape $shape"
  part ${shape}_beside ${#names[@]} $R --tokens 20000 --axis restart --axis "batch size" --axis order --axis neighbours --axis "mixed steps" --axis siblings --axis logprobs
  part ${shape}_hits ${#names[@]} $R --tokens 4096 --times 1000 --axis "prefix hit" --axis "border hit" --axis "A, B, A" --axis "last states"
  part ${shape}_drafts ${#names[@]} $R --tokens 4096 --axis "host memory" --axis "host memory, alone" --axis preemption --axis speculation --axis "oracle's drafts" --axis everything
  part ${shape}_blocks ${#names[@]} $R --tokens 4096 --axis "blocks of 16" --axis "blocks of 32" --axis "blocks of 128" --axis "kernel block" --axis "step in flight" --axis "graph or eager"
  part ${shape}_chunks ${#names[@]} $R --tokens 20000 --axis "chunk size" --axis "chunks of 7" --axis "chunks of 64" --axis "chunks of 100" --axis "chunks of 512"
done
wait
for name in "${names[@]}"; do
  log="$OUT/bits_$name.txt"
  echo "=== $name: $(grep -c 'different: 0 logits, 0 log-probabilities, 0 tokens' "$log") axes without a difference; $(grep -v '^{' "$log" | tail -1 | cut -c1-150)"
  grep -E 'different: |NOT MET|^(FAILED|ERROR)|Error|^octavo: ' "$log" | grep -v 'different: 0 logits, 0 log-probabilities, 0 tokens' | cut -c1-180 | head -8
done
