#!/usr/bin/env bash
# Called by the name of a link to it: runs the Python program of that name beside it, with .venv's
# Python where there is one; --help explains it. Exit status: that of the program.
set -euo pipefail
folder=$(dirname "$0")
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
exec "$python" "$folder/$(basename "$0" .sh).py" "$@"
