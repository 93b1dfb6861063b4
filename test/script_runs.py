"""script_runs.py: runs a Python script of scripts/ in a child of the test, which is a copy of this
process: what the script imports is loaded once, and not for each of a hundred runs.

    import script_runs
    script_runs.load("prepare_data", "pyarrow.parquet")      once, before the first run
    done = script_runs.run("prepare_data", "--out", folder)  returncode, stdout, stderr (text)

The child has a standard input, output and error of its own, and ends as the script does: with its
exit code, an uncaught exception or a signal. Standard library only.
"""

import contextlib
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings

import harness

SCRIPTS = os.path.join(harness.ROOT, "scripts")
FORK = multiprocessing.get_context("fork")


def load(*names):
    """Imports modules, of scripts/ too; a package that is missing stays so. A test that runs in
    another Python than the scripts (harness.PYTHON) begins again in theirs."""
    if sys.executable != harness.PYTHON:
        shutil.rmtree(harness.TEMPORARY)
        os.execv(harness.PYTHON, [harness.PYTHON, *sys.argv])
    if SCRIPTS not in sys.path:
        sys.path.insert(0, SCRIPTS)
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def begin(name, words, setup, environment, cwd, files, others):
    """The child: main() of the script, behind `setup`, Python that changes it before."""
    if others is not None:
        os.close(others)  # it would keep its own input from ending
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")
    sys.argv = [os.path.join(SCRIPTS, name + ".py"), *map(str, words)]
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    if cwd:
        os.chdir(cwd)
    warnings.simplefilter("ignore", ResourceWarning)  # unittest shows them
    exec(setup, vars(sys.modules["__main__"]))  # where workers find its functions
    sys.exit(sys.modules[name].main())


class Started:
    """A run. stdin: a file; input: bytes or text that it gets through a pipe; else it gets
    nothing."""

    def __init__(self, name, *words, setup="", input=None, stdin=None, env=None, cwd=None):
        self.words = name, *words
        self.said = [tempfile.TemporaryFile() for _ in range(2)]
        reads, writes = os.pipe() if input is not None else (None, None)
        with open(os.devnull) if input is None else open(reads, "rb") as given:
            files = [stdin or given, *self.said]
            arguments = name, words, setup, env, cwd, files, writes
            self.process = FORK.Process(target=begin, args=arguments)
            self.process.start()
        self.kill = self.process.kill
        if input is not None:
            data = input.encode() if isinstance(input, str) else input
            threading.Thread(target=self.give, args=(writes, data), daemon=True).start()

    @staticmethod
    def give(pipe, data):
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as file:
            file.write(data)

    def wait(self):
        self.process.join(harness.TIMEOUT)
        if self.process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.words, harness.TIMEOUT)
        said = []
        for file in self.said:
            with file:
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess(self.words, self.process.exitcode, *said)


def run(name, *words, **options):
    return Started(name, *words, **options).wait()
