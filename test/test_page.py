#!/usr/bin/env python3
"""test_page.py: the page that scripts/report.py makes of runs, and what is in a log for it.

    python3 test/test_page.py

    Log         samples and the command in the log of a real run
    Curves      every point of a short run, the extremes of a long one, axes, several runs
    Text        hostile text stays text; torn and hostile logs; what the page says of a run
    Private     a private run's page has nothing that depends on the samples of a step
    Failures    one clear line each
    Browser     in a headless Chromium: no error, as many points as the log has, zooming, names

Browser needs the program chromium, and is skipped without it.
"""

import copy
import html.parser
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

import harness
from harness import EXIT_INPUT, EXIT_RESOURCES, PYTHON, need, scratch, train

SCRIPTS = Path(harness.ROOT) / "scripts"
sys.path.insert(0, str(SCRIPTS))
import report  # noqa: E402
import watch  # noqa: E402

HOSTILE = (
    '</script><img src=x onerror=alert(1)><b>bold</b><!-- & "q" \' %{y} $x$ &lt;i&gt;'
    '<a href="javascript:alert(1)">link</a>'
)
UNSEEN = "\x1b[31m\x00\u202e\u2028\udc80\ud800"
SEEN = r"\x1b[31m\x00\u202e\u2028\x80\ud800"
POINT = re.compile(r"(-?[.\d]+),(-?[.\d]+)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Reader(html.parser.HTMLParser):
    """The tags of a page, its texts by the tag that they are in, and all of its text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.texts, self.inside = [], {}, []
        self.feed(Path(path).read_text(encoding="utf-8"))
        shown = [text for tag, texts in self.texts.items() for text in texts if tag != "script"]
        self.text = "\n".join(shown)
        self.figures = json.loads(
            next(text for text in self.texts["script"] if text.startswith("["))
        )

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside.append(tag)

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.setdefault(self.inside[-1] if self.inside else "", []).append(data)

    def traces(self, title):
        """Those of the figure whose axis or title is called so."""
        found = (one["traces"] for one in self.figures if title in (one["title"], one["ytitle"]))
        return next(found, [])


def step(number, loss=2.0, **more):
    values = dict(grad_norm=0.5, lr=1e-3, ms=10.0, tokens_per_s=1000.0, mfu=0.25)
    return {"event": "step", "step": number, "loss": loss, **values, **more}


def start(**more):
    memory = {"parameters": 1 << 20, "device": 1 << 20, "host": 1 << 21}
    predicted = {"memory": memory, "traffic": {"intra": {"send": 1 << 20}}}
    flags = more.pop("flags", {"model": "d12", "lr": 0.001})
    return {"event": "start", "parameters": 1500000, "ranks": 2, "compute": "fp32",
            "flags": flags, "predicted": predicted, **more}  # fmt: skip


class Pages(harness.InFolder):
    def log(self, *events, name="run/log.jsonl"):
        lines = (e if isinstance(e, str) else json.dumps(e) + "\n" for e in events)
        return self.write(name, *lines).parent

    def report(self, *words, code=0, python=PYTHON, script=SCRIPTS / "report.py"):
        command = [*shlex.split(str(python)), str(script), *map(str, words)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        if code:
            self.assertRegex(done.stderr, r"\Areport.py: [^\n\x00-\x1f]*\n\Z", "one line")
        return done

    def page(self, *words):
        return Reader(self.report(*words).stdout.strip())


class Log(Pages):
    def test_samples(self):
        """The texts that are printed; not where a run is private."""
        same = dict(steps=4, sample_every=2, sample_tokens=5)
        job = train(**same)
        printed = re.findall(r"--- sample at step (\d+) ---\n(.*?)\n---\n", job.out, re.S)
        self.assertEqual([n for n, _ in printed], ["2", "4"])
        found = [(str(e["step"]), e["text"]) for e in job.of("sample")]
        self.assertEqual(found, printed)
        private = dict(same, dp_noise=1, dp_clip=1, grad_clip=None)
        self.assertEqual(train(**private).of("sample"), [])
        self.assertEqual(len(train(**private, dp_show_private=1).of("sample")), 2)

    def test_command(self):
        """Its words, but for the key."""
        job = train(steps=1, seed=7)
        words = job.of("start")[0]["command"]
        self.assertEqual(words[0], harness.BINARY)
        self.assertEqual(words[words.index("--seed") + 1], "7")
        key = "5" * 64
        for form in (["--dp-key", key], [f"--dp-key={key}"]):
            flags = dict(steps=1, dp_noise=1, dp_clip=1, grad_clip=None)
            log = self.folder / "log"
            words = [*harness.command_line(dict(flags, log=log)), *form, "--seed", "9"]
            harness.Job(words=words, log=str(log)).done()
            self.assertNotIn(key, log.read_text())
            found = json.loads(log.read_text().split("\n")[0])["command"]
            self.assertEqual(found[1:], [*map(str, words[: -2 - len(form)]), "--seed", "9"])


class Curves(Pages):
    def test_real_run(self):
        """Each point of a pipeline's log, its memory, traffic, timeline, samples and command."""
        self.out.mkdir()
        flags = dict(val_every=3, sample_every=4, sample_tokens=5, save_every=4, pipeline=2)
        flags.update(profile_steps="3:4", trace=self.out / "trace.json", out=self.out)
        job = train(ranks=2, steps=8, log=self.out / "log.jsonl", **flags)
        self.assertEqual(self.report(self.out).stdout, f"{self.out}/report.html\n")
        page = Reader(self.out / "report.html")
        self.assertLess((self.out / "report.html").stat().st_size, 100_000)
        for event, key, title, name in (
            ("step", "loss", "loss (nats/token)", "training"),
            ("val", "loss", "loss (nats/token)", "validation"),
            ("step", "lr", "learning rate", "learning rate"),
            ("step", "grad_norm", "norm of the gradient", "norm of the gradient"),
            ("step", "tokens_per_s", "tokens/s", "tokens/s"),
        ):
            (trace,) = (t for t in page.traces(title) if t["name"] == name)
            self.assertEqual(trace["x"], [e["step"] for e in job.of(event)])
            self.assert_close(trace["y"], [e[key] for e in job.of(event)], 1e-6, name)
        for panel, title in (("memory", "MiB"), ("traffic", "MiB a step")):
            predicted, measured = page.traces(title)
            self.assertEqual((predicted["name"], measured["name"]), ("predicted", "measured"))
            kinds = job.end()["memory"]["measured"] if panel == "memory" else {}
            for kind, value in kinds.items():
                if kind in measured["x"]:
                    found = measured["y"][measured["x"].index(kind)]
                    self.assertAlmostEqual(found, value / 2**20, delta=1e-5 * found)
            self.assertIn({"memory": "activations", "traffic": "send inside a node"}[panel],
                          measured["x"])  # fmt: skip
        timeline = page.figures[-1]
        self.assertRegex(" ".join(timeline["rows"]), r"^rank 0: \d+% idle rank 1: \d+% idle$")
        self.assertEqual({row for trace in timeline["traces"] for row in trace["row"]}, {0, 1})
        for event in job.of("sample"):
            self.assertIn(event["text"], page.texts["pre"])
        (command,) = (text for text in page.texts["pre"] if "--profile-steps" in text)
        self.assertEqual(
            shlex.split(command), ["mpirun", "-np", "2", *job.of("start")[0]["command"]]
        )
        self.assertIn("2 checkpoints saved", page.text)
        self.assertIn("The run ended at step 8 of 8", page.text)

    def test_long_run(self):
        """Fewer points, among them the extremes of every part, the first and the last."""
        draw = random.Random(harness.SEED)
        ys = [draw.random() for _ in range(100000)]
        kept = list(report.thinned(range(len(ys)), ys, report.POINTS))
        self.assertLessEqual(len(kept), report.POINTS)
        self.assertEqual((kept[0], kept[-1], kept), (0, len(ys) - 1, sorted({*kept})))
        for part in range(0, len(ys), 200):  # any 200 hold a whole part of theirs
            values = [ys[i] for i in kept if part <= i < part + 200]
            inner = sorted(ys[part + 50 : part + 150])
            self.assertLessEqual(min(values), inner[0])
            self.assertGreaterEqual(max(values), inner[-1])
        spike = draw.randrange(20000)
        events = (step(i + 1, 9.5 if i == spike else 2 + y / 9) for i, y in enumerate(ys[:20000]))
        page = self.page(self.log(start(), *events))
        thin = page.traces("loss (nats/token)")[0]
        self.assertLessEqual(len(thin["x"]), report.POINTS)
        self.assertEqual(thin["x"][thin["y"].index(9.5)], spike + 1)
        self.assertEqual((thin["x"][0], thin["x"][-1]), (1, 20000))
        whole = list(report.thinned(range(4000), ys[:4000], report.POINTS))
        self.assertEqual(whole, list(range(4000)))

    def test_axes(self):
        """Steps, tokens and time, of a log that was resumed at step 3."""
        events = [step(1, 4.0), step(2, 3.0), step(3, 9.0), start(), step(3, 2.0), step(4, 1.0)]
        page = self.page(self.log(start(), *events))
        (trace,) = page.traces("loss (nats/token)")
        self.assertEqual((trace["x"], trace["y"]), ([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]))
        tokens, time = ({"label": "tokens", "x": [[10, 20, 30, 40]]},
                        {"label": "time (s)", "x": [[0.01, 0.02, 0.03, 0.04]]})  # fmt: skip
        self.assertEqual(page.figures[0]["axes"], [{"label": "step"}, tokens, time])
        self.assertIn("started again after step 3", page.text)
        self.assertIn("the log has no end", page.text)

    def test_several(self):
        """Each run's curves by its name, and a table of flags and results that differ."""
        paths = [
            self.log(
                start(flags={"model": "d12", "lr": lr, "seed": 1, "dp-key": f"key{lr}"}),
                *(step(n, lr * 10 + n) for n in range(1, 2 + round(lr * 10))),
                {"event": "val", "step": 2, "loss": 5.25 + lr},
                name=f"{lr}/log.jsonl",
            )
            for lr in (0.1, 0.2)
        ]
        page = self.page(*paths)
        names = [trace["name"] for trace in page.traces("loss (nats/token)")]
        self.assertEqual(names, [f"lr {lr}, {w}" for lr in (0.1, 0.2)
                                 for w in ("training", "validation")])  # fmt: skip
        cells = page.texts["td"]
        at = cells.index("--lr")
        self.assertEqual(cells[at : at + 3], ["--lr", "0.1", "0.2"])
        at = cells.index("last validation loss")
        self.assertEqual(cells[at + 1 : at + 3], ["5.3500", "5.4500"])
        at = cells.index("training loss, mean of the last 50 or all")
        self.assertEqual(cells[at + 1 : at + 3], ["2.5000", "4.0000"])
        self.assertNotIn("key0.1", page.text)
        self.assertEqual(self.report(*paths).stdout, f"{paths[0]}/report.html\n")
        one = self.page(paths[1], "--out", self.folder / "one.html")
        self.assertNotIn("Differences", one.text)


class Text(Pages):
    def hostile(self, text):
        flags = {name: text for name in ("model", "optimizer", "lr", "trace", "zero", "log-every")}
        first = start(flags={**flags, text: text}, ranks=text, compute=text, parameters=10**400)
        first.update(command=[text, "--x"], privacy=text)
        first["predicted"] = {"memory": {text: 5}, "traffic": {"intra": {text: 5}}}
        return self.log(
            first,
            step(1, 1.5, lr=text, ms=[], tokens_per_s=1e999),
            *(step(n, loss) for n, loss in ((2, 1e999), (10**30, 1), (3, 10**400), (True, 1))),
            {"event": "val", "step": 3, "loss": 2.5, "bits_per_byte": text, "epsilon": {}},
            {"event": "sample", "step": text, "text": text},
            {"event": "checkpoint", "step": 3, "path": text},
            {"event": "profile", "actions": [{"action": text, "ms": 1, "unit": text}, 3]},
            {"event": "end", "memory": [1], "traffic": 7, "privacy": text},
            {"event": ["x"]},
            "[" * 100000 + "\n",
            f'{{"event":"step","step":{"9" * 5000},"loss":1}}\n',
            '{"event":"step","step":4,"lo',
            name="hostile/log.jsonl",
        )

    def test_hostile(self):
        """In one page and beside another run, whose names then are in the figures."""
        folder = self.hostile(HOSTILE + UNSEEN)
        other = self.log(start(), step(1))
        for words in ((folder,), (folder, other)):
            path = self.report(*words).stdout.strip()
            page = Reader(path)
            self.assertEqual(page.tags.count("script"), 2)
            self.assertFalse({"img", "b", "i", "a", "iframe"} & {*page.tags})
            self.assertIn(HOSTILE + SEEN, page.texts["pre"])
            self.assertFalse(re.search("[\x00-\x08\x0e-\x1f\x7f\u202e\u2028]",
                                       Path(path).read_text()[-20000:]))  # fmt: skip
            self.assertIn("4 lines cut off", page.text)
        page = report.Page([report.run_log.Run(Path("x"))])
        data = [{"name": "</script <!-- <script>"}]
        page.figure("curves", data)
        found = re.search(r"(?s)id=.figures.>(.*?)</script[\s/>]", report.document(page, ""))
        self.assertEqual(json.loads(found[1])[0]["traces"], data)

    def test_other_readers(self):
        """The same log in plot.py and watch.py: no traceback, and no control to the terminal."""
        log = self.hostile(HOSTILE + UNSEEN) / "log.jsonl"
        picture = self.folder / "a.png"
        for words in (["watch.py", log, "--once"], ["plot.py", log, "--out", picture]):
            done = harness.output_of(PYTHON, SCRIPTS / words[0], *words[1:], text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertNotRegex(done.stdout, "[\x00-\x09\x0b-\x1f\x7f\u202e]")
        traces = ['{"traceEvents":' + "[" * 100000, '{"traceEvents":[{"ph":"X","cat":"compute",']
        traces[
            1
        ] += f'"pid":0,"ts":1{"0" * 400},"dur":1,"name":"","args":{{"micro_batch":"x"}}}}]}}'
        for text in traces:
            trace = self.write("trace.json", text)
            done = harness.output_of(PYTHON, SCRIPTS / "plot.py", "--trace", trace, text=True)
            self.assertEqual(done.returncode, EXIT_INPUT)
            self.assertRegex(done.stderr, r"\Aplot: .*no trace of train_gpt\n\Z")
            folder = self.log(start(flags={"trace": str(trace)}), step(1))
            self.assertIn("no trace of train_gpt", self.page(folder).text)

    NASTY = (None, True, -1, 0, 1e99, 1e308, 10**30, 10**400, float("inf"), float("nan"), 2**63)
    NASTY += ("", "x", "\0", "\ud800", [], {}, [[]], {"a": 1}, [{"ms": 1}], "/dev/zero", 1e-320)

    def places(self, value, path=()):
        """Where each value is in an event."""
        for key, each in value.items() if isinstance(value, dict) else ():
            yield (*path, key)
            yield from self.places(each, (*path, key))

    def test_damaged(self):
        """Values of a log replaced by others at random: a page, or a clear refusal."""
        draw, other = random.Random(harness.SEED), self.log(start(), step(1))
        job = train(steps=2, val_every=1, sample_every=1, sample_tokens=2, profile_steps="1:2")
        lines = Path(job.log_path).read_text().splitlines()
        for i in range(60):
            events = [json.loads(line) for line in lines]
            for _ in range(draw.choice((1, 5, 30))):
                value = event = draw.choice(events)
                if event:
                    *path, last = draw.choice([*self.places(event)])
                    for key in path:
                        value = value[key]
                    value[last] = copy.deepcopy(draw.choice(self.NASTY))
            log = self.log(*events, name="damaged/log.jsonl") / "log.jsonl"
            follower = watch.Follower(log)
            follower.read()
            watch.page(follower, 70, 80, 24)
            try:
                text = report.make(report.read([log, other][: 1 + i % 2]))
                self.assertTrue(text.encode())
            except report.BadLog:
                pass

    def test_between_logged_steps(self):
        """Of --log-every 50, steps of 10 tokens and 0.01 s; a sample that was made again counts
        once."""
        sample = [{"event": "sample", "step": 100, "text": text} for text in ("before", "after")]
        logged = [step(n) for n in (1, 50, 100)]
        other = self.log(start(), step(1), name="other/log.jsonl")
        folder = self.log(start(), *logged, sample[0], start(), step(100), sample[1])
        self.assertIn("at step 100 after 1 s of training", self.page(folder).text)
        page = self.page(folder, other)
        for text, times in (("1 s", 1), ("1,000", 2), ("before", 0), ("after", 1)):
            self.assertEqual(page.text.split("\n").count(text), times, text)

    def test_what_is_not_there(self):
        """A run of one rank without samples, validation or profile; a log by its own name."""
        events = [start(flags={}), step(1), {"event": "end"}]
        events[0]["predicted"]["traffic"] = {}
        path = self.log(*events, name="run/only.jsonl")
        page = self.page(path)
        self.assertIn("One rank sends nothing.", page.text)
        self.assertIn("--profile-steps", page.text)
        self.assertIn("--sample-every", page.text)
        self.assertEqual(self.report(path / "only.jsonl").stdout, f"{path}/report.html\n")


class Private(Pages):
    PRIVACY = {"sampling": "poisson", "accountant": "prv", "steps": 2, "epsilon": 2.99881,
               "low": 2.9, "high": 2.99881, "delta": 1.431e-6, "target": 3, "sampling_rate": 0.25,
               "sigma": 0.375, "clip": 1, "unit": "sequence", "neighbours": "add-remove",
               "key": "fingerprint"}  # fmt: skip
    SECRETS = ("7.65", "3.21", "98765", "4321", "a secret text", "fingerprint", "1234567", "55555")

    def private(self, shown):
        flags = {"model": "d12", "lr": 0.001, "dp-show-private": shown, "dp-key": "fingerprint"}
        secret = dict(grad_norm=3.21, tokens_per_s=98765.0, ms=4321.0, samples=[1234567])
        end = {"event": "end", "privacy": self.PRIVACY}
        measured = {"intra": {"send": 55555 << 20}}
        end.update(memory={"predicted": {}, "measured": {"host": 55555 << 20}})
        end["traffic"] = {"predicted": {}, "measured": measured}
        return self.page(
            self.log(
                start(flags=flags, privacy=self.PRIVACY),
                step(1, 7.65, **secret),
                step(2, 7.65, **secret),
                {"event": "val", "step": 2, "loss": 2.25, "epsilon": 2.99881},
                {"event": "sample", "step": 2, "text": "a secret text"},
                {"event": "profile", "actions": [{"action": "FORWARD", "ms": 4321.0}]},
                end,
            )
        )

    def test_hides(self):
        """The guarantee, the validation and the rate alone, even if a log has more."""
        page = self.private(0)
        everything = page.text + json.dumps(page.figures)
        for secret in self.SECRETS:
            self.assertNotIn(secret, everything)
        self.assertIn("After 2 steps: epsilon <= 2.9989 at delta 1.44e-06, for each window",
                      page.text)  # fmt: skip
        for fact in ("add-remove", "prv", "0.375"):
            self.assertIn(fact, page.texts["td"])
        (trace,) = page.traces("loss (nats/token)")
        self.assertEqual((trace["name"], trace["y"]), ("validation", [2.25]))
        self.assertEqual(page.traces("norm of the gradient"), [])

    def test_shows(self):
        """With --dp-show-private it says for whom epsilon does not hold."""
        page = self.private(1)
        everything = page.text + json.dumps(page.figures)
        for secret in ("7.65", "3.21", "98765", "a secret text"):
            self.assertIn(secret, everything)
        for secret in ("fingerprint", "1234567"):
            self.assertNotIn(secret, everything)
        self.assertIn("epsilon does not hold for who sees", page.text)

    def test_real_run(self):
        """Of a real log, no figure of a step but the rate."""
        self.out.mkdir()
        flags = dict(dp_noise=1, dp_clip=1, grad_clip=None, sample_every=2, sample_tokens=4)
        job = train(steps=4, val_every=2, log=self.out / "log.jsonl", out=self.out, **flags)
        page = self.page(self.out)
        self.assertIn("epsilon <= ", page.text)
        drawn = [trace["name"] for one in page.figures for trace in one["traces"]]
        self.assertEqual(drawn, ["validation", "learning rate", "predicted"])
        self.assertNotIn(job.of("start")[0]["privacy"]["key"], page.text)


class Failures(Pages):
    def test_logs(self):
        """Nothing to read, or no event of a run."""
        empty = self.folder / "empty"
        empty.mkdir()
        many = self.log(start(), name="many/a.jsonl")
        self.log(start(), name="many/b.jsonl")
        for path in (
            *(self.folder / "none", "/dev/null", empty, many),
            self.log("\0\1\n", "[]\n", "{}\n", name="torn/log.jsonl"),
            self.log('{"event":"st', name="torn2/log.jsonl"),
        ):
            self.report(path, code=EXIT_INPUT)
            self.assertFalse((Path(path) / "report.html").exists())

    def test_place(self):
        path = self.log(start(), step(1))
        done = self.report(path, "--out", self.folder / "none/a.html", code=EXIT_RESOURCES)
        self.assertIn("cannot write", done.stderr)

    def test_without_packages(self):
        """Python alone makes it; the default run does."""
        for name in ("report.py", "report.js", "plot.py", "run_log.py", "regular_files.py"):
            self.write(f"scripts/{name}", (SCRIPTS / name).read_bytes())
        words = dict(python=f"{sys.executable} -S", script=self.folder / "scripts/report.py")
        path = self.log(start(), step(1))
        self.assertEqual(self.report(path, **words).stdout, f"{path}/report.html\n")
        (self.folder / "scripts/report.js").unlink()
        self.assertIn("report.js: No such file", self.report(path, **words, code=EXIT_INPUT).stderr)
        self.assertIn("scripts/report.py", (SCRIPTS / "run_shakespeare.sh").read_text())


@unittest.skipUnless(CHROMIUM, "needs chromium: apt-get install chromium")
class Browser(Pages):
    def opened(self, path):
        """What the page has become, after its scripts ran, but for these; they must not have
        complained."""
        words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        words += ["--enable-logging=stderr", "--virtual-time-budget=20000"]
        words += ["--window-size=1280,900", f"--user-data-dir={scratch()}", f"file://{path}"]
        done = harness.output_of(*words, text=True, errors="replace")
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        self.assertEqual(re.findall(r".*CONSOLE.*", done.stderr), [])
        return re.sub(r"(?s)<(script|style)\b.*?</\1>", "", done.stdout)

    @staticmethod
    def drawn(dom):
        """Figure -> kind of mark -> how many, legends not counted; of curves, their points."""
        found = {}
        for part in re.split('(?=<div class="figure" id="figure)', dom)[1:]:
            area = part[part.index('class="area"') :]
            lines = (POINT.findall(d) for d in re.findall(r'"curve" d="([^"]*)"', area))
            found[part.split('"')[3]] = {
                "curve": [[(float(x), float(y)) for x, y in line] for line in lines],
                **{kind: area.count(f'class="{kind}"') for kind in ("point", "box", "label")},
                "texts": re.findall(r"<text[^>]*>(.*?)</text>", part),
            }
        return found

    def after(self, path, script):
        """What is drawn after a script that acts as a user; the page's policy would refuse it."""
        text = Path(path).read_text(encoding="utf-8")
        self.assertIn("<meta http-equiv=", text)
        text = text.replace("<meta http-equiv=", "<meta name=")
        acts = """
            SVGElement.prototype.setPointerCapture = () => {};
            const svg = (n) => document.querySelector(`#figure${n} > svg`);
            function act(n, kind, x, y) {
                const corner = svg(n).getBoundingClientRect();
                const place = { clientX: corner.left + x, clientY: corner.top + y };
                svg(n).dispatchEvent(new PointerEvent("pointer" + kind, place));
            }
        """
        text = text.replace("</body>", f"<script>{acts}{script}</script></body>")
        return self.drawn(self.opened(self.write("acted.html", text)))

    def test_draws(self):
        """Every figure is drawn, with the log's points, and nothing is asked of a network."""
        job = [start(), *(step(n, 4 + n % 2) for n in range(1, 11))]
        job += [{"event": "val", "step": n, "loss": 4 + n % 8} for n in (0, 4, 8)]
        path = self.report(self.log(*job)).stdout.strip()
        dom, page = self.opened(path), Reader(path)
        found = self.drawn(dom)
        self.assertEqual([*found], [one["id"] for one in page.figures])
        losses, bars = found["figure0"], found[page.figures[-1]["id"]]
        self.assertEqual([len(line) for line in losses["curve"]], [10, 3])
        self.assertEqual(losses["point"], 3)
        self.assertEqual(bars["box"], 1)
        # Each point where the axes have it: the zigzag of 10 steps, at x and y in proportion.
        xs, ys = zip(*losses["curve"][0])
        left, right = xs[0], xs[-1]
        for n, (x, y) in enumerate(losses["curve"][0]):
            self.assertAlmostEqual(x, left + n * (right - left) / 9, delta=0.11)
            self.assertEqual(y, ys[n % 2])
        self.assertLess(ys[0], ys[1])  # a loss of 5 is above one of 4

    @need("PIL")
    def test_picture(self):
        """README's picture of a page: a PNG of its width, which is small."""
        picture = Path(scratch()) / "page.png"
        words = [PYTHON, SCRIPTS / "run_picture.py"]
        done = harness.output_of(*words, Path(scratch()) / "report.html", picture, text=True)
        self.assertEqual(done.returncode, EXIT_INPUT, done.stderr)
        self.assertIn("not of `make run`", done.stderr)
        page = self.report(self.log(start(), step(1), step(2))).stdout.strip()
        done = harness.output_of(*words, page, picture, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        data = picture.read_bytes()
        self.assertEqual(data[:8] + data[16:20], b"\x89PNG\r\n\x1a\n\0\0\5\0")
        self.assertLess(len(data), 200_000)

    def test_acts(self):
        """What a mouse does: zoom in and out, the nearest point's name, hiding, another axis."""
        events = [start(), *(step(n, 4 + n % 2) for n in range(1, 11))]
        events.append({"event": "val", "step": 10, "loss": 4.5})
        path = self.report(self.log(*events)).stdout.strip()
        whole = self.after(path, "")["figure0"]
        (x2, _), (x5, y5) = whole["curve"][0][1], whole["curve"][0][4]
        left, drag = 62, "act(0, 'down', {}, 150); act(0, 'move', {}, 151); act(0, 'up', {}, 151);"
        zoom = drag.format(left + x2, left + x5, left + x5)
        zoomed = self.after(path, zoom)["figure0"]
        (new2, _), (new5, _) = zoomed["curve"][0][1], zoomed["curve"][0][4]
        self.assertAlmostEqual(new2, 0, delta=1)
        self.assertAlmostEqual(new5 - new2, max(x for x, _ in whole["curve"][0]) * 1.01, delta=15)
        self.assertEqual([y for _, y in zoomed["curve"][0]], [y for _, y in whole["curve"][0]])
        self.assertEqual([text for text in zoomed["texts"] if text in ("2.2", "6")], ["2.2"])
        self.assertEqual([text for text in whole["texts"] if text in ("2.2", "6")], ["6"])
        twice = zoom + "svg(0).dispatchEvent(new MouseEvent('dblclick'));"
        self.assertEqual(self.after(path, twice)["figure0"], whole)
        near = self.after(path, f"act(0, 'move', {left + x5 + 3}, {y5 + 6});")["figure0"]
        self.assertEqual(near["label"], 1)
        self.assertEqual(near["texts"][-2:], ["training", "5 at step 5"])
        name = "document.querySelectorAll('#figure0 .name')[{}].{}"
        hidden = self.after(path, name.format(0, "click()"))["figure0"]
        self.assertEqual((len(hidden["curve"]), hidden["point"]), (1, 1))
        alone = name.format(0, "dispatchEvent(new MouseEvent('dblclick'))")
        shown = self.after(path, alone)["figure0"]
        self.assertEqual((len(shown["curve"]), shown["point"]), (1, 0))
        click = "document.querySelectorAll('#figure0 .axes button')[1].click();"
        self.assertIn("100", self.after(path, click)["figure0"]["texts"])  # tokens

    def test_hostile(self):
        """Names of runs stay text in legends, too."""
        label = HOSTILE[:50]
        paths = [
            self.log(start(flags={"lr": lr}), step(1), step(2), name=f"{i}/log.jsonl")
            for i, lr in enumerate((label, "2"))
        ]
        dom = self.opened(self.report(*paths).stdout.strip())
        self.assertFalse(re.search(r"<(img|b)\b|<a href=\"javascript", dom))
        legend = "".join(re.findall(r'class="name">.*?<span class="">(.*?)</span>', dom))
        self.assertIn("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&lt;b&gt;bold", legend)


if __name__ == "__main__":
    harness.main()
