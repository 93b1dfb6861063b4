"""dpzero_curves.py: the part curves of dpzero.py: how far private training is from non-private
training, by epsilon and by size of the model, at equal tokens.

All runs take the same number of windows of 64 bytes of Shakespeare. Batch and rate are tuned, each
by the validation loss of seed 1:
smallest   for each epsilon and without privacy, over batches and rates; then two more seeds of the
           best
middle     the smallest model's best batch and half of its best rate, since rates fall as channels
           grow; then two more seeds. Some runs are checked at the smallest model's rate itself
largest    the same again, from the middle model's best, without more seeds
"""

import statistics
from dataclasses import dataclass

from experiment import data_flags, last, markdown, percent, plans, spread, words

T = 64
PUBLIC, EPSILONS = 0, (8, 3, 1)  # epsilon 0: not private
KINDS = (PUBLIC, *EPSILONS)
DELTA = "1e-6"
RECIPE = "--final-lr-fraction 0.1 --beta2 0.99 --weight-decay 0.1 --dtype bf16 --threads 1"
MICRO_BATCH, VALIDATION = 64, 1024  # windows


@dataclass(frozen=True)
class Size:
    name: str
    model: str


SMALL = Size("0.12M", "layers=2,heads=2,channels=64,vocab=256")
MIDDLE = Size("0.83M", "layers=4,heads=4,channels=128,vocab=256")
LARGE = Size("4.8M", "layers=6,heads=4,channels=256,vocab=256")


PLANS = plans(
    windows=(8192, 32768),  # that each run takes
    grid=(  # epsilon -> pairs of batch in windows, rate
        {0: ((16, 0.01),), **{epsilon: ((128, 0.01),) for epsilon in EPSILONS}},
        {
            0: ((8, 0.01), (8, 0.02), (16, 0.01)),
            8: ((64, 0.01), (128, 0.01), (128, 0.005)),
            3: ((64, 0.01), (128, 0.005), (128, 0.01), (128, 0.02), (256, 0.01)),
            1: ((128, 0.005), (128, 0.01), (256, 0.01)),
        },
    ),
    sizes=((SMALL,), (SMALL, MIDDLE, LARGE)),
    seeds=(1, 3),  # of the smallest and the middle model
    checked=((), (0, 3)),  # epsilons whose rate is checked with the larger models
)


@dataclass(frozen=True)
class Run:
    size: Size
    epsilon: int
    batch: int
    rate: float
    seed: int = 1

    def name(self):
        return (
            f"curves-{self.size.name}-epsilon{self.epsilon}-{self.batch}-{self.rate:g}-{self.seed}"
        )


def kind(epsilon):
    return f"epsilon {epsilon}" if epsilon else "non-private"


class Curves:
    """Runs that were made, and their validation losses."""

    def __init__(self, bench):
        self.plan, self.bench, self.losses = PLANS[bench.options.plan], bench, {}

    def command(self, run):
        steps, micro_batch = self.plan.windows // run.batch, min(MICRO_BATCH, run.batch)
        key = str(run.seed) * 64
        private = f"--dp-epsilon {run.epsilon} --dp-delta {DELTA} --dp-key {key}"
        return words(
            self.bench.program, data_flags(), f"--model {run.size.model} --seq-len {T}",
            f"--micro-batch {micro_batch} --batch-tokens {run.batch * T}",
            f"--steps {steps} --val-every {steps} --val-batches {VALIDATION // micro_batch}",
            f"--lr {run.rate:g} --warmup {steps // 10} --seed {run.seed} {RECIPE}",
            private if run.epsilon else "",
        )

    def loss(self, run):
        """The validation loss at the end of a run, which is made if it is not there."""
        if run not in self.losses:
            say = lambda log: f": validation loss {last(log, 'val')['loss']:.4f}"
            log = self.bench.run(run.name(), self.command(run), group=run.size.name, say=say)
            self.losses[run] = last(log, "val")["loss"]
        return self.losses[run]

    def best(self, size, epsilon):
        """The run of seed 1 with the lowest loss so far."""
        made = [r for r in self.losses if (r.size, r.epsilon, r.seed) == (size, epsilon, 1)]
        return min(made, key=self.losses.get)

    def seeds(self, size, epsilon):
        """Losses of the best run and of its other seeds."""
        best = self.best(size, epsilon)
        return [
            loss
            for run, loss in self.losses.items()
            if (run.size, run.epsilon, run.batch, run.rate)
            == (size, epsilon, best.batch, best.rate)
        ]

    def planned(self):
        plan = self.plan
        grid, more = sum(map(len, plan.grid.values())), (plan.seeds - 1) * len(KINDS)
        larger = len(KINDS) + len(plan.checked)
        counts = (grid + more, larger + more, larger)
        return {size.name: count for size, count in zip(plan.sizes, counts)}

    def transfer(self, size, smaller, factor, epsilons):
        """Runs at a smaller model's best settings, its rate times a factor."""
        for epsilon in epsilons:
            best = self.best(smaller, epsilon)
            self.loss(Run(size, epsilon, best.batch, best.rate * factor))

    def repeat(self, size):
        for epsilon in KINDS:
            best = self.best(size, epsilon)
            for seed in range(2, self.plan.seeds + 1):
                self.loss(Run(size, epsilon, best.batch, best.rate, seed))

    def make(self):
        """All runs, those that decide before those that tell the spread."""
        smallest, *larger = self.plan.sizes
        for epsilon, settings in self.plan.grid.items():
            for batch, rate in settings:
                self.loss(Run(smallest, epsilon, batch, rate))
        for size, smaller in zip(larger, self.plan.sizes):
            self.transfer(size, smaller, 0.5, KINDS)
            if size is not larger[-1]:
                self.transfer(size, smaller, 1, self.plan.checked)
        for size in self.plan.sizes[:2]:
            self.repeat(size)
        if larger:
            self.transfer(larger[-1], self.plan.sizes[-2], 1, self.plan.checked)

    def ratios(self, size):
        """Mean loss over the mean loss without privacy, by epsilon."""
        public = statistics.mean(self.seeds(size, PUBLIC))
        return {e: statistics.mean(self.seeds(size, e)) / public for e in EPSILONS}


def told(losses):
    """The mean and half of the range."""
    mean = f"{statistics.mean(losses):.4f}"
    return mean if len(losses) == 1 else f"{mean} ± {(max(losses) - min(losses)) / 2:.4f}"


def result_table(curves):
    lines = []
    for size in curves.plan.sizes:
        ratios = curves.ratios(size)
        for epsilon in KINDS:
            best, losses = curves.best(size, epsilon), curves.seeds(size, epsilon)
            lines.append(
                [size.name, kind(epsilon), str(best.batch), str(curves.plan.windows // best.batch),
                 f"{best.rate:g}", told(losses), str(len(losses)),
                 percent(ratios[epsilon]) if epsilon else ""]
            )
    columns = ["parameters", "run", "batch, windows", "steps", "rate", "loss", "seeds"]
    return (
        f"{curves.plan.windows * T} tokens each, delta {DELTA}, `{RECIPE}`; loss: mean of"
        " the seeds ± half of their range\n\n"
        + markdown([*columns, "over non-private"], lines)
    )


def tuning_table(curves):
    """All runs of seed 1."""
    lines = [
        [run.size.name, kind(run.epsilon), str(run.batch), f"{run.rate:g}", f"{loss:.4f}"]
        for run, loss in curves.losses.items()
        if run.seed == 1
    ]
    return "seed 1, all settings\n\n" + markdown(
        ["parameters", "run", "batch, windows", "rate", "loss"], lines
    )


def paint(curves, axes):
    """Left: loss by epsilon, a line for each size; right: the gap by size, one for each epsilon."""
    (left, right), sizes = axes, curves.plan.sizes
    for at, size in enumerate(sizes):
        found = [spread(curves.seeds(size, epsilon)) for epsilon in EPSILONS]
        means = [statistics.mean(curves.seeds(size, epsilon)) for epsilon in EPSILONS]
        around = [
            [mean - of.low for mean, of in zip(means, found)],
            [of.high - mean for mean, of in zip(means, found)],
        ]
        left.errorbar(EPSILONS, means, around, marker="o", color=f"C{at}", label=size.name)
        public = statistics.mean(curves.seeds(size, PUBLIC))
        label = f"{size.name}, non-private"
        left.axhline(public, color=f"C{at}", linestyle="--", label=label)
    left.set(xscale="log", xlabel="epsilon", ylabel="validation loss (nats/byte)")
    left.set_xticks(EPSILONS, map(str, EPSILONS))
    left.minorticks_off()
    for epsilon in EPSILONS:
        gaps = [100 * (curves.ratios(size)[epsilon] - 1) for size in sizes]
        right.plot([size.name for size in sizes], gaps, marker="o", label=kind(epsilon))
    right.set(xlabel="parameters", ylabel="loss over non-private, %", ylim=(0, None))


def curves(bench):
    found = Curves(bench)
    found.make()
    largest = found.plan.sizes[-1]
    seeds = min(len(found.seeds(largest, epsilon)) for epsilon in KINDS)
    bench.tell("private", list(found.ratios(largest).values()), seeds)
    bench.draw("curves", lambda axes: paint(found, axes), columns=2)
    by_size = "; ".join(
        f"{size.name}: " + ", ".join(map(percent, found.ratios(size).values()))
        for size in found.plan.sizes
    )
    return result_table(found) + tuning_table(found), [
        ["loss over non-private at equal tokens, epsilon 8, 3, 1, by parameters",
         "large models come close to non-private ones", by_size,
         "models of some millions of parameters at most, from scratch, on 4.5 MB of text"]
    ]
