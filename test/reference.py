"""reference.py: what a run computes, a second time: numpy in fp64, slow and obvious.

It is written from the text of the semantics (README.md, docs/), not from the program: GPT-2 forward
and backward, the order of samples, learning rates, clipping, the optimizers, and the modes that
change the mathematics (cyclic, sharing and delinking, delayed updates, private steps, skipped
updates). A run is described by the program's own flags, as a dictionary; flags that must not change
the result (ranks, ZeRO, pipelines, micro-batches) are accepted and not read, any other unknown flag
is an error. test_reference.py compares it with the program.

Parameters are a dictionary: (storage, tensor) -> array. A storage is "wte", "wpe", "lnf", "head" or
the number of a block; where blocks share, that of the first block that uses it. Steps count from 0.
reference_modern.py has the other architectures, which follow the same rules.
"""

import math
import struct
import typing

import numpy as np

LAYERNORM_EPS = 1e-5
OUTLIER_WINDOW = 128  # of --skip-loss-z and --skip-grad-z
MASKED = -1  # a target that does not count
MODEL_MAGIC = 20240326

DEFAULTS = {
    "shuffle": 0, "windows": "continuous", "seq-len": None, "batch-tokens": None, "steps": None,
    "optimizer": "adamw", "momentum": 0.9, "muon-lr": 0.02, "muon-momentum": 0.95,
    "muon-momentum-warmup": 0, "muon-steps": 5, "muon-weight-decay": 0.1, "beta1": 0.9,
    "beta2": 0.95, "eps": 1e-8, "lr": 3e-4, "lr-schedule": "cosine", "lr-last-part": 0.2,
    "lr-embedding": 1.0, "lr-head": 1.0, "lr-vectors": 1.0, "nesterov": 0.0, "warmup": 0,
    "final-lr-fraction": 1.0, "weight-decay": 0.0, "grad-clip": 1.0, "skip-loss-z": 0,
    "skip-grad-z": 0, "dtype": "fp32", "cyclic": "off", "cyclic-stages": 1, "cyclic-slack": 0,
    "cyclic-cut": None, "cyclic-clip": "none", "share": "none", "share-lr": 0, "delink-at": 0,
    "delink": 0, "delink-moments": "mean", "delink-warmup": 0, "offload-delay": 0, "dp-noise": None,
    "dp-clip": 1.0, "dp-clip-style": "unit", "dp-clip-function": "abadi", "val-batches": 20,
}
# Flags of layouts and of what is written: they never change the mathematics.
WITHOUT_EFFECT = {
    "micro-batch", "ranks", "zero", "pipeline", "pipeline-schedule", "recompute", "threads",
    "offload", "offload-update", "cyclic-mode", "dp-key", "dp-show-private", "model", "train",
    "val", "val-every", "log", "export", "save-every", "out", "resume", "seed", "tokenizer",
}


# ------------------------------------------------------------------------------------------------
# Files


class Config(typing.NamedTuple):
    layers: int
    heads: int
    channels: int
    vocab: int
    positions: int

    @property
    def padded(self):
        """Rows of wte: the vocabulary, rounded up to 128."""
        return -(-self.vocab // 128) * 128

    def blocks(self):
        """The tensors of a block, in the order of a file."""
        C = self.channels
        return {
            "ln1w": (C,), "ln1b": (C,), "qkvw": (3 * C, C), "qkvb": (3 * C,), "attprojw": (C, C),
            "attprojb": (C,), "ln2w": (C,), "ln2b": (C,), "fcw": (4 * C, C), "fcb": (4 * C,),
            "fcprojw": (C, 4 * C), "fcprojb": (C,),
        }

    def tensors(self):
        """((storage, tensor), shape) in the order of a file: all layers of a tensor together."""
        C = self.channels
        yield ("wte", "wte"), (self.padded, C)
        yield ("wpe", "wpe"), (self.positions, C)
        for name, shape in self.blocks().items():
            for layer in range(self.layers):
                yield (layer, name), shape
        yield ("lnf", "lnfw"), (C,)
        yield ("lnf", "lnfb"), (C,)


def read_model(path):
    """(Config, parameters) of a file in llm.c's format, fp32."""
    with open(path, "rb") as file:
        data = file.read()
    head = struct.unpack("<8i", data[:32])
    magic, version, positions, vocab, layers, heads, channels, padded = head
    config = Config(layers, heads, channels, vocab, positions)
    assert (magic, version, padded) == (MODEL_MAGIC, 3, config.padded), (path, head)
    values, parameters, at = np.frombuffer(data, "<f4", offset=1024).astype(float), {}, 0
    for key, shape in config.tensors():
        parameters[key] = values[at : at + math.prod(shape)].reshape(shape)
        at += math.prod(shape)
    assert at == len(values), f"{path} has {len(values)} parameters instead of {at}"
    return config, parameters


def model_bytes(config, parameters):
    """The same the other way round."""
    words = (
        MODEL_MAGIC, 3, config.positions, config.vocab, config.layers, config.heads,
        config.channels, config.padded,
    )
    head = struct.pack("<256i", *words, *[0] * (256 - len(words)))
    return head + b"".join(parameters[key].astype("<f4").tobytes() for key, _ in config.tensors())


# ------------------------------------------------------------------------------------------------
# Samples


def windows_of_documents(tokens, T, end_of_text):
    """A document begins at each end-of-text token and is cut into windows of T targets."""
    begins = [i for i, token in enumerate(tokens) if token == end_of_text or i == 0]
    for begin, end in zip(begins, begins[1:] + [len(tokens)]):
        for at in range(begin, end - 1, T):
            row = tokens[at : min(at + T + 1, end)]
            short = T - (len(row) - 1)
            yield row[:-1] + [end_of_text] * short, row[1:] + [MASKED] * short


class Samples:
    """Sample g of a stream, for --shuffle 0: (inputs, targets)."""

    def __init__(self, tokens, T, windows="continuous", end_of_text=0):
        self.tokens, self.T, self.documents = list(tokens), T, None
        if windows == "document":
            self.documents = list(windows_of_documents(self.tokens, T, end_of_text))

    def windows(self):
        """Whole ones: those that do not wrap."""
        return len(self.documents) if self.documents else (len(self.tokens) - 1) // self.T

    def __getitem__(self, g):
        if self.documents:
            return self.documents[g % len(self.documents)]
        row = [self.tokens[(g * self.T + k) % len(self.tokens)] for k in range(self.T + 1)]
        return row[:-1], row[1:]

    def batch(self, numbers):
        rows = [self[g] for g in numbers]
        return tuple(np.array(part).reshape(-1, self.T) for part in list(zip(*rows)) or [[], []])


# ------------------------------------------------------------------------------------------------
# GPT-2


def layernorm(x, weight, bias):
    mean = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + LAYERNORM_EPS)
    normal = (x - mean) * rstd
    return normal * weight + bias, (normal, rstd)


def layernorm_backward(dy, weight, kept):
    """dx, dweight, dbias."""
    normal, rstd = kept
    d = dy * weight
    dx = rstd * (d - d.mean(-1, keepdims=True) - normal * (d * normal).mean(-1, keepdims=True))
    return dx, (dy * normal).sum((0, 1)), dy.sum((0, 1))


def linear_backward(dy, x, weight):
    """dx, dweight, dbias of y = x weight^T + bias."""
    return dy @ weight, np.einsum("bto,bti->oi", dy, x), dy.sum((0, 1))


GELU = math.sqrt(2 / math.pi)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(GELU * (x + 0.044715 * x**3)))


def gelu_backward(dy, x):
    t = np.tanh(GELU * (x + 0.044715 * x**3))
    return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * GELU * (1 + 3 * 0.044715 * x**2))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def heads_of(x, heads):
    """(B,T,C) -> (B,heads,T,C/heads)"""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def joined(x):
    """The same back."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def exact(x):
    return x


def bf16(x):
    """Of fp32 numbers: to nearest, ties to even."""
    bits = np.asarray(x, "<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype("<u4").view("<f4").astype(float)


class Precision(typing.NamedTuple):
    """What becomes of numbers: of parameters that are used; of values and of their gradients, where
    an operation stores them; of the scores of attention before they are multiplied."""

    parameters: typing.Callable = exact
    stored: typing.Callable = exact
    scores: typing.Callable = exact


EXACT = Precision()


def attention(qkv, heads, to):
    q, k, v = (heads_of(part, heads) for part in np.split(qkv, 3, -1))
    T, scale = q.shape[2], 1 / math.sqrt(q.shape[3])
    scores = np.where(np.tri(T, dtype=bool), q @ k.transpose(0, 1, 3, 2) * scale, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    out = to.stored(to.scores(e) @ v / e.sum(-1, keepdims=True))
    return joined(out), (q, k, v, softmax(scores), out, scale)


def attention_backward(dy, kept, to):
    q, k, v, share, out, scale = kept
    dy = heads_of(dy, q.shape[1])
    dshare = dy @ v.transpose(0, 1, 3, 2)
    dscores = to.scores(share * (dshare - (dy * out).sum(-1, keepdims=True)))
    dq, dk = dscores @ k * scale, dscores.transpose(0, 1, 3, 2) @ q * scale
    dv = to.scores(share).transpose(0, 1, 3, 2) @ dy
    return np.concatenate([joined(part) for part in (dq, dk, dv)], -1)


def block_forward(p, l, x, heads, to):
    """x += attention(ln1(x)); x += mlp(ln2(x))"""
    stored = to.stored
    ln1, kept1 = layernorm(x, p[l, "ln1w"], p[l, "ln1b"])
    ln1 = stored(ln1)
    mixed, kept_attention = attention(stored(ln1 @ p[l, "qkvw"].T + p[l, "qkvb"]), heads, to)
    x = stored(x + stored(mixed @ p[l, "attprojw"].T + p[l, "attprojb"]))
    ln2, kept2 = layernorm(x, p[l, "ln2w"], p[l, "ln2b"])
    ln2 = stored(ln2)
    hidden = ln2 @ p[l, "fcw"].T + p[l, "fcb"]
    active = stored(gelu(hidden))
    x = stored(x + stored(active @ p[l, "fcprojw"].T + p[l, "fcprojb"]))
    return x, (ln1, kept1, mixed, kept_attention, ln2, kept2, stored(hidden), active)


def block_backward(p, l, dx, kept, g, to):
    """The gradient of the block's input; those of its tensors into g."""
    stored = to.stored
    ln1, kept1, mixed, kept_attention, ln2, kept2, hidden, active = kept
    d, g[l, "fcprojw"], g[l, "fcprojb"] = linear_backward(dx, active, p[l, "fcprojw"])
    d = stored(gelu_backward(d, hidden))
    d, g[l, "fcw"], g[l, "fcb"] = linear_backward(d, ln2, p[l, "fcw"])
    d, g[l, "ln2w"], g[l, "ln2b"] = layernorm_backward(stored(d), p[l, "ln2w"], kept2)
    dx = stored(dx + d)
    d, g[l, "attprojw"], g[l, "attprojb"] = linear_backward(dx, mixed, p[l, "attprojw"])
    d = stored(attention_backward(stored(d), kept_attention, to))
    d, g[l, "qkvw"], g[l, "qkvb"] = linear_backward(d, ln1, p[l, "qkvw"])
    d, g[l, "ln1w"], g[l, "ln1b"] = layernorm_backward(stored(d), p[l, "ln1w"], kept1)
    return stored(dx + d)


def forward(config, p, inputs, to=EXACT):
    """Probabilities of the next tokens (B,T,vocab), and what the backward pass needs."""
    x = to.stored(p["wte", "wte"][inputs] + p["wpe", "wpe"][: inputs.shape[1]])
    blocks = []
    for layer in range(config.layers):
        x, kept = block_forward(p, layer, x, config.heads, to)
        blocks.append(kept)
    last, kept = layernorm(x, p["lnf", "lnfw"], p["lnf", "lnfb"])
    last = to.stored(last)
    return softmax(last @ p["wte", "wte"][: config.vocab].T), (blocks, last, kept)


def losses_of(probabilities, targets):
    """-log p of each target; 0 where it is masked."""
    counts = targets != MASKED
    picked = np.take_along_axis(probabilities, np.where(counts, targets, 0)[..., None], -1)[..., 0]
    return np.where(counts, -np.log(picked), 0.0)


def loss_and_gradient(config, p, inputs, targets, scale, to=EXACT):
    """The sum of all targets' losses, and the gradient of `scale` times it, of each layer apart."""
    probabilities, (blocks, last, kept) = forward(config, p, inputs, to)
    counts, g, wte = targets != MASKED, {}, p["wte", "wte"]
    right = np.eye(config.vocab)[np.where(counts, targets, 0)]
    # The program stores e^(logit - the largest), then what it makes of that, but for the target's.
    largest = probabilities.max(-1, keepdims=True)
    stored = to.stored(probabilities / largest) * largest
    dlogits = np.where(right, probabilities - 1, stored)
    dlogits = to.stored(dlogits * scale * counts[..., None])
    g["wte", "wte"], g["wpe", "wpe"] = np.zeros_like(wte), np.zeros_like(p["wpe", "wpe"])
    g["wte", "wte"][: config.vocab] = np.einsum("btv,btc->vc", dlogits, last)  # as classifier
    dx, g["lnf", "lnfw"], g["lnf", "lnfb"] = layernorm_backward(
        to.stored(dlogits @ wte[: config.vocab]), p["lnf", "lnfw"], kept
    )
    dx = to.stored(dx)
    for layer in reversed(range(config.layers)):
        dx = block_backward(p, layer, dx, blocks[layer], g, to)
    np.add.at(g["wte", "wte"], inputs, dx)  # as table
    g["wpe", "wpe"][: inputs.shape[1]] += dx.sum(0)
    return losses_of(probabilities, targets).sum(), g


# ------------------------------------------------------------------------------------------------
# Rules


def learning_rate(f, t, steps):
    """Of step t."""
    peak, last, warmup = f["lr"], f["lr"] * f["final-lr-fraction"], f["warmup"]
    if t < warmup:
        return peak * (t + 1) / warmup
    done = (t - warmup) / (steps - warmup)
    if f["lr-schedule"] == "cosine":
        return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2
    if f["lr-schedule"] == "linear":
        return peak + (last - peak) * done
    part = f["lr-last-part"]
    if f["lr-schedule"].startswith("wsd") and t >= (1 - part) * steps:  # the last part decays
        done = (t - (1 - part) * steps) / (part * steps)
        down = math.sqrt(done) if f["lr-schedule"] == "wsd" else done
        return last + (peak - last) * (1 - down)
    return peak


ORTHOGONAL = 3.4445, -4.775, 2.0315  # coefficients of KellerJordan/Muon


def orthogonal(U, iterations):
    """Newton and Schulz's iterate of a matrix (outputs, inputs)."""
    a, b, c = ORTHOGONAL
    X = U.T if U.shape[0] > U.shape[1] else U
    X = X / max(np.linalg.norm(X), 1e-7)
    for _ in range(iterations):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if U.shape[0] > U.shape[1] else X


def rows_of(key, config):
    """How many matrices one below the other a tensor is: q, k and v. (reference_modern.py has them
    apart.)"""
    return 3 if key[1] == "qkvw" else 1


def groups_of(share, layers):
    """The first block that uses each block's storage."""
    if share in (None, "none"):
        return list(range(layers))
    if share == "all":
        return [0] * layers
    if "x" in str(share):
        return [layer % int(share.split("x")[0]) for layer in range(layers)]
    return [layer // int(share) * int(share) for layer in range(layers)]


def stages_of_units(units, N, cut=None):
    """The stage (from 1) of each unit: as even as possible, earlier stages take the remainder."""
    lengths = [units // N + (j < units % N) for j in range(N)]
    if cut:
        lengths = [int(n) for n in cut.split(",")]
    return [j + 1 for j, length in enumerate(lengths) for _ in range(length)]


def squares(gradient, keys):
    return sum(float((gradient[key] ** 2).sum()) for key in keys)


def is_outlier(values, limit):
    """Is the last value more than `limit` deviations above the mean of the last 128, with it?"""
    if not limit or len(values) < OUTLIER_WINDOW:
        return False
    window = np.array(values[-OUTLIER_WINDOW:])
    return window[-1] - window.mean() > limit * window.std()


# ------------------------------------------------------------------------------------------------
class Run:
    """A training run. step() makes the next one, and returns (loss, gradient norm, rate)."""

    # of the architecture
    forward = staticmethod(forward)
    loss_and_gradient = staticmethod(loss_and_gradient)

    def __init__(self, config, parameters, samples, flags):
        unknown = set(flags) - set(DEFAULTS) - WITHOUT_EFFECT
        assert not unknown, f"the reference does not know {unknown}"
        given = {k: v for k, v in flags.items() if v is not None and k in DEFAULTS}
        falls = {"final-lr-fraction": 0.1} if given.get("lr-schedule") == "cosine" else {}
        self.f = f = {**DEFAULTS, **falls, **given}
        for name, value in f.items():
            kind = DEFAULTS[name]
            f[name] = float(value) if isinstance(kind, float) and value is not None else value
        assert not f["shuffle"]
        self.precision = Precision(bf16, bf16, bf16) if f["dtype"] == "bf16" else EXACT
        self.config, self.samples, self.t = config, samples, 0
        self.S = f["batch-tokens"] // f["seq-len"]
        self.group = groups_of(f["share"], config.layers)
        self.now = {
            key: value.copy() for key, value in parameters.items() if self.home(key[0]) == key[0]
        }
        self.before = self.now  # theta_(-1) = theta_0
        self.first = self.zeros()  # first moment, or sgd's momentum
        self.second = self.zeros()
        self.updates = {storage: 0 for storage, _ in self.now}
        self.delinked = None  # since which step
        self.losses, self.norms = [], []
        self.skipped = []  # steps without an update, as the log counts them
        self.pending = None  # --offload-delay: the gradient that waits, its norm

    def home(self, storage):
        """The storage that is used in its place."""
        return self.group[storage] if isinstance(storage, int) else storage

    def zeros(self):
        return {key: np.zeros_like(value) for key, value in self.now.items()}

    def layers(self, parameters):
        """Of each layer its own, as if nothing were shared."""
        return {
            (storage, name): parameters[self.home(storage), name]
            for (storage, name), _ in self.config.tensors()
        }

    def storages(self):
        """Storage -> its keys."""
        found = {}
        for key in self.now:
            found.setdefault(key[0], []).append(key)
        return found

    def mean_over_users(self, g):
        """The gradient of each storage."""
        out = {key: np.zeros_like(value) for key, value in self.now.items()}
        for (storage, name), value in g.items():
            users = self.group.count(self.home(storage)) if isinstance(storage, int) else 1
            out[self.home(storage), name] += value / users
        return out

    # -- gradients of a step: (loss, gradient of each storage)

    def gradient(self, parameters, numbers, targets_of_step):
        inputs, targets = self.samples.batch(numbers)
        if not len(inputs):
            return 0.0, self.zeros()
        p = self.layers(parameters)
        p = {key: self.precision.parameters(value) for key, value in p.items()}
        scale = 1 / targets_of_step
        loss, g = self.loss_and_gradient(self.config, p, inputs, targets, scale, self.precision)
        return loss / targets_of_step, self.mean_over_users(g)

    def targets(self, numbers):
        return sum(int((np.array(self.samples[g][1]) != MASKED).sum()) for g in numbers)

    def stage_of(self, storage, stages):
        """wte is the first stage's, for both uses; a shared storage that of its first block."""
        if storage in ("wte", "wpe"):
            return stages[0]
        return stages[-1] if storage in ("lnf", "head") else stages[1 + storage]

    def versions(self, i):
        """The parameters that micro-batch i (from 1) uses."""
        f, N, mixed = self.f, int(self.f["cyclic-stages"]), {}
        stages = stages_of_units(self.config.layers + 2, N, f["cyclic-cut"])
        for key in self.now:
            j = self.stage_of(key[0], stages)
            fresh = f["cyclic"] == "v2" and i + j >= N + 1 + f["cyclic-slack"]
            mixed[key] = (self.now if fresh or f["cyclic"] == "off" else self.before)[key]
        return mixed

    def cyclic_gradient(self):
        N, S = int(self.f["cyclic-stages"]), self.S
        total, sums = 0.0, self.zeros()
        count = self.targets(range(self.t * S, (self.t + 1) * S))
        for i in range(1, N + 1):
            part = range(self.t * S + (i - 1) * S // N, self.t * S + i * S // N)
            loss, g = self.gradient(self.versions(i), part, count)
            total, sums = total + loss, {key: sums[key] + g[key] for key in sums}
        return total, sums

    def clip_groups(self, stages):
        """Of private steps: the keys of each group that has a norm of its own."""
        style, found = self.f["dp-clip-style"], {}
        for key in self.now:
            last = self.config.layers + 1
            unit = {"wte": 0, "wpe": 0, "lnf": last, "head": last}.get(key[0])
            unit = 1 + key[0] if unit is None else unit
            group = {"flat": 0, "unit": unit, "stage": stages[unit]}[style]
            found.setdefault(group, []).append(key)
        return list(found.values())

    def private_gradient(self, numbers, stages):
        """The sum of clipped gradients of the samples drawn, by the expected batch.

        Where the list of samples goes down, the next micro-batch begins.
        """
        f, total, sums, i = self.f, 0.0, self.zeros(), 1
        groups = self.clip_groups(stages)
        R = f["dp-clip"] / math.sqrt(len(groups))
        for k, number in enumerate(numbers):
            i += k > 0 and number < numbers[k - 1]
            loss, g = self.gradient(self.versions(i), [number], self.targets([number]))
            total += loss
            for keys in groups:
                n = math.sqrt(squares(g, keys))
                automatic = f["dp-clip-function"] == "automatic"
                factor = R / (n + 0.01) if automatic else min(1, R / (n + 1e-6))
                for key in keys:
                    sums[key] += factor * g[key]
        return total / max(1, len(numbers)), {key: value / self.S for key, value in sums.items()}

    # -- a step

    def rate(self):
        f, t = self.f, self.t
        rate = learning_rate(f, t, f["steps"])
        shares = len(set(self.group)) < self.config.layers
        if shares and f["share-lr"]:
            rate *= f["share-lr"] / f["lr"]
        if self.delinked is not None and t - self.delinked < f["delink-warmup"]:
            rate *= (t - self.delinked + 1) / f["delink-warmup"]
        return rate

    def delink(self):
        """Each block gets a copy of what it shared."""
        old, self.group = self.group, list(range(self.config.layers))
        reset = self.f["delink-moments"] == "reset"
        self.delinked = self.t
        for states in (self.now, self.first, self.second):
            for (storage, name), shape in self.config.tensors():
                if isinstance(storage, int):
                    states[storage, name] = states[old[storage], name].copy()
                    if reset and states is not self.now:
                        states[storage, name][:] = 0
        for layer in reversed(range(self.config.layers)):
            self.updates[layer] = 0 if reset else self.updates[old[layer]]
        self.before = self.now

    def begin_again(self, flags):
        """A new run that begins with this one's checkpoint: steps of its own, the states go on."""
        flags = {**flags, "share": self.f["share"]}
        other = Run(self.config, self.layers(self.now), self.samples, flags)
        other.now, other.before = self.now, self.now
        other.first, other.second, other.updates = self.first, self.second, self.updates
        self.__dict__ = other.__dict__
        if self.f["delink"]:
            self.delink()
            self.delinked = None  # its rate is that of a new run

    def resume(self, flags):
        """Goes on with other flags. A checkpoint has the version before the newest of what the
        first micro-batch uses in that one; of the others both are the newest."""
        self.before = self.versions(1)
        self.f.update(flags)

    def factors(self, g, norm):
        """Of each storage: what clipping makes of its gradient."""
        clip, storages = self.f["grad-clip"], self.storages()
        if self.f["cyclic"] == "v2" and self.f["cyclic-clip"] == "none":
            clip = 0
        if not clip:
            return dict.fromkeys(storages, 1.0)
        if self.f["cyclic"] == "v2":
            clip = clip / math.sqrt(len(storages))
            norms = {s: math.sqrt(squares(g, keys)) for s, keys in storages.items()}
        else:
            norms = dict.fromkeys(storages, norm)
        return {s: min(1, clip / max(n, 1e-300)) for s, n in norms.items()}

    def rate_of(self, key, p):
        """Which factor of the learning rate a tensor has."""
        if p.ndim == 1:
            return "vectors"
        return None if isinstance(key[0], int) else "head" if key[0] == "head" else "embedding"

    def muon(self, key, p, grad, lr):
        f = self.f
        lr *= f["muon-lr"] / f["lr"]
        mu, warmup = f["muon-momentum"], f["muon-momentum-warmup"]
        if self.t < warmup:
            mu = 0.85 + (mu - 0.85) * self.t / warmup
        M = self.first[key] = self.first[key] + (1 - mu) * (grad - self.first[key])
        U, n = grad + mu * (M - grad), rows_of(key, self.config)
        p = p * (1 - lr * f["muon-weight-decay"])
        parts = []
        for part in np.split(U, n):
            scale = math.sqrt(max(1, part.shape[0] / part.shape[1]))
            parts.append(scale * orthogonal(part, int(f["muon-steps"])))
        return p - lr * np.concatenate(parts)

    def update(self, g, norm, rate):
        f, factors, new = self.f, self.factors(g, norm), {}
        for storage in self.storages():
            self.updates[storage] += 1
        for key, p in self.now.items():
            grad, count = factors[key[0]] * g[key], self.updates[key[0]]
            decay = f["weight-decay"] if p.ndim == 2 else 0.0
            if f["optimizer"] == "muon" and p.ndim == 2 and isinstance(key[0], int):
                new[key] = self.muon(key, p, grad, rate)
                continue
            own = self.rate_of(key, p)
            lr = rate * f[f"lr-{own}"] if own else rate
            if f["optimizer"] == "sgd":
                grad = grad + decay * p
                self.first[key] = f["momentum"] * self.first[key] + grad
                ahead = grad + f["momentum"] * self.first[key]
                new[key] = p - lr * (ahead if f["nesterov"] else self.first[key])
                continue
            self.first[key] = f["beta1"] * self.first[key] + (1 - f["beta1"]) * grad
            self.second[key] = f["beta2"] * self.second[key] + (1 - f["beta2"]) * grad**2
            ahead = f["beta1"] * self.first[key] + (1 - f["beta1"]) * grad
            m = (ahead if f["nesterov"] else self.first[key]) / (1 - f["beta1"] ** count)
            v = self.second[key] / (1 - f["beta2"] ** count)
            new[key] = p - lr * (m / (np.sqrt(v) + f["eps"]) + decay * p)
        self.before, self.now = self.now, new

    def skips(self, loss, norm):
        self.losses.append(loss)
        self.norms.append(norm)
        return (
            not math.isfinite(loss + norm)
            or is_outlier(self.losses, self.f["skip-loss-z"])
            or is_outlier(self.norms, self.f["skip-grad-z"])
        )

    def step(self, drawn=None, stages=None):
        """drawn: the windows of a private step; stages: of its units, for --dp-clip-style stage."""
        f, t, S = self.f, self.t, self.S
        if f["delink-at"] and t == f["delink-at"]:
            self.delink()
        lr = self.rate()
        if f["dp-noise"] is not None:
            loss, g = self.private_gradient(drawn, stages or [0] * (self.config.layers + 2))
        elif f["cyclic"] != "off":
            loss, g = self.cyclic_gradient()
        else:
            numbers = range(t * S, (t + 1) * S)
            loss, g = self.gradient(self.now, numbers, self.targets(numbers))
        norm = math.sqrt(squares(g, g))
        skip = self.skips(loss, norm)
        self.skipped += [t + 1] if skip else []
        if f["offload-delay"]:
            if self.pending:
                self.update(*self.pending, lr)
            self.pending = None if skip else (g, norm)
        elif not skip:
            self.update(g, norm, lr)
        self.t += 1
        return loss, norm, lr

    def validate(self, samples):
        """Of --val-batches batches: the mean loss, the sum of losses, the targets."""
        batches = int(self.f["val-batches"])
        count = samples.windows() if batches < 0 else batches * self.S
        inputs, targets = samples.batch(range(count))
        probabilities = self.forward(self.config, self.layers(self.now), inputs)[0]
        losses = losses_of(probabilities, targets)
        return losses.sum() / (targets != MASKED).sum(), losses.sum(), targets

    def file(self):
        """Parameters as a file has them: of each layer its own."""
        return self.layers(self.now)
