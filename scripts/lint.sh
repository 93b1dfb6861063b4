#!/usr/bin/env bash
# lint.sh: formatting, static analysis, and what a reader would stumble over. Clean, or exit status
# 1.
set -euo pipefail
cd "$(dirname "$0")/.."
# What is generated is in build/.
mapfile -t sources < <(find . -maxdepth 3 \( -path ./build -o -path './.*' \) -prune -o \
    -regex '.*\.\(c\|h\|cu\|cuh\)' -print | sort)
# Versions of clang-format disagree about details; the sources are formatted with Debian 12's.
if clang-format --version 2>/dev/null | grep -q 'version 14\.'; then
    clang-format --dry-run -Werror "${sources[@]}"
else
    echo "lint: no clang-format 14, formatting not checked"
fi
if command -v cppcheck >/dev/null; then
    # train_gpt.c includes every header, so one run sees all of them as the compiler does, in the
    # configuration that is named here; without one it would try many, for a minute.
    cppcheck --quiet --error-exitcode=1 --std=c11 --language=c --inline-suppr -I. \
        -DUSE_SODIUM -DUSE_PCRE2 -D_GNU_SOURCE \
        --enable=warning,performance,portability --suppress=missingIncludeSystem \
        --suppress=internalAstError --suppress='*:/usr/*' train_gpt.c
fi
if command -v shellcheck >/dev/null; then
    shellcheck scripts/*.sh scripts/recipes/*.sh scripts/*.sbatch .ci/run
fi
python3 scripts/lint.py
echo "lint: clean"
