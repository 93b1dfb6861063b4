#!/usr/bin/env python3
"""Runs every test program, as many at a time as there are cores, sums what they report, and ends
with the line `N passed, N failed`.

Unit tests (build/test_*, cmocka) report on stderr; test_comm and test_comm_nccl run under mpirun
with 1 to 4 ranks; test_*.py are Python unittests of the scripts and of the real binary. A program
that ends without a report counts as one failure. `--all` asks for the exhaustive forms
(TEST_ALL=1). What is sampled follows from the source: the same version draws the same cases
everywhere, and each change others. TEST_SEED draws others; the seed is printed.
"""

import argparse
import concurrent.futures
import glob
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time

import harness

# These begin first, so that none of them is left alone at the end.
LONGEST = (
    "test_gpu.py", "test_dp.py", "test_offload.py", "test_train.py", "test_cyclic.py",
    "test_faults.py", "test_docs.py", "test_ops_emu", "test_ops_checked", "test_zero.py",
    "test_pipeline.py", "test_tools.py", "test_pseudo.py", "test_comm_nccl, 4 ranks",
)
ALONE = ("test_cluster.py",)  # looks at what is on the whole machine
SLOWEST = 12  # so many are listed at the end
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
REPORTS = [  # regular expression -> (passed, failed)
    (r"\[  PASSED  \] (\d+) test", lambda m: (int(m), 0)),
    (r"\[  FAILED  \] (?:\S+: )?(\d+) test", lambda m: (0, int(m))),
    (r"(?m)^(\d+) passed, \d+ failed$", lambda m: (int(m), 0)),
    (r"(?m)^\d+ passed, (\d+) failed$", lambda m: (0, int(m))),
]


def seed_of_source():
    """A number that follows from the names and the content of the source files."""
    kinds = ("*.[ch]", "*.cu", "*.cuh", "test/*.py", "scripts/**/*.py")
    names = {name for kind in kinds for name in glob.glob("**/" + kind, recursive=True)}
    seed = hashlib.sha256()
    for name in sorted(name for name in names if not name.startswith(("build/", "out/", "data/"))):
        with open(name, "rb") as file:
            seed.update(name.encode() + file.read())
    return str(int.from_bytes(seed.digest()[:4], "big") >> 2)


def environment(everything):
    env = dict(harness.ENVIRONMENT, TEST_SEED=os.environ.get("TEST_SEED") or seed_of_source())
    # What scripts find as python3 may be a script that looks for one, which takes longer than
    # most of them.
    env["PATH"] = os.path.dirname(sys.executable) + ":" + env["PATH"]
    if everything:
        env["TEST_ALL"] = "1"
    return env


def commands(env):
    """(name, command) of each program and module. The operations are tested with oneDNN's products
    for AVX2, too. NCCL's collectives are emulated slowly: of 3 and 4 ranks the seed chooses one."""
    for program in sorted(glob.glob("build/test_*")):
        if "." in os.path.basename(program):
            continue  # what the compiler wrote beside it
        name = os.path.basename(program)
        if name.startswith("test_comm"):
            launch = ["mpirun", "--oversubscribe", "-np"]
            left_out = 0
            if name == "test_comm_nccl" and "TEST_ALL" not in env:
                left_out = 3 + int(env["TEST_SEED"]) % 2
            for ranks in {1, 2, 3, 4} - {left_out}:
                yield f"{name}, {ranks} ranks", [*launch, str(ranks), program]
            for ranks in (1, 2) if name == "test_comm_nccl" else ():
                on_one_gpu = ["env", "TRAIN_GPT_NCCL_SHARED=1", "EMU_GPUS=1"]
                yield f"{name}, {ranks} ranks on a GPU", [*on_one_gpu, *launch, str(ranks), program]
        elif re.search("emu|checked", name):  # threads would wait for each other
            yield name, ["env", "OMP_NUM_THREADS=1", program]
        else:
            yield name, [program]
        if name == "test_ops":
            yield "test_ops, AVX2", ["env", "DNNL_MAX_CPU_ISA=AVX2", program]
            for how in ("TRAIN_GPT_LIBRARY_PRODUCTS", "TEST_TILES"):  # which the CPU may not choose
                yield f"test_ops, {how}", ["env", f"{how}=1", "OPS_TESTS=*bf16*", program]
    for script in sorted(glob.glob("test/test_*.py")):
        if script != "test/test_arm.py" or "TEST_ALL" in env:  # it fetches packages
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
    """Runs a program to its end, and prints how it ended. Returns (name, passed, failed, seconds,
    seconds of cores, [(seconds of cores, name of a test)])."""
    start = time.time()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, env=env, stdout=said, stderr=said, stdin=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read().decode(errors="replace")
    seconds, cores = time.time() - start, used.ru_utime + used.ru_stime
    passed, failed = counts(output, process.returncode)
    skipped = sum(map(int, re.findall(r"\bskipped=(\d+)", output)))
    line = f"{'FAILED' if failed else 'ok':6} {name:28} {passed:5} passed {failed:3} failed"
    line += f" {seconds:7.1f} s {cores:7.1f} s of cores" + (
        f" {skipped} skipped" if skipped else ""
    )
    print(line + ("\n" + output[-6000:] if failed else ""), flush=True)
    tests = re.findall(r"(?m)^ +([\d.]+) s of cores: (\S+)$", output)
    return name, passed, failed, seconds, cores, [(float(s), f"{name} {t}") for s, t in tests]


def main():
    about = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    about.add_argument("--all", action="store_true", help="the exhaustive forms (TEST_ALL=1)")
    everything = about.parse_args().all
    os.chdir(ROOT)
    start = time.time()
    env = environment(everything)
    print("seed of sampled tests:", env["TEST_SEED"], "(set TEST_SEED to repeat)")
    rank = {name: place for place, name in enumerate(LONGEST)}
    todo = sorted(commands(env), key=lambda one: rank.get(one[0], len(LONGEST)))
    # One more than there are cores: tests wait now and then.
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)) + 1) as pool:
        jobs = [pool.submit(run, name, command, env) for name, command in todo if name not in ALONE]
        results = [job.result() for job in jobs]
    results += [run(name, command, env) for name, command in todo if name in ALONE]
    print(f"\nthe slowest of {len(results)}:")
    for name, _, _, seconds, cores, _ in sorted(results, key=lambda one: -one[4])[:SLOWEST]:
        print(f"  {name:28} {seconds:7.1f} s {cores:7.1f} s of cores")
    print("\nthe slowest tests of modules:")
    for cores, name in sorted((test for one in results for test in one[5]), reverse=True)[:SLOWEST]:
        print(f"  {cores:7.1f} s of cores  {name}")
    total = sum(one[4] for one in results)
    print(f"in all {time.time() - start:.1f} s, {total:.1f} s of cores")
    passed, failed = (sum(one[kind] for one in results) for kind in (1, 2))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
