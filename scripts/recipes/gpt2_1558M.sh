#!/usr/bin/env bash
# gpt2_1558M.sh [--FLAG VALUE ...]: GPT-2 1558M on 33.6 billion tokens of FineWeb-Edu, on 8 GPUs
# of 80 GB or more. Flags given here take the place of those below; RANKS and PROGRAM in the
# environment those of the 8 GPUs and of the GPU build.
#
#   Data      FineWeb-Edu's sample of 100 billion tokens as shards of llm.c's format,
#             data/edu_fineweb_train_*.bin and data/edu_fineweb_val_*.bin, and
#             data/hellaswag_val.bin: dev/data/fineweb.py and dev/data/hellaswag.py of
#             https://github.com/karpathy/llm.c write them
#   Tokens    32,000 steps x 1,048,576 tokens = 33,554,432,000; a step is 8 micro-steps of 16
#             sequences on each of 8 GPUs
#   Memory    64.7 GiB on each GPU (predicted; --dry-run has the table)
#   Time      25.8 hours on 8 H100, predicted by
#             RANKS=1 PROGRAM=./train_gpt scripts/recipes/gpt2_1558M.sh --dry-run \
#                 --cluster "1x8,gpu=h100"; not measured. llm.c notes 2.7 to 2.8 s a step: 24 to 25
#             hours
#   Loss      not known here
# The hyperparameters are those of llm.c's recipe for this model. To go on after a stop or a crash:
# --resume 1.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/recipe.sh
recipe "${RANKS:-8}" "${PROGRAM:-./train_gpt_cuda}" \
    --train 'data/edu_fineweb_train_*.bin' --val 'data/edu_fineweb_val_*.bin' \
    --hellaswag data/hellaswag_val.bin --model gpt2:1558M --dtype bf16 --seq-len 1024 \
    --micro-batch 16 --batch-tokens 1048576 --steps 32000 \
    --lr 6e-4 --lr-schedule cosine --warmup 700 --final-lr-fraction 0.1 --weight-decay 0.1 \
    --val-every 250 --save-every 2000 --keep 2 --out out/gpt2_1558M \
    --log out/gpt2_1558M/log.jsonl "$@"
