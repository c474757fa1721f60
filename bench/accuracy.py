"""Accuracy: products by distribution, GPT-2's gradients against float64, and 500 steps of training.

    python -m bench.accuracy products
    python -m bench.accuracy gradients --text FILE
    python -m bench.accuracy curves --text FILE [--plot curves.png]
    python -m bench.accuracy curves --text FILE --layers 4 --width 128 --batch 8 --length 64    # for a CPU

Every section prints a table and, under --json, its numbers.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics

import torch
import torch.nn.functional as F
from tabulate import tabulate

from carbon_compile.templates.matmul import exact_mm

# --- products -------------------------------------------------------------------------------------


def distributions(m, n, k, generator):
    """Name -> (a [m, k], b [k, n], balance): those of the numerics survey, and a compensated one."""

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def outliers(scale):
        a = normal(m, k)
        a[:, torch.randperm(k, generator=generator)[: k // 128]] *= scale
        return a

    t2 = lambda *s: normal(*s) / (-torch.log(torch.rand(*s, generator=generator))).sqrt()  # noqa: E731
    scales = torch.exp(2.5 * normal(1, k))
    compensated = torch.exp2(torch.round(4 * normal(1, k)))
    return {
        "Gaussian": (normal(m, k), normal(k, n), "weight"),
        "100x outlier channels": (outliers(100), normal(k, n), "weight"),
        "1000x outlier channels": (outliers(1000), normal(k, n), "weight"),
        "outliers met by small weights": (normal(m, k) * compensated, normal(k, n) / compensated.t(), "weight"),
        "Student t, 2 degrees": (t2(m, k), t2(k, n), "weight"),
        "log-normal, sigma 3": (torch.exp(3 * normal(m, k)), torch.exp(3 * normal(k, n)), "weight"),
        "softmax times values": (torch.softmax(4 * normal(m, k), -1), normal(k, n), "none"),
        "weight gradient, token scales": (normal(m, k) * scales, normal(k, n) * torch.exp(2.5 * normal(k, 1)), "gradient"),
        "positive (ReLU squared)": (F.relu(normal(m, k)) ** 2, F.relu(normal(k, n)) ** 2, "weight"),
    }


def products(device, k=4096, m=64, n=64):
    rows = []
    for dtype, window, label in ((torch.float32, 24, "X3 of float32"), (torch.bfloat16, 16, "X2 of bfloat16"), (torch.bfloat16, 24, "X3 of bfloat16")):
        for name, (a, b, balance) in distributions(m, n, k, torch.Generator().manual_seed(0)).items():
            a, b = a.to(device, dtype), b.to(device, dtype)
            truth = a.double() @ b.double()
            exact = exact_mm(a, b, window=window, balance=balance, out_dtype=torch.float32)
            stock = (a.float() @ b.float()) if dtype is torch.float32 else (a @ b).float()
            error = lambda c, truth=truth: ((c.double() - truth).norm() / truth.norm()).item()  # noqa: E731
            rows.append({"product": label, "data": name, "exact": error(exact), "stock, same type": error(stock)})
    return rows


# --- gradients and curves ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Size:
    """A small GPT-2 over bytes, and its batches."""

    layers: int = 4
    width: int = 256
    batch: int = 16
    length: int = 128

    def __str__(self):
        return f"GPT-2, {self.layers} layers of {self.width}, batch {self.batch} x {self.length} bytes"


def model_of(size, seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256, n_positions=size.length, n_embd=size.width, n_layer=size.layers, n_head=8, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


class Text:
    """Batches of bytes from a file: the same for the same seed."""

    def __init__(self, path, size, seed=5):
        self.data = torch.frombuffer(bytearray(pathlib.Path(path).read_bytes()), dtype=torch.uint8).long()
        self.batch, self.length = size.batch, size.length
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, device):
        starts = torch.randint(0, len(self.data) - self.length, (self.batch,), generator=self.generator)
        return torch.stack([self.data[s : s + self.length] for s in starts.tolist()]).to(device)


VARIANTS = {
    "stock float32": (None, None, {}),
    "exact float32": ("carbon", None, {}),
    "stock bfloat16": (None, torch.bfloat16, {}),
    "exact bfloat16, X2": ("carbon", torch.bfloat16, {"bfloat16_matmul": "X2"}),
    "exact bfloat16, X3": ("carbon", torch.bfloat16, {"bfloat16_matmul": "X3"}),
}


def loss_function(model, variant, device):
    from carbon_compile.backend import carbon

    backend, autocast, options = VARIANTS[variant]

    def loss(x):
        with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
            return model(x, labels=x).loss

    return loss if backend is None else torch.compile(loss, backend=carbon, options=options)


def gradient_of(model, loss, batch):
    model.zero_grad()
    loss(batch).backward()
    return torch.cat([p.grad.detach().double().flatten() for p in model.parameters()])


def gradients(device, text, size, steps=500):
    """Relative error of the whole gradient against float64, at the start and after training."""
    model = model_of(size).to(device)
    data = Text(text, size)
    rows = []
    for moment in ("at the start", f"after {steps} steps"):
        if moment != "at the start":
            train(model, loss_function(model, "stock float32", device), device, Text(text, size, seed=7), steps)
        batch = data.draw(device)
        reference = model_of(size).to(device).double()
        reference.load_state_dict(model.state_dict())
        truth = gradient_of(reference, lambda x, r=reference: r(x, labels=x).loss, batch)
        row = {"gradient": moment}
        for variant in VARIANTS:
            torch.compiler.reset()
            found = gradient_of(model, loss_function(model, variant, device), batch)
            row[variant] = ((found - truth).norm() / truth.norm()).item()
        rows.append(row)
    return rows


def train(model, loss, device, data, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for _ in range(steps):
        value = loss(data.draw(device))
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(value.detach())
    return [v.item() for v in history]


def curves(device, text, size, steps=500, seeds=3, variants=tuple(VARIANTS)):
    """Loss curves under several seeds, which choose the weights and the batches."""
    found = {}
    for variant in variants:
        torch.compiler.reset()
        model = model_of(size).to(device)
        loss = loss_function(model, variant, device)  # compiled once: a seed's weights are loaded into the model
        for seed in range(seeds):
            model.load_state_dict(model_of(size, seed).state_dict())
            model.zero_grad()
            found[f"{variant}, seed {seed}"] = train(model, loss, device, Text(text, size, seed=7 + seed), steps)
    return found


def curve_rows(found):
    return [{"run": name, "final loss (mean of last 20)": statistics.mean(losses[-20:])} for name, losses in found.items()]


def plot(found, path, title):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    variants = list(dict.fromkeys(name.partition(", seed")[0] for name in found))
    for name, losses in found.items():
        smooth = [statistics.mean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        variant = name.partition(", seed")[0]
        first = name == next(n for n in found if n.startswith(variant + ","))
        axes.plot(smooth, label=variant if first else None, color=f"C{variants.index(variant)}", linewidth=0.9)
    axes.set(xlabel="step", ylabel="loss (mean of 10 steps)", title=title)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("products", "gradients", "curves"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", help="a text file to train on")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3, help="of the curves")
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS), help="of the curves")
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--plot", metavar="PNG")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.what != "products" and not options.text:
        parser.error(f"{options.what} needs --text FILE")
    size = Size(options.layers, options.width, options.batch, options.length)
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.what == "products":
        rows = found = products(options.device)
    elif options.what == "gradients":
        rows = found = gradients(options.device, options.text, size, options.steps)
    else:
        found = curves(options.device, options.text, size, options.steps, options.seeds, options.variants)
        rows = curve_rows(found)
        if options.plot:
            plot(found, options.plot, str(size))
    print(tabulate(rows, headers="keys", floatfmt=".3g"))
    if options.json:
        card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        pathlib.Path(options.json).write_text(json.dumps({"card": card, "torch": torch.__version__, "size": dataclasses.asdict(size), "steps": options.steps, "result": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
