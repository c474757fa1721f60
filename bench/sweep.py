"""Hashes of the elementary functions over all 2^32 binary32 inputs.

    python -m bench.sweep --device cuda [--engine eager] [--json tests/golden/elementary.json]
    python -m bench.sweep --stride 64 [--functions exp tanh] [--against tests/golden/elementary.json]

The inputs are cut into 65,536 blocks of 2^16 consecutive bit patterns. A block's digest is the
wraparound int64 sum, over its elements, of a 64-bit mix of the output bits (every NaN is 0x7FC00000)
and the position, so it depends neither on how blocks are batched nor on the order of the sum. The
file holds one SHA-256 over all digests, in block order, and the digests of some published blocks,
which a CPU can check in seconds. Functions of several inputs take pairs mixed from a counter instead,
1,024 blocks of them. `--stride N` evaluates every Nth block and the published ones.

`compiled` runs the operation in a fused kernel, `eager` as one tensor operation after another; both
must give the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time

import torch

from carbon_compile import inductor_config
from carbon_compile.bits import canonical_bits
from carbon_compile.lowering import prims
from carbon_compile.lowering.elementary import PROGRAMS

BLOCK = 1 << 16
BLOCKS = {1: 1 << 16, 2: 1 << 10}
# Zero and subnormals, the binades around 1, overflow of exp, the largest numbers, infinity and NaN.
_EDGES = (0x0000, 0x0080, 0x3300, 0x3E80, 0x3F00, 0x3F7F, 0x3F80, 0x3FC0, 0x4049, 0x40C0, 0x4180, 0x42B1, 0x7F7F, 0x7F80)
PUBLISHED = {
    1: sorted({(i * 65536) // 20 + 37 * i for i in range(20)} | {e | s for e in _EDGES for s in (0, 0x8000)}),
    2: list(range(0, 1024, 43)),
}
# softplus and its derivative have beta and threshold too: PyTorch's defaults.
_DEFAULTS = {"softplus": (1.0, 20.0), "softplus_grad": (1.0, 20.0)}


def _inputs(name):
    """Inputs that vary: 1 or 2."""
    return PROGRAMS[name][1] - len(_DEFAULTS.get(name, ()))


def _signed(n):
    return n - (1 << 64) if n >> 63 else n


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_A = _signed(0xBF58476D1CE4E5B9)
_MIX_B = _signed(0x94D049BB133111EB)


def mix(x):
    """SplitMix64's finaliser on an int64 tensor, with wraparound products and logical shifts."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_A
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_B
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def block_inputs(inputs, blocks):
    """binary32 inputs [len(blocks), BLOCK] of the given block numbers, as a tuple of `inputs` tensors."""
    index = blocks[:, None] * BLOCK + torch.arange(BLOCK, device=blocks.device)
    if inputs == 1:
        return (((index + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32),)
    # Odd blocks keep to [2^-7, 2), where pairs have finite results more often.
    near = (blocks[:, None] & 1) == 1
    words = [(mix(index * 2 + i) & 0xFFFFFFFF) - 2**31 for i in range(inputs)]
    words = [torch.where(near, (w & ~0x7C000000) | 0x3C000000, w) for w in words]
    return tuple(w.to(torch.int32).view(torch.float32) for w in words)


def block_digests(y):
    """int64 digests [n] of outputs y [n, BLOCK]."""
    position = torch.arange(BLOCK, device=y.device) * _GOLDEN
    return mix((canonical_bits(y).to(torch.int64) & 0xFFFFFFFF) ^ position).sum(dim=1)


def evaluator(name, engine):
    """A function from the varying inputs to the float32 result."""
    defaults = _DEFAULTS.get(name, ())

    def function(*args):
        return prims.apply(name, *args, *defaults)

    if engine == "eager":
        return function
    # Every function shares this code object: without a reset the ninth meets the recompile limit, and
    # without fullgraph it would then run eagerly and the file would claim a kernel that never was.
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, options=inductor_config())


def digests(name, blocks, device="cpu", engine="eager", batch=None):
    """Digests of the numbered blocks of `name`, as a list of int.

    Raises KeyError for an unknown function.
    """
    inputs = _inputs(name)
    function = evaluator(name, engine)
    batch = batch or (256 if device == "cuda" else 4)
    out = []
    for start in range(0, len(blocks), batch):
        part = list(blocks[start : start + batch])
        # A compiled function sees one shape only.
        padded = part + [part[-1]] * (batch - len(part)) if engine == "compiled" else part
        y = function(*block_inputs(inputs, torch.tensor(padded, device=device)))
        out.append(block_digests(y)[: len(part)].cpu())
    return torch.cat(out).tolist()


def _must_equal_eager(name, device, known):
    """Exit unless one tensor operation after another gives the same published blocks on this device."""
    eager = digests(name, list(known), device, "eager")
    wrong = [f"{b:04x}" for (b, fused), value in zip(known.items(), eager, strict=True) if fused != value]
    if wrong:
        sys.exit(f"{name}: the fused kernel differs from eager on {device} in blocks {', '.join(wrong)}")


def sweep(name, device, engine, stride):
    """The record of one function: SHA-256 over every stride-th block, and the published blocks.

    Exits with a message where a fused kernel and eager disagree on the published blocks: such a file
    must not be recorded.
    """
    inputs = _inputs(name)
    all_blocks = list(range(0, BLOCKS[inputs], stride))
    values = digests(name, all_blocks, device, engine)
    data = b"".join(v.to_bytes(8, "little", signed=True) for v in values)
    known = dict(zip(all_blocks, values, strict=True))
    missing = [b for b in PUBLISHED[inputs] if b not in known]
    if missing:
        known.update(zip(missing, digests(name, missing, device, engine), strict=True))
    if engine == "compiled":
        _must_equal_eager(name, device, {b: known[b] for b in PUBLISHED[inputs]})
    published = {f"{b:04x}": f"{known[b] & (2**64 - 1):016x}" for b in PUBLISHED[inputs]}
    return {"sha256": hashlib.sha256(data).hexdigest(), "blocks": published}


def main(argv=None):
    parser = argparse.ArgumentParser(description="hash the elementary functions over all binary32 inputs")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--engine", default="compiled", choices=["compiled", "eager"])
    parser.add_argument("--stride", type=int, default=1, help="evaluate every Nth block and the published ones")
    parser.add_argument("--functions", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--json", help="write the hashes here")
    parser.add_argument("--against", help="compare with a file written before; exit 1 on a difference")
    args = parser.parse_args(argv)
    if args.engine == "compiled":
        from carbon_compile.lowering import pointwise

        pointwise.install_lowerings()
    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "engine": args.engine,
        "stride": args.stride,
        "functions": {},
    }
    old = json.load(open(args.against)) if args.against else None
    differing = []
    for name in args.functions:
        start = time.perf_counter()
        record = result["functions"][name] = sweep(name, args.device, args.engine, args.stride)
        line = f"{name:15s} {record['sha256'][:16]} {time.perf_counter() - start:7.1f} s"
        if old:
            same = record["blocks"] == old["functions"].get(name, {}).get("blocks")
            if old["stride"] == args.stride:
                same = same and record["sha256"] == old["functions"][name]["sha256"]
            line += "  same" if same else "  DIFFERS"
            differing += [] if same else [name]
        print(line, flush=True)
        if args.json:
            with open(args.json, "w") as f:
                json.dump(result, f, indent=1)
                f.write("\n")
    if differing:
        sys.exit(f"these functions differ from {args.against}: {', '.join(differing)}")


if __name__ == "__main__":
    main()
