"""Attention (contract section 5): exact scores, softmax with the row's exact maximum, values by keys.

`scaled_dot_product_attention` is the one place that composes them, so that a template which never
stores the weights can take over the composition without touching its callers.
"""

import math

import torch
import torch.nn.functional as F

from ..templates import launch
from ..templates import matmul as templates
from . import policy, random, softmax
from . import prims as P
from .columns import on_gpu
from .composed import compose, derivative
from .matmul import BMM, define_product
from .pointwise import LIBRARY
from .registry import Refusal, composite, direct, kernels, refuse

# The last argument of these products, and of `carbon::bmm`, is `causal` of `exact_bmm`. Attention leaves it 0: where
# a graph shows what is zero, `recognise.causal_products` sets it, and no bit of attention depends on it.


def _scores(q, k, window, causal=0):
    """q [B, L, E] times k [B, S, E] transposed, to binary32; with `causal` zero where no query sees a key."""
    return templates.exact_bmm(q, k.transpose(1, 2), window=window, causal=causal)


def _bmm_keys(a, b, window, dtype, causal=0):
    """a [B, M, K] times b [B, K, N], where b is quantised by its rows: see "keys" in section 5."""
    return templates.exact_bmm(a, b, window=window, balance="keys", out_dtype=dtype, causal=causal)


def _scores_fake(q, k, window, causal=0):
    torch._check(q.shape[2] == k.shape[2], lambda: f"queries of {q.shape[2]} features do not fit keys of {k.shape[2]}")
    return q.new_empty((q.shape[0], q.shape[1], k.shape[1]), dtype=torch.float32)


def _bmm_keys_fake(a, b, window, dtype, causal=0):
    torch._check(a.shape[2] == b.shape[1], lambda: f"bmm_keys cannot contract {tuple(a.shape)} with {tuple(b.shape)}")
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=dtype)


SCORES = define_product("attention_scores", "5", "(Tensor q, Tensor k, int window, SymInt causal=0) -> Tensor", _scores, _scores_fake)
KEYS = define_product("bmm_keys", "5", "(Tensor a, Tensor b, int window, ScalarType dtype, SymInt causal=0) -> Tensor", _bmm_keys, _bmm_keys_fake)


def _scores_setup(ctx, inputs, output):
    q, k, ctx.window, ctx.causal = inputs
    ctx.save_for_backward(q, k)


def _scores_backward(ctx, grad):
    """dQ = dS K and dK = dS^T Q: no key or query without weight shows in another's gradient."""
    q, k = ctx.saved_tensors
    dq = KEYS(grad, k, ctx.window, q.dtype, ctx.causal) if ctx.needs_input_grad[0] else None
    dk = KEYS(grad.transpose(1, 2), q, ctx.window, k.dtype, -ctx.causal) if ctx.needs_input_grad[1] else None
    return dq, dk, None, None


def _bmm_keys_setup(ctx, inputs, output):
    a, b, ctx.window, _, ctx.causal = inputs
    ctx.save_for_backward(a, b)


def _bmm_keys_backward(ctx, grad):
    a, b = ctx.saved_tensors
    da = BMM(grad, b.transpose(1, 2), ctx.window, a.dtype, ctx.causal) if ctx.needs_input_grad[0] else None
    db = KEYS(a.transpose(1, 2), grad, ctx.window, b.dtype, -ctx.causal) if ctx.needs_input_grad[1] else None
    return da, db, None, None, None


torch.library.register_autograd("carbon::attention_scores", _scores_backward, setup_context=_scores_setup, lib=LIBRARY)
torch.library.register_autograd("carbon::bmm_keys", _bmm_keys_backward, setup_context=_bmm_keys_setup, lib=LIBRARY)


@compose("attention_weights(Tensor scores, Tensor? mask) -> Tensor", "5")
def attention_weights(scores, mask):
    """Softmax over the last dimension of the keys that `mask` (bool) keeps; 0 in a row without any."""
    if mask is not None:
        scores = torch.ops.carbon.select(mask, scores, P.scalar(-math.inf, scores), dtype=torch.float32)
    return softmax.safe_softmax(scores, scores.dim() - 1)


@compose("attention_weights_backward(Tensor grad, Tensor weights) -> Tensor", "5")
def attention_weights_backward(grad, weights):
    """(g - sum(g p)) p, where a key without weight takes no part, whatever its g."""
    zero = P.scalar(0.0, weights)
    absent = P.eq(weights, 0.0, dtype=torch.bool)
    g = torch.ops.carbon.select(absent, zero, grad, dtype=torch.float32)
    total = P.sum(P.mul(g, weights), [-1], True)
    return torch.ops.carbon.select(absent, zero, P.mul(P.sub(g, total), weights), dtype=torch.float32)


@compose("attention_weights_marked(Tensor dropped, Tensor weights) -> Tensor", "5")
def attention_weights_marked(dropped, weights):
    """Weights after dropout, equal to `dropped`: those dropped of a query that is NaN throughout are -0, so that
    its weight of key 0 says so, which of `dropped` need not be NaN. See `exact_bmm`, `causal`."""
    minus = torch.ops.carbon.select(P.eq(dropped, 0.0, dtype=torch.bool), P.neg(dropped), dropped, dtype=torch.float32)
    number = P.eq(weights, weights, dtype=torch.bool)
    return torch.ops.carbon.select(number, dropped, minus, dtype=torch.float32)


def _weights_setup(ctx, inputs, output):
    ctx.save_for_backward(output)


@derivative(torch.ops.carbon.attention_weights.default, _weights_setup)
def _weights_backward(ctx, grad):
    return torch.ops.carbon.attention_weights_backward(grad, *ctx.saved_tensors), None


# --- the softmax as a kernel of ours, see `recognise.attention_softmax` --------------------------------


def suits(weights):
    """Whether attention's weights [..., L, S] are on a GPU, and of a size that a program holds."""
    shape = weights.shape
    return on_gpu(weights) and all(isinstance(n, int) for n in shape) and math.prod(shape) > 0 and shape[-1] <= launch.SOFTMAX_KEYS and len(shape) > 1


def _softmax(scores, scale, causal):
    """`attention_weights` of scale times scores [..., L, S], which see all keys, or if `causal` those up to their query."""
    if on_gpu(scores):
        from ..templates import attention_softmax

        return attention_softmax.weights(scores, scale, causal)
    mask = ~templates.beyond(*scores.shape[-2:], scores.shape[-2], scores.device) if causal else None
    return attention_weights(P.mul(scores, P.scalar(scale, scores)), mask)


def _softmax_backward(grad, weights, scale, causal):
    """The gradient of the scores, from those weights and their gradient."""
    if on_gpu(weights):
        from ..templates import attention_softmax

        return attention_softmax.gradient(grad, weights, scale, causal)
    return P.mul(attention_weights_backward(grad, weights), P.scalar(scale, weights))


def _like_weights(*arguments):
    return arguments[-3].new_empty(arguments[-3].shape)


_operator = kernels("5")
SOFTMAX = direct(_operator("attention_softmax(Tensor scores, float scale, bool causal) -> Tensor", _softmax, _like_weights), _softmax)
SOFTMAX_BACKWARD = direct(
    _operator("attention_softmax_backward(Tensor grad, Tensor weights, float scale, bool causal) -> Tensor", _softmax_backward, _like_weights),
    _softmax_backward,
)


@composite(F.scaled_dot_product_attention, section="5")
def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention: query [..., L, E], key [..., S, E], value [..., S, Ev].

    With `enable_gqa` query heads are a multiple of key heads, and those that share a key head are
    rows of one product: the gradient of a shared key is then one exact sum.
    """
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)[0]


def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, drop=None):
    """The output and the weights [..., L, S], in binary32 and after dropout.

    drop(weights, p): dropout of weights that are a part of a larger tensor.
    """
    _check(query, key, value, attn_mask, is_causal)
    (length, features), keys = query.shape[-2:], key.shape[-2]
    rows = _grouped(query, key, value) if enable_gqa else query
    batch = torch.broadcast_shapes(rows.shape[:-2], key.shape[:-2], value.shape[:-2])
    heads = (*batch[:-1], query.shape[-3]) if enable_gqa else batch
    q, k, v = (t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch), *t.shape[-2:]) for t in (rows, key, value))
    window = policy.current().window(query.dtype)
    scores = SCORES(q, k, window).reshape(*heads, length, keys)
    scores = scores * (1.0 / math.sqrt(features) if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype is not torch.bool:
        scores = scores + attn_mask
        attn_mask = None
    if is_causal:
        attn_mask = torch.arange(keys, device=q.device) <= torch.arange(length, device=q.device).unsqueeze(1)
    weights = torch.ops.carbon.attention_weights(scores, attn_mask)
    weights = random.dropout(weights, dropout_p, True) if drop is None else drop(weights, dropout_p)
    out = KEYS(weights.reshape(q.shape[0], q.shape[1], keys), v, window, query.dtype)
    return out.reshape(*heads, length, value.shape[-1]), weights


def _check(query, key, value, attn_mask, is_causal):
    if not query.dtype is key.dtype is value.dtype:
        raise RuntimeError(f"Expected query, key, and value to have the same dtype, but got {query.dtype}, {key.dtype}, and {value.dtype}")
    if query.dtype is torch.float64:
        raise Refusal("CB201", "attention in float64 has no rule; use float32, bfloat16 or float16")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError("Expected query, key, and value to all be at least 2 dimensional")
    if is_causal and attn_mask is not None:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")


def _grouped(query, key, value):
    """query [..., H, L, E] as [..., Hk, (H / Hk) L, E] for key [..., Hk, S, E]."""
    if min(query.dim(), key.dim(), value.dim()) < 3 or key.shape[-3] != value.shape[-3] or query.shape[-3] % key.shape[-3]:
        raise RuntimeError(f"enable_gqa needs as many heads in key and value, and a multiple of them in query; got {query.shape[-3]}, {key.shape[-3]} and {value.shape[-3]}")
    groups = query.shape[-3] // key.shape[-3]
    return query.unflatten(-3, (key.shape[-3], groups)).flatten(-3, -2)


# What torch.nn's transformer layers call by themselves where no gradient is needed.


def _self_attention(x, heads, qkv_weight, qkv_bias, mask, mask_type):
    """x [B, L, E] to the heads' outputs side by side [B, L, E], and the weights. `mask` is true for keys to leave
    out: [L, S] (type 0), [B, S] of padding (type 1) or [B, H, L, S] (type 2)."""
    if mask is not None:
        mask = torch.logical_not(mask.to(torch.bool))
        mask = mask[:, None, None, :] if mask_type == 1 else mask
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in F.linear(x, qkv_weight, qkv_bias).chunk(3, -1))
    y, weights = attend(q, k, v, mask)
    return y.transpose(1, 2).flatten(2), weights


@composite(torch._native_multi_head_attention, section="5")
def native_multi_head_attention(
    query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask=None, need_weights=True,
    average_attn_weights=True, mask_type=None,
):  # fmt: skip
    """Self-attention of nn.MultiheadAttention, with its weights [B, (H,) L, S] if wanted."""
    if key is not query or value is not query:
        raise Refusal("CB101", "the inference path of nn.MultiheadAttention has a rule for self-attention only; call it with gradients enabled")
    y, weights = _self_attention(query, num_head, qkv_weight, qkv_bias, mask, mask_type)
    weights = weights.to(query.dtype) if need_weights else None
    return F.linear(y, proj_weight, proj_bias), weights.mean(1) if need_weights and average_attn_weights else weights


@composite(torch._transformer_encoder_layer_fwd, section="5")
def transformer_encoder_layer(
    src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps, norm_weight_1, norm_bias_1,
    norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask=None, mask_type=None,
):  # fmt: skip
    """nn.TransformerEncoderLayer: the composition of its parts, as its training path has it."""

    def attention(x):
        return F.linear(_self_attention(x, num_heads, qkv_weight, qkv_bias, mask, mask_type)[0], proj_weight, proj_bias)

    def feed_forward(x):
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def first(x):
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x):
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attention(first(src))
        return x + feed_forward(second(x))
    x = first(src + attention(src))
    return second(x + feed_forward(x))


refuse(
    "aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default", "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default", "aten._flash_attention_forward.default",
    "aten._efficient_attention_forward.default", "aten._native_multi_head_attention.default",
    "aten._transformer_encoder_layer_fwd.default",
    code="CB101",
    reason="a vendor's fused attention; call torch.nn.functional.scaled_dot_product_attention",
)  # fmt: skip
