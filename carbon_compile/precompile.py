"""Kernels of products and sums of columns compiled beside Inductor's own work, so that the first call finds them ready."""

import functools
import logging
import os
import threading

import torch

from . import host
from .lowering import policy

log = logging.getLogger(__name__)


def start(graph, tune="off"):
    """Compile the kernels that the products and column sums of a final graph will launch, in processes of their own.

    Only for graphs on a CUDA device, and only a saving of time: a product whose kernel is not ready
    compiles it at its first call. Products of symbolic sizes are left to that. The thread that waits gets
    no tensors: a fake one would bring its mode into it while this thread traces. With `tune="on"` their plans
    are measured first, here, where they weren't before on such a GPU.
    """
    with host.real_tensors():
        calls = [call for node in graph.nodes if (call := _product(node)) is not None]
        sums = [call for node in graph.nodes if (call := _column_sum(node)) is not None]
        kept = [call for node in graph.nodes if (call := _kept(node)) is not None]
        softmaxes = [call for node in graph.nodes if (call := _softmax(node)) is not None]
        if not calls and not sums and not kept and not softmaxes:
            return None
        from .templates import attention_softmax, column_sums, matmul

        device = (calls or sums or kept or softmaxes)[0][0]
        plans = _plans() if tune == "on" else None
        others = [functools.partial(column_sums.warmable, *call[1:5], device, call[5]) for call in sums if call[0] == device]
        others += [functools.partial(warmable, *call, device) for on, warmable, call in kept if on == device]
        others += [functools.partial(attention_softmax.warmable, *call[1:]) for call in softmaxes if call[0] == device]
        compile_kernels = matmul.precompilation([call[1:] for call in calls if call[0] == device], device, host.compile_processes(device), plans, others)
    thread = threading.Thread(target=_logged, args=(compile_kernels,), daemon=True)
    thread.start()
    return thread


def recall_plans(inputs):
    """Use the plans that were measured before on these inputs' GPUs, also where a warm cache compiles nothing."""
    devices = {v.device for v in inputs if isinstance(v, torch.Tensor) and v.is_cuda}
    if devices:
        from .templates import tuning

        for device in devices:
            tuning.recall(device, _plans())


def _plans():
    return os.path.join(host.cache_dir(), "carbon")


def _logged(compile_kernels):
    try:
        compile_kernels()
    except Exception as error:  # the first call compiles, and reports what is wrong
        log.info("precompiling products failed: %s: %s", type(error).__name__, error)


def _product(node):
    """(device, a, b, options of the template) of a product node on CUDA with known sizes, else None."""
    describe = _OPTIONS.get(str(node.target)) if node.op == "call_function" else None
    if describe is None:
        return None
    values = [a.meta.get("val") if isinstance(a, torch.fx.Node) else a for a in node.args]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if not tensors or tensors[0].device.type != "cuda" or not all(_known(t) for t in tensors):
        return None
    device = tensors[0].device
    return (device, *describe(*(_bare(v) for v in values)))


def _column_sum(node):
    """(device, g, h, types of the results, numbers a row that h is made by) of a node that sums columns on CUDA, with known sizes, else None."""
    types = _SUMS.get(str(node.target)) if node.op == "call_function" else None
    if types is None:
        return None
    g, h, mean, factor = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in (*node.args, None, None, None)][:4]
    tensors = [t for t in (g, h) if t is not None]
    if g.device.type != "cuda" or not all(_known(t) and t.stride(-1) == 1 for t in tensors):
        return None
    h = _bare(h)
    if h is not None and h.dim() != 2:
        h = h.reshape(g.shape)
    return (g.device, _bare(g), h, *(node.kwargs.get(name) for name in types), (factor is not None) + (mean is not None))


def _kept(node):
    """(device, function that makes a recipe, its arguments) of a product by a kept weight on CUDA with known sizes, or
    of the input that holds the weight, or of what makes the weight's digits and balance; else None."""
    from .templates import kept

    if "kept" in node.meta:
        weight, window = node.meta["kept"]
        return (weight.device, kept.warmable_digits, (_bare(weight), window)) if weight.device.type == "cuda" else None
    operator = str(node.target)
    if operator in ("carbon.weight_digits.default", "carbon.weight_balance.default", "carbon.weight_factors.default", "carbon.mm_digits.default"):
        first, *rest = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args]
        if first.device.type != "cuda":
            return None
        if operator == "carbon.weight_digits.default":
            return first.device, kept.warmable_digits, (_bare(first), *rest)
        if operator != "carbon.mm_digits.default":
            return first.device, functools.partial(kept.warmable_balance, factors=operator == "carbon.weight_factors.default"), tuple(rest)
        exponents, _, bias, n, window, raw, dtype = rest
        return first.device, kept.warmable_product, (exponents.shape[0], first.shape[1], n, window, raw, _bare(bias), dtype)
    if operator != "carbon.mm_kept.default":
        return None
    a, _, bias, n, window, dtype = node.args
    a, bias = a.meta["val"], None if bias is None else bias.meta["val"]
    if a.device.type != "cuda" or not _known(a) or not a.shape[0]:
        return None
    return a.device, kept.warmable, (_bare(a), n, window, _bare(bias), dtype)


def _softmax(node):
    """(device, scores or weights, whether forward, scale, causal) of an attention's softmax, which is on CUDA; else None."""
    if str(node.target) not in ("carbon.attention_softmax.default", "carbon.attention_softmax_backward.default"):
        return None
    *tensors, scale, causal = node.args
    x = tensors[-1].meta["val"]
    return (x.device, _bare(x), len(tensors) == 1, scale, causal) if x.device.type == "cuda" else None


_SUMS = {
    "carbon.column_sum.default": ("", "dtype"),
    "carbon.norm_scale_gradient.default": ("dtype", ""),
    "carbon.norm_gradients.default": ("weight", "bias"),
    "carbon.norm_scale_gradient_of.default": ("dtype", ""),
    "carbon.norm_gradients_of.default": ("weight", "bias"),
}


def _known(tensor):
    return all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride()))


def _bare(value):
    """A tensor's size, strides and type, without its fake mode."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(tuple(value.shape), tuple(value.stride()), dtype=value.dtype, device="meta")


def _mm(a, b, bias, window, balance, dtype):
    if balance == "gradient_transposed":
        return b.t(), a.t(), {"window": window, "balance": "gradient", "out_dtype": dtype, "transposed": True}
    return a, b, {"window": policy.window_for(window, balance, a.shape[1]), "balance": balance, "bias": bias, "out_dtype": dtype}


def _mm_padded(a, b, bias, window, balance, dtype, row):
    *operands, options = _mm(a, b, bias, window, balance, dtype)
    return *operands, {**options, "row": row}


def _bmm(a, b, window, dtype, causal=0):
    return a, b, {"window": window, "out_dtype": dtype, "causal": causal}


def _bmm_keys(a, b, window, dtype, causal=0):
    return a, b, {"window": window, "balance": "keys", "out_dtype": dtype, "causal": causal}


def _scores(q, k, window, causal=0):
    return q, k.transpose(1, 2), {"window": window, "causal": causal}


_OPTIONS = {
    "carbon.mm_kernel.default": _mm,
    "carbon.mm_padded.default": _mm_padded,
    "carbon.bmm_kernel.default": _bmm,
    "carbon.bmm_keys_kernel.default": _bmm_keys,
    "carbon.attention_scores_kernel.default": _scores,
}
