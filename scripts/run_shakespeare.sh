#!/usr/bin/env bash
# run_shakespeare.sh [--FLAG VALUE ...]: the default training run: a small GPT on Shakespeare's
# works, byte by byte, with five whole plays held out. One to four minutes on 2 cores. Flags given
# here take the place of those below. One rank per core: on matrices this small, ranks that exchange
# gradients beat threads that meet in every operation.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/recipe.sh
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
ranks=$(nproc)
((ranks <= 8)) || ranks=8 # a step has 8 samples
! without_mpi ./train_gpt || ranks=1
out=out/shakespeare
mkdir -p "$out"
recipe "$ranks" ./train_gpt \
    --train "data/text_bytes_train_*.bin" --val "data/text_bytes_val_*.bin" \
    --model "arch=nano,layers=4,heads=4,channels=128,vocab=256" --seq-len 256 --micro-batch 8 \
    --batch-tokens 2048 --steps 1500 --optimizer muon --muon-lr 0.02 --muon-weight-decay 0.01 \
    --lr 1e-2 --beta1 0.8 --warmup 20 --lr-schedule wsd-linear --lr-last-part 0.5 \
    --final-lr-fraction 0 \
    --val-every 1500 --val-batches -1 --sample-every 1500 --sample-tokens 400 --temperature 0.8 \
    --save-every 500 --keep 2 --out "$out" --log "$out/log.jsonl" "$@"
# --dry-run and the like log nothing. Without matplotlib there is no picture, which plot.py says.
if [ -e "$out/log.jsonl" ]; then
    "$python" scripts/plot.py "$out/log.jsonl" --out "$out/loss.png" ||
        "$python" scripts/watch.py "$out/log.jsonl" --once
    "$python" scripts/report.py "$out" || true
fi
