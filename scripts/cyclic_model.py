#!/usr/bin/env python3
"""cyclic_model.py: how long a step of --cyclic-mode data takes over slow links, by a model of its
schedule.

    ./train_gpt ... --cyclic v2 --cyclic-mode data --show-schedule > LIST
    scripts/cyclic_model.py LIST ...   [--c 3] [--layers 12] [--channels 128] [--positions 64]
                                       [--latency 0] [--free-statistics]
    scripts/cyclic_model.py            asks ./train_gpt for the lists of v1, v2 and v2 with slack 1,
                                       in the case of papers/cyclic.py

The actions of each rank are those of LIST. A block's forward pass takes 1, each of its two backward
parts 1, the head its share, all else nothing. Links have a rate into and out of each rank, at which
data parallelism's all-reduce takes c times a forward pass. Deferred operations wait for what LIST
says, and run between actions. A row of the table says, for a list:

bytes      the least time of a step in which the busiest link can carry its bytes
alone      the time if no message shared its link with another: what the dependencies alone allow
shared     all messages at once; ranks share a link evenly, as TCP does
program    the same, but between two ranks one message at a time, in the order of the list: as the
           program does (executor/deferred.h)
in turns   between two ranks one message at a time, the earliest needed first
agreed     each rank sends one message at a time and receives one, the earliest needed first of all
           whose two ends are posted: as if the ranks knew of each other's messages at once
by need    at any moment the messages that are needed first have the whole link

and the speed of each against an ideal overlapped data parallelism, F + max(B, c). Vocabulary: 256.
A second table says how long each rank waits in a step of "program", and for what: parameters (a
forward or backward pass needs a version that has not arrived), gradient (the next gradient would
overwrite one that is still being sent or added), statistics (updates are not complete). With
--free-statistics, statistics wait for nothing: what the program could gain if it took them later.
--latency: a message begins so long after both ends are posted (ranks must hear of each other).
"""

import argparse
import glob
import re
import subprocess
from collections import defaultdict
from pathlib import Path

from regular_files import read_regular

STEPS = 14
# all else that waits needs the buffer of a gradient
WAITS = {"ACQUIRE": "parameters", "STATS": "statistics"}
RULES = {  # list -> flags
    "v1": ("--cyclic", "v1"),
    "v2": ("--cyclic", "v2"),
    "slack 1": ("--cyclic", "v2", "--cyclic-slack", "1"),
}
PROGRAM = (
    "mpirun --oversubscribe -np 4 ./train_gpt --model layers=12,heads=4,channels=128,vocab=256"
    " --seq-len 64 --micro-batch 4 --batch-tokens 1024 --grad-clip 0 --val-every 0 --threads 1"
    " --cyclic-cut 4,3,3,4 --show-schedule"
)  # the case of papers/cyclic.py
TINY = 1e-9


class Model:
    """Sizes of storages in elements; costs of units, forward pass of a block = 1."""

    def __init__(self, options):
        width, vocab, self.layers = options.channels, 256, options.layers
        block = 12 * width * width + 13 * width
        self.size = [vocab * width, options.positions * width] + [block] * self.layers + [2 * width]
        self.head = vocab / (12 * width)
        self.free_statistics, self.latency = options.free_statistics, options.latency
        self.forward = self.layers + self.head

    def cost(self, action):
        if action["kind"] not in ("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"):
            return 0
        unit = action["unit"]
        return 0 if unit == 0 else self.head if unit == self.layers + 1 else 1


def read(text):
    """The list of each rank. Of an action, "waits" and "after" are what must be done before the
    list reaches it, and before it runs if it is deferred: pairs of windows before, and an index."""
    lists, orders = [], []
    for line in text.splitlines():
        if re.match(r"rank \d+: order", line):
            orders.append(lists[len(orders)])
        elif re.match(r"rank \d+: ", line):
            lists.append([])
        found = re.match(r"\s+(\d+) (\w+)\s*(.*)", line)
        if lists and found and orders:
            before = [tuple(map(int, pair)) for pair in re.findall(r"(\d+):(\d+)", found[3])]
            orders[-1][int(found[1])]["after" if found[2] == "is" else "waits"] = before
        elif lists and found:
            words = re.findall(r"(storage|unit|peer|step) +(-?\d+)", found[3])
            action = {"kind": found[2], "waits": [], **{name: int(n) for name, n in words}}
            lists[-1].append(action)
    return lists


def planned():
    """The text of each rule's list."""
    data = sorted(glob.glob("data/text_bytes_train_*.bin"))
    return {
        rule: subprocess.run(
            [*PROGRAM.split(), "--train", *data[:1], *flags],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for rule, flags in RULES.items()
    }


class Message:
    """Posted when both ends are (ends); begins a latency later."""

    def __init__(self, source, target, left):
        self.source, self.target, self.left = source, target, left
        self.need, self.began, self.ends = 0.0, False, []
        self.begins = 0.0
        self.place = 0  # in the sender's list


class Rank:
    """Its list of all steps, and where it is."""

    def __init__(self, model, window):
        self.list, self.at, self.busy, self.doing = [], 0, 0.0, False
        self.queue, self.begins = [], []
        self.open = set()  # deferred operations that are not done: window, index
        self.statistics = set()  # messages of statistics under way
        self.sends = set()  # other messages that it sends, under way
        work = 0.0
        for step in range(STEPS):
            for at, action in enumerate(window):
                a = dict(action, begins=work, name=(step, at), place=len(self.list))
                for key in {"waits", "after"} & set(action):
                    a[key] = [(step - back, before) for back, before in action[key]]
                work += model.cost(a)
                self.list.append(a)
        self.plan_needs()

    def plan_needs(self):
        """When the list needs what a message brings: at the first action that it must precede."""
        need = {}
        for a in reversed(self.list):
            a["need"] = need.get(a["name"], 1e9)
            for before in a["waits"] + a.get("after", []):
                need[before] = a["begins"]

    def waits(self, model, a):
        """Whether the list waits before an action. free_statistics: STATS does not."""
        if a["kind"] == "STATS":
            return not model.free_statistics and bool(self.statistics or self.open & {*a["waits"]})
        return not self.open.isdisjoint(a["waits"])


class Run:
    """All ranks and messages, event by event."""

    def __init__(self, model, lists, c, order):
        self.model, self.order, self.now = model, order, 0.0
        self.ranks = [Rank(model, window) for window in lists]
        n = len(lists)
        self.rate = 2 * (n - 1) / n * sum(model.size) / (c * model.forward)
        self.posted, self.active = defaultdict(list), []
        self.waited = [defaultdict(float) for _ in lists]  # time by what a rank waits for

    def post(self, rank, a):
        way, _, what = a["kind"].partition("_")
        ends = (rank, a["peer"]) if way == "SEND" else (a["peer"], rank)
        posted = self.posted[ends, what, a.get("storage")]
        if posted and posted[0][0] != way:
            message = posted.pop(0)[1]
            message.begins = self.now + self.model.latency
            self.active.append(message)
        else:
            size = self.model.size[a["storage"]] if "storage" in a else 0
            message = Message(*ends, size / self.rate)
            posted.append((way, message))
        message.need = max(message.need, a.get("need", 0))
        message.ends.append((rank, a["name"]))
        if what == "STATS":
            self.ranks[rank].statistics.add(message)
        elif way == "SEND":
            message.place = a["place"]
            self.ranks[rank].sends.add(message)

    def held(self, rank, a):
        """Whether a message waits for one before it to the same rank."""
        return (
            self.order == "program"
            and a["kind"].startswith("SEND")
            and any(m.target == a["peer"] and m.place < a["place"] for m in rank.sends)
        )

    def run_ready(self, number):
        """Deferred operations whose predecessors are done; a message is when it is complete."""
        rank, left, moved = self.ranks[number], [], False
        for a in rank.queue:
            if not rank.open.isdisjoint(a["after"]) or self.held(rank, a):
                left.append(a)
                continue
            moved = True
            if "peer" in a:
                self.post(number, a)
            else:
                rank.open.discard(a["name"])
        rank.queue = left
        return moved

    def advance(self, number):
        """Runs a rank's list as far as it goes now. Returns whether anything was done."""
        rank, moved = self.ranks[number], False
        if rank.busy > self.now + TINY:
            return False
        if rank.doing:
            rank.doing, rank.at, moved = False, rank.at + 1, True
        while True:
            moved = self.run_ready(number) or moved
            if rank.at == len(rank.list) or rank.waits(self.model, rank.list[rank.at]):
                return moved
            a, moved = rank.list[rank.at], True
            if a["kind"] == "FORWARD" and a["unit"] == 0:
                rank.begins.append(self.now)
            if self.model.cost(a):
                rank.busy, rank.doing = self.now + self.model.cost(a), True
                return True
            if "after" in a:
                rank.queue.append(a)
                rank.open.add(a["name"])
            elif "peer" in a:
                self.post(number, a)
            rank.at += 1

    def rates(self):
        """The share of a link that each message has now."""
        begun = [m for m in self.active if m.begins <= self.now + TINY]
        if self.order == "alone":
            return {message: 1.0 for message in begun}
        links = defaultdict(lambda: 1.0)
        if self.order == "by need":
            rates = {}
            for m in sorted(begun, key=lambda m: m.need):
                out, into = ("out", m.source), ("in", m.target)
                rates[m] = min(links[out], links[into])
                links[out] -= rates[m]
                links[into] -= rates[m]
            return rates
        pairs, taken = defaultdict(list), set()
        for m in sorted(begun, key=lambda m: (not m.began, m.need)):
            ends = {("out", m.source), ("in", m.target)}
            if self.order != "agreed" or not ends & taken:
                pairs["out", m.source, "in", m.target].append(m)
                taken |= ends
        first = 1 if self.order == "in turns" else None
        return self.shared({pair: waiting[:first] for pair, waiting in pairs.items()})

    def shared(self, pairs):
        """Pairs of ranks share each link evenly: the most loaded link first (max-min fairness)."""
        rates, left, open_pairs = {}, defaultdict(lambda: 1.0), set(pairs)
        while open_pairs:
            users = defaultdict(list)
            for pair in open_pairs:
                users[pair[:2]].append(pair)
                users[pair[2:]].append(pair)
            link = min(users, key=lambda link: (left[link] / len(users[link]), link))
            share = left[link] / len(users[link])
            for pair in users[link]:
                left[pair[:2]] -= share
                left[pair[2:]] -= share
                open_pairs.discard(pair)
                rates.update({m: share / len(pairs[pair]) for m in pairs[pair]})
        return rates

    def complete(self):
        done = [m for m in self.active if m.left <= TINY]
        self.active = [m for m in self.active if m.left > TINY]
        for m in done:
            for rank, name in m.ends:
                self.ranks[rank].open.discard(name)
                self.ranks[rank].statistics.discard(m)
                self.ranks[rank].sends.discard(m)
        return bool(done)

    def note_waits(self, seconds):
        """Counts who waits now, in the steps whose period is taken."""
        for rank, waited in zip(self.ranks, self.waited):
            idle = rank.busy <= self.now + TINY and rank.at < len(rank.list)
            step = rank.at * STEPS // len(rank.list)
            if idle and STEPS // 2 <= step < STEPS - 2:
                what = WAITS.get(rank.list[rank.at]["kind"], "gradient")
                waited[what] += seconds / (STEPS - 2 - STEPS // 2)

    def period(self):
        """The time of a step, from the middle of the run on."""
        while True:
            while any([*(self.advance(r) for r in range(len(self.ranks))), self.complete()]):
                pass
            if all(rank.at == len(rank.list) for rank in self.ranks):
                break
            rates = self.rates()
            next_ = [self.now + m.left / rate for m, rate in rates.items() if rate > TINY]
            next_ += [rank.busy for rank in self.ranks if rank.busy > self.now + TINY]
            next_ += [m.begins for m in self.active if m.begins > self.now + TINY]
            for m, rate in rates.items():
                m.left -= rate * (min(next_) - self.now)
                m.began = m.began or rate > TINY
            self.note_waits(min(next_) - self.now)
            self.now = min(next_)
        begins = self.ranks[0].begins
        return (begins[-2] - begins[STEPS // 2]) / (len(begins) - 2 - STEPS // 2)


def bytes_bound(model, lists, c):
    loads = defaultdict(float)
    for rank, actions in enumerate(lists):
        for a in actions:
            if "peer" in a and "storage" in a:
                loads[rank, a["kind"][:4]] += model.size[a["storage"]]
    n = len(lists)
    return max(loads.values()) * c * model.forward / (2 * (n - 1) / n * sum(model.size))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lists", nargs="*", metavar="LIST", help="what --show-schedule printed")
    parser.add_argument("--c", type=float, default=3.0)
    parser.add_argument("--latency", type=float, default=0.0)
    for name, default in (("layers", 12), ("channels", 128), ("positions", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--free-statistics", action="store_true")
    options = parser.parse_args()
    texts = {path: read_regular(path).decode() for path in options.lists} or planned()
    print_tables(Model(options), {name: read(text) for name, text in texts.items()}, options.c)


def print_tables(model, found, c):
    """found: lists by name."""
    ideal, waits = model.forward * (1 + max(2, c)), []
    orders = ("alone", "shared", "program", "in turns", "agreed", "by need")
    print(f"| list, ideal DP {ideal:.1f} | bytes |", " | ".join(orders), "|")
    print("|---" * (len(orders) + 2) + "|")
    for name, lists in found.items():
        runs = {order: Run(model, lists, c, order) for order in orders}
        times = [bytes_bound(model, lists, c), *(run.period() for run in runs.values())]
        print(f"| {name} |", " | ".join(f"{t:.1f}, {ideal / t:.2f}x" for t in times), "|")
        waits += [(f"{name}, rank {r}", waited) for r, waited in enumerate(runs["program"].waited)]
    names = ("parameters", "gradient", "statistics")
    print("\n| waits of a step, program |", " | ".join(names), "|")
    print("|---" * (len(names) + 1) + "|")
    for name, waited in waits:
        print(f"| {name} |", " | ".join(f"{waited[what]:.1f}" for what in names), "|")


if __name__ == "__main__":
    main()
