"""The options of `torch.compile(..., backend="carbon", options={...})`, validated."""

import difflib
import os
from dataclasses import dataclass, fields

from . import diagnostics
from .lowering.policy import Policy, float32_class, matmul_precision


class OptionError(ValueError):
    """An option that carbon does not know, or a value that it does not take."""


_CHOICES = {
    "on_unsafe": ("refuse", "warn", "allow"),
    "float32_matmul": ("auto", "X2", "X3"),
    "bfloat16_matmul": ("auto", "X2", "X3"),
    "float16_matmul": ("auto", "X2", "X3"),
    "tune": ("off", "on"),
    "weights": ("fresh", "kept"),
}


# What stock PyTorch's modes mean, where that can't move a bit.
_MODES = {"default": {}, "reduce-overhead": {"triton.cudagraphs": True}}


@dataclass(frozen=True)
class Options:
    """What a user may set. Tuning options never change a bit; the classes of products do."""

    on_unsafe: str = "refuse"
    allow: tuple = ()
    float32_matmul: str = "auto"
    bfloat16_matmul: str = "auto"
    float16_matmul: str = "auto"
    tune: str = "off"
    weights: str = "fresh"
    table: bool = False
    dump: str = ""
    inductor: tuple = ()

    @staticmethod
    def parse(mode=None, options=None):
        """Options from what torch.compile hands over. Raises OptionError with the nearest name."""
        if mode not in (None, *_MODES):
            raise OptionError(f"mode={mode!r} is Inductor's; carbon takes {' or '.join(_MODES)}, or options={{...}} (see README, Options)")
        known = [f.name for f in fields(Options)]
        values = {}
        for key, value in (options or {}).items():
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known options: {', '.join(known)}"
                raise OptionError(f"unknown option {key!r}{hint}")
            values[key] = _checked(key, value)
        values["inductor"] = tuple(sorted({**_MODES.get(mode, {}), **dict(values.get("inductor", ()))}.items()))
        chosen = Options(**values)
        try:
            chosen.refusals()
        except ValueError as error:
            raise OptionError(f"option 'allow': {error}") from None
        return chosen

    def refusals(self):
        """What to do about findings."""
        return diagnostics.Policy(self.on_unsafe, frozenset(self.allow))

    def policy(self):
        """Product classes by input type, with the matmul precision of this moment."""
        chosen = {
            "float32": float32_class(matmul_precision()) if self.float32_matmul == "auto" else self.float32_matmul,
            "bfloat16": "X2" if self.bfloat16_matmul == "auto" else self.bfloat16_matmul,
            "float16": "X3" if self.float16_matmul == "auto" else self.float16_matmul,
        }
        return Policy(**chosen)


def _checked(key, value):
    choices = _CHOICES.get(key)
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"option {key!r} takes one of {', '.join(choices)}, not {value!r}{hint}")
    if key == "allow":
        if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(v, str) for v in value):
            raise OptionError(f"option 'allow' takes a list of codes such as ['CB101'], not {value!r}")
        return tuple(sorted(value))
    if key == "table" and not isinstance(value, bool):
        raise OptionError(f"option 'table' takes True or False, not {value!r}")
    if key == "dump" and not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"option 'dump' takes a folder to write graphs to, not {value!r}")
    if key == "dump":
        return os.fspath(value)
    if key == "inductor":
        if not isinstance(value, dict):
            raise OptionError(f"option 'inductor' takes a dict of Inductor config values, not {value!r}")
        _check_inductor(value)
        return tuple(sorted(value.items()))
    return value


def _check_inductor(value):
    from . import host

    for name in value.keys() - host.known_config(value).keys():
        near = difflib.get_close_matches(str(name), host.inductor_settings(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"option 'inductor': Inductor has no setting {name!r}{hint}")
