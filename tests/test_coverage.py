"""Every operator has a verdict, and no core operator is refused without a reason."""

import pathlib

import pytest
import torch

from carbon_compile import tables
from carbon_compile.codes import CODES
from carbon_compile.lowering import registry

# What a training run of the supported models is made of: none of it may be refused.
NEEDED = """
aten.mm aten.bmm aten.addmm aten.baddbmm aten.mv aten.dot aten.sum.dim_IntList aten.mean.dim aten.var.correction
aten.amax aten.amin aten.max.dim aten.min.dim aten.any.dim aten.all.dim aten.argmax aten.argmin aten.logsumexp
aten.cumsum aten.prod.dim_int aten._softmax aten._log_softmax aten.native_layer_norm aten.native_group_norm
aten.nll_loss_forward aten.nll_loss_backward aten.mse_loss aten.smooth_l1_loss aten.binary_cross_entropy
aten.embedding aten.embedding_dense_backward aten.index.Tensor aten.index_select aten.gather aten.index_put
aten.index_add aten.scatter_add aten.scatter_reduce.two aten.native_dropout aten.bernoulli.p aten.rand aten.randn
aten.randint aten.uniform aten.normal_functional aten.gelu aten.gelu_backward aten.silu aten.tanh aten.exp aten.log
aten.pow.Tensor_Scalar aten.rsqrt aten.lerp.Scalar aten.addcmul aten.addcdiv aten.sort aten.topk
""".split()


def rows():
    return {row["op"]: row for row in registry.coverage()}


def test_every_operator_has_a_verdict():
    table = rows()
    assert len(table) > 2500
    assert {row["verdict"] for row in table.values()} <= {"keep", "expand", "template", "refuse", "decomposed"}


def test_core_operators_are_ruled_or_refused_with_a_reason():
    bare = []
    for name, row in rows().items():
        op = registry.overload(name)
        if op is not None and torch.Tag.core in op.tags and row["verdict"] == "refuse" and row["reason"] == "no rule":
            bare.append(name)
    assert not bare, f"core operators without a rule and without a reason: {bare}"


def test_what_training_needs_is_not_refused():
    table = rows()
    names = [n if n in table else f"{n}.default" for n in NEEDED]
    refused = [n for n in names if table[n]["verdict"] == "refuse"]
    assert not refused


def test_every_refusal_names_a_known_code():
    registry.load()
    for op, rule in registry.RULES.items():
        if rule.verdict == "refuse":
            assert rule.code in CODES and rule.reason, op


def test_every_rule_file_is_listed():
    folder = pathlib.Path(registry.__file__).parent
    frame = {"__init__", "composed", "composites", "coverage", "elementary", "engines", "padding", "partial", "philox", "pointwise", "policy", "prims", "registry", "unsigned"}
    assert {p.stem for p in folder.glob("*.py")} - frame == set(registry.MODULES)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="operators differ between releases; the README counts 2.13's")
def test_the_readme_shows_this_table():
    readme = pathlib.Path(__file__).parents[1] / "README.md"
    assert tables.coverage_summary(registry.coverage()) in readme.read_text()
