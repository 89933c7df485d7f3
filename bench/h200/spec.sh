#!/usr/bin/env bash
# One H200, about 120 s where kernels are compiled already, 560 s at most (PARTS="tests", "bits" or "bench" runs a part; "cases" the kernels of drafts against their references, some 40 s): tests/gpu of speculation; the axis speculation on 0.6b; one row
# with an oracle of p = 0.8 and k = 4 beside plain on 0.6b and 8b, bare and with an EAGLE-3-shaped drafter of random weights run for its
# cost; 64 rows of 8b; n-grams. PARTS="row" is the four of one row alone (some 60 s), "row profile" with their kernels, "eagle profile" the drafter's on 0.6b alone. Every comparison
# fails if a token differs. Table last. Run in the repository root.
set -u
PY=${PY:-python3}; OUT=${OUT:-/tmp}; PARTS=${PARTS:-"bench bits tests"}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
$PY - "$OUT" <<'PYEOF'
import json, pathlib, sys
for name, hidden, heads, kv, ff in (("0.6b", 1024, 16, 8, 3072), ("8b", 4096, 32, 8, 12288)):
    folder = pathlib.Path(sys.argv[1], "head-" + name)
    folder.mkdir(exist_ok=True)
    facts = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 32000,
             "target_hidden_size": hidden, "tie_word_embeddings": False, "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
             "hidden_size": hidden, "intermediate_size": ff, "max_position_embeddings": 4096, "num_attention_heads": heads,
             "num_key_value_heads": kv, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "vocab_size": 151936}
    (folder / "config.json").write_text(json.dumps(facts))
PYEOF
one() { timeout "$((${MOST:-55}${PROFILE:+ + 25}))" $PY -m octavo bench engine --shape "$2" --workload "$3" --num-drafts 4 "${@:4}" > "$OUT/spec_$1.txt" 2>&1; }
cost() { echo "{\"method\": \"eagle3\", \"model\": \"$OUT/head-$1\"}"; }
case "$PARTS" in *profile*) PROFILE=--profile;; *) PROFILE=; esac
case "$PARTS" in *bench*|*row*)
  MOST=90 one 0.6b 0.6b single --oracle 0.8 $PROFILE  # where nothing is compiled yet
  MOST=80 one 8b 8b single --oracle 0.8 $PROFILE
  one 0.6b_eagle3 0.6b single --oracle 0.8 --drafts "$(cost 0.6b)" $PROFILE
  one 8b_eagle3 8b single --oracle 0.8 --drafts "$(cost 8b)" $PROFILE
esac
case "$PARTS" in *eagle*) MOST=90 one 0.6b_eagle3 0.6b single --oracle 0.8 --drafts "$(cost 0.6b)" $PROFILE;; esac
case "$PARTS" in *bench*)
  one 8b_rows64 8b decode64 --oracle 0.8
  one 0.6b_ngram 0.6b quotes --drafts '{"method": "ngram"}'
esac
case "$PARTS" in *cases*)
  timeout 110 $PY tests/gpu/kernel_cases.py "rows that verify" "rotation and attention" "decode attention" inputs draw drafts \
    "a drafter's entries" "few rows of a head" > "$OUT/spec_cases.txt" 2>&1 || echo "FAILED" >> "$OUT/spec_cases.txt"
esac
case "$PARTS" in *bits*)
  timeout 60 $PY -m octavo bench reproducibility --shape 0.6b --tokens 4000 --axis speculation > "$OUT/spec_bits.txt" 2>&1
esac
case "$PARTS" in *tests*)
  timeout 110 $PY -m pytest -q -n 0 -m gpu -p no:cacheprovider tests/gpu/test_speculation_gpu.py > "$OUT/spec_tests.txt" 2>&1
esac
case "$PARTS" in *profile*)
  for name in 0.6b 8b 0.6b_eagle3; do echo "== $name"; grep -A18 '^kernels with drafts' "$OUT/spec_$name.txt" 2>/dev/null | cut -c1-110; done
esac
case "$PARTS" in *cases*) echo "== cases"; tail -8 "$OUT/spec_cases.txt" 2>&1 | cut -c1-220;; esac
case "$PARTS" in *tests*) echo "== tests"; tail -6 "$OUT/spec_tests.txt" 2>&1 | cut -c1-220;; esac
case "$PARTS" in *bits*) echo "== bits"; grep -v '^{' "$OUT/spec_bits.txt" 2>&1 | tail -3 | cut -c1-220;; esac
for name in 0.6b 8b 0.6b_eagle3 8b_eagle3 8b_rows64 0.6b_ngram; do
  printf '%-12s ' "$name"; grep -v '^{' "$OUT/spec_$name.txt" 2>/dev/null | tail -1 | cut -c1-260; done
