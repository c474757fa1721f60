"""The code that Inductor generates for a GPU, and that our faster ways through it give the same."""

import json
import re
from unittest import mock

import pytest
import sympy
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from carbon_compile import host
from tests.offline import printed

MODELS = {
    # Layers that are alike, so that kernels recur, and one that is not.
    "transformer": """
class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.other = torch.nn.LayerNorm(width), torch.nn.RMSNorm(width)
        self.mix, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(self.other(x)), approximate="tanh")), 0.1)

embed, blocks, norm = torch.nn.Embedding(97, 64), torch.nn.Sequential(*[Block(64) for _ in range(2)]), torch.nn.LayerNorm(64)
tokens = torch.randint(0, 97, (4, 32))

def loss():
    with torch.autocast("cpu", torch.bfloat16, enabled=NARROW):
        logits = norm(blocks(embed(tokens))) @ embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
""",
    "reductions": """
scales = torch.nn.ParameterList([torch.ones(2000) for _ in range(2)])
x, index = torch.randn(300, 2000), torch.randint(0, 300, (300,))

def loss():
    y = x.bfloat16() if NARROW else x
    for scale in scales:
        y = F.batch_norm((y * scale.to(y.dtype))[index].cumsum(1).softmax(1), None, None, training=True)
        y = y + y.amax(0) * y.std(1, keepdim=True) + torch.where(y > 0, y, y.mean())
    return (y - y.sum(0)).square().sum() + y.argmax(1).sum()
""",
}

PROGRAM = """
import contextlib, sys
import torch, torch.nn.functional as F
from carbon_compile import host
from tests.offline import generated
torch.manual_seed(0)
NARROW, PLAIN = {narrow}, {plain}
if PLAIN:
    for name in ("_known_sizes_need_no_algebra", "_sets_of_dictionaries", "_dependencies_keep_their_hash", "_no_second_propagation",
                 "_equal_kernels_are_written_once", "_fake_results_are_remembered", "_lean_loop_bodies", "_equal_ranges_need_no_algebra",
                 "_no_symbols_where_sizes_are_known", "_one_dtype_handler"):
        assert hasattr(host, name)
        setattr(host, name, contextlib.nullcontext)
    host.quick_player = lambda handler: None
written = []
if not PLAIN:
    restore = host._Written.restore
    host._Written.restore = lambda *args: written.append(restore(*args))
{model}
import hashlib, json
sources = generated(loss)
print(json.dumps([[hashlib.sha256(source.encode()).hexdigest(), source.count(".run(")] for source in sources] + [len(written)]))
"""


@pytest.mark.parametrize(("model", "narrow"), (("transformer", True), ("reductions", False)))
def test_faster_compilation_writes_the_same_code(model, narrow):
    fast, plain = (json.loads(printed(PROGRAM.format(model=MODELS[model], narrow=narrow, plain=plain)).splitlines()[-1]) for plain in (False, True))
    assert fast[:-1] == plain[:-1]
    assert len(fast) == 3 and all(launches for _, launches in fast[:-1])
    assert fast[-1] > 5  # kernels that were not written out again


ROWS = """
import torch, torch.nn.functional as F
from tests.offline import generated
x, w = (torch.randn(n, 2048, requires_grad=True) for n in (300, 300))

def loss():
    return (x.bfloat16() * 1.0 @ w.bfloat16().t() + F.layer_norm(w, (2048,)) @ x.t()).sum(1).square().sum()

print(*generated(loss), sep="\\n")
"""


def test_rows_are_read_once_and_maxima_are_of_unsigned_bits():
    """Rows leave the cache first unless float32 rows are written, and no key is made of an element for its sign's sake."""
    kernels = printed(ROWS).split("@triton.jit")[1:]
    rows = [kernel for kernel in kernels if "R0_BLOCK: tl.constexpr = 2048" in kernel]
    writing = [kernel for kernel in rows if re.search(r"tl\.store\(\w+ \+ \(r0_", kernel)]
    assert rows and writing and any("tl.uint32" in kernel for kernel in rows)
    assert not any("triton_helpers.min2" in kernel for kernel in kernels)
    for kernel in rows:
        assert ("evict_first" in kernel) != (kernel in writing)


def test_strides_read_off_are_those_of_algebra():
    d0, d1, size = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("d0", "d1", "s0"))
    others = [0, 5, d0, 7 * d0 + 3, size * d0, d0 * size + size, FloorDiv(d0, 3), 4 * ModularIndexing(d0, 3, 5) - d0, FloorDiv(d0 + size, 2) + 6 * size]
    known = [term + other for term in (sympy.Integer(0), d1, 6 * d1, -d1, d1 - 6) for other in others]
    harder = [size * d1, d0 * d1, FloorDiv(d1, 4), FloorDiv(d1, 32), ModularIndexing(d1, 1, 64) + d1, 2 * ModularIndexing(d0 + d1, 2, 4) + d1, d1 * d1]
    algebra = cpp.stride_at_vec_range
    with mock.patch.object(cpp, "stride_at_vec_range", mock.Mock(side_effect=algebra)) as asked, host._known_strides_need_no_algebra():
        for indices, searches in ((known, 0), (harder, 3 * len(harder))):
            for index in indices:
                for length in (None, 8, 16):
                    found, expected = cpp.stride_at_vec_range(index, d1, length), algebra(index, d1, length)
                    assert found == expected and type(found) is type(expected), (index, length)
            assert asked.call_count == searches
