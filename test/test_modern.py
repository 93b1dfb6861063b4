#!/usr/bin/env python3
"""test_modern.py: Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE and nanochat's block against
huggingface/transformers and against reference_modern.py, the same mathematics a second time.

    python3 test/test_modern.py         TEST_ALL=1: more random runs, and all planted faults;
                                        TEST_SEED=N: the random choices, printed
                                        TRAIN_GPT=FILE: another binary than ./train_gpt

    TheReference  agrees with the numbers of transformers (test/golden/modern_*.json); its gradient
                  is what differences of its loss say; each fault of FAULTS, planted into it, shows
    Files         a Hugging Face folder is read and written without a change
    GoldenRuns    the program makes transformers' ten steps, on random layouts
    Random        random models, rules and layouts against the reference: plain, cyclic, shared
    Delink        blocks that share, then do not: within a run, between runs, and beside copies made
                  in Python
    Private       clipped gradients of single samples
    InitialValues of each tensor: its deviation and distribution
    Presets       parameters of the models that --model knows by name
    Faults        a program with a fault in a rule (planted_faults.py), which its model must see

Standard library and numpy; the tests run themselves in .venv's Python where this one has none.
"""

import contextlib
import glob
import json
import math
import os
import random
import shlex
import typing
import unittest
import unittest.mock

import harness

harness.need_numpy()
import numpy as np  # noqa: E402
from harness import ALL, SEED, at_once, sample, scratch, shard
from planted_faults import MODERN, numbered

import reference_modern as modern
import test_reference
from reference import MASKED, Samples, groups_of
from reference_modern import Config, Run
from test_reference import dashed

# Relative errors of the program, and of transformers, in fp32. Of weights: of the tensor's norm.
GOLDEN_LOSS, GOLDEN_NORM, GOLDEN_WEIGHTS = 1e-5, 1e-4, 1e-4
EXACT_LOSS, EXACT_NUMBERS = 1e-6, 1e-5  # of the reference: of losses; of gradients, logits
ROUNDED = 1e-7  # the norm of a gradient of rounding alone
SHOWS = 5  # a fault must change losses or weights by so many tolerances of the program
ARCHITECTURES = "llama", "qwen2", "qwen3", "nano"
# The others' names are of blocks with experts. prototypes: Mixtral's with groups of experts
# shared: and with experts to which all tokens go
WITH_EXPERTS = {"mixtral": "llama", "qwen3_moe": "qwen3", "prototypes": "llama", "shared": "llama"}
ALL_ARCHITECTURES = *ARCHITECTURES, *WITH_EXPERTS

# As in make_transformers_golden.py
GOLDEN_T, GOLDEN_S = 20, 3
GOLDEN_RUN = dict(
    shuffle=0, seq_len=GOLDEN_T, batch_tokens=GOLDEN_S * GOLDEN_T, steps=10, lr=1e-3,
    lr_schedule="constant", weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1,
    val_every=0,
)


class Golden:
    """The numbers of transformers for a model."""

    def __init__(self, path):
        self.name = os.path.basename(path)[len("modern_") : -len(".json")]
        with open(path) as file:
            self.found = json.load(file)
        muon = path.replace("modern_", "muon_")
        self.muon = None
        if os.path.exists(muon):
            with open(muon) as file:
                self.muon = json.load(file)
        fields = self["config"]
        self.config = Config(**{**fields, "scaling": tuple(fields["scaling"] or ()) or None})

    def __getitem__(self, key):
        return self.found[key]

    def initial(self):
        return modern.initial(self.config, self["seed"], self["deviations"].items())

    def reference(self, parameters=None):
        samples = Samples(harness.golden_tokens(), GOLDEN_T)
        return Run(self.config, parameters or self.initial(), samples, dashed(self.run()))

    def run(self):
        return {**GOLDEN_RUN, "eps": self.found.get("eps", GOLDEN_RUN["eps"])}


GOLDENS = [
    Golden(path) for path in sorted(glob.glob(os.path.join(harness.ROOT, "test/golden/modern_*")))
]


def relative(found, expected):
    return max(abs(float(a) / b - 1) for a, b in zip(found, expected, strict=True))


def tensor_error(found, expected):
    """Of the norm of all elements, and of the difference of those that a golden file has. Of a
    gradient that is nothing but rounding: 0, if it is one here, too."""
    flat, elements = found.ravel(), np.array(expected["elements"])
    if expected["norm"] < ROUNDED:
        return float(np.linalg.norm(flat) > ROUNDED)
    at = [i * len(flat) // len(elements) for i in range(len(elements))]
    return max(
        abs(np.linalg.norm(flat) / expected["norm"] - 1),
        np.linalg.norm(flat[at] - elements) / np.linalg.norm(elements),
    )


def tensor_errors(found, expected, config):
    """The largest, and of which tensor it is. Both must have the same tensors."""
    names = {modern.file_name(key, config): value for key, value in found.items()}
    assert names.keys() == expected.keys(), names.keys() ^ expected.keys()
    return max((tensor_error(value, expected[name]), name) for name, value in names.items())


# ------------------------------------------------------------------------------------------------
# Faults


class Fault(typing.NamedTuple):
    """What to put in place of a name of reference_modern, or what to make of the weights."""

    where: typing.Callable  # models that have the rule
    name: str = ""
    value: typing.Any = None
    weights: typing.Callable = None


def of(*architectures):
    return lambda config: config.arch in architectures


ROTATE, ATTENTION, ATTENTION_BACKWARD = modern.rotate, modern.attention, modern.attention_backward
RMSNORM, FREQUENCIES = modern.rmsnorm, modern.frequencies
CHOOSE, WEIGHTS = modern.choose, modern.weights_of
every, gated = of(*ARCHITECTURES), of("llama", "qwen2", "qwen3")
dense = lambda c: gated(c) and not c.experts
mixed, several = lambda c: c.experts, lambda c: c.top_k > 1
shares = lambda c: c.shared_experts
scaled, grouped = lambda c: c.scaling, lambda c: c.kv_heads > 1


def neighbours(x, config, back=False):
    """Pairs (2 i, 2 i + 1), as in Meta's files."""
    order = [*range(0, config.head_dim, 2), *range(1, config.head_dim, 2)]
    out = np.empty_like(x)
    out[..., order] = ROTATE(x[..., order], config, back)
    return out


def normed_late(x, gain, config):
    """Qwen3's norm of heads, after the rotation."""
    return modern.rmsnorm(modern.rotate(x, config), gain, config.eps)


def one_head_of_group(dy, kept, config):
    """Gradients of keys and values from the last head of each group alone."""
    groups = kept[-1]
    last = [h for h, group in enumerate(groups) if group not in groups[h + 1 :]]
    dq, dk, dv = ATTENTION_BACKWARD(dy, kept, config)
    alone = np.zeros_like(dy)
    alone[:, last] = dy[:, last]
    return dq, *ATTENTION_BACKWARD(alone, kept, config)[1:]


def scaled_by(**changes):
    return lambda config: FREQUENCIES(config._replace(**changes))


def all_of_p(share, chosen, config):
    """Weights that are not divided by their sum."""
    mask = WEIGHTS(share, chosen, config)[1]
    return share * mask, mask, 1


def first_choices(share, chosen, config):
    """The last expert that was chosen gets nothing, as if its row were lost."""
    weights, mask, total = WEIGHTS(share, chosen, config)
    np.put_along_axis(weights, chosen[..., -1:], 0, -1)
    return weights, mask, total


def turned_weights(share, chosen, config):
    """Each expert has the weight of the one that was chosen before it."""
    weights, mask, total = WEIGHTS(share, chosen, config)
    found = np.take_along_axis(weights, np.roll(chosen, 1, -1), -1)
    np.put_along_axis(weights, chosen, found, -1)
    return weights, mask, total


def exchanged(one, other):
    """The weights, with two tensors of each block in each other's place."""
    names = {one: other, other: one}
    return lambda p: {(s, n): p[s, names.get(n, n)] for s, n in p}


def without(name):
    return lambda p: {key: 0 * value if key[1] == name else value for key, value in p.items()}


FAULTS = {
    "pairs of neighbours": Fault(every, "rotate", neighbours),
    "the other way": Fault(every, "rotate", lambda x, c, back=False: ROTATE(x, c, not back)),
    "no rotation": Fault(every, "rotate", lambda x, c, back=False: x),
    "no rotation back": Fault(
        every, "rotate", lambda x, c, back=False: x if back else ROTATE(x, c)
    ),
    "another theta": Fault(every, "frequencies", scaled_by(theta=2e4)),
    "frequencies are not scaled": Fault(scaled, "frequencies", scaled_by(scaling=None)),
    "all frequencies are scaled": Fault(
        scaled, "frequencies", lambda c: scaled_by(scaling=None)(c) / c.scaling[0]
    ),
    "nothing between scaled and not": Fault(
        scaled, "frequencies", scaled_by(scaling=(8, 3.9999, 4, 64))
    ),
    "scaled for 8192 positions": Fault(scaled, "frequencies", scaled_by(scaling=(8, 1, 4, 8192))),
    "heads take keys in turns": Fault(grouped, "group_of", lambda h, c: h % c.kv_heads),
    "the first keys for all": Fault(grouped, "group_of", lambda h, c: 0),
    "one head's gradient of keys": Fault(every, "attention_backward", one_head_of_group),
    "scale of channels / heads": Fault(
        lambda c: c.head_dim * c.heads != c.channels,
        "attention",
        lambda q, k, v, c: ATTENTION(q * math.sqrt(c.head_dim * c.heads / c.channels), k, v, c),
    ),
    "no eps": Fault(every, "rmsnorm", lambda x, gain, eps: RMSNORM(x, gain, 0)),
    "no eps in norms of heads": Fault(
        of("qwen3", "nano"),
        "rmsnorm",
        lambda x, gain, eps: RMSNORM(x, gain, 0 if x.ndim == 4 else eps),
    ),
    "eps of layernorm": Fault(
        lambda c: c.eps != 1e-5, "rmsnorm", lambda x, gain, eps: RMSNORM(x, gain, 1e-5)
    ),
    "the mean is subtracted": Fault(
        every, "rmsnorm", lambda x, gain, eps: RMSNORM(x - x.mean(-1, keepdims=True), gain, eps)
    ),
    "gain + 1": Fault(gated, "rmsnorm", lambda x, gain, eps: RMSNORM(x, gain + 1, eps)),
    "heads are normed after rotation": Fault(of("qwen3"), "turned", normed_late),
    "no norm of heads": Fault(
        of("qwen3", "nano"),
        "rmsnorm",
        lambda x, gain, eps: (
            (x, RMSNORM(x, gain, eps)[1]) if x.ndim == 4 else RMSNORM(x, gain, eps)
        ),
    ),
    "q's gain and k's": Fault(of("qwen3"), weights=exchanged("qnorm", "knorm")),
    "gate and up": Fault(dense, weights=exchanged("gate", "up")),
    "k and v": Fault(every, weights=exchanged("k", "v")),
    "no bias of q": Fault(of("qwen2"), weights=without("qb")),
    "no bias of k": Fault(of("qwen2"), weights=without("kb")),
    "no bias of v": Fault(of("qwen2"), weights=without("vb")),
    "no 1.2": Fault(of("nano"), "NANO_QK_SCALE", 1.0),
    "1.2 once": Fault(of("nano"), "NANO_QK_SCALE", math.sqrt(1.2)),
    "a cap of 30": Fault(of("nano"), "NANO_SOFTCAP", 30),
    "no cap": Fault(of("nano"), "NANO_SOFTCAP", 1e6),
    "weights do not add up to 1": Fault(mixed, "weights_of", all_of_p),
    "a row is lost": Fault(mixed, "weights_of", first_choices),
    "weights of other rows": Fault(several, "weights_of", turned_weights),
    "the least likely": Fault(mixed, "choose", lambda share, k: CHOOSE(-share, k)),
    "one expert less": Fault(several, "choose", lambda share, k: CHOOSE(share, k - 1)),
    "one expert more": Fault(several, "choose", lambda share, k: CHOOSE(share, k + 1)),
    "no gradient of weights": Fault(several, "weights_backward", lambda d, kept, c: 0 * d),
    "gradient of weights that are not divided": Fault(
        several, "weights_backward", lambda d, kept, c: d * kept[1]
    ),
    "a neighbour's matrices": Fault(mixed, "expert_of", lambda e, c: f".{(e + 1) % c.experts}"),
    "no shared experts": Fault(shares, "shared_forward", lambda p, l, n: (0, None)),
    "no shared gate": Fault(shares, weights=exchanged("gate.shared", "up.shared")),
}


# ------------------------------------------------------------------------------------------------
class TheReference(harness.TestCase):
    def test_golden(self):
        for golden in GOLDENS:
            with self.subTest(golden.name):
                ours = golden.reference()
                steps = [ours.step() for _ in golden["losses"]]
                losses, norms, _ = zip(*steps)
                self.assertLess(relative(losses, golden["losses"]), EXACT_LOSS)
                self.assertLess(relative(norms, golden["norms"]), EXACT_NUMBERS)
                worst = tensor_errors(ours.now, golden["weights"], golden.config)
                self.assertLess(worst, (GOLDEN_WEIGHTS, ""))
                if os.environ.get("TEST_PRINT"):
                    print(golden.name, relative(losses, golden["losses"]), *worst)

    def test_first_pass(self):
        """Gradients, logits, texts."""
        for golden in GOLDENS:
            with self.subTest(golden.name):
                ours = golden.reference()
                _, gradient = ours.gradient(ours.now, range(GOLDEN_S), GOLDEN_S * GOLDEN_T)
                worst = tensor_errors(gradient, golden["gradients"], golden.config)
                self.assertLess(worst, (EXACT_NUMBERS, ""))
                inputs, _ = ours.samples.batch([0])
                logits, _ = modern.logits_of(golden.config, ours.now, inputs)
                for position, expected in golden["logits"].items():
                    error = np.abs(logits[0, int(position)] - expected).max()
                    self.assertLess(error, EXACT_NUMBERS * np.abs(expected).max())
                for text in golden["greedy"]:
                    found = modern.greedy(
                        golden.config, ours.now, text["prompt"], len(text["tokens"])
                    )
                    self.assertEqual(found, text["tokens"])

    def test_gradient(self):
        """Central differences of the loss, for some elements of each tensor; a target is masked."""
        for number, arch in sample(enumerate(ALL_ARCHITECTURES * 2), len(ALL_ARCHITECTURES)):
            draw = np.random.default_rng((SEED, number))
            tie = arch != "nano" and number >= len(ALL_ARCHITECTURES)
            own = WITH_EXPERTS.get(arch, arch)
            config = Config(own, 2, 4, 2, 6, 10, 8, 9, eps=1e-3, tie=tie, scaling=(8, 1, 4, 16))
            config = config._replace(**experts_of(arch, random.Random(f"{SEED} {number}")))
            p = modern.initial(config, f"{SEED} {number}")
            inputs, targets = draw.integers(0, 9, (3, 5)), draw.integers(0, 9, (3, 5))
            targets[1, 2] = MASKED
            _, g = modern.loss_and_gradient(config, p, inputs, targets, 0.1)
            self.assertEqual(g.keys(), p.keys())
            for key, value in p.items():
                for at in draw.integers(0, value.size, 3):
                    old, sums = value.flat[at], []
                    for step in (1e-6, -1e-6):
                        value.flat[at] = old + step
                        loss = modern.loss_and_gradient(config, p, inputs, targets, 0.1)[0]
                        sums.append(0.1 * loss)
                    value.flat[at] = old
                    slope = (sums[0] - sums[1]) / 2e-6
                    delta = 1e-8 + 1e-5 * abs(slope)
                    what = (config, key, at)
                    self.assertAlmostEqual(g[key].flat[at], slope, delta=delta, msg=what)

    def test_scaled_frequencies(self):
        """Numbers that were computed elsewhere, from the rule in Llama 3.1's code."""
        for head_dim, factor, expected in (
            (64, 32, {15: 1.29054793e-3, 16: 4.29556797e-4, 17: 9.7082878e-5}),
            (128, 8, {29: 2.16657076e-3, 34: 1.78507813e-4}),
            (128, 32, {29: 2.118407e-3, 34: 9.7082878e-5}),
        ):
            config = Config("llama", 1, 1, 1, head_dim, 8, 8, 8, theta=5e5)
            plain = modern.frequencies(config)
            found = modern.frequencies(config._replace(scaling=(factor, 1, 4, 8192)))
            first, last = min(expected), max(expected)
            self.assert_close(found[:first], plain[:first], 1e-15)
            self.assert_close(found[last + 1 :], plain[last + 1 :] / factor, 1e-15)
            self.assert_close([found[i] for i in expected], [*expected.values()], 5e-7)

    def test_faults_show(self):
        """Each, in a golden model that has its rule, or all: in the losses of three steps."""
        for name, fault in FAULTS.items():
            models = [golden for golden in GOLDENS if fault.where(golden.config)]
            self.assertTrue(models, name)
            for golden in sample(models, 1):
                with self.subTest(name, model=golden.name):
                    self.assertGreater(self.change(golden, fault), SHOWS * GOLDEN_LOSS)

    def change(self, golden, fault):
        weights = golden.initial()
        ours = golden.reference(fault.weights(weights) if fault.weights else weights)
        patch = unittest.mock.patch.object
        with patch(modern, fault.name, fault.value) if fault.name else contextlib.nullcontext():
            losses = [ours.step()[0] for _ in range(3)]
        return relative(losses, golden["losses"][:3])


# ------------------------------------------------------------------------------------------------
# Runs of the program


def trained(config, parameters, tokens, **flags):
    """A run that begins with a folder of these weights, or with a descriptor if there are none."""
    model = config.keys()
    if parameters:
        model = modern.write_folder(os.path.join(scratch(), "model"), config, parameters)
    return begun(config, tokens, **{**flags, "model": model})


def begun(config, tokens, **flags):
    """A run that begins with the model of its flags."""
    data, export = shard(tokens), os.path.join(scratch(), "export")
    job = test_reference.run(**flags, train=data, val=data, export=export)
    job.weights = modern.read_folder(export, config)
    return job


def initial_weights(config, **flags):
    """Of a descriptor."""
    return trained(config, None, [0] * 100, **flags, steps=0).weights


class Check(test_reference.Check):
    def found(self, job):
        return job.steps("loss", "grad_norm", "lr"), job.weights

    @contextlib.contextmanager
    def clear(self, *what, **fields):
        """A sub-test that is skipped where rounding decides which experts a token goes to."""
        with self.subTest(*what, **fields):
            try:
                yield
            except modern.Unclear:
                self.skipTest("a choice of experts is not clear")

    def assert_same(self, found, expected, start, optimizer, what, follow=None):
        """follow(weights): what the reference finds from other weights.

        Some of the random models enlarge rounding more than test_reference's, in norms first. Where
        the errors are too large, they are compared with those that rounding the first weights
        makes in the reference.
        """
        self.assertEqual(len(found[0]), len(expected[0]), what)

        def errors(run):
            worst = test_reference.differences(run, expected, start, optimizer)
            worst["norm"] *= test_reference.NORM / harness.SAME_NORM
            return worst

        worst, allowed = errors(found), 1
        if max(worst.values()) > 1 and follow:
            own = [errors(follow(rounded(start, seed))) for seed in range(ROUNDINGS)]
            allowed = max(1, ENLARGED * max(max(one.values()) for one in own))
        self.assertLessEqual(
            max(worst.values()), allowed, f"{what}: errors, in tolerances: {worst}"
        )


# Models that enlarge rounding: how often the first weights are rounded otherwise, by 2^-24 at most,
# and how many times the errors of that the program may have, which rounds in each operation.
ROUNDINGS, ENLARGED = 4, 10


def rounded(weights, seed):
    draw = np.random.default_rng(seed)
    return {
        key: value * (1 + draw.uniform(-(2.0**-24), 2.0**-24, np.shape(value)))
        for key, value in weights.items()
    }


def composition(draw, total, parts):
    """Positive numbers that add up to the total."""
    cuts = [0, *sorted(draw.sample(range(1, total), parts - 1)), total]
    return [b - a for a, b in zip(cuts, cuts[1:])]


def layout(draw, units, samples):
    """Flags that change no number."""
    ranks = draw.randrange(1, 5)
    flags = dict(
        ranks=ranks, zero=draw.randrange(4), micro_batch=draw.randrange(1, samples + 1),
        recompute=draw.choice(("none", "block")),
    )
    stages = draw.randrange(1, min(ranks, units) + 1)
    if stages > 1:
        parts = zip(composition(draw, units, stages), composition(draw, ranks, stages))
        flags.update(
            pipeline=",".join(f"{length}:{replicas}" for length, replicas in parts),
            pipeline_schedule=draw.choice(("gpipe", "dapple", "zero-bubble")),
            micro_batch=samples,
        )
        if flags["pipeline_schedule"] == "zero-bubble":  # it keeps activations
            flags["recompute"] = "none"
    return flags


class GoldenRuns(Check):
    def test_ten_steps(self):
        """Losses and weights of transformers, on any layout."""

        def check(case):
            golden, number = case
            draw = random.Random(f"{SEED} {golden.name} {number}")
            where = layout(draw, golden.config.layers + 2, GOLDEN_S)
            with self.subTest(golden.name, **where):
                self.check(golden, **where)

        at_once(check, [(golden, n) for golden in GOLDENS for n in range(12 if ALL else 1)])

    def test_muon(self):
        """Those of torch.optim.Muon (make_muon_golden.py), on any layout."""

        def check(case):
            golden, number = case
            draw = random.Random(f"{SEED} muon {golden.name} {number}")
            where = layout(draw, golden.config.layers + 2, GOLDEN_S)
            with self.subTest(golden.name, **where):
                self.check(golden, golden.muon, **where)

        cases = [golden for golden in GOLDENS if golden.muon]
        at_once(check, [(golden, n) for golden in cases for n in range(12 if ALL else 1)])

    def check(self, golden, muon=None, **where):
        """muon: the numbers of the same model with this optimizer."""
        numbers = muon or golden
        flags = {**golden.run(), **where}
        for flag, value in muon["flags"].items() if muon else ():
            flags[flag.replace("-", "_")] = value
        job = trained(golden.config, golden.initial(), harness.golden_tokens(), **flags)
        what = golden.name, bool(muon), where
        self.assert_close(job.losses(), numbers["losses"], GOLDEN_LOSS, what)
        norms = [norm for (norm,) in job.steps("grad_norm")]
        self.assert_close(norms, numbers["norms"], GOLDEN_NORM, what)
        worst = tensor_errors(job.weights, numbers["weights"], golden.config)
        self.assertLess(worst, (GOLDEN_WEIGHTS, ""), what)
        if os.environ.get("TEST_PRINT"):
            print(*what, relative(job.losses(), golden["losses"]), *worst)


class Files(Check):
    def test_there_and_back(self):
        """The same bits, read and written by any layout."""
        for golden in sample(GOLDENS, 4):
            draw = random.Random(f"{SEED} {golden.name}")
            where = layout(draw, golden.config.layers + 2, GOLDEN_S)
            with self.subTest(golden.name, **where):
                flags = {**GOLDEN_RUN, **where, "steps": 0}
                start = golden.initial()
                found = trained(golden.config, start, harness.golden_tokens(), **flags).weights
                for key, value in start.items():
                    self.assertTrue((found[key] == value).all(), key)


# ------------------------------------------------------------------------------------------------
def experts_of(arch, draw):
    """Fields of Config; none if blocks of this name have no experts."""
    if arch not in WITH_EXPERTS:
        return {}
    groups = draw.choice({"prototypes": (2, 3), "shared": (0, 0, 2)}.get(arch, (0,)))
    each = draw.randrange(2, 4) if groups else draw.randrange(1, 7)
    shared = arch == "shared"
    return dict(
        shared_experts=draw.randrange(1, 3) if shared else 0,
        shared_expert_ffn=draw.randrange(5, 20) if shared else 0,
        experts=each * max(1, groups),
        top_k=draw.randrange(1, min(3, each) + 1),
        expert_ffn=draw.randrange(5, 20),
        prototypes=groups,
        ffn=0,
    )


def random_config(draw, arch=None, layers=4):
    name = arch or draw.choice(ARCHITECTURES)
    arch = WITH_EXPERTS.get(name, name)
    kv_heads = draw.choice((1, 2, 3))
    config = Config(
        arch,
        layers,
        heads=kv_heads * draw.choice((1, 2, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw.randrange(2, 9),
        channels=draw.choice((12, 16, 24)),
        ffn=draw.randrange(8, 50),
        vocab=draw.randrange(20, 140),
        theta=draw.choice((100, 1e4)),
        eps=draw.choice((1e-3, 1e-2)),
        tie=arch != "nano" and draw.random() < 0.5,
        scaling=(8.0, 1.0, 4.0, 16) if arch == "llama" and draw.random() < 0.5 else None,
    )
    return config._replace(**experts_of(name, draw))


KINDS = len(ARCHITECTURES) + 1


def kind(number):
    """Of so many cases in turn: each architecture, then one of those with experts."""
    mixed = tuple(WITH_EXPERTS)[(number // KINDS + SEED) % len(WITH_EXPERTS)]
    return (*ARCHITECTURES, mixed)[number % KINDS]


def is_done(config, flags):
    """Experts are refused with some flags."""
    return not (config.experts and (flags.get("cyclic") or flags["optimizer"] == "muon"))


def random_weights(config, text):
    """So that rounding does not grow from step to step: inputs of the first norm are not small."""
    return modern.initial(config, text, [("wte", 0.5)])


def tokens_for(config):
    """Fewer than a run takes; documents begin with token 0."""
    return [0, *modern.token_stream(config, SEED, 210)]


class Random(Check):
    def test_prototypes(self):
        self.check_prototypes()

    def check_prototypes(self, **program):
        """Groups of experts, on one rank."""
        config = Config("llama", 3, 2, 1, 6, 16, 0, 40, eps=1e-3)
        config = config._replace(experts=6, top_k=2, expert_ffn=9, prototypes=2)
        flags = {**test_reference.BASE, **test_reference.SGD}
        start, tokens = random_weights(config, "prototypes"), tokens_for(config)
        job = trained(config, start, tokens, **flags, **program)
        ours = Run(config, start, Samples(tokens, test_reference.T), dashed(flags))
        expected = [ours.step() for _ in range(flags["steps"])], ours.file()
        self.assert_same(self.found(job), expected, start, flags["optimizer"], "prototypes")

    def test_combinations(self):
        """The rules of test_reference.py in models of any shape."""

        def check(number):
            draw = random.Random(f"{SEED} {number}")
            config = random_config(draw, kind(number))
            flags, where = test_reference.Random("test_combinations").flags(draw)
            while not is_done(config, flags):
                flags, where = test_reference.Random("test_combinations").flags(draw)
            flags = {**test_reference.BASE, **flags}
            shares = flags.pop("model", None)  # a descriptor: blocks begin alike
            if shares:
                config = config._replace(scaling=None)  # which a descriptor cannot say
                alike = {"seed": flags["seed"], "share": flags["share"]}
                start = initial_weights(config, **alike)
            else:
                start = random_weights(config, f"{SEED} {number}")
            what = f"run {number} of seed {SEED}: {config}, {flags}, {where}"
            with self.clear(what):
                tokens = tokens_for(config)
                job = trained(config, None if shares else start, tokens, **{**flags, **where})
                samples = Samples(tokens, test_reference.T, flags["windows"], 0)

                def follow(weights):
                    ours = Run(config, weights, samples, dashed(flags))
                    return [ours.step() for _ in range(flags["steps"])], ours.file()

                self.assert_same(
                    self.found(job), follow(start), start, flags["optimizer"], what, follow
                )

        at_once(check, range(200 if ALL else 2 * KINDS))


# ------------------------------------------------------------------------------------------------
class Delink(Check):
    """Blocks that share, then have copies, on layouts that change no number."""

    AT, STEPS = 3, 6
    OPTIMIZERS = (
        dict(test_reference.SGD, lr=0.4),
        dict(test_reference.ADAM, lr=0.02, eps=0.02),
        dict(test_reference.MUON, lr=0.02, eps=0.02),
    )

    def drawn(self, what, number, **changes):
        """(draw, a model, flags of a run that shares)"""
        draw = random.Random(f"{SEED} delink {what} {number}")
        config = random_config(draw, kind(number))
        optimizers = self.OPTIMIZERS[:2] if config.experts else self.OPTIMIZERS
        optimizer = optimizers[(number + SEED) % len(optimizers)]
        flags = {**test_reference.BASE, "steps": self.STEPS, **optimizer, **changes}
        flags.update(share=draw.choice(("all", "2", "2x2", "3")), grad_clip=draw.choice((0, 1)))
        flags.update(seed=draw.randrange(99))
        return draw, config._replace(scaling=None), flags  # which a descriptor cannot say

    def assert_close_to(self, job, ours, steps, start, what):
        expected = [ours.step() for _ in range(steps)], ours.file()
        self.assert_same(self.found(job), expected, start, ours.f["optimizer"], what)

    def each(self, check, count):
        at_once(check, range(40) if ALL else sample(range(2 * KINDS), count))

    def start(self, config, flags):
        return initial_weights(config, seed=flags["seed"], share=flags["share"])

    def copied(self, weights, config, share):
        """What each block of a group has if it has what the first of them has."""
        groups = groups_of(share, config.layers)
        home = dict(enumerate(groups))
        return {(at, name): weights[home.get(at, at), name] for at, name in weights}

    def follows(self, config, start, flags, tokens):
        """The reference at the start of a run."""
        return Run(config, start, Samples(tokens, test_reference.T), dashed(flags))

    def kinds(self, weights, config):
        """How many different blocks there are."""
        names = [key[1] for key in weights if key[0] == 0]
        blocks = [b"".join(weights[l, n].tobytes() for n in names) for l in range(config.layers)]
        return len(set(blocks))

    def test_within_a_run(self):
        """As the reference has it; the first loss of copies is that of what they are copies of, bit
        by bit, and then they differ."""

        def check(number):
            draw, config, flags = self.drawn("within", number)
            changes = dict(delink_at=self.AT)
            changes.update(delink_moments=("mean", "reset")[number // KINDS % 2])
            tokens, where = tokens_for(config), layout(draw, config.layers + 2, test_reference.S)
            what = f"run {number} of seed {SEED}: {config}, {flags}, {changes}, {where}"
            with self.clear(what):
                start = self.start(config, flags)
                on = trained(config, None, tokens, **{**flags, **where})
                job = trained(config, None, tokens, **{**flags, **changes, **where})
                found, shared = (one.steps("loss") for one in (job, on))
                self.assertEqual(found[: self.AT + 1], shared[: self.AT + 1], what)
                self.assertEqual(self.kinds(job.weights, config), config.layers, what)
                ours = self.follows(config, start, {**flags, **changes}, tokens)
                self.assert_close_to(job, ours, self.STEPS, start, what)

        self.each(check, KINDS)

    CYCLIC = (
        dict(cyclic="v1", cyclic_stages=2),
        dict(cyclic="v2", cyclic_stages=3, grad_clip=None),
        dict(cyclic="v2", cyclic_stages=2, cyclic_mode="data", ranks=2, grad_clip=None),
    )

    def test_between_runs(self):
        """A run begins with the checkpoint of another, which shares: on another layout, or in a
        cyclic schedule, which has no switch within a run."""

        def check(number):
            draw, config, first = self.drawn("between", number, steps=self.AT)
            start, tokens = self.start(config, first), tokens_for(config)
            units, out = config.layers + 2, os.path.join(scratch(), "out")
            places = [layout(draw, units, test_reference.S) for _ in range(2)]
            if not config.experts:
                places[1] = draw.choice((places[1], draw.choice(self.CYCLIC)))
            trained(config, None, tokens, **{**first, **places[0]}, out=out, save_every=self.AT)
            begin = dict(first, model=harness.checkpoint(out, self.AT), share=None, seed=None)
            for changes in dict(), dict(delink=1), dict(delink=1, delink_moments="reset"):
                second = {**begin, **places[1], **changes}
                if not changes and "cyclic" in second:  # where blocks of several stages may share
                    second.update(cyclic_mode="data", ranks=second["cyclic_stages"])
                what = f"run {number} of seed {SEED}: {config}, {first}, {places}, {changes}"
                with self.clear(what):
                    job = begun(config, tokens, **second)
                    if not changes:
                        shared = job
                    ours = self.follows(config, start, first, tokens)
                    for _ in range(self.AT):
                        ours.step()
                    ours.begin_again(dashed(second))
                    self.assert_close_to(job, ours, self.AT, start, what)
                    self.assertEqual(job.steps("loss")[0], shared.steps("loss")[0], what)

        self.each(check, 3)

    def test_copies_made_by_python(self):
        """A delinked run is bit by bit the run of a real model whose blocks this test has copied
        into a folder (of sgd without momentum, which has no states)."""

        def check(number):
            draw, config, flags = self.drawn("copies", number)
            unused = dict.fromkeys(("eps", "beta1", "beta2", "muon_lr"))
            flags.update(unused, optimizer="sgd", momentum=0, lr=0.4, steps=self.AT)
            tokens = tokens_for(config)
            where = layout(draw, config.layers + 2, test_reference.S)
            out = os.path.join(scratch(), "out")
            trained(config, None, tokens, **flags, out=out, save_every=self.AT)
            begin = dict(flags, model=harness.checkpoint(out, self.AT), share=None, seed=None)
            what = f"run {number} of seed {SEED}: {config}, {flags}, {where}"
            with self.clear(what):
                weights = begun(config, tokens, **dict(begin, steps=0)).weights
                copies = self.copied(weights, config, flags["share"])
                job = begun(config, tokens, **{**begin, **where}, delink=1)
                other = trained(config, copies, tokens, **{**begin, **where})
                self.assertEqual(*(one.steps("loss", "grad_norm") for one in (job, other)), what)
                for key, value in job.weights.items():
                    self.assertTrue((value == other.weights[key]).all(), (what, key))

        self.each(check, 3)


class Private(Check):
    """Noise 0: what is clipped, and how it is added up. The log tells the windows of each step."""

    def test_each(self):
        draw, rows = random.Random(SEED), test_reference.Private.ROWS
        archs = [ARCHITECTURES[i % len(ARCHITECTURES)] for i in range(len(rows))]
        draw.shuffle(archs)
        cases = [(name, random_config(draw, arch)) for name, arch in zip(rows, archs)]
        cases = sample(cases, 5)  # test_reference.py has each rule in GPT-2

        def check(case):
            name, config = case
            with self.subTest(name, config=config):
                self.check(name, config)

        at_once(check, cases)

    def test_one_norm_over_stages(self):
        """The classifier has a table of its own, with norms by ghosts (T 8) or not, or is tied."""

        def check(number):
            draw = random.Random(f"{SEED} stages {number}")
            arch = ARCHITECTURES[number % len(ARCHITECTURES)]
            tie = arch != "nano" and draw.random() < 0.2
            config = random_config(draw, arch)._replace(tie=tie)
            T = draw.choice((8, 40))
            stages = draw.randrange(2, 5)
            replicas = composition(draw, draw.randrange(stages, 5), stages)
            parts = zip(composition(draw, 6, stages), replicas)
            changes = dict(
                pipeline=",".join(f"{units}:{ranks}" for units, ranks in parts),
                ranks=sum(replicas),
                pipeline_schedule=draw.choice(("gpipe", "dapple")),
                micro_batch=draw.randrange(1, 4),
                zero=draw.randrange(4),
                seq_len=T,
                batch_tokens=3 * T,
                dp_clip=1,
                dp_clip_style="flat",
            )
            with self.subTest(number, config=config, **changes):
                other = dict(dp_clip_style="unit")
                self.compare(f"stages {number}", config, changes, other)

        at_once(check, range(40) if ALL else sample(range(len(ARCHITECTURES)), 2))

    def test_an_embedding_alone(self):
        """In its stage, and the classifier has a table of its own: each micro-batch has norms of
        its own."""
        config = random_config(random.Random(f"{SEED} alone"), "nano")
        changes = dict(pipeline="1:1,5:1", ranks=2, micro_batch=1, dp_clip=1, dp_clip_style="stage")
        self.compare("alone", config, changes, None, stages=[1, 2, 2, 2, 2, 2])

    def check(self, name, config, **program):
        self.compare(name, config, *test_reference.Private.ROWS[name], **program)

    def compare(self, name, config, changes, without, stages=(1, 1, 2, 2, 2, 2), **program):
        """The rules `without` would lead elsewhere."""
        flags = {**test_reference.BASE, **test_reference.Private.FLAGS, **changes}
        start, tokens = random_weights(config, f"{SEED} {name}"), tokens_for(config)
        job = trained(config, start, tokens, **flags, **program)

        def follow(weights, other=()):
            rules = {**flags, **dict(other), "shuffle": 0}
            ours = Run(config, weights, Samples(tokens, flags["seq_len"]), dashed(rules))
            cut = stages if rules.get("dp_clip_style") == "stage" else None
            return [ours.step(drawn, cut) for (drawn,) in job.steps("samples")], ours.file()

        expected = follow(start)
        optimizer = flags["optimizer"]
        self.assert_same(self.found(job), expected, start, optimizer, name, follow)
        if without:
            self.assert_acts(follow(start, without), expected, start, optimizer, name)


# ------------------------------------------------------------------------------------------------
class InitialValues(Check):
    def test_each_tensor(self):
        """Deviation, mean and how many lie within a deviation, to 5 standard errors."""
        for arch in ALL_ARCHITECTURES:
            own = WITH_EXPERTS.get(arch, arch)
            config = Config(own, 2, 4, 2, 16, 64, 256, 300, tie=arch == "qwen2")
            if own != arch:
                config = config._replace(experts=6, top_k=2, expert_ffn=100)
            with self.subTest(arch):
                for key, value in initial_weights(config).items():
                    self.check(config, key[1], value)

    @staticmethod
    def expected(config, name):
        """(mean, deviation, is uniform)"""
        if config.arch == "nano":
            deviations = {"wte": 0.8, "head": 0.001, "o": 0, "fcproj": 0}
            uniform = config.channels**-0.5 * (0.4 if name == "fc" else 1)
            return 0, deviations.get(name, uniform), name not in deviations
        if "norm" in name:
            return 1, 0, False
        name = name.partition(".")[0]
        residual = math.sqrt(2 * config.layers) if name in ("o", "down") else 1
        return 0, 0 if name in ("qb", "kb", "vb") else 0.02 / residual, False

    def check(self, config, name, value):
        mean, deviation, uniform = self.expected(config, name)
        if not deviation:
            self.assertTrue((value == mean).all(), name)
            return
        error = 5 / math.sqrt(value.size)
        self.assertLess(abs(value.mean() - mean), error * deviation, name)
        self.assertLess(abs(value.std() / deviation - 1), error, name)
        within = 3**-0.5 if uniform else 0.6827
        self.assertLess(abs((np.abs(value) < deviation).mean() - within), error / 2, name)
        if uniform:
            self.assertLess(np.abs(value).max(), 1.0001 * 3**0.5 * deviation, name)


class Presets(harness.TestCase):
    PARAMETERS = {
        "llama3.2:1B": 1_235_814_400,
        "llama3.2:3B": 3_212_749_824,
        "llama3.1:8B": 8_030_261_248,
        "llama3:8B": 8_030_261_248,
        "llama3:70B": 70_553_706_496,
        "qwen2.5:0.5B": 494_032_768,
        "qwen2.5:1.5B": 1_543_714_304,
        "qwen2.5:7B": 7_615_616_512,
        "qwen3:0.6B": 596_049_920,
        "qwen3:1.7B": 1_720_574_976,
        "qwen3:4B": 4_022_468_096,
        "qwen3:8B": 8_190_735_360,
        # 64 channels a layer, heads of 128, ffn 4 channels, 32768 tokens, an own classifier
        "nano:d4": 2 * 32768 * 256 + 4 * 12 * 256**2,
        "nano:d20": 2 * 32768 * 1280 + 20 * 12 * 1280**2,
    }

    def parameters(self, model):
        data = shard([0] * 100)
        words = ["--model", model, "--train", data, "--val", data, "--seq-len", 64]
        words += ["--micro-batch", 1, "--batch-tokens", 64, "--steps", 1]
        words += ["--cluster", "1x1,intra=1,inter=1,tflops=1,memory=9999"]  # nothing is timed
        command = shlex.join(map(str, [harness.BINARY, "--dry-run", "--json", *words]))
        start = json.loads(harness.Job(shell=command).done().out.splitlines()[0])
        return start["parameters"]

    def test_sizes(self):
        found = at_once(self.parameters, self.PARAMETERS)
        self.assertEqual(dict(zip(self.PARAMETERS, found)), self.PARAMETERS)

    def test_keys(self):
        """Of models of any shape, as counted by the reference; tables have rows of padding."""
        draw = random.Random(SEED)
        configs = [
            random_config(draw, arch)._replace(scaling=None) for arch in ALL_ARCHITECTURES * 2
        ]
        padded = [c._replace(vocab=-(-c.vocab // 128) * 128) for c in configs]
        expected = [sum(math.prod(shape) for _, shape in c.tensors()) for c in padded]
        self.assertEqual(at_once(self.parameters, [c.keys() for c in configs]), expected)


# ------------------------------------------------------------------------------------------------
class Faults(test_reference.Faults):
    """The same with these faults and checks."""

    FAULTS, SAMPLE = numbered(MODERN), 3

    def notice(self, where, **program):
        if where.startswith("private: "):
            arch = where.split()[1]
            config = Config(arch, 4, 4, 2, 8, 16, 32, 50, eps=1e-3)
            Private().check("unit, abadi", config, **program)
            return
        if where == "prototypes":
            Random("test_combinations").check_prototypes(**program)
            return
        if where.startswith("stages: "):
            config = Config(where.split()[1], 4, 4, 2, 8, 16, 32, 50, eps=1e-3)
            flat = dict(dp_clip=1, dp_clip_style="flat", ranks=3, pipeline="1:1,4:1,1:1")
            Private().compare(where, config, dict(flat, micro_batch=1), None, **program)
            return
        (golden,) = [golden for golden in GOLDENS if golden.name == where]
        GoldenRuns().check(golden, **program)


if __name__ == "__main__":
    harness.main()
