#!/usr/bin/env bash
# nano_d20.sh [--FLAG VALUE ...]: nanochat's depth 20 (20 layers of 1280 channels, heads of 128,
# contexts of 2048) with Muon, on 8 GPUs of 80 GB. Flags given here take the place of those below;
# RANKS and PROGRAM in the environment those of the 8 GPUs and of the GPU build.
#
#   Data      as gpt2_1558M.sh: FineWeb-Edu's sample of 100 billion tokens, as shards of llm.c's
#             format. nanochat has a tokenizer of its own; GPT-2's is what these shards have
#   Tokens    9,165 steps x 524,288 tokens = 4,805,099,520: 10.5 for each of the 457.6 M parameters
#             of blocks and head, nanochat's default; a step is 2 micro-steps of 16 sequences on
#             each of 8 GPUs
#   Memory    40.5 GiB on each GPU (predicted; --dry-run has the table)
#   Time      73 minutes on 8 H100, predicted by
#             RANKS=1 PROGRAM=./train_gpt scripts/recipes/nano_d20.sh --dry-run \
#                 --cluster "1x8,gpu=h100"; not measured
#   Loss      not known here: nanochat's figures are bits a byte of other data
# Rates and schedule are nanochat's (July 2026): matrices 0.02, embedding 0.3 and head 0.008, both
# times (channels / 768)^-0.5, 40 steps of warm-up, a decay over 65 % of the steps to 5 %, momentum
# from 0.85 to 0.97 in 400 steps. Not here: its windows, value embeddings and scalars of the
# residual stream, momentum that falls at the end, and cautious weight decay, for which the plain
# 0.0125 of modded-nanogpt's track 3 stands.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/recipe.sh
recipe "${RANKS:-8}" "${PROGRAM:-./train_gpt_cuda}" \
    --train 'data/edu_fineweb_train_*.bin' --val 'data/edu_fineweb_val_*.bin' \
    --hellaswag data/hellaswag_val.bin \
    --model arch=nano,layers=20,heads=10,channels=1280,vocab=50304 --dtype bf16 --seq-len 2048 \
    --micro-batch 16 --batch-tokens 524288 --steps 9165 \
    --optimizer muon --muon-lr 0.02 --muon-momentum 0.97 --muon-momentum-warmup 400 \
    --muon-weight-decay 0.0125 --lr 0.0062 --lr-embedding 37.5 --beta1 0.8 --beta2 0.95 \
    --eps 1e-10 --warmup 40 --lr-schedule wsd-linear --lr-last-part 0.65 --final-lr-fraction 0.05 \
    --val-every 250 --save-every 1000 --keep 2 --out out/nano_d20 \
    --log out/nano_d20/log.jsonl "$@"
