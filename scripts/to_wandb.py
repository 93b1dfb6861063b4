#!/usr/bin/env python3
"""to_wandb.py: turns logs of train_gpt (--log FILE) into offline runs of Weights & Biases.

    to_wandb.py run.jsonl DIR [--project NAME]
    wandb sync DIR/wandb/offline-run-*          sends them, when and if you wish

Needs the package: pip install wandb. Nothing is sent from here. A run has the log's name, the
program's flags as its configuration, and the values as in TensorBoard: train/loss, val/loss and so
on (to_tensorboard.py). Where a run was resumed, the later events of a step count.

Exit status: 0 done, 2 bad input, 3 the package is missing.
"""

import argparse
import sys

from plot import inner, load
from to_tensorboard import convert_all, values


def by_step(path):
    """Step -> its values, in order."""
    found = {}
    for _, step, _, numbers in values(path):
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
    return convert_all(parser, convert)


if __name__ == "__main__":
    sys.exit(main())
