"""dapple_planners.py: what two other planners choose for a profile, on nodes of equally many GPUs.

equations   the planner of DAPPLE (arXiv 2007.01045, section 4): equations 1 to 3, over the kinds of
            plans that the paper's table 4 has: data parallelism, a stage for each GPU, two stages
pipedream   the planner of PipeDream (SOSP 2019, section 3.1)

Stages take the GPUs in order, as train_gpt's --pipeline does. A plan is a list of (units,
replicas); spec() writes it as that flag. The profiles are those of --profile (docs/formats.md).
"""

import json
from itertools import accumulate


def ordered(profile):
    """The nodes in the order of the file if every edge goes forward in it, else by id as far as
    edges allow."""
    nodes, edges = profile["nodes"], profile["edges"]
    place = {node["id"]: at for at, node in enumerate(nodes)}
    if all(place[begin] < place[end] for begin, end in edges):
        return nodes
    found = []
    while len(found) < len(nodes):
        done = {node["id"] for node in found}
        waiting = {end for begin, end in edges if begin not in done}
        ready = (node for node in nodes if node["id"] not in done | waiting)
        found.append(min(ready, key=lambda node: node["id"]))
    return found


class Model:
    """Prefix sums over the units of a profile: seconds of a sample, bytes of parameters. cut[u]:
    bytes of a sample before unit u."""

    def __init__(self, path, name):
        profile = json.loads(path.read_text())["models"][name]
        nodes, self.batch = ordered(profile), profile["profile_batch_size"]
        costs = [not node["name"].startswith("Input") for node in nodes]

        def sums(key, scale):
            values = [scale * node[key] * cost for node, cost in zip(nodes, costs)]
            return [0, *accumulate(values)]

        self.units = len(nodes)
        self.forward = sums("fwd_ms", 1e-3 / self.batch)
        self.backward = sums("bwd_ms", 1e-3 / self.batch)
        self.parameters = sums("param_bytes", 1)
        place = {node["id"]: u for u, node in enumerate(nodes)}
        last = list(range(self.units))  # unit that needs a node's outputs last
        for begin, end in profile["edges"]:
            last[place[begin]] = max(last[place[begin]], place[end])
        self.cut = [0] * (self.units + 1)
        for u, node in enumerate(nodes):
            outputs = node["act_bytes"]
            size = (sum(outputs) if isinstance(outputs, list) else outputs) * costs[u] / self.batch
            for border in range(u + 1, last[u] + 1):
                self.cut[border] += size

    def seconds(self, first, end):
        """Of a sample, forward and backward."""
        both = (times[end] - times[first] for times in (self.forward, self.backward))
        return sum(both)


class Cluster:
    """NODESxGPUS,intra=GB/s,inter=GB/s,gather=GB/s (of many senders to one node; inter)."""

    def __init__(self, text):
        shape, *rates = text.split(",")
        self.nodes, self.of_node = map(int, shape.split("x"))
        self.ranks = self.nodes * self.of_node
        rates = {key: 1e9 * float(value) for key, value in (rate.split("=") for rate in rates)}
        self.inter = rates["inter"]
        self.intra = rates.get("intra", self.inter)
        self.gather = rates.get("gather", self.inter)

    def homes(self, begin, end):
        """Nodes of the GPUs from `begin` on."""
        return begin // self.of_node, (end - 1) // self.of_node

    def all_reduce(self, begin, end, size):
        """Seconds in a ring; inside a node half as many pairs as GPUs send at once."""
        count, homes = end - begin, self.homes(begin, end)
        if count == 1:
            return 0
        rate = self.intra * (count // 2) if homes[0] == homes[1] else self.inter
        return 2 * (count - 1) / count * size / rate

    def message(self, senders, receivers, size):
        """Seconds from all of a stage's GPUs to all of another's. Each is (begin, end)."""
        first, last = self.homes(*receivers)
        outside = senders[1] - senders[0]
        if first == last:
            outside = sum(rank // self.of_node != first for rank in range(*senders))
        if not outside:
            return size / self.intra
        rate = self.gather if first == last and outside > 1 else self.inter
        return size * outside / (senders[1] - senders[0]) / rate


def spec(plan):
    """As --pipeline takes it."""
    return ",".join(f"{units}:{replicas}" for units, replicas in plan)


def pivot(line, batches):
    """The stage with the least bubbles. line: (forward, backward, all-reduce) of the stages and of
    the links between them."""
    found = len(line) - 1
    for s in reversed(range(found)):
        between = sum(forward + backward for forward, backward, _ in line[s + 1 : found])
        if (batches - 1) * (sum(line[s][:2]) - sum(line[found][:2])) > between:
            found = s
    return found


def latency(line, batches):
    """Equations 1 to 3: seconds of a step's warm-up, its steady phase at the pace of the pivot, and
    its end, in which all-reduces hide behind the backward passes that remain."""
    at = pivot(line, batches)
    ends = [
        reduce
        + (sum(b for _, b, _ in line[s : at + 1]) if s <= at else 0)
        - (sum(b for _, b, _ in line[at : s + 1]) if s > at else 0)
        for s, (_, _, reduce) in enumerate(line)
    ]
    warm = sum(forward for forward, _, _ in line[: at + 1])
    return warm + (batches - 1) * sum(line[at][:2]) + max(ends)


def pipeline_seconds(model, cluster, plan, samples, batch):
    """Of a step of two stages or more. Replicas take even parts of a micro-batch, as in the paper's
    code, also where these are fractions of a sample."""
    line, unit, rank, before = [], 0, 0, None
    for units, replicas in plan:
        end, here, rows = unit + units, (rank, rank + replicas), batch / replicas
        if before:
            size = batch * model.cut[unit]
            line.append(
                (cluster.message(before, here, size), cluster.message(here, before, size), 0)
            )
        times = (rows * (of[end] - of[unit]) for of in (model.forward, model.backward))
        size = model.parameters[end] - model.parameters[unit]
        line.append((*times, cluster.all_reduce(*here, size)))
        unit, rank, before = end, rank + replicas, here
    return latency(line, samples // batch)


def data_parallel_seconds(model, cluster, samples, batch):
    """Of a step; the all-reduce of a unit begins with its gradients, the last unit's first."""
    rows, computed, sent = batch / cluster.ranks, 0, 0
    for u in reversed(range(model.units)):
        computed += rows * (model.backward[u + 1] - model.backward[u])
        size = model.parameters[u + 1] - model.parameters[u]
        if size:
            sent = max(sent, computed) + cluster.all_reduce(0, cluster.ranks, size)
    whole = samples // batch * rows * model.seconds(0, model.units)
    return whole + max(0, sent - computed)


def straight(model, ranks):
    """A stage for each GPU, the slowest as fast as possible."""

    def fill(most):
        first, plan = 0, []
        for left in reversed(range(ranks)):
            end = first + 1
            while end < model.units - left and model.seconds(first, end + 1) <= most:
                end += 1
            plan.append((end - first, 1))
            first = end
        fits = first == model.units and all(
            model.seconds(end - units, end) <= most
            for end, (units, _) in zip(accumulate(units for units, _ in plan), plan)
        )
        return plan if fits else None

    low, high = 0, model.seconds(0, model.units)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if fill(middle) else (middle, high)
    return fill(high)


def equations(model, cluster, samples, batch):
    """(seconds, plan): what equations 1 to 3 choose, with this micro-batch; data parallelism, whose
    all-reduce overlaps with a backward pass, with any."""
    whole = [(model.units, cluster.ranks)]
    found = [
        (data_parallel_seconds(model, cluster, samples, any_batch), whole)
        for any_batch in range(1, samples + 1)
        if samples % any_batch == 0
    ]
    plans = [straight(model, cluster.ranks)] if model.units >= cluster.ranks else []
    plans += [
        [(units, replicas), (model.units - units, cluster.ranks - replicas)]
        for units in range(1, model.units)
        for replicas in range(1, cluster.ranks)
    ]
    found += [(pipeline_seconds(model, cluster, plan, samples, batch), plan) for plan in plans]
    return min(found)


class Level:
    """A level of PipeDream's planner: GPUs of a node, or nodes. The time of the slowest stage of
    units i..j on m members, with 2 a / bandwidth for the activations before unit s:

        A(i..j, m) = min over s, k of max{ A(i..s, m - k), 2 a_s / bandwidth, T(s..j, k) }
        T(i..j, m) = max{ A of the level below, 2 (m - 1) w / bandwidth } / m
    """

    def __init__(self, model, below, members, rate):
        self.model, self.below, self.members, self.rate = model, below, members, rate

    def stage(self, first, end, count):
        size = self.model.parameters[end] - self.model.parameters[first]
        return max(self.below(first, end), 2 * (count - 1) * size / self.rate) / count

    def solve(self, first, last):
        """{(end, members): (time, begin of the last stage, its members)}."""
        best = {}
        for end in range(first + 1, last + 1):
            for count in range(1, self.members + 1):
                found = self.stage(first, end, count), first, count
                for begin in range(first + 1, end):
                    link = 2 * self.model.batch * self.model.cut[begin] / self.rate
                    for take in range(1, count if link < found[0] else 1):
                        before = max(best[begin, count - take][0], link)
                        if before < found[0]:
                            time = max(before, self.stage(begin, end, take))
                            found = min(found, (time, begin, take), key=lambda one: one[0])
                best[end, count] = found
        return best

    def stages(self, first, last):
        """(first unit, end, members) of the best stages of these units."""
        best, count, stages = self.solve(first, last), self.members, []
        while last > first:
            _, begin, take = best[last, count]
            stages.append((begin, last, take))
            last, count = begin, count - take
        return stages[::-1]


def pipedream(model, cluster):
    """The plan: first for the GPUs of a node, then for the nodes, each with the batch of the
    profile. The stages of several nodes are replicated on each of them."""
    inner = Level(model, lambda first, end: model.batch * model.seconds(first, end),
                  cluster.of_node, cluster.intra)
    times = {}
    for first in range(model.units):
        for (end, count), (time, _, _) in inner.solve(first, model.units).items():
            if count == cluster.of_node:
                times[first, end] = time
    outer = Level(model, lambda first, end: times[first, end], cluster.nodes, cluster.inter)
    return [
        (end - begin, replicas * nodes)
        for first, last, nodes in outer.stages(0, model.units)
        for begin, end, replicas in inner.stages(first, last)
    ]
