#!/usr/bin/env bash
# reproduce_zeropp.sh --quick | --full [option ...]: ZeRO++ against ZeRO-3 on an emulated cluster;
# see reproduce_zeropp.py, which does it, or --help. Exit status: that of reproduce_zeropp.py.
set -euo pipefail
folder=$(dirname "$0")
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
exec "$python" "$folder/reproduce_zeropp.py" "$@"
