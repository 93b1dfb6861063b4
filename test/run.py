#!/usr/bin/env python3
"""Runs every test program, sums what they report, and ends with the line `N passed, N failed`.

Unit tests (build/test_*, cmocka) report on stderr; test_comm and test_comm_nccl run under mpirun with 1 to 4 ranks; test_*.py are Python
unittests of the scripts and of the real binary. A program that ends without a report counts as one failure.
`--all` asks for the exhaustive forms (TEST_ALL=1); TEST_SEED seeds what is sampled and is printed.
"""
import glob
import os
import random
import re
import resource
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
REPORTS = [  # regular expression -> (passed, failed)
    (r"\[  PASSED  \] (\d+) test", lambda m: (int(m), 0)),
    (r"\[  FAILED  \] (?:\S+: )?(\d+) test", lambda m: (0, int(m))),
    (r"(?m)^(\d+) passed, \d+ failed$", lambda m: (int(m), 0)),
    (r"(?m)^\d+ passed, (\d+) failed$", lambda m: (0, int(m))),
]


def environment(everything):
    env = dict(os.environ, TEST_SEED=os.environ.get("TEST_SEED", str(random.randrange(1 << 30))), OMP_WAIT_POLICY="passive")  # test_train.ENVIRONMENT
    if everything:
        env["TEST_ALL"] = "1"
    if os.geteuid() == 0:
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return env


def commands():
    for program in sorted(glob.glob("build/test_*")):
        if program.startswith("build/test_comm"):
            for ranks in range(1, 5):
                yield f"{os.path.basename(program)}, {ranks} ranks", ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), program]
        else:
            yield os.path.basename(program), [program]
    for script in sorted(glob.glob("test/test_*.py")):
        yield os.path.basename(script), [sys.executable, script]


def unittest_counts(output):
    ran = re.search(r"(?m)^Ran (\d+) tests? in", output)
    if not ran:
        return None
    bad = sum(int(n) for n in re.findall(r"(?:failures|errors|unexpected successes)=(\d+)", output))
    skipped = sum(int(n) for n in re.findall(r"skipped=(\d+)", output))
    return int(ran.group(1)) - bad - skipped, bad


def counts(output, status):
    found = unittest_counts(output) or tuple(map(sum, zip((0, 0), *(to(m) for pattern, to in REPORTS for m in re.findall(pattern, output)))))
    return found if sum(found) and (status == 0 or found[1]) else (found[0], found[1] + 1)


def processor_seconds():
    """Of all programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    os.chdir(ROOT)
    env = environment("--all" in sys.argv[1:])
    print("seed of sampled tests:", env["TEST_SEED"], "(set TEST_SEED to repeat)")
    total = [0, 0]
    for name, command in commands():
        start, before = time.time(), processor_seconds()
        run = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", stdin=subprocess.DEVNULL)
        passed, failed = counts(run.stdout, run.returncode)
        total[0] += passed
        total[1] += failed
        skipped = sum(map(int, re.findall(r"\bskipped=(\d+)", run.stdout)))
        print(f"{'FAILED' if failed else 'ok':6} {name:28} {passed:5} passed {failed:3} failed {time.time() - start:7.1f} s {processor_seconds() - before:7.1f} s of cores"
              + (f" {skipped} skipped" if skipped else ""), flush=True)
        if failed:
            print(run.stdout[-6000:], flush=True)
    print(f"{total[0]} passed, {total[1]} failed")
    return 1 if total[1] or not total[0] else 0


if __name__ == "__main__":
    sys.exit(main())
