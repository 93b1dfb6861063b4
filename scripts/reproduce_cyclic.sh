#!/usr/bin/env bash
# reproduce_cyclic.sh --quick | --full [option ...]: Cyclic Data Parallelism beside data
# parallelism; see reproduce_cyclic.py, which does it, or --help. Exit status: that of
# reproduce_cyclic.py.
set -euo pipefail
folder=$(dirname "$0")
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
exec "$python" "$folder/reproduce_cyclic.py" "$@"
