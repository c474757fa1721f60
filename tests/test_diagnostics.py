import functools
import os
import pathlib
import pickle
import re
import textwrap

import pytest
import torch

import carbon_compile
from carbon_compile.codes import CODES, FIX, LOST, WHY, find_code, find_codes, page
from carbon_compile.diagnostics import Diagnostic, Policy, Refused, Report, locate
from carbon_compile.graph_lint import lint
from carbon_compile.location import clean_module_path, operator_name, stack_frames, user_frame

from .forks import Forks

EXAMPLES = [(code, i, example) for code in CODES for i, example in enumerate(page(code).examples())]


def ids(rows):
    return [f"{code}-{example.kind}-{'fails' if example.fails else 'passes'}-{i}" for code, i, example in rows]


# --- the table and its pages


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_every_code_has_a_complete_page(code):
    text = page(code.id)
    assert text.name == code.name, "title and table differ"
    for section in ("", WHY, FIX, *([LOST] if code.allowable else [])):
        assert 10 < len(text.short(section)) <= 170, f"first paragraph of {section!r}: one line in reports"
    assert "http" not in text.text


@pytest.mark.parametrize("code", [c for c in CODES.values() if c.id > "CB1" and c.id < "CB9"], ids=lambda c: c.id)
def test_every_way_to_find_a_code_is_shown_failing_and_passing(code):
    shown = {(example.kind, example.fails) for example in page(code.id).examples()}
    kinds = {kind for kind, _ in shown}
    assert kinds <= set(code.seen_in)
    assert shown == {(kind, fails) for kind in kinds for fails in (True, False)}
    assert "source" in kinds or "source" not in code.seen_in


def test_names_and_messages_have_one_form():
    for code in CODES.values():
        assert re.fullmatch(r"CB[0-69]\d\d", code.id)
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code.name)
        message = Diagnostic(code.id, "the detail", "aten.op").message
        assert "\n" not in message and not message.endswith(".") and len(message) < 120
    assert len({code.name for code in CODES.values()}) == len(CODES)


def test_find_code_by_id_name_and_near_miss():
    assert find_code("cb101").name == "operator-without-rule"
    assert find_code("graph-break").id == "CB601"
    with pytest.raises(ValueError, match="no such code: 'graph-brake'; did you mean graph-break?"):
        find_code("graph-brake")
    with pytest.raises(ValueError, match="no such code: 'xyz'; `carbon-compile explain` lists them"):
        find_code("xyz")
    assert [code.id for code in find_codes("CB5")] == ["CB501", "CB502"]


GRAPH_EXAMPLES = [row for row in EXAMPLES if row[2].kind == "graph" and not row[2].distributed]


@pytest.mark.parametrize("code,i,example", GRAPH_EXAMPLES, ids=ids(GRAPH_EXAMPLES))
def test_graph_examples_run_in_eager(code, i, example):
    made = {}
    exec(compile(example.source, f"{code}.md", "exec"), made)
    (made.get("fn") or made["model"])(*made["args"])


@pytest.mark.parametrize("code,i,example", GRAPH_EXAMPLES, ids=ids(GRAPH_EXAMPLES))
def test_graph_examples_are_judged(code, i, example):
    made = {}
    exec(compile(example.source, f"{code}.md", "exec"), made)
    report = lint(made.get("fn") or made["model"], *made["args"], device="cuda" if example.cuda else None)
    assert (code in report.counts()) == example.fails, str(report)
    assert example.fails or report.clean, str(report)


RUN_EXAMPLES = [row for row in EXAMPLES if row[2].kind == "run"]


@pytest.fixture(scope="module")
def with_entry_point(tmp_path_factory):
    """An environment in which a new process knows backend="carbon", installed or not."""
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "carbon_compile_checkout-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carbon-compile-checkout\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\ncarbon = carbon_compile.backend:carbon\n")
    root = pathlib.Path(carbon_compile.__file__).parent.parent
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"}


@pytest.fixture(scope="module")
def run_script(with_entry_point, tmp_path_factory):
    """Exit code and output of a script; several pages share one that passes, which runs once."""

    @functools.cache
    def run(source):
        folder = tmp_path_factory.mktemp("script")
        (folder / "example.py").write_text(source)
        return forks.run("example.py", folder)

    with Forks("import torch._inductor.compile_fx", with_entry_point) as forks:
        yield run


@pytest.mark.parametrize("code,i,example", RUN_EXAMPLES, ids=ids(RUN_EXAMPLES))
def test_run_examples_name_their_code(code, i, example, run_script):
    returned, shown = run_script(example.source)
    assert (code in shown) == example.fails, shown
    assert example.fails or returned == 0 and "promise broken" not in shown, shown


@pytest.mark.parametrize("code,i,example", EXAMPLES, ids=ids(EXAMPLES))
def test_examples_are_python(code, i, example):
    compile(example.source, f"{code}.md", "exec")


# --- policy and inline allows


@pytest.fixture
def user_file(tmp_path):
    def write(text, name="model.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def at(file, line, code="CB101"):
    return Diagnostic(code, op="aten.mode", file=file, line=line)


def test_refused_by_default_and_warned_of_where_only_a_warning():
    assert Policy().decide(Diagnostic("CB101")) == "refuse"
    assert Policy().decide(Diagnostic("CB206")) == "warn"
    assert Policy("warn").decide(Diagnostic("CB101")) == "warn"
    assert Policy("allow").judge(Diagnostic("CB101")) == ("allow", "on_unsafe=allow")


def test_allow_list_takes_ids_and_names():
    policy = Policy(allow=["CB101, cb402", "graph-break"])
    assert policy.allow == {"CB101", "CB402", "CB601"}
    assert policy.judge(Diagnostic("CB402")) == ("allow", "allow=CB402")
    assert policy.decide(Diagnostic("CB103")) == "refuse"


def test_policy_rejects_unknown_words_and_our_own_bugs():
    with pytest.raises(ValueError, match="on_unsafe must be one of refuse, warn, allow, not 'refuze'; did you mean 'refuse'?"):
        Policy("refuze")
    with pytest.raises(ValueError, match="no such code: 'CB999'"):
        Policy(allow=["CB999"])
    with pytest.raises(ValueError, match="CB901 can't be allowed: it is a bug of carbon's, please report it"):
        Policy(allow=["CB901"])
    assert Policy("allow").decide(Diagnostic("CB901")) == "refuse"


def test_inline_allow_covers_its_statement_only(user_file):
    file = user_file("""\
        y = mode(x)  # carbon: allow[CB101] ties don't matter
        y = mode(x)
        z = mode(
            x,
        )  # carbon: allow[CB101, CB402] moved here by a formatter
        # carbon: allow[operator-without-rule] too long for one line
        w = mode(x)
        v = mode(x)
        """)
    decisions = {line: Policy().judge(at(file, line)) for line in range(1, 9)}
    assert decisions[1] == ("allow", "ties don't matter")
    assert [decisions[line][0] for line in (2, 8)] == ["refuse", "refuse"]
    assert [decisions[line][0] for line in (3, 4, 5)] == ["allow"] * 3
    assert decisions[7] == ("allow", "too long for one line")
    assert Policy().decide(at(file, 3, "CB402")) == "allow"
    assert Policy().decide(at(file, 1, "CB402")) == "refuse"


def test_inline_allow_in_a_string_is_no_comment(user_file):
    file = user_file('y = f("# carbon: allow[CB101] no")\n')
    assert Policy().decide(at(file, 1)) == "refuse"


def test_inline_allow_without_reason_is_reported_and_has_no_effect(user_file):
    file = user_file("y = mode(x)  # carbon: allow[CB101]\n")
    report = Report([at(file, 1)])
    assert [d.code for d in report.refused] == ["CB101"]
    assert [d.message for d in report.warned] == ["allow[CB101] gives no reason and has no effect"]


def test_inline_allow_counts_where_installed_code_is_called(user_file):
    file = user_file("out = model(x)  # carbon: allow[CB101] their mode is harmless\n", "train.py")
    inside = Diagnostic("CB101", file="/x/site-packages/lib/m.py", line=3, called_from=(file, 1))
    assert Policy().decide(inside) == "allow"


def test_unused_allow_is_reported_on_traced_lines_only(user_file):
    file = user_file("""\
        a = x + 1  # carbon: allow[CB101] no longer needed
        b = mode(x)  # carbon: allow[CB101] used
        c = x + 2  # carbon: allow[CB101] in a branch that was not traced
        d = x + 3  # carbon: allow[CB604] only a running program can tell
        """)
    report = Report([at(file, 2)])
    report.check_allows([(file, 1), (file, 2), (file, 4)])
    assert [(d.code, d.line, d.message) for d in report.warned] == [("CB001", 1, "allow[CB101] matches no finding here")]


# --- reports


def test_report_sorts_counts_and_merges():
    findings = [Diagnostic("CB402", op="b", file="z.py", line=2), Diagnostic("CB101", op="a", file="a.py", line=9, node="mode")]
    report = Report([*findings, Diagnostic("CB101", op="a", file="a.py", line=9, node="mode_1")])
    assert [d.code for d in report] == ["CB101", "CB402"] and len(report) == 2
    assert report.counts() == {"CB101": 2, "CB402": 1}
    assert report.findings[0].count == 2 and report.diagnostics[0].node == "mode"


def test_report_select_and_ignore():
    report = Report([Diagnostic("CB101"), Diagnostic("CB402"), Diagnostic("CB601")])
    assert [d.code for d in report.select(["CB1", "graph-break"])] == ["CB101", "CB601"]
    assert [d.code for d in report.select(ignore=["CB4"])] == ["CB101", "CB601"]


def test_report_survives_a_cache_and_is_judged_anew():
    report = Report([Diagnostic("CB101", op="aten.mode", file="a.py", line=3, called_from=("b.py", 4))])
    again = Report.load(report.dump(), Policy(allow=["CB101"]))
    assert again.diagnostics == report.diagnostics
    assert again.allowed and not again.refused


def test_refused_reads_as_its_report_and_pickles():
    report = Report([Diagnostic("CB101", op="aten.mode")])
    with pytest.raises(Refused, match=r"error\[CB101\]: aten.mode has no rule in the contract") as caught:
        report.raise_if_refused()
    assert isinstance(caught.value, RuntimeError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    Report([Diagnostic("CB101")], Policy(allow=["CB101"])).raise_if_refused()


def test_unknown_code_is_an_error():
    with pytest.raises(ValueError, match="no such code: 'CB999'"):
        Diagnostic("CB999")


# --- locations


def test_stack_frames_skip_markers_and_torch():
    torch_file = torch.nn.modules.linear.__file__
    trace = f'''
  File "/home/me/train.py", line 12, in step
    loss = model(x)
           ^^^^^^^^
  File "/x/site-packages/transformers/gpt2.py", line 34, in forward
    return self.c_attn(x)
           ~~~~~~~~~~~^^^
  File "{torch_file}", line 125, in forward
    return F.linear(input, self.weight, self.bias)
'''
    frames = stack_frames(trace)
    assert [frame[1] for frame in frames] == [12, 34, 125]
    frame, called_from = user_frame(frames)
    assert frame == ("/x/site-packages/transformers/gpt2.py", 34, "return self.c_attn(x)")
    assert called_from == ("/home/me/train.py", 12)
    assert user_frame(frames[:1]) == (("/home/me/train.py", 12, "loss = model(x)"), None)
    assert user_frame(frames[2:])[0][1] == 125, "only torch frames: better than none"
    assert user_frame([]) == (None, None)


@pytest.mark.parametrize(
    "dynamo,clean",
    [
        ("L['self']", ""),
        ("L['self'].layers.3.router", "layers.3.router"),
        ("L['self']._modules['layers']._modules['3']", "layers.3"),
        ("L['model'].layers.0", "model.layers.0"),
        ("L['self']._orig_mod.head", "head"),
        ("L['fn'].0", "0"),
        ("L['fn']", ""),
        ("L['selfie'].0", "selfie.0"),
        ("L['self'].block@1.norm", "block.norm"),
    ],
)
def test_module_paths_are_the_users(dynamo, clean):
    assert clean_module_path(dynamo) == clean


BLOCKS = """\
import torch


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(4, 4)

    def forward(self, x):
        score = self.gate(x)
        return (
            score
            .cumsum(0)
        )
"""
MAIN = """\
import torch
from torch.utils.checkpoint import checkpoint

from {blocks} import Router


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        self.routers = torch.nn.ModuleList([Router(), Router()])

    def forward(self, x):
        x = self.stem(x)
        for router in self.routers:
            x = checkpoint(router, x, use_reentrant=False)
        return x.prod(1)
"""


def joint_graph(model, *args):
    """The joint graph of AOTAutograd."""
    from functorch.compile import default_partition
    from torch._dynamo.backends.common import aot_autograd

    kept = []

    def partition(joint, inputs, **kwargs):
        kept.append(joint)
        return default_partition(joint, inputs, **kwargs)

    torch._dynamo.reset()
    nop = aot_autograd(fw_compiler=lambda gm, _: gm, bw_compiler=lambda gm, _: gm, partition_fn=partition)
    torch.compile(model, backend=nop)(*args)
    return kept[0].graph


@pytest.fixture(scope="module")
def located(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_files")
    (folder / "located_blocks.py").write_text(BLOCKS)
    (folder / "located_main.py").write_text(MAIN.format(blocks="located_blocks"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import located_main

        graph = joint_graph(located_main.Net(), torch.randn(3, 4))
    found = {}
    for node in graph.nodes:
        if node.op == "call_function":
            where = locate(node)
            place = (where.file and where.file.rpartition("/")[2], where.line, where.module_path, where.direction)
            found.setdefault(place, []).append(operator_name(node))
            if where.line:
                assert where.source_line, node
    return found


def test_forward_nodes_are_located_across_two_files(located):
    assert "aten.tanh" in located["located_main.py", 14, "stem.1", "forward"]
    assert "aten.addmm" in located["located_main.py", 14, "stem.0", "forward"]
    assert "aten.prod.dim_int" in located["located_main.py", 17, "", "forward"]


@pytest.mark.parametrize("i", [0, 1])
def test_checkpointed_blocks_are_located(located, i):
    assert "aten.cumsum" in located["located_blocks.py", 13, f"routers.{i}", "forward"]
    assert "aten.addmm" in located["located_blocks.py", 10, f"routers.{i}.gate", "forward"]
    assert "aten.cumsum" in located["located_blocks.py", 13, f"routers.{i}", "backward"]
    assert "aten.mm" in located["located_blocks.py", 10, f"routers.{i}.gate", "backward"]


def test_backward_nodes_are_located_in_sequential(located):
    assert "aten.mm" in located["located_main.py", 14, "stem.0", "backward"]


def test_every_node_has_a_line(located):
    assert not [operators for place, operators in located.items() if place[1] is None]


def test_a_node_without_stack_takes_its_neighbours_line():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.ops.aten.sin.default, (x,))
    b = graph.call_function(torch.ops.aten.cos.default, (a,))
    b.meta["stack_trace"] = 'File "/home/me/m.py", line 5, in f\n    return x.sin().cos()'
    assert (locate(a).file, locate(a).line) == ("/home/me/m.py", 5)
    assert Diagnostic.of("CB101", a).op == "aten.sin"
