#!/usr/bin/env bash
# Called by the name of a link to it: runs the Python program of that name beside it, or, where the
# name begins with reproduce_, the experiments of that paper (papers/). Takes .venv's Python where
# there is one; --help explains it. Exit status: that of the program.
set -euo pipefail
folder=$(dirname "$0")
name=$(basename "$0" .sh)
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
case $name in
reproduce_*) exec "$python" "$folder/experiment.py" "${name#reproduce_}" "$@" ;;
*) exec "$python" "$folder/$name.py" "$@" ;;
esac
