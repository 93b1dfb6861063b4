#!/usr/bin/env bash
# gpt2_124M.sh [--FLAG VALUE ...]: GPT-2 124M on 10 billion tokens of FineWeb, on 8 GPUs of 40
# GB or more. Flags given here take the place of those below; RANKS and PROGRAM in the environment
# those of the 8 GPUs and of the GPU build.
#
#   Data      FineWeb's sample of 10 billion tokens as shards of llm.c's format,
#             data/fineweb_train_*.bin and data/fineweb_val_*.bin, and data/hellaswag_val.bin:
#             dev/data/fineweb.py and dev/data/hellaswag.py of https://github.com/karpathy/llm.c
#             write them
#   Tokens    19,073 steps x 524,288 tokens = 9,999,745,024; a step is 1 micro-step of 64 sequences
#             on each of 8 GPUs
#   Memory    21.8 GiB on each GPU (predicted; --dry-run has the table)
#   Time      43 minutes on 8 H100, predicted by
#             RANKS=1 PROGRAM=./train_gpt scripts/recipes/gpt2_124M.sh --dry-run \
#                 --cluster "1x8,gpu=h100"; not measured. llm.c's took 45 (record 1 of
#             modded-nanogpt)
#   Loss      3.28 on FineWeb's validation tokens, and HellaSwag about 0.30 at the end, as OpenAI's
#             124M (0.294) and llm.c after the same tokens (0.299; 3.272 after 19,560 steps: record
#             1); not measured
# The hyperparameters are those of llm.c's recipe for this model. To go on after a stop or a crash:
# --resume 1.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/recipe.sh
recipe "${RANKS:-8}" "${PROGRAM:-./train_gpt_cuda}" \
    --train 'data/fineweb_train_*.bin' --val 'data/fineweb_val_*.bin' \
    --hellaswag data/hellaswag_val.bin --model gpt2:124M --dtype bf16 --seq-len 1024 \
    --micro-batch 64 --batch-tokens 524288 --steps 19073 \
    --lr 6e-4 --lr-schedule cosine --warmup 700 --final-lr-fraction 0 --weight-decay 0.1 \
    --val-every 250 --save-every 5000 --keep 2 --out out/gpt2_124M \
    --log out/gpt2_124M/log.jsonl "$@"
