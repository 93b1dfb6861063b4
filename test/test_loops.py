#!/usr/bin/env python3
"""test_loops.py: the compiler makes vectors of the loops that say so (`omp simd`), in the files
where its report names the loop. It leaves a loop as it is without a word, four times slower, as it
did with AdamW's, where a variable that the loop shares with its caller was in the way.
"""

import os
import platform
import re
import shutil
import subprocess
import unittest

from harness import ROOT, TestCase, get, scratch

# Of the others the report names the place of an inlined function: real_cpu.h's store_real().
FILES = ["update_cpu.h", "quantize_cpu.h"]
FLAGS = "-std=gnu11 -O3 -march=x86-64-v4 -fno-math-errno -fno-trapping-math -fopenmp -D_GNU_SOURCE"
CC = shutil.which("gcc")


def loops_of(source):
    """(first line, last line) of each loop that follows `omp simd`, with that line."""
    lines = source.split("\n")
    for i, line in enumerate(lines):
        if re.match(r"\s*#pragma omp (parallel for )?simd", line):
            end, depth = i + 1, lines[i + 1].count("{") - lines[i + 1].count("}")
            while depth:
                end += 1
                depth += lines[end].count("{") - lines[end].count("}")
            yield i + 1, end + 2


class Loops(TestCase):
    def report(self, file, *flags):
        """Lines of a header of which vectors were made. Every function of it is compiled."""
        report = os.path.join(scratch(), "report")
        source = f'#include "ops/cpu/{file}"\n'
        words = [CC, *FLAGS.split(), *flags, "-fkeep-inline-functions", "-x", "c", "-c", "-"]
        words += ["-o", os.devnull, "-fopt-info-vec-optimized=" + report, "-I" + ROOT]
        subprocess.run(words, input=source, text=True, check=True, capture_output=True)
        pattern = rf"(?m)^\S*ops/cpu/{file}:(\d+):\d+: optimized: +loop vectorized"
        return {int(line) for line in re.findall(pattern, get(report).decode())}

    def missed(self, file, *flags):
        vectors = self.report(file, *flags)
        source = get(os.path.join(ROOT, "ops/cpu", file)).decode()
        return [
            source.split("\n")[first].strip()
            for first, last in loops_of(source)
            if not vectors & set(range(first, last + 1))
        ]

    @unittest.skipUnless(CC and platform.machine() == "x86_64", "not gcc on x86-64")
    def test_vectors(self):
        for file in FILES:
            self.assertEqual(self.missed(file), [], file)
        loops = list(loops_of(get(os.path.join(ROOT, "ops/cpu", FILES[0])).decode()))
        self.assertEqual(len(self.missed(FILES[0], "-fno-tree-loop-vectorize")), len(loops))


if __name__ == "__main__":
    unittest.main()
