#!/usr/bin/env bash
# english_cpu.sh [--FLAG VALUE ...]: a nano model of 18 million parameters on 106 million bytes of
# English, for an hour of two CPU cores. Flags given here take the place of those below; RANKS and
# PROGRAM in the environment those of the two ranks and of the CPU build.
#
#   Data      .venv/bin/python scripts/recipes/english_corpus.py (docs/results/english.md)
#   Tokens    800 steps x 8,192 tokens = 6,553,600, so 0.27 of the corpus
#   Memory    0.67 GiB on each rank (predicted; --dry-run has the table)
#   Time      about an hour on two cores of an Intel Xeon (3.2 to 4 s a step, measured)
#   Loss      4.318 of held-out text, 1.459 bits a byte (measured: docs/results/english.md)
#
# It goes on after a stop or a crash with --resume 1, in another layout with, for example, --zero 3.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/recipe.sh
recipe "${RANKS:-2}" "${PROGRAM:-./train_gpt}" \
    --train 'data/english_train_*.bin' --val 'data/english_val_*.bin' \
    --tokenizer data/english_tokenizer.bin \
    --model arch=nano,layers=6,heads=5,channels=320,vocab=16384 --dtype bf16 --seq-len 512 \
    --micro-batch 8 --batch-tokens 8192 --steps 800 \
    --optimizer muon --muon-lr 0.025 --muon-weight-decay 0.05 \
    --lr 0.004 --lr-embedding 50 --beta1 0.8 --beta2 0.95 --eps 1e-10 --weight-decay 0.001 \
    --lr-schedule wsd-linear --lr-last-part 0.5 --final-lr-fraction 0 \
    --val-every 200 --val-batches -1 --save-every 100 --keep 2 --out out/english_cpu \
    --sample-every 400 --sample-tokens 200 --temperature 0.8 \
    --log out/english_cpu/log.jsonl "$@"
