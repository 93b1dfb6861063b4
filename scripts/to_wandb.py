#!/usr/bin/env python3
"""to_wandb.py: turns logs of train_gpt (--log FILE) into offline runs of Weights & Biases.

    to_wandb.py run.jsonl DIR [--project NAME]
    wandb sync DIR/wandb/offline-run-*          sends them, when and if you wish

Needs the package: pip install wandb. Nothing is sent from here. A run has the log's name, the
program's flags as its configuration, and the values as in TensorBoard
(--tensorboard of the program): train/loss, val/loss and so on. Where a run was resumed, the later
events of a step count. What the log has as null, or cuts off, is left out.

Exit status: 0 done, 2 bad input, 3 the package is missing.
"""

import argparse
import sys
from pathlib import Path

from regular_files import one_line
from run_log import EXIT_INPUT, EXIT_RESOURCES, events, inner, is_number, load, names

GROUPS = {"step": "train", "val": "val", "hellaswag": "hellaswag"}  # of events with values


def by_step(path):
    """Step -> its values, in order."""
    found = {}
    for event in events(path):
        group, step = GROUPS.get(event.get("event")), event.get("step")
        if group and isinstance(step, int) and 0 <= step < 1 << 63:
            numbers = {
                f"{group}/{key}": float(value)
                for key, value in event.items()
                if key != "step" and is_number(value)
            }
            found.setdefault(step, {}).update(numbers)
    if not found:
        raise ValueError(f"{path}: no steps in it")
    return dict(sorted(found.items()))


def convert(path, options, name):
    steps = by_step(path)
    import wandb

    options.folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        mode="offline",
        project=options.project,
        name=name,
        dir=str(options.folder),
        config=inner(load(path, name).start, "flags"),
    )
    for step, numbers in steps.items():
        run.log(numbers, step=step)
    run.finish()


def main():
    parser = argparse.ArgumentParser(description="Turn logs of train_gpt into offline wandb runs.")
    parser.add_argument("--project", default="train_gpt")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("folder", type=Path, metavar="DIR")
    options = parser.parse_args()
    code, text = 0, ""
    try:
        for path, name in zip(options.logs, names(options.logs)):
            convert(path, options, name)
    except ImportError as error:
        code = EXIT_RESOURCES
        text = f"the package {error.name} is missing: pip install {error.name}"
    except OSError as error:
        reads = error.filename in map(str, options.logs) or error.filename in options.logs
        code = EXIT_INPUT if reads else EXIT_RESOURCES
        text = f"{error.filename}: {error.strerror}"
    except ValueError as error:
        code, text = EXIT_INPUT, error
    if code:
        print(one_line(f"{parser.prog}: {text}"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
