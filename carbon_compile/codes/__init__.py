"""The code table, and one page a code, `CB101.md` and so on: the only place that explains it.

The first paragraph of a page's section is what reports print on one line; `carbon-compile explain`
prints the page. Its examples are run by the tests, so a page can't promise what doesn't happen.
"""

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Code:
    """A defect. The id is never reused, and the name describes the defect, never its remedy.

    message: one line, may name {op} and {detail}. severity: "error" breaks the promise; "warning"
    does not by itself, and is never refused. seen_in: which of the source lint, the graph lint and
    the running program can find it. allowable: False where no user can take the responsibility.
    """

    id: str
    name: str
    message: str
    severity: str
    seen_in: tuple[str, ...]
    allowable: bool = True

    def page(self) -> "Page":
        return page(self.id)


def _error(id, name, seen_in, message, allowable=True):
    return Code(id, name, message, "error", tuple(seen_in.split()), allowable)


def _warning(id, name, seen_in, message):
    return Code(id, name, message, "warning", tuple(seen_in.split()))


_TABLE = (
    # CB0xx: the allow comments themselves
    _warning("CB001", "unused-allow", "source graph", "allow[{detail}] matches no finding here"),
    _warning("CB002", "allow-without-reason", "source graph", "allow[{detail}] gives no reason and has no effect"),
    _warning("CB003", "allow-of-unknown-code", "source graph", "the allow comment names {detail}"),
    # CB1xx: operators without a rule
    _error("CB101", "operator-without-rule", "graph", "{op} has no rule in the contract"),
    _error("CB102", "duplicate-index-write", "graph", "{op} may write one element twice, in an unfixed order"),
    _error("CB103", "vendor-linear-algebra", "source graph", "{op} runs a vendor's linear-algebra solver"),
    _error("CB104", "vendor-fft", "source graph", "{op} runs a vendor's Fourier transform"),
    _error("CB105", "overlapping-convolution", "graph", "{op} has overlapping or padded windows, which have no rule yet"),
    _error("CB106", "unordered-accumulation", "graph", "{op} adds its contributions in an unfixed order"),
    _error("CB107", "recurrence-without-rule", "source graph", "{op} is a recurrent layer, or a packed sequence, in a form that has no rule"),
    _error("CB108", "unsupported-layout", "graph", "{op} works on {detail} storage, which has no rule"),
    _error("CB109", "function-without-program", "graph", "{op} is a function without a program, so its bits are the vendor's"),
    _error("CB110", "hidden-subgraph", "graph", "{op} holds a graph of its own, which was not judged"),
    # CB2xx: numerics
    _error("CB201", "float64-product", "source graph", "{op} multiplies matrices in float64"),
    _error("CB202", "float64-sum", "graph", "{op} sums in float64"),
    _error("CB203", "float64-function", "graph", "{op} is an elementary function in float64"),
    _error("CB204", "complex-arithmetic", "graph", "{op} computes with complex numbers"),
    _error("CB205", "float8-arithmetic", "graph", "{op} computes in an 8-bit float"),
    _warning("CB206", "tf32-enabled", "source", "TF32 is on for whatever runs outside carbon"),
    _error("CB207", "precision-set-while-running", "source graph", "{op} changes the matmul precision inside compiled code"),
    _error("CB208", "unsupported-dtype", "graph", "{op} computes in {detail}, a dtype without a rule"),
    # CB3xx: host and environment
    _error("CB301", "unsupported-version", "run", "{detail} is outside the supported range"),
    _error("CB302", "subnormals-flushed", "source run", "this thread flushes subnormal numbers to zero"),
    _error("CB303", "fast-math-enabled", "source run", "{detail} lets a compiler change floating-point results"),
    _error("CB304", "unsupported-device", "run", "no promise is made for {detail}"),
    _error("CB305", "set-order-iteration", "source", "the order of a set decides the order of operations"),
    _error("CB306", "device-dependent-graph", "graph", "the program takes another path on CUDA than on a CPU"),
    # CB4xx: randomness
    _error("CB401", "host-random", "source", "{op} draws from a generator that torch.manual_seed doesn't seed alone"),
    _error("CB402", "sampler-without-rule", "source graph", "{op} is a sampler without a rule"),
    _error("CB403", "explicit-generator", "graph", "{op} draws from a generator object"),
    _error("CB404", "seed-set-while-running", "source", "{op} sets a seed inside compiled code"),
    _error("CB405", "unrepeatable-seed", "source", "{op} seeds from a value that no later run will have"),
    _warning("CB406", "initialised-on-gpu", "source", "{op} draws initial weights on the GPU"),
    # CB5xx: distributed
    _error("CB501", "collective-without-rule", "source graph", "{op} combines ranks without a rule"),
    _error("CB502", "gradient-reduction-outside", "source run", "{op} reduces gradients outside the compiled graph"),
    # CB6xx: escapes, ways for work to run where carbon doesn't see it
    _error("CB601", "graph-break", "source graph run", "compilation stops here and Python takes over"),
    _error("CB602", "recompile-limit", "source run", "recompiled too often, further calls would run uncompiled"),
    _warning("CB603", "errors-suppressed", "source run", "suppress_errors turns a failed compilation into a silent eager run"),
    _error("CB604", "compiler-disabled", "source run", "{detail} turns torch.compile off"),
    _error("CB605", "eager-stance", "source run", "the compiler stance {detail} lets calls run uncompiled"),
    _error("CB606", "data-dependent-shape", "source graph", "the shape of {op} depends on values"),
    _error("CB607", "uncompiled-frame", "run", "{op} ran without being compiled"),
    _error("CB608", "storage-resized", "source graph", "{op} resizes or swaps a tensor's storage"),
    _error("CB609", "uninitialised-read", "source graph", "{op} is read before anything is written to it"),
    _error("CB610", "custom-operator", "graph", "{op} is a custom operator, whose arithmetic carbon can't see"),
    _error("CB611", "user-triton-kernel", "source graph", "{op} is a user's Triton kernel, whose arithmetic carbon can't judge"),
    _error("CB612", "tensor-value-in-python", "source graph", "{op} moves a tensor's value into Python"),
    _error("CB613", "bypassed-call", "run", "{detail} ran outside carbon"),
    # CB9xx: our bugs
    _error("CB901", "rule-missing-after-rewrite", "graph", "{op} is still in the rewritten graph and has no rule", False),
    _error("CB902", "compiler-pass-failed", "graph", "carbon's pass {op} failed: {detail}", False),
    _error("CB903", "device-graphs-differ", "graph", "the canonical graph depends on the device: {detail}", False),
)
CODES = {code.id: code for code in _TABLE}
_BY_NAME = {code.name: code for code in _TABLE}


def find_code(text: str) -> Code:
    """The code with this id or name. ValueError, with the nearest one, for anything else."""
    code = CODES.get(text.strip().upper()) or _BY_NAME.get(text.strip().lower())
    if code is None:
        raise ValueError(f"no such code: {text.strip()!r}{_nearest(text)}")
    return code


def find_codes(text: str) -> list[Code]:
    """The codes that an id, a name, or the start of an id such as "CB1" stands for."""
    prefix = text.strip().upper()
    family = [code for id, code in CODES.items() if id.startswith(prefix)]
    return family if family and prefix.startswith("CB") else [find_code(text)]


def _nearest(text):
    text = text.strip()
    near = [id for id in CODES if id.startswith(text.upper()[:5]) and len(text) >= 4]
    near = near or difflib.get_close_matches(text.upper(), CODES, 1) or difflib.get_close_matches(text.lower(), _BY_NAME, 1)
    return f"; did you mean {near[0]}?" if near else "; `carbon-compile explain` lists them"


WHY, FIX, LOST, EXAMPLES = "Why the bits are lost", "Fix", "If you allow it", "Examples"

_FENCE = re.compile(r"^```python (fails|passes) (source|graph|run)( distributed)?( cuda)?\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Example:
    """A snippet of a page.

    kind: what finds the code in it. `source`: the source lint, over the text. `graph`: the graph
    lint, over the `fn` (or `model`) and `args` it defines. `run`: running it as a script of its
    own, whose standard error then names the code. cuda: judged as if there.
    """

    code: str
    fails: bool
    kind: str
    distributed: bool
    cuda: bool
    source: str


@dataclass(frozen=True)
class Page:
    code: str
    name: str
    text: str
    sections: dict

    def short(self, section: str) -> str:
        """The section's first paragraph on one line; "" where there is no such section."""
        return " ".join(self.sections.get(section, "").partition("\n\n")[0].split())

    def examples(self) -> list[Example]:
        return [
            Example(self.code, verdict == "fails", kind, bool(distributed), bool(cuda), source)
            for verdict, kind, distributed, cuda, source in _FENCE.findall(self.text)
        ]


@cache
def page(code: str) -> Page:
    """The page of a code such as "CB101"; FileNotFoundError where none is shipped."""
    text = (Path(__file__).parent / f"{code}.md").read_text(encoding="utf-8")
    title, _, body = text.partition("\n")
    name = title.removeprefix(f"# {code} ").strip()
    parts = re.split(r"^## (.+)$", body, flags=re.M)
    sections = {"": parts[0].strip()}
    sections.update((head.strip(), text.strip()) for head, text in zip(parts[1::2], parts[2::2], strict=True))
    return Page(code, name, text, sections)
