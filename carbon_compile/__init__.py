"""carbon: a torch.compile backend whose results are the same bits everywhere.

`torch.compile(model, backend="carbon")` needs no import of this package. What is exported here is
what people use around the compiler; every name is loaded on first use, because the package may be
imported while torch itself is still importing.
"""

import importlib
from os.path import abspath, dirname, isfile, join

__version__ = "0.1.0"

# A checkout keeps `lowering` and `templates` at its top level, while an installed copy holds them
# inside the package. Run from a checkout, the checkout shadows the installed copy: look there too.
# Not again in carbon_compile.carbon_compile, which whoever walks our packages (TORCH_LOGS) finds there.
_root = dirname(dirname(abspath(__file__)))
if __name__ == "carbon_compile" and isfile(join(_root, "pyproject.toml")) and isfile(join(_root, "lowering", "__init__.py")):
    __path__.append(_root)

_EXPORTS = {
    "DeterministicLoader": "carbon_compile.data_order",
    "DeterministicTrainer": "carbon_compile.trainer",
    "Policy": "carbon_compile.diagnostics",
    "Refused": "carbon_compile.diagnostics",
    "Report": "carbon_compile.diagnostics",
    "assert_bitwise": "carbon_compile.bits",
    "certificate": "carbon_compile.certify",
    "disable": "carbon_compile.eager",
    "enable": "carbon_compile.eager",
    "fingerprint": "carbon_compile.hashing",
    "inductor_config": "carbon_compile.backend",
    "ledger": "carbon_compile.recording",
    "lint": "carbon_compile.graph_lint",
    "weights_changed": "carbon_compile.weights",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name):
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'carbon_compile' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__():
    return sorted(__all__)
