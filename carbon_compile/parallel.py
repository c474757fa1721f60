"""Tensor and sequence parallelism with the bits of one rank: styles for `parallelize_module`.

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {
        "attention_norm": SequenceParallel(),
        "attention.q": ColwiseParallel(input_layouts=Shard(1)),
        "attention.project": RowwiseParallel(output_layouts=Shard(1)),
    })

The styles take the arguments of PyTorch's own (`torch.distributed.tensor.parallel`), whose modules
round partial results before they add them; these exchange maxima and exact totals (contract section
8). Parameters are DTensors, so checkpoints, `full_tensor()` and `fingerprint` see whole tensors;
activations are plain tensors, this rank's part.
"""

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from . import host
from .lowering import registry

registry.load()

from .lowering import cut  # noqa: E402  (rule files are imported in the registry's order)


class _Cut:
    """What a module of a style knows: its group, which dimension of activations ranks share, and sizes
    of the whole."""

    def adopt(self, mesh, shared, whole=None):
        self.mesh, self.group, self.shared, self.whole = mesh, mesh.get_group().group_name, shared, whole
        return self


def _shared_dim(layout, style):
    """None for Replicate, the dimension for Shard of a dimension other than the last."""
    if isinstance(layout, Replicate):
        return None
    if isinstance(layout, Shard):
        return layout.dim
    raise NotImplementedError(f"{style} has no exact form for the layout {layout}")


def _local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _distribute(module, name, mesh, dim, parts=1):
    """Replace a parameter by a DTensor; every rank cuts its own copy, so all must start from the same."""
    parameter = getattr(module, name)
    if parameter is None:
        return
    value = parameter.detach()
    cut_value = distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None) if parts == 1 else host.strided(value, mesh, dim, parts)
    setattr(module, name, nn.Parameter(cut_value, requires_grad=parameter.requires_grad))


class ColumnLinear(nn.Linear, _Cut):
    """A linear layer of which each rank computes a chunk of the output features."""

    gathers, parts = False, 1

    def forward(self, x):
        y = cut.linear(x, _local(self.weight), _local(self.bias), self.whole, "columns", self.group, self.shared)
        return cut.unshare(y, -1, self.group) if self.gathers else y


class RowLinear(nn.Linear, _Cut):
    """A linear layer of which each rank holds a chunk of the input features."""

    def forward(self, x):
        return cut.linear(x, _local(self.weight), _local(self.bias), self.whole, "contraction", self.group, self.shared)


class RowEmbedding(nn.Embedding, _Cut):
    """An embedding of which each rank holds a chunk of the table."""

    def forward(self, index):
        y = cut.embedding(index, _local(self.weight), self.whole[0], self.group, self.padding_idx)
        return y if self.shared is None else cut.share(y, self.shared, self.group)


class SharedLayerNorm(nn.LayerNorm, _Cut):
    def forward(self, x):
        return cut.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, self.group)


class SharedRMSNorm(nn.RMSNorm, _Cut):
    def forward(self, x):
        return cut.rms_norm(x, self.normalized_shape, self.weight, self.eps, self.group)


class SharedDropout(nn.Dropout, _Cut):
    """Dropout of a part of a tensor, with the random numbers of the whole one."""

    def forward(self, x):
        size = self.mesh.size() * x.shape[self.shared] if self.whole is None else self.whole
        return cut.dropout(x, self.p, self.training, self.shared, size, self.group)


def _become(module, kind, mesh, shared, whole=None):
    module.__class__ = kind
    return module.adopt(mesh, shared, whole)


class _Style(ParallelStyle):
    def _apply(self, module, device_mesh):
        if device_mesh.ndim != 1:
            names = ", ".join(f'mesh["{name}"]' for name in device_mesh.mesh_dim_names or ()) or "a slice of it"
            raise ValueError(f"{type(self).__name__} cuts over one dimension of a mesh, and this one has {device_mesh.ndim}: give it {names}")
        return self._cut(module, device_mesh)


class ColwiseParallel(_Style):
    """nn.Linear cut by output features, as `torch.distributed.tensor.parallel.ColwiseParallel`.

    input_layouts: Replicate() or, where ranks share the sequence, Shard(dim). output_layouts: Shard(-1),
    the default, or Replicate(). parts: how many projections of equal size the weight holds one behind
    the other, such as 2 for a fused gate and up, 3 for a fused query, key and value; each is cut.
    """

    def __init__(self, *, input_layouts=None, output_layouts=None, parts=1):
        super().__init__()
        self.shared = _shared_dim(input_layouts or Replicate(), "ColwiseParallel")
        self.gathers, self.parts = isinstance(output_layouts, Replicate), parts

    def _cut(self, module, device_mesh):
        if not isinstance(module, nn.Linear):
            raise NotImplementedError(f"ColwiseParallel takes nn.Linear, not {type(module).__name__}")
        whole = (module.out_features, module.in_features)
        if (self.parts > 1 or self.gathers) and whole[0] % (self.parts * device_mesh.size()):
            raise ValueError(f"{whole[0]} features in {self.parts} parts can't be cut evenly over {device_mesh.size()} ranks")
        for name in ("weight", "bias"):
            _distribute(module, name, device_mesh, 0, self.parts)
        _become(module, ColumnLinear, device_mesh, self.shared, whole)
        module.gathers, module.parts = self.gathers, self.parts
        return module


class RowwiseParallel(_Style):
    """nn.Linear cut by input features, or nn.Embedding by its table, as PyTorch's RowwiseParallel.

    output_layouts: Replicate(), the default, or Shard(dim) where ranks share the sequence afterwards.
    """

    def __init__(self, *, output_layouts=None):
        super().__init__()
        self.shared = _shared_dim(output_layouts or Replicate(), "RowwiseParallel")

    def _cut(self, module, device_mesh):
        if isinstance(module, nn.Linear):
            _distribute(module, "weight", device_mesh, 1)
            return _become(module, RowLinear, device_mesh, self.shared, (module.out_features, module.in_features))
        if isinstance(module, nn.Embedding):
            if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
                raise NotImplementedError("a cut embedding has no max_norm, sparse gradients or scale_grad_by_freq")
            _distribute(module, "weight", device_mesh, 0)
            return _become(module, RowEmbedding, device_mesh, self.shared, (module.num_embeddings, module.embedding_dim))
        raise NotImplementedError(f"RowwiseParallel takes nn.Linear or nn.Embedding, not {type(module).__name__}")


class SequenceParallel(_Style):
    """nn.LayerNorm, nn.RMSNorm or nn.Dropout where ranks share the sequence, as PyTorch's style."""

    def __init__(self, *, sequence_dim=1):
        super().__init__()
        self.dim = sequence_dim

    def _cut(self, module, device_mesh):
        for plain, kind in ((nn.LayerNorm, SharedLayerNorm), (nn.RMSNorm, SharedRMSNorm), (nn.Dropout, SharedDropout)):
            if isinstance(module, plain):
                return _become(module, kind, device_mesh, self.dim)
        raise NotImplementedError(f"SequenceParallel takes nn.LayerNorm, nn.RMSNorm or nn.Dropout, not {type(module).__name__}")


class SharedSequence(_Style):
    """A module in which ranks share the sequence: its input is cut along `sequence_dim`, its output
    gathered. PyTorch spells this PrepareModuleInputOutput."""

    def __init__(self, *, sequence_dim=1):
        super().__init__()
        self.dim = sequence_dim

    def _cut(self, module, device_mesh):
        dim = self.dim
        module.register_forward_pre_hook(lambda module, inputs: (share(inputs[0], device_mesh, dim), *inputs[1:]))
        module.register_forward_hook(lambda module, inputs, output: unshare(output, device_mesh, dim))
        return module


class CutDropout(_Style):
    """nn.Dropout of a tensor that is cut along `dim`, of `whole` elements there on all ranks together:
    between ColwiseParallel and RowwiseParallel, say."""

    def __init__(self, whole, dim=-1):
        super().__init__()
        self.whole, self.dim = whole, dim

    def _cut(self, module, device_mesh):
        return _become(module, SharedDropout, device_mesh, self.dim, self.whole)


def scaled_dot_product_attention(query, key, value, mesh, heads, **arguments):
    """F.scaled_dot_product_attention of this rank's chunk of `heads` heads.

    Needed only where attention has dropout: the weights that are dropped are those of the whole. Other
    keywords are PyTorch's.
    """
    return cut.scaled_dot_product_attention(query, key, value, heads, mesh.get_group().group_name, **arguments)


def cross_entropy(logits, target, mesh, classes, **arguments):
    """F.cross_entropy of logits [N, classes / ranks] as ColwiseParallel leaves them; target [N] on all
    ranks. ignore_index and reduction are PyTorch's; weights and label smoothing have no cut form."""
    return cut.cross_entropy(logits, target, classes, mesh.get_group().group_name, **arguments)


def share(x, mesh, dim=1):
    """This rank's equal share of a dimension of a tensor that every rank has."""
    return cut.share(x, dim, mesh.get_group().group_name)


def unshare(x, mesh, dim=1):
    """The whole tensor, on every rank, of what ranks share along `dim`."""
    return cut.unshare(x, dim, mesh.get_group().group_name)
