"""The program on ARM's CPUs: cross-compiled, and run by an emulator.

python3 test/test_arm.py        TEST_ALL=1: else left out, since it fetches packages
"""

import os
import subprocess
import unittest

from harness import (
    ENVIRONMENT, ROOT, SAME, TEMPORARY, Job, command_line, get, golden_run, main, parse_log,
    scratch,
)

LIBRARIES = os.path.join(ROOT, "build/arm64/usr/lib/aarch64-linux-gnu")
PLACES = (
    LIBRARIES,
    f"{LIBRARIES}/openblas-openmp",
    f"{LIBRARIES}/openmpi/lib",
    os.path.join(ROOT, "build/arm64/lib/aarch64-linux-gnu"),
)
# mpirun of another architecture cannot start this one's ranks, so a rank runs alone.
EMULATOR = (
    *("env", "OMPI_MCA_ess_singleton_isolated=1", f"OPAL_PREFIX={ROOT}/build/arm64/usr"),
    *("qemu-aarch64", "-L", f"{ROOT}/build/arm64", "-E", f"LD_LIBRARY_PATH={':'.join(PLACES)}"),
    os.path.join(ROOT, "build/train_gpt_arm64"),
)


KEY = "0123456789abcdef" * 4


def emulated_run(**changes):
    """The losses of a run on the emulated CPU."""
    log = os.path.join(scratch(), "log")
    command = [*EMULATOR, *command_line(dict(changes, log=log))]
    done = subprocess.run(
        command, env=ENVIRONMENT, cwd=TEMPORARY, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {command}\n{done.stderr}")
    return losses(parse_log(get(log).decode()))


def losses(events):
    return [float(event["loss"]) for event in events if event["event"] == "step"]


@unittest.skipUnless("TEST_ALL" in os.environ, "TEST_ALL=1 fetches packages for ARM")
class Arm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        for command in (["scripts/setup.sh", "arm64"], ["make", "build/train_gpt_arm64"]):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode == 3:
                raise unittest.SkipTest(done.stderr.strip())
            if done.returncode:
                raise AssertionError(f"{command}: {done.stdout}{done.stderr}")

    def assert_near(self, found, wanted, tolerance):
        self.assertEqual(len(found), len(wanted))
        for a, b in zip(found, wanted):
            self.assertLessEqual(abs(a - b), tolerance * b)

    def test_losses_are_pytorchs(self):
        self.assert_near(emulated_run(threads=2), golden_run()[0], SAME)

    def test_bf16(self):
        self.assert_near(emulated_run(dtype="bf16"), golden_run()[0], 1e-2)

    def test_private_samples_and_noise_are_those_of_this_machine(self):
        private = {
            **{"dp-noise": 1, "dp-delta": 1e-5, "dp-key": KEY, "dp-show-private": 1},
            **{"grad-clip": None, "steps": 3},
        }
        self.assert_near(emulated_run(**private), losses(Job(1, **private).done().events), SAME)


if __name__ == "__main__":
    main()
