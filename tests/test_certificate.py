import json

import pytest
import torch

from carbon_compile import certify, environment, runlog, tables
from carbon_compile.canonical import graph_hash, graph_text
from carbon_compile.certificate_diff import diff
from carbon_compile.certify import Certificate, canonical_json, certificate
from carbon_compile.diagnostics import Diagnostic, Policy, Report
from carbon_compile.runlog import Log, NodeRow, allowed_row

MM = NodeRow("aten.mm", "template", "4", "mm", "s8", "128x128", 2, file="model.py", line=3, module_path="head")
ADD = NodeRow("aten.add", "keep", "1")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def logged(nodes=(MM, ADD), calls=1, **kwargs):
    log = Log()
    graph = log.graph("a" * 64, function="forward (model.py:2)", precision={"float32": "X3"}, nodes=nodes, **kwargs)
    for _ in range(calls):
        graph.called()
    return log


def report(code, decision="allow", **place):
    policy = {"allow": Policy(allow=[code]), "warn": Policy("warn")}[decision]
    return Report([Diagnostic(code, op="aten.mode", **place)], policy)


# --- the promise


def test_promise_held():
    made = certificate(log=logged(calls=3))
    assert made.held and made.reasons == [] and made.data["promise"] == "held"
    assert made.data["graphs"][0]["calls"] == 3
    assert str(made).startswith("promise held: 1 graph, 3 calls, none outside carbon\ncontract 4 ")


def test_promise_needs_something_that_ran():
    assert certificate(log=Log()).reasons == ["CB607: carbon compiled no graph"]
    assert certificate(log=logged(calls=0)).reasons == ["no compiled graph has run yet"]


def test_allowed_and_warned_findings_break_it():
    allowed = certificate(log=logged(report=report("CB101", file="/x/site-packages/lib/m.py", line=7)))
    assert allowed.reasons == ["CB101: aten.mode has no rule in the contract at lib/m.py:7; allowed: allow=CB101"]
    assert allowed.data["findings"][0]["decision"] == "allow"
    warned = certificate(log=logged(report=report("CB101", "warn")))
    assert warned.reasons == ["CB101: aten.mode has no rule in the contract; on_unsafe=warn"]


def test_warnings_do_not_break_it():
    assert certificate(log=logged(report=report("CB206"))).held


def test_bypassed_calls_break_it_and_are_counted():
    log = logged()
    log.bypass("scale", "CB602", 11, "model.py", 9)
    log.bypass("scale", "CB602", 1, "model.py", 9)
    made = certificate(log=log)
    assert made.reasons == ["CB613: 12 calls of scale (model.py:9) ran outside carbon, because of CB602 recompile-limit"]
    assert made.data["bypassed"] == [{"calls": 12, "code": "CB602", "file": "model.py", "function": "scale", "line": 9}]
    assert "12 outside carbon\n  because CB613" in str(made)


def test_a_disabled_compiler_is_named(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert certificate(log=Log()).reasons == [
        "CB604: TORCHDYNAMO_DISABLE=1 turns torch.compile off",
        "CB607: carbon compiled no graph",
    ]


def test_a_stance_is_named():
    torch.compiler.set_stance("force_eager")
    try:
        assert 'CB605: the compiler stance "force_eager" lets calls run uncompiled' in certificate(log=logged()).reasons
    finally:
        torch.compiler.set_stance("default")


def test_graphs_are_found_by_parameters():
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    log = logged(parameters=one.parameters())
    assert len(certificate(one, log).data["graphs"]) == 1
    assert len(certificate(torch.optim.SGD(one.parameters()), log).data["graphs"]) == 1
    assert certificate(other, log).reasons == ["CB607: carbon compiled no graph"]
    assert len(certificate(torch.nn.ReLU(), log).data["graphs"]) == 1, "no parameters: the whole process"
    log.reset()
    assert certificate(one, log).data["graphs"] == []


# --- its form


def test_json_is_canonical_and_reads_back(tmp_path):
    made = certificate(log=logged())
    text = made.to_json()
    assert text.isascii() and text.endswith("}\n") and certificate(log=logged()).to_json() == text
    assert json.loads(text) == made.data
    made.write(tmp_path / "c.json")
    assert Certificate.read(tmp_path / "c.json").to_json() == text


def test_floats_have_no_place_in_it():
    with pytest.raises(TypeError, match=r"graphs\.0\.tile is a float; certificates hold none"):
        canonical_json({"graphs": [{"tile": 1.5}]})
    assert canonical_json({"b": 1, "a": "é"}) == '{\n "a": "\\u00e9",\n "b": 1\n}\n'


@pytest.mark.parametrize(
    "text,message",
    [
        ("nonsense", "c.json isn't a certificate: Expecting value"),
        ("[]", 'c.json isn\'t a certificate: it has no "promise"'),
        ('{"promise": "held", "certificate": 99}', "c.json is a certificate of format 99; this release reads 1"),
    ],
)
def test_reading_something_else(tmp_path, text, message):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Certificate.read(tmp_path / "c.json")


def test_contract_and_source():
    assert certify.contract_version().startswith("4")
    assert certify.source_hash() == certify.source_hash() and len(certify.source_hash()) == 64
    names = {name for name, _ in certify._sources()}
    assert {"carbon_compile/contract.md", "carbon_compile/codes/CB101.md", "lowering/registry.py"} <= names


def test_identity_depends_on_graphs_and_contract_alone(monkeypatch):
    one = certificate(log=logged())
    moved = certificate(log=logged(nodes=[NodeRow("aten.mm", "template", "4", "mm", "bf16", "64x64", 1)], calls=9, device="cuda"))
    assert one.identity == moved.identity
    monkeypatch.setattr(certify, "contract_version", lambda: "5")
    assert certificate(log=logged()).identity != one.identity


def test_node_table_shows_what_templates_chose():
    row = allowed_row(NodeRow("aten.mode", "refuse", "9", direction="backward"), Diagnostic("CB101"))
    lines = tables.nodes([vars(MM), vars(row)]).splitlines()
    assert lines[0].split() == ["op", "verdict", "section", "template", "engine", "tile", "split-K", "code", "line", "module"]
    assert lines[2].split() == ["aten.mm", "template", "4", "mm", "s8", "128x128", "2", "model.py:3", "head"]
    assert lines[3].split() == ["aten.mode", "allowed", "9", "CB101", "backward"]


# --- differences


def test_equal_certificates_do_not_differ():
    assert diff(certificate(log=logged()), certificate(log=logged())) == []


def test_speed_choices_are_told_apart_from_bits():
    other = NodeRow(**(vars(MM) | {"tile": "64x64", "split_k": 4}))
    lines = diff(certificate(log=logged()), certificate(log=logged([other, ADD])))
    assert lines == ["graph 0: aten.mm: tile 128x128 -> 64x64, split_k 2 -> 4 (speed only)"]


def test_other_graphs_promise_and_environment():
    one = certificate(log=logged())
    log = Log()
    log.graph("b" * 64, function="forward (model.py:2)", precision={"float32": "X2"}, nodes=[MM], report=report("CB101")).called()
    other = certificate(log=log)
    other.data["environment"] = other.data["environment"] | {"torch": "9.9"}
    lines = diff(one, other)
    assert lines[0] == "identity differs: not the same graphs by the same contract, so the bits may differ"
    assert lines[1:3] == ["promise: held -> broken", "+ CB101: aten.mode has no rule in the contract; allowed: allow=CB101"]
    assert "graph 0: hash aaaaaaaaaaaa -> bbbbbbbbbbbb" in lines
    assert "graph 0: precision float32=X3 -> float32=X2" in lines
    assert "graph 0: -aten.add keep" in lines
    assert lines[-1] == f"environment: torch {torch.__version__} -> 9.9"


# --- the canonical text of a graph


def traced(function, *args, symbolic=False):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*args).graph


def test_graph_text_names_operators_types_and_sizes():
    graph = traced(lambda x: torch.full_like(x, -0.0, device="cpu").add(x, alpha=2), torch.ones(2, 3))
    assert graph_text(graph) == """\
%0 = input -> float32[2, 3]
%1 = aten.full_like.default(%0, -0.0, device=device, pin_memory=False) -> float32[2, 3]
%2 = aten.add.Tensor(%1, %0, alpha=2) -> float32[2, 3]
return %2"""


def test_graph_hash_ignores_device_and_names_but_not_constants():
    def f(x):
        return torch.zeros(4, device=x.device) + x

    cpu, meta = traced(f, torch.ones(4)), traced(f, torch.ones(4, device="meta"))
    assert graph_hash(cpu) == graph_hash(meta)
    assert graph_hash(traced(lambda x: x + 1, torch.ones(4))) != graph_hash(traced(lambda x: x + 2, torch.ones(4)))
    assert graph_hash(traced(f, torch.ones(4))) != graph_hash(traced(f, torch.ones(1, 4)))


def test_symbolic_sizes_are_renumbered():
    text = graph_text(traced(lambda x, y: torch.cat([x, y]) * 2, torch.ones(4, 3), torch.ones(5, 3), symbolic=True))
    assert text.splitlines()[0] == "%0 = input -> float32[n0, n1]"
    assert "n0 + n2" in text or "n2 + n0" in text


# --- the environment


def test_environment_is_plain_and_names_what_decides_bits(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    facts = environment.describe()
    canonical_json(facts)
    assert facts["torch"] == torch.__version__ and facts["OMP_NUM_THREADS"] == "2"
    assert {"python", "triton", "cuda", "driver", "gpus", "cpu_capability", "threads", "float32_matmul_precision"} <= facts.keys()


def test_environment_text_is_a_block(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    lines = environment.text().splitlines()
    assert lines[0] == "carbon-compile env"
    assert any(line.split() == ["torch", torch.__version__] for line in lines)
    assert lines[-1] == "CB604 compiler-disabled: TORCHDYNAMO_DISABLE=1 turns torch.compile off"


def found(**kwargs):
    return [(d.code, d.message) for d in environment.findings(**kwargs)]


def test_environment_findings(monkeypatch):
    assert found(devices=("cpu", "cuda")) == []
    assert found(devices=("meta",)) == [("CB304", "no promise is made for device 'meta'")]
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert found() == [("CB301", "PyTorch 2.99.0 (supported: 2.11 to 2.13) is outside the supported range")]


def test_subnormals_flushed_is_seen():
    assert not environment.subnormals_flushed()
    torch.set_flush_denormal(True)
    try:
        assert [code for code, _ in found()] == ["CB302"]
    finally:
        torch.set_flush_denormal(False)


def test_fast_math_and_suppressed_errors_are_seen(monkeypatch):
    import torch._dynamo.config

    monkeypatch.setenv("TORCHINDUCTOR_USE_FAST_MATH", "1")
    with torch._dynamo.config.patch(suppress_errors=True):
        assert [code for code, _ in found()] == ["CB603", "CB303"]


def test_supported_range_is_that_of_the_package():
    import pathlib
    import tomllib

    project = pathlib.Path(environment.__file__).parent.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("installed without its source tree")
    first, last = environment.SUPPORTED_TORCH
    wanted = f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1]}"
    assert wanted in tomllib.loads(project.read_text())["project"]["dependencies"]


def test_a_second_model_of_the_architecture_finds_the_graph_it_shares():
    runlog.LOG.reset()  # what ran eagerly in this process before counts for every model
    models = [torch.nn.Linear(3, 3) for _ in range(3)]
    for model in models[:2]:
        torch.compile(model, backend="carbon")(torch.randn(2, 3))
    assert [certificate(model).held for model in models] == [True, True, False]
