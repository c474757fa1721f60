"""The demo: train a small transformer on handwritten digits and print the hash of its weights.

The hash is the same on any machine that keeps the contract, and one recorded on a GPU ships with
the package. What could differ before carbon starts is fixed here without PyTorch's generators,
whose draws depend on the instruction set and the release: initial weights and the order of batches
come from Philox words and IEEE arithmetic alone.
"""

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from importlib import resources

import torch
import torch.nn.functional as F
from torch import nn

from carbon_compile.data import digits
from carbon_compile.hashing import fingerprint
from carbon_compile.lowering import philox
from carbon_compile.lowering.engines import TorchEngine

STEPS = 200
BATCH = 64
WIDTH = 48
HEADS = 4
LAYERS = 2
DROPOUT = 0.1
SEED = 2025
PRECISIONS = ("float32", "bfloat16")

_MATCHES, _DIFFERS, _UNUSABLE = 0, 1, 2  # exit codes


class Block(nn.Module):
    """A pre-norm transformer layer: [B, L, WIDTH] to the same."""

    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x):
        x = x + self.dropout(self.project(self.attend(self.attention_norm(x))))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def attend(self, x):
        heads = self.qkv(x).unflatten(-1, (3, -1, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, HEADS, L, WIDTH / HEADS]
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class DigitTransformer(nn.Module):
    """Classifies images read as sequences of 64 pixel tokens: int64 [B, 64] to logits [B, 10]."""

    def __init__(self):
        super().__init__()
        self.pixel = nn.Embedding(digits.LEVELS, WIDTH)
        self.position = nn.Embedding(digits.PIXELS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.classify = nn.Linear(WIDTH, digits.CLASSES)

    def forward(self, images):
        x = self.pixel(images) + self.position.weight
        return self.classify(self.norm(self.blocks(x)).mean(1))


def words(n, *key):
    """n Philox words as int64 in [0, 2^32)."""
    key_lo, key_hi = (torch.tensor(k) for k in key)
    return philox.philox(TorchEngine, key_lo, key_hi, torch.arange(n))


def initialise(model):
    """Fill `model` (on the CPU) with the same bits on every machine: norms 1, biases 0, rest uniform."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            unit = ((words(parameter.numel(), SEED, number) >> 8).float() * 2.0**-23 - 1.0).view_as(parameter)
            bound = {"pixel.weight": 0.2, "position.weight": 1.0}.get(name, parameter.shape[1] ** -0.5)
            parameter.copy_(unit * bound)
        # Pixel values start out in order, on a line: 1438 images are too few to learn that they are.
        brightness = torch.arange(digits.LEVELS).float()[:, None] * 0.125 - 1.0
        direction = (words(WIDTH, SEED, 2**32 - 1) >> 8).float() * 2.0**-23 - 1.0
        model.pixel.weight.add_(brightness * direction)


def batches(n, steps):
    """`steps` index tensors [BATCH] into n examples, each epoch in an order of its own."""
    epoch_length = n // BATCH
    for step in range(steps):
        epoch, place = divmod(step, epoch_length)
        if place == 0:
            order = torch.sort(words(n, epoch, SEED), stable=True).indices
        yield order[place * BATCH : (place + 1) * BATCH]


@dataclass
class Run:
    """What one training left behind; `match` is None where nothing comparable was recorded."""

    loss: float
    accuracy: float
    weights: str
    optimizer: str
    seconds: float
    match: bool | None = None


def train(data, device, precision, steps, backend, progress):
    """Train one model from the fixed start and return its `Run`; forward, update and test compiled."""
    began = time.perf_counter()
    model = DigitTransformer()
    initialise(model)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.01)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")

    def loss_of(images, labels):
        with autocast:
            return F.cross_entropy(model(images), labels)

    def update():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    loss_of = torch.compile(loss_of, backend=backend, fullgraph=True, dynamic=False)
    # PyTorch puts a graph break at the start of every optimizer's step.
    update = torch.compile(update, backend=backend, dynamic=False)
    images, labels = data.train_images.to(device), data.train_labels.to(device)
    torch.manual_seed(SEED)  # dropout
    for step, chosen in enumerate(batches(len(images), steps), 1):
        chosen = chosen.to(device)
        optimizer.zero_grad()
        loss = loss_of(images[chosen], labels[chosen])
        loss.backward()
        update()
        progress(precision, step, steps, loss.item())
    return Run(
        loss=loss.item(),
        accuracy=accuracy(model, data, device, backend),
        weights=fingerprint(model),
        optimizer=fingerprint(optimizer),
        seconds=round(time.perf_counter() - began, 1),
    )


def accuracy(model, data, device, backend):
    """The share of held-out images that `model` gets right, in float32 whatever it was trained in."""
    predict = torch.compile(model.eval(), backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        guesses = predict(data.test_images.to(device)).argmax(-1)
    return int((guesses == data.test_labels.to(device)).sum()) / len(data.test_labels)


class Progress:
    """Shows training on standard error: a bar on a terminal, a line now and then elsewhere."""

    WIDTH = 30

    def __init__(self, stream):
        self.stream = stream
        self.bar = stream.isatty()

    def compiling(self, precision):
        self._show(f"{precision:8}  compiling the first step", done=not self.bar)

    def __call__(self, precision, step, steps, loss):
        if self.bar:
            full = self.WIDTH * step // steps
            bar = "#" * full + "-" * (self.WIDTH - full)
            self._show(f"{precision:8}  [{bar}] {step}/{steps}  loss {loss:.3f}", done=step == steps)
        elif step == steps or step % max(1, math.ceil(steps / 8)) == 0:
            self._show(f"{precision:8}  step {step}/{steps}  loss {loss:.3f}", done=True)

    def _show(self, text, done):
        start = "\r\x1b[K" if self.bar else ""
        self.stream.write(start + text + ("\n" if done else ""))
        self.stream.flush()


def recorded():
    """The result that ships with the package, as `report` made it on a GPU, or None."""
    file = resources.files("carbon_compile.data").joinpath("demo_golden.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def compare(runs, steps, backend, golden):
    """Set each run's `match`; return the verdict (None: nothing to compare with) and why it is None."""
    if backend != "carbon":
        return None, f"the backend {backend!r} promises no bits"
    if golden is None:
        return None, "no recorded result ships with this release"
    if steps != golden["steps"]:
        return None, f"the recorded result is that of {golden['steps']} steps"
    for precision, run in runs.items():
        expected = golden["runs"][precision]
        run.match = all(getattr(run, key) == expected[key] for key in ("weights", "optimizer"))
    return all(run.match for run in runs.values()), None


def versions():
    from carbon_compile import environment

    return {key: environment.describe()[key] for key in ("carbon_compile", "python", "torch", "triton", "cuda")}


def card(device):
    """The GPU's name, or the CPU's."""
    from carbon_compile import environment

    return torch.cuda.get_device_name(device) if device.type == "cuda" else environment.describe()["cpu"]


def report(runs, device, steps, backend, golden):
    """The result as `--json` prints it; what a GPU prints is what ships as recorded."""
    match, why = compare(runs, steps, backend, golden)
    return {
        "match": match,
        "not_compared": why,
        "device": device.type,
        "card": card(device),
        "versions": versions(),
        "steps": steps,
        "runs": {precision: asdict(run) for precision, run in runs.items()},
        "recorded_on": golden and {key: golden[key] for key in ("card", "versions", "steps")},
    }


def text(result):
    """The result for people."""
    lines = []
    for precision, run in result["runs"].items():
        mark = {True: "as recorded", False: "NOT as recorded", None: ""}[run["match"]]
        lines += [
            f"{precision}: loss {run['loss']:.4f}, {run['accuracy']:.1%} of the held-out images right, {run['seconds']:.0f} s",
            f"  weights    {run['weights']}  {mark}".rstrip(),
            f"  optimizer  {run['optimizer']}  {mark}".rstrip(),
        ]
    if result["match"] is None:
        lines.append(f"not compared: {result['not_compared']}")
    else:
        there = result["recorded_on"]
        relation = "The same bits as" if result["match"] else "NOT the same bits as"
        lines.append(f"{relation} on {there['card']} (PyTorch {there['versions']['torch']}); this is {result['card']}.")
    return "\n".join(lines) + "\n"


def main(arguments):
    """Run the demo and return the exit code: 0, 1 if a recorded hash differs, 2 if it cannot run.

    Args:
        arguments: a list of command-line words, or the namespace that the command line made of them.
    """
    if isinstance(arguments, (list, tuple)):
        from carbon_compile import cli

        return cli.main(["demo", *arguments])
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    problem = _problem(device, arguments.certificate)
    if problem:
        print(f"carbon-compile demo: {problem}", file=sys.stderr)
        return _UNUSABLE
    steps, name = arguments.steps or STEPS, arguments.backend
    runs, progress, data = {}, Progress(sys.stderr), digits.load()
    for precision in PRECISIONS:
        progress.compiling(precision)
        runs[precision] = train(data, device, precision, steps, _backend(name), progress)
    result = report(runs, device, steps, name, recorded())
    sys.stdout.write(json.dumps(result, indent=1) + "\n" if arguments.json else text(result))
    if arguments.certificate:
        from carbon_compile.certify import certificate

        certificate().write(arguments.certificate)
    return _DIFFERS if result["match"] is False else _MATCHES


def _problem(device, certificate):
    """One line saying why the demo cannot run, or None."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "--device cuda: PyTorch sees no CUDA device here"
    if certificate:
        folder = os.path.dirname(os.path.abspath(certificate))
        if os.path.isdir(certificate) or not os.access(folder, os.W_OK):
            return f"--certificate {certificate}: can't write there"
    return None


def _backend(name):
    if name != "carbon":
        return name
    # By its function, so that a checkout that is not installed runs too; users write the name.
    from carbon_compile.backend import carbon

    return carbon
