#!/bin/sh
# Compares ./train_gpt with the current PyTorch on this machine's processor. Usage:
# scripts/bench_peers.sh [options] Options go to bench_peers.py (--help lists them). The first call
# installs PyTorch and Opacus from PyPI into .venv-peers.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-peers
packages="torch numpy opacus"
# PyPI's only Linux build brings the CUDA libraries along: about 6 GB installed, and the downloads.
need_gb=10

if [ "$(cat "$venv/installed" 2>/dev/null)" != "$packages" ]; then
    free_gb=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1048576))
    if [ "$free_gb" -lt "$need_gb" ] && [ ! -e "$venv/installed" ]; then
        echo "bench_peers: PyTorch needs $need_gb GB of disk here, $free_gb GB are free" >&2
        exit 3
    fi
    [ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
    echo '*' > "$venv/.gitignore"
    # shellcheck disable=SC2086 # words
    "$venv/bin/pip" install --quiet --no-cache-dir $packages
    echo "$packages" >"$venv/installed" # an interrupted installation starts again
fi
exec "$venv/bin/python" scripts/bench_peers.py "$@"
