#!/usr/bin/env python3
"""Runs every test program, as many at a time as there are cores, sums what they report, and ends
with the line `N passed, N failed`.

Unit tests (build/test_*, cmocka) report on stderr; test_comm and test_comm_nccl run under mpirun
with 1 to 4 ranks; test_*.py are Python unittests of the scripts and of the real binary. A program
that ends without a report counts as one failure. `--all` asks for the exhaustive forms
(TEST_ALL=1); TEST_SEED seeds what is sampled and is printed.
"""

import concurrent.futures
import glob
import os
import random
import re
import subprocess
import sys
import tempfile
import time

LONGEST = (
    "test_gpu.py",
    "test_dp.py",
    "test_train.py",
)  # begin first, so that none of them is left alone at the end
ALONE = ("test_cluster.py",)  # looks at what is on the whole machine
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
REPORTS = [  # regular expression -> (passed, failed)
    (r"\[  PASSED  \] (\d+) test", lambda m: (int(m), 0)),
    (r"\[  FAILED  \] (?:\S+: )?(\d+) test", lambda m: (0, int(m))),
    (r"(?m)^(\d+) passed, \d+ failed$", lambda m: (int(m), 0)),
    (r"(?m)^\d+ passed, (\d+) failed$", lambda m: (0, int(m))),
]


def environment(everything):
    env = dict(
        os.environ,
        TEST_SEED=os.environ.get("TEST_SEED", str(random.randrange(1 << 30))),
        OMP_WAIT_POLICY="passive",
    )  # test_train.ENVIRONMENT
    if everything:
        env["TEST_ALL"] = "1"
    if os.geteuid() == 0:
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return env


def commands():
    for program in sorted(glob.glob("build/test_*")):
        if program.startswith("build/test_comm"):
            for ranks in range(1, 5):
                yield f"{os.path.basename(program)}, {ranks} ranks", [
                    "mpirun",
                    "--oversubscribe",
                    "--bind-to",
                    "none",
                    "-np",
                    str(ranks),
                    program,
                ]
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
    found = unittest_counts(output) or tuple(
        map(
            sum,
            zip((0, 0), *(to(m) for pattern, to in REPORTS for m in re.findall(pattern, output))),
        )
    )
    return found if sum(found) and (status == 0 or found[1]) else (found[0], found[1] + 1)


def run(name, command, env):
    """Runs a program to its end, and prints how it ended. Returns (passed, failed)."""
    start = time.time()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, env=env, stdout=said, stderr=said, stdin=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read().decode(errors="replace")
    passed, failed = counts(output, process.returncode)
    skipped = sum(map(int, re.findall(r"\bskipped=(\d+)", output)))
    line = (
        f"{'FAILED' if failed else 'ok':6} {name:28} {passed:5} passed {failed:3} failed"
        f" {time.time() - start:7.1f} s {used.ru_utime + used.ru_stime:7.1f} s of cores"
    )
    print(
        line
        + (f" {skipped} skipped" if skipped else "")
        + ("\n" + output[-6000:] if failed else ""),
        flush=True,
    )
    return passed, failed


def main():
    os.chdir(ROOT)
    env = environment("--all" in sys.argv[1:])
    print("seed of sampled tests:", env["TEST_SEED"], "(set TEST_SEED to repeat)")
    todo = sorted(
        commands(), key=lambda one: LONGEST.index(one[0]) if one[0] in LONGEST else len(LONGEST)
    )
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [pool.submit(run, name, command, env) for name, command in todo if name not in ALONE]
        results = [job.result() for job in jobs]
    results += [run(name, command, env) for name, command in todo if name in ALONE]
    passed, failed = map(sum, zip(*results))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
