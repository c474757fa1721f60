"""Operators that are exact as they are: views, copies, gathers, integer and boolean work."""

from .registry import keep

VIEWS = """
alias.default as_strided.default as_strided_copy.default detach.default diagonal.default expand.default
permute.default reshape.default select.int slice.Tensor split.Tensor split_with_sizes.default
squeeze.default squeeze.dim squeeze.dims t.default transpose.int unbind.int unfold.default
unsqueeze.default view.default view.dtype _unsafe_view.default view_as_real.default view_as_complex.default lift_fresh.default
lift_fresh_copy.default unsafe_split.Tensor unsafe_split_with_sizes.default movedim.int
_reshape_alias.default chunk.default narrow.default unflatten.int flatten.using_ints real.default
"""

COPIES = """
clone.default cat.default stack.default constant_pad_nd.default flip.default roll.default repeat.default
tril.default triu.default diagonal_scatter.default select_scatter.default slice_scatter.default
as_strided_scatter.default contiguous.default expand_copy.default index.Tensor _unsafe_index.Tensor
index_select.default gather.default embedding.default take.default masked_select.default rot90.default
diag_embed.default fill.Tensor pixel_shuffle.default
pixel_unshuffle.default channel_shuffle.default repeat_interleave.self_int expand_as.default
select_backward.default slice_backward.default diagonal_backward.default
"""

CREATION = """
zeros.default
zeros_like.default ones.default ones_like.default new_zeros.default new_ones.default 
eye.default eye.m tril_indices.default triu_indices.default empty_like.default
empty.memory_format empty_permuted.default empty_strided.default new_empty.default
new_empty_strided.default
"""

INTEGERS = """
gcd.default lcm.default bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor
bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Scalar_Tensor
bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor
bitwise_xor.Scalar bitwise_not.default bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar __and__.Tensor __or__.Tensor
__xor__.Tensor __and__.Scalar __or__.Scalar __lshift__.Scalar __rshift__.Scalar __lshift__.Tensor
__rshift__.Tensor logical_and.default logical_or.default logical_xor.default logical_not.default
isin.Tensor_Tensor nonzero.default nonzero_static.default
equal.default
sym_size.int sym_numel.default sym_stride.int sym_storage_offset.default
_assert_async.msg _assert_scalar.default _assert_tensor_metadata.default
_local_scalar_dense.default
"""

PRIMS = """
prims.iota.default prims.device_put.default prims.broadcast_in_dim.default prims.collapse_view.default
prims.rev.default prims.split_dim.default prims.squeeze.default prims.transpose.default prims.view_element_type.default
"""

for _group in (VIEWS, COPIES, CREATION, INTEGERS):
    keep(*(f"aten.{name}" for name in _group.split()))
keep(*PRIMS.split())
