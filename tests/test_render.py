import json

import jsonschema
import pytest

from carbon_compile import render
from carbon_compile.diagnostics import Diagnostic, Policy, Report

ROOT = "/repo"


def finding(code="CB102", **changes):
    place = dict(op="aten.put", file="/repo/src/router.py", line=42, source_line="out.put_(idx, w)", module_path="layers.3.router")
    return Diagnostic(code, **(place | changes))


# --- text


def test_text_shows_what_where_why_and_what_to_do():
    assert Report([finding()]).render("text", root=ROOT) == """\
error[CB102]: aten.put may write one element twice, in an unfixed order
  --> src/router.py:42  layers.3.router
 42 |     out.put_(idx, w)
why: Where an index repeats, the last writer wins, and on a GPU no rule says which thread is last.
fix: Accumulate (`index_add`, `scatter_add`, `scatter_reduce` with "amax"), or write through a mask with `torch.where`.
if allowed: Elements whose index repeats may hold either value; the others are exact.
more: carbon-compile explain CB102

1 refused (CB102)
"""


def test_text_shows_detail_direction_caller_and_reason_but_explains_once():
    installed = finding(
        "CB105", op="aten.convolution", detail="3x3, padding 1", file="/env/lib/site-packages/timm/vit.py", line=7,
        source_line="x = self.proj(x)", module_path="stem", direction="backward", called_from=("/repo/train.py", 5),
    )
    shown = Report([installed, finding("CB105", op="aten.convolution")], Policy(allow=["CB105"])).render("text", root=ROOT)
    assert """\
allowed[CB105]: aten.convolution has overlapping or padded windows, which have no rule yet
  --> timm/vit.py:7  stem  (backward)
 7 |     x = self.proj(x)
called from: train.py:5
note: 3x3, padding 1
allowed because: allow=CB105
why: cuDNN""" in shown
    assert shown.count("why: ") == shown.count("more: ") == 1
    assert shown.endswith("2 allowed (CB105 x2)\n")


def test_text_merges_findings_that_differ_in_the_module():
    report = Report([finding(module_path=f"layers.{i}") for i in range(12)])
    shown = report.render("text", root=ROOT)
    assert "src/router.py:42  layers.0, layers.1 and 10 more\n" in shown
    assert shown.count("error[CB102]") == 1 and shown.endswith("12 refused (CB102 x12)\n")


def test_text_without_findings_and_without_place():
    assert Report().render("text") == "no findings\n"
    shown = Report([Diagnostic("CB302")]).render("text")
    assert shown.startswith("error[CB302]: this thread flushes subnormal numbers to zero\nwhy: ")


def test_our_own_bug_offers_no_allow():
    assert "if allowed" not in Report([Diagnostic("CB901", op="aten.mm")]).render("text")


def test_color_only_on_request():
    report = Report([finding(), finding("CB206")])
    assert "\x1b" not in report.render("text", root=ROOT)
    painted = report.render("text", root=ROOT, color=True)
    assert "\x1b[1;31merror[CB102]\x1b[0m: " in painted and "\x1b[1;33mwarning[CB206]\x1b[0m: " in painted


def test_unknown_format():
    with pytest.raises(ValueError, match="format must be one of text, json, sarif, github, not 'xml'"):
        Report().render("xml")


def test_statistics():
    report = Report([finding(), finding(line=43), finding("CB402")])
    assert render.statistics(report) == "2  CB102  duplicate-index-write\n1  CB402  sampler-without-rule\n"
    assert render.statistics(Report()) == ""


# --- JSON


def test_json_has_every_key():
    report = json.loads(Report([finding()]).render("json", root=ROOT))
    assert report["version"] == 1
    assert report["summary"] == {"refused": 1, "warned": 0, "allowed": 0, "codes": {"CB102": 1}}
    row = report["findings"][0]
    expected = dict(
        code="CB102", name="duplicate-index-write", severity="error", decision="refuse", reason="", detail="",
        message="aten.put may write one element twice, in an unfixed order", op="aten.put", file="src/router.py", line=42,
        source_line="out.put_(idx, w)", called_from=None, module_path="layers.3.router", direction="forward", node="", count=1,
    )
    assert {key: row[key] for key in expected} == expected
    assert row.keys() - expected == {"why", "fix", "lost_if_allowed"}


# --- SARIF

TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
LOCATION = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "physicalLocation": {
            "type": "object",
            "required": ["artifactLocation"],
            "additionalProperties": False,
            "properties": {
                "artifactLocation": {
                    "type": "object",
                    "required": ["uri"],
                    "additionalProperties": False,
                    "properties": {"uri": {"type": "string", "pattern": r"^[^\\ ]+$"}, "uriBaseId": {"const": "%SRCROOT%"}},
                },
                "region": {
                    "type": "object",
                    "required": ["startLine"],
                    "additionalProperties": False,
                    "properties": {"startLine": {"type": "integer", "minimum": 1}, "snippet": TEXT},
                },
            },
        },
        "logicalLocations": {"type": "array", "items": {"type": "object", "required": ["fullyQualifiedName", "kind"]}},
    },
}
# The part of the SARIF 2.1.0 schema that concerns what we write, stricter where GitHub is.
SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["tool", "results"],
                "additionalProperties": False,
                "properties": {
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "tool": {
                        "type": "object",
                        "required": ["driver"],
                        "additionalProperties": False,
                        "properties": {
                            "driver": {
                                "type": "object",
                                "required": ["name", "version", "rules"],
                                "additionalProperties": False,
                                "properties": {
                                    "name": {"type": "string"},
                                    "version": {"type": "string"},
                                    "rules": {
                                        "type": "array",
                                        "uniqueItems": True,
                                        "items": {
                                            "type": "object",
                                            "required": ["id", "name", "shortDescription", "fullDescription", "help", "defaultConfiguration"],
                                            "additionalProperties": False,
                                            "properties": {
                                                "id": {"type": "string", "pattern": r"^CB\d{3}$"},
                                                "name": {"type": "string", "pattern": "^[A-Z][A-Za-z0-9]+$"},
                                                "shortDescription": TEXT,
                                                "fullDescription": TEXT,
                                                "help": TEXT | {"required": ["text", "markdown"]},
                                                "defaultConfiguration": {"properties": {"level": {"enum": ["error", "warning"]}}},
                                            },
                                        },
                                    },
                                },
                            }
                        },
                    },
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["ruleId", "ruleIndex", "level", "message", "partialFingerprints"],
                            "additionalProperties": False,
                            "properties": {
                                "ruleId": {"type": "string"},
                                "ruleIndex": {"type": "integer", "minimum": 0},
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "message": TEXT,
                                "locations": {"type": "array", "minItems": 1, "items": LOCATION},
                                "partialFingerprints": {"type": "object", "additionalProperties": {"type": "string"}},
                                "suppressions": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "required": ["kind", "justification"],
                                        "properties": {"kind": {"enum": ["inSource", "external"]}},
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def sarif(report, root=ROOT):
    log = json.loads(report.render("sarif", root=root))
    jsonschema.validate(log, SARIF)
    run = log["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    return run["results"]


def test_sarif_is_valid_for_every_kind_of_finding(tmp_path):
    file = tmp_path / "my model.py"
    file.write_text("y = mode(x)  # carbon: allow[CB101] ties don't matter\n")
    found = [
        finding(),
        finding("CB206", module_path=""),
        Diagnostic("CB302"),
        Diagnostic("CB107", module_path="encoder"),
        finding("CB101", file=str(file), line=1),
        finding("CB402", file="<ipython-input-1-abc>"),
        finding("CB103", file="/elsewhere/lib.py"),
    ]
    by_code = {result["ruleId"]: result for result in sarif(Report(found, Policy(allow=["CB402"])), str(tmp_path))}
    assert by_code["CB101"]["suppressions"] == [{"kind": "inSource", "justification": "ties don't matter"}]
    assert by_code["CB402"]["suppressions"] == [{"kind": "external", "justification": "allow=CB402"}]
    assert by_code["CB206"]["level"] == "warning"
    assert "locations" not in by_code["CB302"]
    assert by_code["CB107"]["locations"] == [{"logicalLocations": [{"fullyQualifiedName": "encoder", "kind": "module"}]}]
    artifact = by_code["CB101"]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact == {"uri": "my%20model.py", "uriBaseId": "%SRCROOT%"}
    assert by_code["CB103"]["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "file:///elsewhere/lib.py"}


def test_sarif_without_findings_is_valid():
    assert sarif(Report()) == []


def test_sarif_identity_survives_moved_code_and_tells_twins_apart():
    def marks(*found):
        return [result["partialFingerprints"]["primaryLocationLineHash"] for result in sarif(Report(found))]

    assert marks(finding(line=42)) == marks(finding(line=99))
    assert marks(finding()) != marks(finding(source_line="other.put_(idx, w)"))
    first, second = marks(finding(line=42), finding(line=43))
    assert first.endswith(":1") and second.endswith(":2") and first[:16] == second[:16]


# --- GitHub


def test_github_annotations_escape_and_stay_on_one_line():
    report = Report([finding(file="/repo/a,b:c.py", detail="100%\nsure"), finding("CB206"), Diagnostic("CB302")])
    lines = report.render("github", root=ROOT).splitlines()
    assert len(lines) == 3
    by_command = {line.split(" ")[0] + line.split("title=")[1][:5]: line for line in lines}
    assert by_command["::errorCB102"].startswith(
        "::error file=a%2Cb%3Ac.py,line=42,title=CB102 duplicate-index-write::"
        "aten.put may write one element twice, in an unfixed order in layers.3.router%0A100%25%0Asure%0Awhy: "
    )
    assert by_command["::warningCB206"].startswith("::warning file=src/router.py,line=42,title=CB206 tf32-enabled::")
    assert by_command["::errorCB302"].startswith("::error title=CB302 subnormals-flushed::")


def test_github_shows_allowed_findings_as_notices():
    assert Report([finding()], Policy(allow=["CB102"])).render("github", root=ROOT).startswith("::notice ")


# --- paths


def test_paths_are_relative_to_the_repository(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "m.py").write_text("")
    monkeypatch.chdir(tmp_path / "src")
    assert render.repository_root() == str(tmp_path)
    assert render.relative("m.py", render.repository_root()) == "src/m.py"
    assert render.relative("/env/lib/python3.11/site-packages/timm/vit.py", str(tmp_path)) == "timm/vit.py"


def test_github_names_module_and_direction():
    def message(**where):
        return Report([finding(**where)]).render("github", root=ROOT).partition("::aten.put ")[2].partition("%0A")[0]

    told = "may write one element twice, in an unfixed order"
    assert message(module_path="a.b", direction="backward") == f"{told} in a.b (backward)"
    assert message(module_path="", direction="backward") == f"{told} (backward)"
    assert message(module_path="") == told
