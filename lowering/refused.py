"""Core operators without a rule of their own, and what to write instead.

Pooling, padding and bags of embeddings are caught as functions, above the device's and version's
choice of operator (see pool.py, scatter.py); reached in another way, the operator itself is refused.
"""

from .registry import refuse

refuse(
    "aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default",
    "aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default",
    code="CB101", reason="the pooling functions of torch.nn.functional have rules, this operator below them has none",
)  # fmt: skip
refuse(
    "aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default",
    "aten.replication_pad2d.default", "aten.replication_pad3d.default",
    code="CB101", reason="torch.nn.functional.pad has a rule, this operator below it has none",
)  # fmt: skip
refuse(
    "aten._adaptive_avg_pool2d_backward.default", "aten.avg_pool2d_backward.default", "aten.max_pool2d_with_indices_backward.default",
    "aten.col2im.default", "aten._embedding_bag.default",
    code="CB106", reason="its overlapping contributions are added in an unfixed order; the function of torch.nn.functional has a rule",
)  # fmt: skip
refuse("aten.grid_sampler_2d.default", code="CB106", reason="its backward adds contributions in an unfixed order, and no rule is written yet")
refuse("aten._fft_c2r.default", "aten._fft_r2c.default", "aten._fft_c2c.default", code="CB104", reason="a vendor's transform, whose order of additions is its own")
refuse("aten._native_batch_norm_legit.default", code="CB101", reason="it writes running statistics in place; torch.nn.functional.batch_norm has a rule")
refuse("aten.resize_.default", code="CB608", reason="it exposes memory that nothing has written")
