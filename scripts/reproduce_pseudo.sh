#!/usr/bin/env bash
# reproduce_pseudo.sh --quick | --full [option ...]: blocks that share their parameters and are
# delinked, beside training from scratch; see reproduce_pseudo.py, which does it, or --help. Exit
# status: that of reproduce_pseudo.py.
set -euo pipefail
folder=$(dirname "$0")
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
exec "$python" "$folder/reproduce_pseudo.py" "$@"
