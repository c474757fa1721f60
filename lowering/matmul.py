"""Matrix products (contract section 4): one rule for the whole family, forward and backward.

Every product above autograd becomes `carbon::mm` (a 2-D second operand, which balances the product)
or `carbon::bmm` (batched, no balance). Their derivatives are carbon's own: the input gradient is
balanced by the weight, the weight gradient per token on both sides.
"""

import operator

import torch
import torch.nn.functional as F

from ..templates import kept as kept_templates
from ..templates import matmul as templates
from . import policy
from . import prims as P
from .pointwise import LIBRARY
from .registry import composite, direct, kernels, rule, template

_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)


def define_product(name, section, schema, implementation, fake):
    """Define `carbon::<name>` and the same kernel without autograd, `carbon::<name>_kernel`.

    Compiled graphs call the second: their autograd is over, and passing through the Python layer of
    a registered derivative costs more host time than the launches of a product.
    """
    for each in (name, f"{name}_kernel"):
        LIBRARY.define(each + schema, tags=_TAGS)
        LIBRARY.impl(each, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"carbon::{each}", fake, lib=LIBRARY)
    kernel = template(f"{name}_kernel", section)
    direct(getattr(torch.ops.carbon, f"{name}_kernel").default, implementation)

    @rule(f"carbon.{name}.default", section=section, verdict="template", integers="rule")
    def call_kernel(*args):
        return kernel(*args)

    return template(name, section)


def _mm(a, b, bias, window, balance, dtype):
    if balance == "gradient_transposed":  # (A^T dC)^T, written in the layout of a transposed weight
        return templates.exact_mm(b.t(), a.t(), window=window, balance="gradient", out_dtype=dtype, transposed=True).t()
    window = policy.window_for(window, balance, a.shape[1])
    return templates.exact_mm(a, b, window=window, balance=balance, bias=bias, out_dtype=dtype)


def _mm_fake(a, b, bias, window, balance, dtype):
    torch._check(a.dim() == 2 and b.dim() == 2, lambda: f"mm takes 2-D operands, got {a.dim()}-D and {b.dim()}-D")
    torch._check(a.shape[1] == b.shape[0], lambda: f"mm cannot contract {tuple(a.shape)} with {tuple(b.shape)}")
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def _bmm(a, b, window, dtype, causal=0):
    return templates.exact_bmm(a, b, window=window, out_dtype=dtype, causal=causal)


def _bmm_fake(a, b, window, dtype, causal=0):
    torch._check(a.dim() == 3 and b.dim() == 3, lambda: f"bmm takes 3-D operands, got {a.dim()}-D and {b.dim()}-D")
    torch._check(a.shape[2] == b.shape[1], lambda: f"bmm cannot contract {tuple(a.shape)} with {tuple(b.shape)}")
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=dtype)


MM = define_product("mm", "4", "(Tensor a, Tensor b, Tensor? bias, int window, str balance, ScalarType dtype) -> Tensor", _mm, _mm_fake)
MM_KERNEL = torch.ops.carbon.mm_kernel.default
BMM = define_product("bmm", "4", "(Tensor a, Tensor b, int window, ScalarType dtype, SymInt causal=0) -> Tensor", _bmm, _bmm_fake)


def _mm_padded(a, b, bias, window, balance, dtype, row):
    window = policy.window_for(window, balance, a.shape[1])
    return templates.exact_mm(a, b, window=window, balance=balance, bias=bias, out_dtype=dtype, row=row)


def _mm_padded_fake(a, b, bias, window, balance, dtype, row):
    _mm_fake(a, b, bias, window, balance, dtype)
    return a.new_empty_strided((a.shape[0], b.shape[1]), (row, 1), dtype=dtype)


# `carbon::mm_kernel` whose rows lie `row` elements apart: see `padding`.
MM_PADDED = direct(
    kernels("4")("mm_padded(Tensor a, Tensor b, Tensor? bias, int window, str balance, ScalarType dtype, int row) -> Tensor", _mm_padded, _mm_padded_fake),
    _mm_padded,
)


def _mm_kept(a, kept, bias, n, window, dtype):
    return kept_templates.exact_mm_kept(a, kept, n, window=window, bias=bias, out_dtype=dtype)


def _mm_kept_fake(a, kept, bias, n, window, dtype):
    torch._check(a.dim() == 2 and kept.dim() == 1, lambda: f"mm_kept takes rows and bytes, got {a.dim()}-D and {kept.dim()}-D")
    return a.new_empty((a.shape[0], n), dtype=dtype)


# `carbon::mm` with balance "weight" where no gradient is wanted and the weight's digits are there.
MM_KEPT = direct(kernels("4")("mm_kept(Tensor a, Tensor kept, Tensor? bias, int n, int window, ScalarType dtype) -> Tensor", _mm_kept, _mm_kept_fake), _mm_kept)


def _mm_setup(ctx, inputs, output):
    a, b, bias, ctx.window, ctx.balance, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(a, b)


def _mm_backward(ctx, grad):
    a, b = ctx.saved_tensors
    da = db = dbias = None
    if ctx.needs_input_grad[0]:
        da = MM(grad, b.t(), None, ctx.window, "weight", a.dtype)
    if ctx.needs_input_grad[1]:
        db = weight_gradient(a, grad, ctx.window, b)
    if ctx.needs_input_grad[2]:
        dbias = torch.sum(grad, [0], dtype=ctx.bias_dtype)
    return da, db, dbias, None, None, None


def weight_gradient(a, grad, window, b):
    """dB = A^T dC, laid out as `b` is, so that a transposed weight receives a contiguous gradient."""
    if b.dim() == 2 and b.stride(0) == 1 and b.stride(1) != 1:
        return MM(grad.t(), a, None, window, "gradient_transposed", b.dtype).t()
    return MM(a.t(), grad, None, window, "gradient", b.dtype)


def _bmm_setup(ctx, inputs, output):
    a, b, ctx.window, _, ctx.causal = inputs
    ctx.save_for_backward(a, b)


def _bmm_backward(ctx, grad):
    a, b = ctx.saved_tensors
    if ctx.causal != 0:
        grad = grad.masked_fill(templates.beyond(*grad.shape[1:], ctx.causal, grad.device), 0.0)
    da = BMM(grad, b.transpose(1, 2), ctx.window, a.dtype) if ctx.needs_input_grad[0] else None
    db = BMM(a.transpose(1, 2), grad, ctx.window, b.dtype) if ctx.needs_input_grad[1] else None
    return da, db, None, None, None


torch.library.register_autograd("carbon::mm", _mm_backward, setup_context=_mm_setup, lib=LIBRARY)
torch.library.register_autograd("carbon::bmm", _bmm_backward, setup_context=_bmm_setup, lib=LIBRARY)


def _check_types(a, b):
    if a.dtype is not b.dtype:
        raise RuntimeError(f"a product of {a.dtype} and {b.dtype} needs one type; convert one operand, or use torch.autocast")


def mm(a, b, bias=None, dtype=None):
    """[M, K] @ [K, N] (+ bias [N]), balanced by `b`; integers take PyTorch's own exact product."""
    _check_types(a, b)
    if not a.is_floating_point():
        return torch.ops.aten.mm.default(a, b)
    return MM(a, b, bias, policy.current().window(a.dtype), "weight", dtype or a.dtype)


def bmm(a, b, dtype=None):
    """[B, M, K] @ [B, K, N], without a balance."""
    _check_types(a, b)
    if not a.is_floating_point():
        return torch.ops.aten.bmm.default(a, b)
    return BMM(a, b, policy.current().window(a.dtype), dtype or a.dtype)


@composite(F.linear, section="4")
def linear(x, weight, bias=None):
    """x [..., K] times weight [N, K] transposed, plus bias [N] before the last rounding."""
    if weight.dim() == 1:
        y = matmul(x, weight)
        return y if bias is None else y + bias
    y = mm(x.reshape(_product(x.shape[:-1]), x.shape[-1]), weight.t(), bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


@composite(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, operator.matmul, torch.linalg.matmul, section="4")
def matmul(a, b):
    """torch.matmul: a 2-D second operand is a weight, whatever is folded into the rows of the first."""
    if a.dim() == 0 or b.dim() == 0:
        raise RuntimeError("both operands of matmul need at least one dimension")
    if b.dim() == 1:
        return matmul_vector(a, b)
    if a.dim() == 1:
        return matmul(a.unsqueeze(0), b).squeeze(-2)
    if b.dim() == 2:
        y = mm(a.reshape(_product(a.shape[:-1]), a.shape[-1]), b)
        return y.reshape(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a3 = a.expand(*batch, *a.shape[-2:]).reshape(_product(batch), *a.shape[-2:])
    b3 = b.expand(*batch, *b.shape[-2:]).reshape(_product(batch), *b.shape[-2:])
    return bmm(a3, b3).reshape(*batch, a.shape[-2], b.shape[-1])


def matmul_vector(a, v):
    """a [..., K] times v [K]: a product with one column and no balance."""
    rows = a.reshape(1, _product(a.shape[:-1]), a.shape[-1])
    y = bmm(rows, v.reshape(1, v.shape[0], 1))
    return y.reshape(a.shape[:-1])


def _rmatmul(b, a):
    return matmul(a, b)


composite(torch.Tensor.__rmatmul__, section="4")(_rmatmul)


@composite(torch.mm, torch.Tensor.mm, section="4")
def mm_2d(a, b):
    return mm(a, b)


@composite(torch.bmm, torch.Tensor.bmm, section="4")
def bmm_3d(a, b):
    return bmm(a, b)


@composite(torch.mv, torch.Tensor.mv, torch.dot, torch.Tensor.dot, torch.vdot, torch.Tensor.vdot, torch.inner, torch.Tensor.inner, section="4")
def mv(a, b):
    """mv, dot, vdot and inner: the last dimensions are contracted."""
    if b.dim() == 1:
        return matmul_vector(a, b)
    if a.dim() == 0 or b.dim() == 0:
        return a * b
    y = mm(a.reshape(_product(a.shape[:-1]), a.shape[-1]), b.reshape(_product(b.shape[:-1]), b.shape[-1]).t())
    return y.reshape(*a.shape[:-1], *b.shape[:-1])


@composite(torch.addmm, torch.Tensor.addmm, section="4")
def addmm(x, a, b, *, beta=1, alpha=1):
    """beta x + alpha (a @ b); a bias of shape [N] joins before the product's last rounding."""
    if x.dim() == 1 and beta == 1 and alpha == 1:
        return mm(a, b, x)
    return _affine(x, mm(a, b, dtype=P.wide(a)), beta, alpha, a.dtype)


@composite(torch.addmv, torch.Tensor.addmv, section="4")
def addmv(x, a, v, *, beta=1, alpha=1):
    product = BMM(a.unsqueeze(0), v.reshape(1, v.shape[0], 1), policy.current().window(a.dtype), torch.float32)
    return _affine(x, product.reshape(a.shape[0]), beta, alpha, a.dtype)


@composite(torch.baddbmm, torch.Tensor.baddbmm, section="4")
def baddbmm(x, a, b, *, beta=1, alpha=1):
    """beta x + alpha (a @ b), batched."""
    return _affine(x, bmm(a, b, dtype=P.wide(a)), beta, alpha, a.dtype)


@composite(torch.addbmm, torch.Tensor.addbmm, section="4")
def addbmm(x, a, b, *, beta=1, alpha=1):
    """beta x + alpha sum_b (a_b @ b_b): one contraction over batch and K."""
    rows = a.permute(1, 0, 2).reshape(a.shape[1], a.shape[0] * a.shape[2])
    return addmm(x, rows, b.reshape(b.shape[0] * b.shape[1], b.shape[2]), beta=beta, alpha=alpha)


def _affine(x, product, beta, alpha, dtype):
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product.to(dtype)
    x = x.to(product.dtype)
    return ((x if beta == 1 else x * beta) + product).to(dtype)


@composite(torch.outer, torch.Tensor.outer, torch.ger, torch.Tensor.ger, section="4")
def outer(a, b):
    return a.unsqueeze(1) * b.unsqueeze(0)


@composite(torch.einsum, section="4")
def einsum(equation, *operands):
    """torch.einsum, pairwise from the left. A 2-D second operand without batch dimensions balances."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        raise NotImplementedError("einsum in the sublist form has no rule; write the equation as a string")
    inputs, output = parse_einsum(equation, [x.dim() for x in operands])
    terms = list(zip(inputs, operands, strict=True))
    first, x = _diagonals(*terms[0])
    for i in range(1, len(terms)):
        second, y = _diagonals(*terms[i])
        later = set(output).union(*(labels for labels, _ in terms[i + 1 :]))
        first, x = _contract(first, x, second, y, later)
    summed = [d for d, label in enumerate(first) if label not in output]
    if summed:
        x = x.sum(summed)
        first = [label for label in first if label in output]
    return x.permute([first.index(label) for label in output])


def parse_einsum(equation, dims):
    """Labels of each operand and of the output, an ellipsis spelled out as negative integers."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    specs = left.split(",")
    if len(specs) != len(dims):
        raise ValueError(f"einsum '{equation}' names {len(specs)} operands, but {len(dims)} were given")

    def labels(spec, n):
        head, dots, tail = spec.partition("...")
        missing = n - len(head) - len(tail)
        if missing < 0 or (missing and not dots):
            raise ValueError(f"einsum '{equation}': '{spec}' does not fit an operand of {n} dimensions")
        return [*head, *range(-missing, 0), *tail]

    inputs = [labels(s, n) for s, n in zip(specs, dims, strict=True)]
    widest = max((-min([x for x in i if isinstance(x, int)], default=0) for i in inputs), default=0)
    if arrow:
        output = labels(right, widest + len(right.replace("...", ""))) if "..." in right else list(right)
    else:
        flat = [x for i in inputs for x in i]
        output = [*range(-widest, 0), *sorted(x for x in set(flat) if isinstance(x, str) and flat.count(x) == 1)]
    return inputs, output


def _diagonals(labels, x):
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            x = x.diagonal(dim1=i, dim2=j)
            labels = [l for k, l in enumerate(labels) if k not in (i, j)] + [label]
    return labels, x


def _contract(la, a, lb, b, later):
    """One pair: labels of both and of the result are batch, of neither's result are contracted."""
    for mine, other in ((la, lb), (lb, la)):
        alone = [l for l in mine if l not in other and l not in later]
        if alone:
            if mine is la:
                a = a.sum([la.index(l) for l in alone])
                la = [l for l in la if l not in alone]
            else:
                b = b.sum([lb.index(l) for l in alone])
                lb = [l for l in lb if l not in alone]
    shared = [l for l in la if l in lb]
    size = {l: n for l, n in [*zip(la, a.shape, strict=True), *zip(lb, b.shape, strict=True)] if not isinstance(n, int) or n != 1}
    size = {l: size.get(l, 1) for l in [*la, *lb]}
    a = a.expand([size[l] for l in la])
    b = b.expand([size[l] for l in lb])
    batch = [l for l in shared if l in later]
    summed = [l for l in shared if l not in later]
    rows = [l for l in la if l not in shared]
    columns = [l for l in lb if l not in shared]
    if not summed:
        full = [*batch, *rows, *columns]
        a = a.permute([la.index(l) for l in [*batch, *rows]])[(..., *[None] * len(columns))]
        b = b.permute([lb.index(l) for l in [*batch, *columns]])
        b = b.reshape(*[size[l] for l in batch], *[1] * len(rows), *[size[l] for l in columns])
        return full, a * b
    weight = not batch and b.dim() == 2 and len(columns) == 1
    fold = lambda labels: _product(size[l] for l in labels)  # noqa: E731
    a = a.permute([la.index(l) for l in [*batch, *rows, *summed]]).reshape(fold(batch), fold(rows), fold(summed))
    b = b.permute([lb.index(l) for l in [*batch, *summed, *columns]]).reshape(fold(batch), fold(summed), fold(columns))
    y = mm(a[0], b[0]) if weight else bmm(a, b)
    shape = [size[l] for l in [*batch, *rows, *columns]]
    return [*batch, *rows, *columns], y.reshape(shape)


def _product(sizes):
    n = 1
    for s in sizes:
        n = n * s
    return n


@composite(torch.tensordot, section="4")
def tensordot(a, b, dims=2, out=None):
    """torch.tensordot as one product of the folded operands."""
    if isinstance(dims, int):
        da, db = list(range(a.dim() - dims, a.dim())), list(range(dims))
    else:
        da, db = ([d] if isinstance(d, int) else list(d) for d in dims)
    da, db = [d % a.dim() for d in da], [d % b.dim() for d in db]
    rows = [d for d in range(a.dim()) if d not in da]
    columns = [d for d in range(b.dim()) if d not in db]
    k = _product(a.shape[d] for d in da)
    left = a.permute([*rows, *da]).reshape(_product(a.shape[d] for d in rows), k)
    right = b.permute([*db, *columns]).reshape(k, _product(b.shape[d] for d in columns))
    weight = b.dim() == 2 and len(columns) == 1
    y = mm(left, right) if weight else bmm(left.unsqueeze(0), right.unsqueeze(0))
    return y.reshape([*(a.shape[d] for d in rows), *(b.shape[d] for d in columns)])


# Products that reach the joint graph by other ways (PyTorch's own composites) obey the same rule.


@rule("aten.mm.default", section="4", verdict="template")
def aten_mm(a, b):
    return mm(a, b)


@rule("aten.bmm.default", section="4", verdict="template")
def aten_bmm(a, b):
    return bmm(a, b)


@rule("aten.addmm.default", section="4", verdict="template")
def aten_addmm(x, a, b, *, beta=1, alpha=1):
    return addmm(x, a, b, beta=beta, alpha=alpha)


@rule("aten.baddbmm.default", section="4", verdict="template")
def aten_baddbmm(x, a, b, *, beta=1, alpha=1):
    return baddbmm(x, a, b, beta=beta, alpha=alpha)


@rule("aten.mv.default", "aten.dot.default", "aten.vdot.default", section="4", verdict="template")
def aten_mv(a, v):
    return matmul_vector(a, v)


@rule("aten.addmv.default", section="4", verdict="template")
def aten_addmv(x, a, v, *, beta=1, alpha=1):
    return addmv(x, a, v, beta=beta, alpha=alpha)
