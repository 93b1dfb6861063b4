"""reproduce.py: what the reproductions of papers (reproduce_*.py) share: runs that go on where they
were stopped, and tables."""

import argparse
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

EXIT_INPUT, EXIT_RESOURCES, EXIT_FAILED, EXIT_STOPPED = 2, 3, 4, 130
SCRIPTS = Path(__file__).resolve().parent
TEXT = "data/text_bytes"


class Failed(Exception):
    """The script ends with this status and message; of_run is the exit status of the run that
    failed."""

    def __init__(self, status, message, of_run=None):
        super().__init__(message)
        self.status, self.of_run = status, of_run


class Runner:
    """Starts commands and waits for them, in several threads where that is asked for. A signal ends
    the running ones gently, which remove what they made, and then us."""

    def __init__(self):
        self.children, self.stopped = set(), False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.stop)

    def stop(self, *_):
        for child in () if self.stopped else tuple(self.children):
            child.terminate()
        self.stopped = True

    def run(self, command, output):
        """Returns the exit status. What the command says goes into the file output."""
        if self.stopped:
            raise KeyboardInterrupt
        environment = dict(
            os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"
        )
        with open(output, "wb") as file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        self.children.add(child)
        if self.stopped:  # the signal came between the look above and now
            child.terminate()
        status = child.wait()
        self.children.discard(child)
        if self.stopped:
            raise KeyboardInterrupt
        return status


def last_words(path):
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    ours = [
        line
        for line in lines
        if line.startswith(("train_gpt: ", "cluster: ")) and " sent " not in line
    ]
    return (ours or lines or ["it says nothing"])[-1]


def recorded(folder):
    """The command of the finished run in a folder, or None."""
    record = folder / "run.json"
    return json.loads(record.read_text())["command"] if record.exists() else None


def complete(runner, folder, command):
    """Makes sure that the run is in its folder, whose log is returned; True if it had to run."""
    log, output = folder / "log.jsonl", folder / "output.txt"
    command = [*command, "--log", str(log)]
    found = recorded(folder)
    if found and found != command:
        raise Failed(EXIT_INPUT, f"{folder} holds another run: choose another --into, or remove it")
    if found:
        return log, False
    folder.mkdir(parents=True, exist_ok=True)
    status = runner.run(command, output)
    if status:
        raise Failed(
            EXIT_FAILED,
            f"{folder.name}: exit status {status}: {last_words(output)} (all of it: {output})",
            status,
        )
    new = folder / "run.tmp"
    new.write_text(json.dumps({"command": command}) + "\n")
    new.replace(folder / "run.json")
    return log, True


def markdown(header, lines):
    first, *rest = (f"| {' | '.join(line)} |\n" for line in (header, *lines))
    return "".join((first, "|---" * len(header), "|\n", *rest, "\n"))


def percent(ratio):
    return f"{100 * (ratio - 1):+.1f} %"


def pyplot_or_none(name):
    """matplotlib's drawing, without a screen; None, and a word about it, where it is not
    installed."""
    try:
        import matplotlib
    except ImportError:
        print(f"{name}: matplotlib is not there (scripts/setup.sh python gets it): no pictures")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def parts_parser(name, doc, plans, parts):
    """Of a script that has so many plans (--quick, --full) and parts; parts_options() reads it."""
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{name}.sh --quick | --full [option ...]",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    for plan in plans:
        size.add_argument(f"--{plan}", dest="plan", action="store_const", const=plan)
    parser.add_argument("--part", action="append", choices=parts)
    parser.add_argument("--steps", type=int, metavar="N")
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    parser.add_argument("--program", default="./train_gpt", metavar="FILE")
    return parser


def parts_options(parser, name):
    options = parser.parse_args()
    options.into = options.into or Path("out") / f"{name.removeprefix('reproduce_')}_{options.plan}"
    if not shutil.which(options.program):
        parser.error(f"{options.program} is not there: run make first")
    if not glob.glob(TEXT + "_train_*.bin") or not glob.glob(TEXT + "_val_*.bin"):
        parser.error(f"no {TEXT}_train_*.bin and {TEXT}_val_*.bin: run make data first")
    return options


def reproduce_parts(bench, parts):
    """Each part of a bench gives (tables, lines of claims): all of them, printed and written."""
    tables, claims = [], []
    for part in bench.options.part or parts:
        table, lines = parts[part](bench)
        tables.append(table)
        claims += lines
    text = markdown(["claim", "paper", "ours", "why they differ"], claims) + "".join(tables)
    print("\n" + text, end="")
    (bench.options.into / "table.md").write_text(text)


def run_script(name, into, work):
    """Does the work, whose results go into a folder; returns the exit status."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        work()
    except KeyboardInterrupt:
        print(f"{name}: stopped; the same command goes on", file=sys.stderr)
        return EXIT_STOPPED
    except Failed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        print(f"{name}: cannot write into {into}: {error}", file=sys.stderr)
        return EXIT_RESOURCES
    return 0
