#!/usr/bin/env bash
# reproduce_dapple.sh --quick | --full [option ...]: DAPPLE's plans, simulated from its profiles;
# see reproduce_dapple.py, which does it, or --help. Exit status: that of reproduce_dapple.py.
set -euo pipefail
folder=$(dirname "$0")
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
exec "$python" "$folder/reproduce_dapple.py" "$@"
