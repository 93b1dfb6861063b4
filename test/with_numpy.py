"""with_numpy.py: `import with_numpy` before numpy, for tests that need it.

Where this Python has no numpy, the program begins again in the Python of .venv, which has one.
"""

import importlib.util
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv/bin/python")

if not importlib.util.find_spec("numpy"):
    if sys.prefix != sys.base_prefix or not os.path.exists(VENV):
        sys.exit(f"{os.path.basename(sys.argv[0])} needs numpy: scripts/setup.sh python gets it")
    os.execv(VENV, [VENV, *sys.argv])
