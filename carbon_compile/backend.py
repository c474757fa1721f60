"""START HERE: the torch.compile backend, a page of named passes.

    Dynamo graph -> composites -> AOTAutograd -> joint graph -> judge -> rewrite -> verify -> Inductor
"""

import functools
import hashlib
import pathlib

import torch

from . import host
from .lowering import pointwise, registry
from .options import Options
from .rewrite import ambient_policy, replace_graph, rewrite_dynamo, rewrite_joint
from .verify import offenders


def carbon(gm, example_inputs, *, mode=None, options=None):
    """Compile one Dynamo graph so that its bits depend on nothing but the graph and its inputs.

    The entry point behind `torch.compile(..., backend="carbon")`; see `Options` for `options`.
    """
    options = Options.parse(mode, options)
    registry.load()
    pointwise.install_lowerings()
    rewrite_dynamo(gm, ambient_policy(options))
    with host.no_autocast():
        return host.compile_fx(
            gm,
            example_inputs,
            inner=compile_inner,
            decompositions=Decompositions(),
            config=host.known_config({**inductor_config(), **dict(options.inductor), "joint_custom_pre_pass": JointPass()}),
        )


def compile_inner(gm, example_inputs, **kwargs):
    """Inductor on one final graph (forward, backward or inference), after the closed-world check."""
    left = offenders(gm.graph)
    if left:
        raise RuntimeError(f"carbon let an operator through without a rule: {left[0].target} (please report this)")
    return host.compile_fx_inner(gm, example_inputs, **kwargs)


class JointPass(host.custom_graph_pass()):
    """Judge and rewrite the joint graph; its uuid is our identity in Inductor's caches."""

    def __call__(self, graph):
        replace_graph(graph, rewrite_joint(graph.owning_module))

    def uuid(self):
        return source_hash()


class Decompositions(dict):
    """The decompositions that AOTAutograd may apply: none of arithmetic. Pickles by our version, so
    that the caches of both supported PyTorch lines hold it."""

    def __reduce_ex__(self, protocol):
        return Decompositions._load, (source_hash(),)

    @staticmethod
    def _load(version):
        return Decompositions()


@functools.cache
def source_hash():
    """sha256 over every source file that can change a result, in name order."""
    root = pathlib.Path(__file__).parent
    folders = [root, pathlib.Path(registry.__file__).parent, pathlib.Path(pointwise.__file__).parent.parent / "templates"]
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def inductor_config():
    """The Inductor config under which carbon's operations keep their bits, for use with stock Inductor.

    `torch.compile(f, options=carbon_compile.inductor_config())` fixes rounding (no fused
    multiply-add, IEEE division, no flush to zero, signed zeros); it does not fix the order of sums.
    """
    return host.known_config(
        {
            "emulate_precision_casts": True,
            "emulate_precision_casts_on_saved_tensors": False,
            "eager_numerics.division_rounding": True,
            "eager_numerics.disable_ftz": True,
            "use_fast_math": False,
            "cpp.enable_unsafe_math_opt_flag": False,
            "cpp.enable_floating_point_contract_flag": host.STRICT_CPP,
            "pattern_matcher": False,
            "joint_graph_constant_folding": False,
        }
    )
