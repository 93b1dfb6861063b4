#!/usr/bin/env bash
# run_shakespeare.sh [--FLAG VALUE ...]: the default training run: a small GPT on Shakespeare's
# works, byte by byte, with five whole plays held out. About two minutes on 2 cores. Flags given
# here take the place of those below. One rank per core: on matrices this small, ranks that exchange
# gradients beat threads that meet in every operation.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/recipe.sh
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
ranks=$(nproc)
((ranks <= 8)) || ranks=8 # a step has 8 samples
out=out/shakespeare
mkdir -p "$out"
recipe "$ranks" ./train_gpt \
    --train "data/text_bytes_train_*.bin" --val "data/text_bytes_val_*.bin" \
    --model "layers=4,heads=4,channels=128,vocab=256" --seq-len 64 --micro-batch 8 \
    --batch-tokens 512 --steps 9000 --lr 3e-3 --warmup 200 --lr-schedule cosine \
    --final-lr-fraction 0.02 --weight-decay 0.1 --beta2 0.99 \
    --val-every 3000 --val-batches -1 --sample-every 9000 --sample-tokens 400 --temperature 0.8 \
    --save-every 3000 --keep 2 --out "$out" --log "$out/log.jsonl" "$@"
# --dry-run and the like log nothing.
[ ! -e "$out/log.jsonl" ] || "$python" scripts/plot.py "$out/log.jsonl" --out "$out/loss.png"
