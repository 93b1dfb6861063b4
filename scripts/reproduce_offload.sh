#!/usr/bin/env bash
# reproduce_offload.sh --quick | --full [option ...]: states on the host by a budget in bytes, and
# what that costs; see reproduce_offload.py, which does it, or --help. Exit status: that of
# reproduce_offload.py.
set -euo pipefail
folder=$(dirname "$0")
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
exec "$python" "$folder/reproduce_offload.py" "$@"
