#!/usr/bin/env bash
# reproduce_dpzero.sh --quick | --full [option ...]: private against non-private training at every
# ZeRO stage; see reproduce_dpzero.py, which does it, or --help. Exit status: that of
# reproduce_dpzero.py.
set -euo pipefail
folder=$(dirname "$0")
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
exec "$python" "$folder/reproduce_dpzero.py" "$@"
