#!/usr/bin/env bash
# run_shakespeare.sh [FLAG VALUE ...]: the default training run: a small GPT on Shakespeare's works, byte by byte, with
# five whole plays held out. About three minutes on 2 cores. Flags given here come on top and replace those below.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
out=out/shakespeare
mkdir -p "$out"
flags=(--train "data/text_bytes_train_*.bin" --val "data/text_bytes_val_*.bin"
    --model layers=4,heads=4,channels=192,vocab=256 --seq-len 128 --micro-batch 16 --batch-tokens 2048 --steps 2400
    --lr 3e-3 --warmup 100 --lr-schedule cosine --final-lr-fraction 0.05 --weight-decay 0.1 --beta2 0.99
    --val-every 400 --val-batches 40 --sample-every 2400 --sample-tokens 400 --temperature 0.8
    --save-every 800 --keep 2 --out "$out" --log "$out/log.jsonl")
# A flag on the command line takes the place of the one above.
kept=()
for ((i = 0; i < ${#flags[@]}; i += 2)); do
    case " $* " in *" ${flags[i]} "*) ;; *) kept+=("${flags[i]}" "${flags[i + 1]}") ;; esac
done
mpirun --bind-to none -np 1 ./train_gpt "${kept[@]}" "$@"
"$python" scripts/plot.py "$out/log.jsonl" --out "$out/loss.png"
