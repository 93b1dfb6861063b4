#!/usr/bin/env bash
# nano_d12.sh [--FLAG VALUE ...]: 124M-sized GPT in 2026's way, nanochat's block with Muon, on one
# GPU of 40 GB or more, in a sixth of the tokens of gpt2_124M.sh. Flags given here take the place of
# those below; RANKS and PROGRAM in the environment those of the one GPU and of the GPU build. On 8
# GPUs: RANKS=8 scripts/recipes/nano_d12.sh.
#
#   Data      as gpt2_124M.sh: FineWeb's sample of 10 billion tokens, as shards of llm.c's format
#   Tokens    3,250 steps x 524,288 tokens = 1,703,936,000; a step is 8 micro-steps of 64 sequences
#   Memory    26.4 GiB on each GPU (predicted; --dry-run has the table)
#   Time      59 minutes on one H100, predicted by
#             RANKS=1 PROGRAM=./train_gpt scripts/recipes/nano_d12.sh --dry-run \
#                 --cluster "1x1,gpu=h100"; not measured
#   Loss      3.28 on FineWeb's validation tokens, if it learns as the run that it follows; not
#             measured
# Width, depth, batch, steps and rates are those of track 3 of modded-nanogpt, #36 (Muon tuned with
# its AdamW parts: 3.28 in 3,250 steps; records/track_3_optimization/README.md). That run's block
# has gains and biases, rotates half of the pairs, starts its embedding at deviation 1, and makes
# matrices orthogonal by 12 exact iterations; this one is nanochat's.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/recipe.sh
recipe "${RANKS:-1}" "${PROGRAM:-./train_gpt_cuda}" \
    --train 'data/fineweb_train_*.bin' --val 'data/fineweb_val_*.bin' \
    --hellaswag data/hellaswag_val.bin \
    --model arch=nano,layers=12,heads=6,channels=768,vocab=50304 --dtype bf16 --seq-len 1024 \
    --micro-batch 64 --batch-tokens 524288 --steps 3250 \
    --optimizer muon --muon-lr 0.025 --muon-weight-decay 0.05 \
    --lr 0.004 --lr-embedding 175 --beta1 0.8 --beta2 0.95 --eps 1e-10 --weight-decay 0.001 \
    --lr-schedule wsd-linear --lr-last-part 0.7 --final-lr-fraction 0 \
    --val-every 250 --save-every 1000 --keep 2 --out out/nano_d12 \
    --log out/nano_d12/log.jsonl "$@"
