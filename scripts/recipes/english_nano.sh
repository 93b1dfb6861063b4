#!/usr/bin/env bash
# english_nano.sh [--FLAG VALUE ...]: a nano model of 27 million parameters on 106 million bytes of
# English, for minutes of one GPU or hours of a CPU. Flags given here take the place of those below;
# RANKS and PROGRAM in the environment those of the one GPU and of the GPU build. On two CPU cores:
# RANKS=2 PROGRAM=./train_gpt scripts/recipes/english_nano.sh --micro-batch 8.
#
#   Data      .venv/bin/python scripts/recipes/english_corpus.py (docs/results/english.md)
#   Tokens    2,500 steps x 32,768 tokens = 81,920,000, so 3.3 times the corpus
#   Memory    4.7 GiB on each GPU (predicted; --dry-run has the table)
#   Time      0.69 minutes on one H100, predicted by
#             RANKS=1 PROGRAM=./train_gpt scripts/recipes/english_nano.sh --dry-run \
#                 --cluster "1x1,gpu=h100"; not measured. Under 3 minutes of an H200 that had three
#             more such runs beside it, measured
#   Loss      3.300 of held-out text, 1.115 bits a byte (measured: docs/results/english.md)
# Rates are nano_d12.sh's, with an embedding that learns as fast as nanochat's does at this width.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/recipe.sh
recipe "${RANKS:-1}" "${PROGRAM:-./train_gpt_cuda}" \
    --train 'data/english_train_*.bin' --val 'data/english_val_*.bin' \
    --tokenizer data/english_tokenizer.bin \
    --model arch=nano,layers=8,heads=6,channels=384,vocab=16384 --dtype bf16 --seq-len 512 \
    --micro-batch 64 --batch-tokens 32768 --steps 2500 \
    --optimizer muon --muon-lr 0.025 --muon-weight-decay 0.05 \
    --lr 0.004 --lr-embedding 50 --beta1 0.8 --beta2 0.95 --eps 1e-10 --weight-decay 0.001 \
    --lr-schedule wsd-linear --lr-last-part 0.5 --final-lr-fraction 0 \
    --val-every 200 --val-batches -1 --save-every 500 --keep 2 --out out/english_nano \
    --sample-every 1250 --sample-tokens 200 --temperature 0.8 \
    --log out/english_nano/log.jsonl "$@"
