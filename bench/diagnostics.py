"""Compile time of a GPT-2 with carbon's verdicts and without: python -m bench.diagnostics [layers] [rounds]

Without: no verdicts, no rows, no graph hash, no record, and nobody listens to Dynamo; the rewrite stays.
Both compile cold, in turns, for the same machine noise.
"""

import argparse
import contextlib
import statistics
import time
from unittest import mock

import torch
from torch import fx

from carbon_compile import backend, runtime
from carbon_compile.diagnostics import Report


class Silent(fx.Interpreter):
    """Applies the rules and says nothing."""

    def __init__(self, gm, policy):
        super().__init__(gm)
        self.report, self.rows, self.stock = Report(policy=policy), [], set()


@contextlib.contextmanager
def without_verdicts():
    with (
        mock.patch.object(backend, "Judge", Silent),
        mock.patch.object(backend, "graph_hash", lambda graph: ""),
        mock.patch.object(backend, "uninitialised_reads", lambda graph: ()),
        mock.patch.object(runtime, "region_key", lambda *args: "none"),
        mock.patch.object(runtime.Region, "remember", lambda region, record: setattr(region, "record", record)),
        mock.patch.object(backend.carbon, "listener", lambda **options: None),
    ):
        yield


def model(layers):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=48, n_head=4, vocab_size=512, use_cache=False))


def compile_seconds(layers):
    """Forward and backward of one training step, nothing cached."""
    torch.compiler.reset()
    net, ids = model(layers), torch.arange(32).reshape(2, 16)
    step = torch.compile(lambda ids: net(input_ids=ids).logits.square().mean(), backend=backend.carbon)
    start = time.perf_counter()
    step(ids).backward()
    return time.perf_counter() - start


def main(layers=2, rounds=3):
    found = {"with": [], "without": []}
    with torch._inductor.config.patch(force_disable_caches=True):
        compile_seconds(1)  # imports, and the C++ compiler's first look around
        for _ in range(rounds):
            found["with"].append(compile_seconds(layers))
            with without_verdicts():
                found["without"].append(compile_seconds(layers))
    middle = {name: statistics.median(times) for name, times in found.items()}
    print(f"{layers} layers, median of {rounds}: with {middle['with']:.1f} s, without {middle['without']:.1f} s: {middle['with'] / middle['without']:.3f}x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="?", type=int, default=2)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    main(**vars(parser.parse_args()))
