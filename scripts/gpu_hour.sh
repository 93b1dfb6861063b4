#!/usr/bin/env bash
# gpu_hour.sh --out FOLDER [option ...]: the first hour on a GPU: does the program work there, and
# how fast is it; see gpu_hour.py, which does it, or --help. Exit status: that of gpu_hour.py.
set -euo pipefail
folder=$(dirname "$0")
exec python3 "$folder/gpu_hour.py" "$@"
