#!/usr/bin/env bash
# reproduce_muon.sh --quick | --full [option ...]: steps, tokens and seconds to equal loss, AdamW
# beside Muon, with GPT-2's block and nanochat's; see reproduce_muon.py, which does it, or --help.
# Exit status: that of reproduce_muon.py.
set -euo pipefail
folder=$(dirname "$0")
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
exec "$python" "$folder/reproduce_muon.py" "$@"
