import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from carbon_compile import __version__, cli, graph_lint
from carbon_compile.certify import certificate
from carbon_compile.codes import CODES, page
from carbon_compile.diagnostics import Diagnostic, Report
from carbon_compile.graph_lint import TargetError, diagnose_break, diagnose_reason, load_target
from carbon_compile.runlog import Log

BAD = "import torch\n\n\ndef f(x):\n    return torch.linalg.svd(x)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "good.py").write_text("x = 1\n")
    return tmp_path


@pytest.fixture
def run(capsys):
    def call(*argv):
        try:
            code = cli.main(list(argv))
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


# --- lint of source


def test_lint_exit_codes(folder, run):
    assert run("lint", "good.py") == (0, "no findings\n", "")
    code, out, err = run("lint", "good.py", "bad.py")
    assert code == 1 and err == ""
    assert out.startswith(
        "error[CB103]: torch.linalg.svd runs a vendor's linear-algebra solver\n  --> bad.py:5\n 5 |     return torch.linalg.svd(x)\n"
    )
    assert out.endswith("1 refused (CB103)\n")
    assert run("lint", ".", "--exit-zero")[0] == 0


@pytest.mark.parametrize("choice", [["--ignore", "CB1"], ["--select", "CB4,graph-break"], ["--ignore", "vendor-linear-algebra"]])
def test_lint_selection(folder, run, choice):
    assert run("lint", "bad.py", *choice) == (0, "no findings\n", "")


def test_lint_allow_keeps_the_finding_but_not_the_exit_code(folder, run):
    code, out, _ = run("lint", "bad.py", "--allow", "CB103")
    assert code == 0 and out.startswith("allowed[CB103]") and out.endswith("1 allowed (CB103)\n")


def test_lint_formats_and_output(folder, run):
    code, out, _ = run("lint", "bad.py", "--format", "json")
    assert code == 1 and json.loads(out)["summary"]["codes"] == {"CB103": 1}
    assert run("lint", "bad.py", "--format", "github")[1].startswith("::error file=bad.py,line=5,title=CB103 ")
    code, out, err = run("lint", "bad.py", "--format", "sarif", "--output", "out.sarif")
    assert (code, out, err) == (1, "", "")
    log = json.loads((folder / "out.sarif").read_text())
    assert log["version"] == "2.1.0" and log["runs"][0]["results"][0]["ruleId"] == "CB103"


def test_lint_statistics(folder, run):
    assert run("lint", "bad.py", "--statistics")[1] == "1  CB103  vendor-linear-algebra\n"
    assert json.loads(run("lint", "bad.py", "--statistics", "--format", "json")[1]) == {"CB103": 1}


def test_lint_of_a_broken_file_reports_the_others_and_exits_2(folder, run):
    (folder / "broken.py").write_text("def f(:\n")
    code, out, err = run("lint", ".")
    assert code == 2 and "error[CB103]" in out and err == "carbon-compile lint: broken.py:1: not Python: invalid syntax\n"


# --- lint of graphs


def make_module(folder, text, name="toy"):
    sys.modules.pop(name, None)
    (folder / f"{name}.py").write_text(text)


@pytest.fixture
def analyzed(monkeypatch):
    """Stands in for the pipeline and keeps what it was asked."""
    asked = []
    result = Report()

    def analyze(fn, args, *, kwargs, backward, device, policy):
        asked.append(dict(fn=fn, args=args, kwargs=kwargs, backward=backward, device=device, policy=policy))
        return result

    fake = types.ModuleType("carbon_compile.backend")
    fake.analyze = analyze
    monkeypatch.setitem(sys.modules, "carbon_compile.backend", fake)
    return types.SimpleNamespace(asked=asked, result=result, module=fake)


def test_lint_of_a_factory_hands_over_what_was_asked(folder, run, analyzed):
    make_module(folder, "def make():\n    return len, ([1, 2],)\n")
    assert run("lint", "toy:make", "--no-backward", "--device", "cuda", "--allow", "CB402")[0] == 0
    (asked,) = analyzed.asked
    assert (asked["fn"], asked["args"], asked["backward"], asked["device"]) == (len, ([1, 2],), False, "cuda")
    assert asked["policy"].allow == {"CB402"}
    run("lint", "toy:make")
    assert (analyzed.asked[1]["backward"], analyzed.asked[1]["device"]) == (None, None)
    run("lint", "toy:make", "--backward")
    assert analyzed.asked[2]["backward"] is True


def test_lint_mixes_graphs_and_files(folder, run, analyzed):
    make_module(folder, "def make():\n    return len, ()\n")
    analyzed.result.add(Diagnostic("CB101", op="aten.mode"))
    code, out, _ = run("lint", "bad.py", "toy:make", "--select", "CB1")
    assert code == 1 and out.endswith("2 refused (CB101, CB103)\n")


TARGETS = [
    ("nowhere:make", None, "no module named 'nowhere'"),
    ("toy:make", "import nowhere_else\n", "no module named 'nowhere_else', which toy imports"),
    ("toy:make", "raise ValueError('broken\\nin two lines')\n", "importing toy raised ValueError: broken"),
    ("toy:make", "import sys\nsys.exit(3)\n", "importing toy raised SystemExit: 3"),
    ("toy:make", "def make(:\n", "importing toy raised SyntaxError: invalid syntax (toy.py, line 1)"),
    ("toy:mke", "def make(): pass\n", "toy has no 'mke'; did you mean 'make'?"),
    ("toy:make", "make = 3\n", "toy:make is a int, not a function that returns (module, args)"),
    ("toy:make", "def make(): raise RuntimeError('no data')\n", "toy:make() raised RuntimeError: no data"),
    ("toy:make", "def make(n): pass\n", "toy:make() raised TypeError: make() missing 1 required positional argument: 'n'"),
    ("toy:make", "def make(): return 3\n", "toy:make() must return (module or function, tuple of inputs), not a int"),
    ("toy:make", "def make(): return len, 3\n", "toy:make() must return (module or function, tuple of inputs), not (builtin_function_or_method, int)"),
    ("toy:make", "def make(): return len, 3, 4\n", "toy:make() must return (module or function, tuple of inputs), not a tuple of 3"),
]


@pytest.mark.parametrize("target,text,message", TARGETS, ids=[message[:40] for *_, message in TARGETS])
def test_bad_targets_give_one_line(folder, run, analyzed, target, text, message):
    if text is not None:
        make_module(folder, text)
    assert run("lint", target) == (2, "", f"carbon-compile lint: {message}\n")


def test_verbose_shows_the_traceback(folder, run, analyzed):
    make_module(folder, "def make(): raise RuntimeError('no data')\n")
    code, _, err = run("lint", "toy:make", "--verbose")
    assert code == 2 and "Traceback" in err and 'toy.py", line 1' in err


def test_what_the_analysis_raises_is_one_line(folder, run, analyzed):
    def fail(*args, **kwargs):
        raise RuntimeError("shapes differ\nat length")

    analyzed.module.analyze = fail
    make_module(folder, "def make():\n    return len, ()\n")
    code, out, err = run("lint", "toy:make")
    assert (code, out) == (2, "")
    assert err == "carbon-compile lint: toy:make can't be analysed: RuntimeError: shapes differ (--verbose for the traceback)\n"


def test_lint_in_python(analyzed):
    graph_lint.lint(len, [1], kwargs={"k": 2}, backward=True)
    assert analyzed.asked[0]["args"] == ([1],) and analyzed.asked[0]["kwargs"] == {"k": 2}


def test_a_class_method_can_be_the_factory(folder):
    make_module(folder, "class Cases:\n    @staticmethod\n    def small(): return len, [[1]]\n")
    assert load_target("toy:Cases.small") == (len, ([1],))
    with pytest.raises(TargetError):
        load_target("toy:Cases.large")


# --- wrong command lines


@pytest.mark.parametrize(
    "argv,message",
    [
        (["lint", "bad.py", "--fromat", "json"], "carbon-compile lint: unrecognized arguments: --fromat json; did you mean --format?"),
        (["lint", "bad.py", "--format", "jso"], "carbon-compile lint: argument --format: invalid choice: 'jso' (choose from"),
        (["lnt", "bad.py"], "carbon-compile: argument COMMAND: invalid choice: 'lnt' (choose from"),
        (["lint"], "carbon-compile lint: the following arguments are required: TARGET"),
        ([], "carbon-compile: the following arguments are required: COMMAND"),
        (["lint", "nothere.py"], "carbon-compile lint: 'nothere.py' is neither a file, a folder, nor package.module:make"),
        (["lint", "toy:"], "carbon-compile lint: 'toy:' is neither a file, a folder, nor package.module:make"),
        (["lint", "bad.py", "--select", "CB999"], "carbon-compile lint: no such code: 'CB999'"),
        (["lint", "bad.py", "--ignore", "grph-break"], "carbon-compile lint: no such code: 'grph-break'; did you mean graph-break?"),
        (["lint", "bad.py", "--allow", "CB902"], "carbon-compile lint: CB902 can't be allowed"),
        (["lint", "bad.py", "--statistics", "--format", "sarif"], "carbon-compile lint: --statistics goes with --format text or json, not sarif"),
        (["lint", "bad.py", "--output", "no/such/place"], "carbon-compile lint: can't write no/such/place: No such file or directory"),
        (["explain", "CB10"], "carbon-compile explain: no such code: 'CB10'; did you mean CB101?"),
        (["diff", "a.json", "b.json"], "carbon-compile diff: can't read a.json: No such file or directory"),
        (["diff", "bad.py", "bad.py"], "carbon-compile diff: bad.py isn't a certificate: "),
        (["demo", "--steps", "0"], "carbon-compile demo: argument --steps: '0' is not a positive number"),
    ],
)
def test_wrong_command_lines_give_one_line_and_exit_2(folder, run, argv, message):
    code, out, err = run(*argv)
    assert code == 2 and out == "" and err.startswith(message) and err.count("\n") == 1


# --- the other commands


def test_version(run):
    assert run("--version") == (0, f"carbon-compile {__version__}\n", "")


@pytest.mark.parametrize("code", CODES)
def test_explain(run, code):
    assert run("explain", code) == (0, page(code).text, "")


def test_explain_by_name_and_without_a_code(run):
    assert run("explain", "graph-break")[1].startswith("# CB601 graph-break\n")
    code, out, _ = run("explain")
    assert code == 0 and all(id in out for id in CODES)


ROWS = [
    {"op": "aten.mm", "verdict": "template", "template": "mm", "section": "4", "reason": ""},
    {"op": "aten.fft_fft", "verdict": "refuse", "template": None, "section": "9", "reason": "vendor's transform"},
]


@pytest.fixture
def covered(monkeypatch):
    from carbon_compile.lowering import registry

    monkeypatch.setattr(registry, "coverage", lambda: ROWS, raising=False)


def test_coverage(run, covered, folder):
    code, out, _ = run("coverage")
    assert code == 0 and out.splitlines()[2].split() == ["aten.fft_fft", "refuse", "9", "vendor's", "transform"]
    assert out.endswith("\n2 operators: 1 template, 1 refuse\n")
    assert run("coverage", "--verdict", "template")[1].endswith("\n1 operator: 1 template\n")
    assert run("coverage", "--format", "markdown")[1].startswith("| op ")
    assert json.loads(run("coverage", "--format", "json")[1])[1] == ROWS[0]
    assert run("coverage", "--output", "c.txt")[1] == "" and (folder / "c.txt").read_text() == out


def test_diff(run, folder):
    log = Log()
    log.graph("a" * 64).called()
    certificate(log=log).write("a.json")
    log.bypass("f", "CB602", 3)
    certificate(log=log).write("b.json")
    assert run("diff", "a.json", "a.json") == (0, "equal: 1 graph\n", "")
    code, out, err = run("diff", "a.json", "b.json")
    assert (code, err) == (1, "")
    assert out == "promise: held -> broken\n+ CB613: 3 calls of f ran outside carbon, because of CB602 recompile-limit\n"


def test_env(run):
    code, out, _ = run("env")
    assert code == 0 and out.startswith("carbon-compile env\n") and "\ntorch " in out


def test_demo_is_handed_its_options(run, monkeypatch):
    got = []
    demo = types.ModuleType("carbon_compile.demo")
    demo.main = lambda arguments: got.append(arguments) or 0
    monkeypatch.setitem(sys.modules, "carbon_compile.demo", demo)
    monkeypatch.setattr("carbon_compile.demo", demo, raising=False)
    assert run("demo", "--device", "cpu", "--steps", "3", "--json", "--certificate", "c.json")[0] == 0
    assert (got[0].device, got[0].steps, got[0].json, got[0].certificate) == ("cpu", 3, True, "c.json")


def test_color_only_on_a_terminal_that_wants_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal, pipe = types.SimpleNamespace(isatty=lambda: True), types.SimpleNamespace(isatty=lambda: False)
    assert cli._wants_color(terminal) and not cli._wants_color(pipe)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not cli._wants_color(terminal)


def process(command):
    root = str(pathlib.Path(cli.__file__).parent.parent)
    line = command.replace("carbon-compile", f"{sys.executable} -m carbon_compile.cli")
    where = {**os.environ, "PYTHONPATH": root}
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, env=where)


def test_the_command_as_a_process(folder):
    done = process("carbon-compile lint bad.py --format github")
    assert done.returncode == 1 and done.stdout.startswith("::error file=bad.py,line=5,") and done.stderr == ""


def test_a_closed_pipe_is_no_error(folder):
    assert process("carbon-compile explain | true").stderr == ""


# --- what Dynamo's errors mean

BREAKS = """\
import random

import torch

generator = torch.Generator()
rnn = torch.nn.GRU(2, 2)


def item(x):
    if x.sum().item() > 0:
        return x
    return -x

def tolist(x):
    return x.tolist()

def broken(x):
    torch._dynamo.graph_break()
    return x.sin()

def printed(x):
    print("hello")
    return x.sin()

def drawn(x):
    return x * random.random()

def generated(x):
    return x + torch.rand(2, generator=generator)

def recurrent(x):
    return rnn(x)[0]

def resized(x):
    return (x * 1).resize_(8)

def seeded(x):
    torch.manual_seed(0)
    return x + 1

def sparse(x):
    return x.to_sparse() @ x
"""


@pytest.fixture(scope="module")
def breaks(tmp_path_factory):
    path = tmp_path_factory.mktemp("breaks") / "carbon_breaks.py"
    path.write_text(BREAKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        import carbon_breaks

        yield carbon_breaks


def raised_by(function):
    import torch

    torch._dynamo.reset()
    try:
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2, 2))
    except Exception as error:
        return error
    raise AssertionError("it compiled")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name,code,source",
    [
        ("item", "CB612", "if x.sum().item() > 0:"),
        ("tolist", "CB612", "return x.tolist()"),
        ("broken", "CB601", "torch._dynamo.graph_break()"),
        ("printed", "CB601", 'print("hello")'),
        ("drawn", "CB401", "return x * random.random()"),
        ("generated", "CB403", "return x + torch.rand(2, generator=generator)"),
        ("recurrent", "CB107", "return rnn(x)[0]"),
        ("resized", "CB608", "return (x * 1).resize_(8)"),
        ("seeded", "CB404", "torch.manual_seed(0)"),
        ("sparse", "CB108", "return x.to_sparse() @ x"),
    ],
)
def test_breaks_become_findings_at_the_users_line(breaks, name, code, source):
    found = diagnose_break(raised_by(getattr(breaks, name)))
    assert (found.code, found.source_line) == (code, source), found
    assert found.file.endswith("carbon_breaks.py") and BREAKS.splitlines()[found.line - 1].strip() == source
    assert found.detail


def test_breaks_without_fullgraph_are_seen_by_the_backend(breaks):
    import torch

    reasons = []

    def backend(gm, inputs):
        reasons.append(gm.compile_subgraph_reason)
        return gm

    torch._dynamo.reset()
    torch.compile(lambda x: breaks.item(x * 2), backend=backend)(torch.ones(2))
    # Dynamo meets the break twice: inlined into its caller, and in the function itself.
    (found,) = Report(filter(None, map(diagnose_reason, reasons)))
    assert (found.code, found.source_line) == ("CB612", "if x.sum().item() > 0:")
    assert diagnose_reason(None) is None


def test_what_a_backend_raises_is_our_bug_unless_a_size_depends_on_values():
    import torch

    def fails(gm, inputs):
        raise KeyError("lost")

    def sizes(x):
        y = x[x > 0]
        return y if y.shape[0] > 3 else x

    torch._dynamo.reset()
    with pytest.raises(Exception) as caught:
        torch.compile(lambda x: x + 1, backend=fails)(torch.ones(2))
    found = diagnose_break(caught.value)
    assert (found.code, found.message) == ("CB902", "carbon's pass backend failed: KeyError: 'lost'")
    assert diagnose_break(raised_by(sizes)).source_line == "return y if y.shape[0] > 3 else x"


def test_recompile_limit_is_named():
    import torch

    torch._dynamo.reset()
    scale = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=2), pytest.raises(Exception) as caught:
        for n in range(4):
            scale(torch.ones(2), n)
    assert diagnose_break(caught.value).code == "CB602"
