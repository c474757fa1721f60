"""Training steps and all-reduces over several ranks: exact ones beside PyTorch's own.

    python -m bench.parallel [--device cuda] [--world 2] [--width 2048] [--layers 4] [--batch 8]
                             [--length 512] [--bfloat16] [--rounds 10] [--select NAME ...] [--json FILE]

Starts its ranks itself, on this machine (under torchrun each process is a rank), and ends them after
`--limit` seconds. A transformer is cut Megatron's way: queries, keys, values and the first product of
each MLP by columns, the products behind them by rows; embedding, head and norms are whole everywhere.

Steps: forward, backward and PyTorch's fused AdamW for everybody. Every round gives each contender one
turn; a turn lasts until the slowest rank has ended. Who works on one rank does so while others wait.

Bytes: what a rank has to send in a step at the least, agreements on what is done included, counted at PyTorch's functional collectives,
through which eager and compiled contenders of both kinds go: of a tensor of S bytes on n ranks, 2 S
(n - 1) / n for an all-reduce, S (n - 1) / n for an all-gather (of its result), a reduce-scatter and an
all-to-all. One step is counted, before those that are timed.

All-reduces: an exact one sends as many bytes as a plain one, in two messages with a sum between
them; messages and sum are timed alone as well, and the larger part is what bounds it.
"""

import argparse
import contextlib
import copy
import datetime
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

from bench.contenders import engines
from bench.measure import Timing, first_line, wait

HEAD, CLASSES = 64, 1024
WARM_STEPS = 3  # the first compiles
_BEGAN = time.monotonic()


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.project = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        y = self.attention_norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES, bias=False)
        self.blocks, self.norm = nn.Sequential(*(Block(width, heads) for _ in range(layers))), nn.LayerNorm(width)

    def forward(self, tokens):
        logits = self.head(self.norm(self.blocks(self.embed(tokens[:, :-1]))))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def cut(model, mesh, exact):
    """The model cut over the ranks of a mesh, by carbon's styles or by PyTorch's."""
    from torch.distributed.tensor import parallel as plain

    from carbon_compile import parallel

    styles = parallel if exact else plain
    columns = {name: styles.ColwiseParallel() for name in ("q", "k", "v", "up")}
    rows = {name: styles.RowwiseParallel() for name in ("project", "down")}
    for block in model.blocks:
        plain.parallelize_module(block, mesh, {**columns, **rows})
    return model


# Exact or not, cut over the ranks or whole on one, engine; the first ones matter most if time is short.
CONTENDERS = {
    "plain eager": (False, True, "eager"),
    "exact compiled": (True, True, "carbon"),
    "exact compiled, one rank": (True, False, "carbon"),
    "plain compiled": (False, True, "inductor"),
    "plain compiled, one rank": (False, False, "inductor"),
    "exact eager": (True, True, "eager"),
    "exact eager, one rank": (True, False, "eager"),
}


class Contender:
    """A model with its optimizer, and what became of it."""

    def __init__(self, name, whole, mesh, options):
        self.exact, self.cut, engine = CONTENDERS[name]
        self.name, self.options, self.timing, self.losses = name, options, Timing(), []
        self.working = self.cut or dist.get_rank() == 0
        self.sent = self.messages = 0
        if not self.working:
            return
        model = copy.deepcopy(whole).to(options.device)
        self.model = cut(model, mesh, self.exact) if self.cut else model
        self.loss = engines()[engine].compiled(lambda tokens: self.model(tokens), fullgraph=engine == "carbon") if engine != "eager" else self.model
        self.eager_rules = self.exact and engine == "eager"
        # DTensors and plain tensors don't mix in one fused call.
        groups = [[p for p in self.model.parameters() if hasattr(p, "placements") == is_cut] for is_cut in (True, False)]
        self.optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-4, fused=True)

    def step(self, tokens):
        import carbon_compile

        rules = carbon_compile.enable(seed=None) if self.eager_rules else contextlib.nullcontext()
        with rules:
            with torch.autocast(self.options.device, torch.bfloat16, enabled=self.options.bfloat16):
                loss = self.loss(tokens)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def turn(self, tokens):
        """Seconds until the slowest rank has made its step; what any rank raises, all raise."""
        error, seconds = None, 0.0
        wait(self.options.device)
        dist.barrier()
        start = time.perf_counter()
        if self.working:
            try:
                self.step(tokens)
                wait(self.options.device)
                seconds = time.perf_counter() - start
            except Exception as raised:
                error = first_line(raised)
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, (seconds, error))
        errors = [e for _, e in told if e]
        if errors:
            raise RuntimeError(errors[0])
        return max(s for s, _ in told)


class Sent:
    """Counts what functional collectives send, eager or compiled, while it is entered."""

    def __init__(self, device):
        self.key, self.bytes, self.messages = {"cpu": "CPU", "cuda": "CUDA"}[device], 0.0, 0

    def __enter__(self):
        self.library = torch.library.Library("_c10d_functional", "IMPL")
        for name, weigh in WEIGHTS.items():
            operator = getattr(torch.ops._c10d_functional, name).default
            self.library.impl(name, self._counting(operator, weigh), self.key)
        return self

    def __exit__(self, *error):
        self.library._destroy()

    def _counting(self, operator, weigh):
        def call(*arguments):
            result = operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments)
            ranks = dist.get_world_size()
            self.bytes += weigh(_bytes(arguments[0]), _bytes(result)) * (ranks - 1) / ranks
            self.messages += 1
            return result

        return call


WEIGHTS = {
    "all_reduce": lambda given, result: 2 * given,
    "all_reduce_": lambda given, result: 2 * given,
    "all_reduce_coalesced": lambda given, result: 2 * given,
    "all_reduce_coalesced_": lambda given, result: 2 * given,
    "all_gather_into_tensor": lambda given, result: result,
    "all_gather_into_tensor_coalesced": lambda given, result: result,
    "reduce_scatter_tensor": lambda given, result: given,
    "reduce_scatter_tensor_coalesced": lambda given, result: given,
    "all_to_all_single": lambda given, result: given,
    "broadcast": lambda given, result: given,
    "broadcast_": lambda given, result: given,
}


def _bytes(x):
    return sum(map(_bytes, x)) if isinstance(x, (list, tuple)) else x.numel() * x.element_size()


# --- steps ------------------------------------------------------------------------------------------------


def steps(options, mesh, save):
    """A row for each contender; `save` gets what there is after each round."""
    generator = torch.Generator().manual_seed(1)
    heads = max(options.width // HEAD, dist.get_world_size())
    data = [torch.randint(0, CLASSES, (options.batch, options.length + 1), generator=generator).to(options.device) for _ in range(options.rounds + WARM_STEPS + 1)]
    torch.manual_seed(0)
    whole = Transformer(options.width, options.layers, heads)
    contenders = []
    for name in CONTENDERS:
        if not any(text in name for text in options.select):
            continue
        if not _in_time(options, 0.6):
            say(f"{name}: left out, to time those before it")
            continue
        contender = Contender(name, whole, mesh, options)
        contenders.append(contender)
        first = _turns(contender, data[:1])
        _turns(contender, data[1:WARM_STEPS])
        contender.first = first[0] if first else None
        with Sent(options.device) as sent:
            _turns(contender, data[-1:])
        contender.sent, contender.messages = sent.bytes, sent.messages
        say(f"{name}: {contender.timing.error or 'warm'}")
    for number, tokens in enumerate(data[WARM_STEPS:-1]):
        if number and not _in_time(options, 0.9):
            break
        turn = number % max(1, len(contenders))
        for contender in contenders[turn:] + contenders[:turn]:
            contender.timing.rounds += [1e3 * s for s in _turns(contender, [tokens])]
        save([_step_row(contender, contenders) for contender in contenders])
    return [_step_row(contender, contenders) for contender in contenders]


def _in_time(options, part):
    """Whether less than this part of the time limit has gone, on rank 0: all ranks stop together."""
    told = [time.monotonic() - _BEGAN < part * options.limit]
    dist.broadcast_object_list(told, 0)
    return told[0]


def _turns(contender, data):
    """Seconds of each turn; none once the contender has failed."""
    found = []
    for tokens in data:
        if contender.timing.error:
            break
        try:
            found.append(contender.turn(tokens))
        except RuntimeError as error:
            contender.timing.error = str(error)
    return found


def _step_row(contender, contenders):
    timing = contender.timing
    base = next((c for c in contenders if c.name == "plain eager" and c.timing.rounds), None)
    alone = next((c for c in contenders if c.exact and not c.cut), None)
    row = {"step": contender.name, "median ms": timing.median, "spread ms": timing.spread, "over plain eager": None, "compile s": None}
    if timing.rounds:
        row["over plain eager"] = timing.median / base.timing.median if base else None
        row["compile s"] = contender.first - timing.median / 1e3
    row |= {"messages": contender.messages, "MiB sent": contender.sent / 2**20, "loss": contender.losses[-1] if contender.losses else None, "bits of one rank": None}
    if contender.exact and contender.cut and contender.losses and alone and alone.losses:
        row["bits of one rank"] = contender.losses == alone.losses
    return row | {"error": timing.error}


# --- all-reduces -------------------------------------------------------------------------------------------


def all_reduces(options):
    """A row for each type and size."""
    from carbon_compile.lowering import collective, registry

    registry.load()
    group, ranks = dist.group.WORLD.group_name, dist.get_world_size()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for elements in options.sizes:
            x = torch.randn(elements, device=options.device).to(dtype)
            y = torch.zeros_like(x)  # reduced in place, again and again
            exchange = collective.Exchange("timed alone", group, x.device)
            calls = {
                "exact": lambda x=x: collective.ALL_REDUCE(x, "sum", group, ranks),
                "plain": lambda y=y: collective.c10d.wait_tensor(collective.c10d.all_reduce_(y, "sum", group)),
                "messages": lambda x=x, exchange=exchange: (exchange.swap(x), exchange.gather(x[: x.numel() // ranks])),
                "sum": lambda x=x: collective._sum_rows(x.view(ranks, -1), x.dtype),
            }
            found, sent = _timed(calls, options), {}
            for who in ("exact", "plain"):
                with Sent(options.device) as counted:
                    calls[who]()
                sent[who] = counted.bytes
            ms = {who: timing.median for who, timing in found.items()}
            parts = {"messages": ms["messages"], "sum": ms["sum"], "neither": ms["exact"] - ms["messages"] - ms["sum"]}
            rows.append(
                {
                    "type": str(dtype).removeprefix("torch."), "elements": elements, "exact ms": ms["exact"], "spread": found["exact"].spread,
                    "plain ms": ms["plain"], "plain's spread": found["plain"].spread, "exact over plain": ms["exact"] / ms["plain"],
                    "its messages ms": ms["messages"], "its sum ms": ms["sum"], "bound by": max(parts, key=parts.get),
                    "MiB sent": sent["exact"] / 2**20, "plain MiB": sent["plain"] / 2**20,
                    "GB/s": sent["exact"] / ms["exact"] / 1e6, "plain GB/s": sent["plain"] / ms["plain"] / 1e6,
                }
            )  # fmt: skip
            say(f"all-reduce of {elements} {dtype}: timed")
    return rows


def _timed(calls, options):
    """A Timing for each call, on the slowest rank, by turns and after two warm ones."""
    timings = {who: Timing() for who in calls}
    for number in range(options.rounds + 2):
        for who, call in calls.items():
            wait(options.device)
            dist.barrier()
            start = time.perf_counter()
            call()
            wait(options.device)
            if number >= 2:
                timings[who].rounds.append((time.perf_counter() - start) * 1e3)
    for timing in timings.values():
        slowest = torch.tensor(timing.rounds, dtype=torch.float64, device=options.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        timing.rounds = slowest.tolist()
    return timings


# --- ranks -------------------------------------------------------------------------------------------------


def say(line):
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def about(options):
    """Where, with what and at which sizes."""
    from bench.command import about as facts

    found = facts(options.device, "kept" if os.environ.get("TORCHINDUCTOR_CACHE_DIR") else "user's")
    if options.device == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["NCCL settings"] = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    sizes = {name: getattr(options, name) for name in ("width", "layers", "batch", "length", "bfloat16", "rounds")}
    return {**found, "ranks": dist.get_world_size(), **sizes}


def work(options):
    """What one rank does; rank 0 prints and writes."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    torch.set_float32_matmul_precision("highest")
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=options.limit))
    result = {"about": about(options), "all-reduces": [], "steps": []}

    def save(name, rows):
        """Who is stopped keeps what there is."""
        result[name] = rows
        if rank == 0 and options.json:
            with open(options.json, "w") as file:
                json.dump(result, file, indent=1)

    mesh = init_device_mesh(options.device, (ranks,))
    save("all-reduces", all_reduces(options))
    save("steps", steps(options, mesh, functools.partial(save, "steps")))
    if rank == 0:
        found = result["about"]
        print(f"{found['card']} x {ranks}, torch {found['torch']}, Triton {found['triton']}, {'NCCL ' + found['nccl'] if 'nccl' in found else 'Gloo'}")
        print(f"width {options.width}, {options.layers} layers, batch {options.batch} x {options.length}, {'bfloat16 autocast' if options.bfloat16 else 'float32'}")
        for name in ("steps", "all-reduces"):
            print("\n" + tabulate(result[name], headers="keys", floatfmt=".4g"))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # NCCL's own threads may outlast an orderly end


def start(options, words):
    """One process a rank; the worst exit code, or 124 where the time is over."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = []
    for rank in range(options.world):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        if options.device == "cpu":
            environment.setdefault("OMP_NUM_THREADS", "1")
        ranks.append(subprocess.Popen([sys.executable, "-m", "bench.parallel", *words], env=environment, start_new_session=True))
    end = time.monotonic() + options.limit
    try:
        while any(p.poll() is None for p in ranks):
            failed = [p.returncode for p in ranks if p.returncode]
            if failed or time.monotonic() > end:
                return failed[0] if failed else 124
            time.sleep(0.2)
        return max(abs(p.returncode) for p in ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its compilers too
                process.wait()


def main(words=None):
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--world", type=int, default=2, help="how many ranks")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--bfloat16", action="store_true", help="autocast instead of float32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1 << 16, 1 << 20, 1 << 24], help="elements of the all-reduces")
    parser.add_argument("--select", nargs="*", default=list(CONTENDERS), help="contenders, by parts of their names")
    parser.add_argument("--limit", type=int, default=540, help="seconds until every rank is stopped")
    parser.add_argument("--json")
    options = parser.parse_args(words)
    if options.width % max(options.width // HEAD, options.world) or any(n % options.world for n in options.sizes):
        parser.error("ranks must divide the heads, and the sizes of the all-reduces")
    if "RANK" in os.environ:
        return work(options)
    if options.device == "cuda" and torch.cuda.device_count() < options.world:
        parser.error(f"{options.world} ranks need as many GPUs; there are {torch.cuda.device_count()}")
    return start(options, words)


if __name__ == "__main__":
    sys.exit(main())
