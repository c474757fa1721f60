"""Smallest negative keys as largest unsigned bits, on a GPU: an instruction an element less, the same integers.

x -> x ^ 0x7FFFFFFF turns the order of unsigned integers into the opposite one of signed integers. So

    min over i of (bits_i ^ 0x7FFFFFFF)   =   (max over i of bits_i, unsigned) ^ 0x7FFFFFFF

and a processor that has both maxima needs no exclusive or of each element. PyTorch reduces no unsigned integers in
eager code; Inductor does on a GPU, so this is the last that happens to a graph.
"""

import torch

from .pointwise import register

aten, carbon = torch.ops.aten, torch.ops.carbon

register("unsigned_bits", lambda o, x: o.bits(o.to(x, torch.float32), torch.uint32), 1, "3", widen=False)
register("negative_key_of", lambda o, bits: o.bits(bits, torch.int32) ^ 0x7FFFFFFF, 1, "3", widen=False)


def place(gm):
    """Take each `amin` of `carbon::negative_key` on a GPU so, in a final graph, in place."""
    found = [n for n in gm.graph.nodes if n.target is aten.amin.default and _on_gpu_of_keys(n.args[0])]
    for node in found:
        key, *how = node.args
        with gm.graph.inserting_before(node):
            bits = _call(gm, carbon.unsigned_bits.default, key.args, {"dtype": torch.uint32}, key)
            largest = _call(gm, aten.amax.default, (bits, *how), {}, node)
            result = _call(gm, carbon.negative_key_of.default, (largest,), {"dtype": torch.int32}, node)
        result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)
    if found:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _on_gpu_of_keys(node):
    return node.op == "call_function" and node.target is carbon.negative_key.default and node.meta["val"].device.type == "cuda"


def _call(gm, target, args, kwargs, like):
    """A node that gives unsigned integers in the layout of another's."""
    node = gm.graph.call_function(target, args, kwargs)
    val = like.meta["val"]
    with val.fake_mode:
        node.meta = {key: value for key, value in like.meta.items() if key != "tensor_meta"}  # which is of signed ones
        node.meta["val"] = torch.empty_strided(val.shape, val.stride(), dtype=torch.uint32, device=val.device)
    return node
