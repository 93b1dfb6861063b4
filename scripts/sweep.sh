#!/usr/bin/env bash
# sweep.sh GRID [option ...]: runs train_gpt with every combination of the flags in a file; see
# sweep.py, which does it, or --help. Exit status: that of sweep.py.
set -euo pipefail
folder=$(dirname "$0")
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
exec "$python" "$folder/sweep.py" "$@"
