#!/usr/bin/env bash
# long_run.sh [option ...]: trains under faults and without, and compares the two; see long_run.py,
# which does it, or --help. Exit status: that of long_run.py.
exec python3 "$(dirname "$0")/long_run.py" "$@"
