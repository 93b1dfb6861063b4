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
# It is english_nano.sh with a smaller model and smaller steps.
set -euo pipefail
RANKS="${RANKS:-2}" PROGRAM="${PROGRAM:-./train_gpt}" exec "${BASH_SOURCE[0]%/*}/english_nano.sh" \
    --model arch=nano,layers=6,heads=5,channels=320,vocab=16384 \
    --micro-batch 8 --batch-tokens 8192 --steps 800 \
    --save-every 100 --sample-every 400 \
    --out out/english_cpu --log out/english_cpu/log.jsonl "$@"
