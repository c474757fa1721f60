"""The benchmarks' own logic, at tiny sizes: nothing here asserts a time."""

import json
import pathlib
import sys
import types

import pytest
import torch

from bench import cases_reductions, command, contenders, measure, registry, report
from bench.registry import Case, Contender, Cost, Prepared, Work
from carbon_compile import cli

from .definition import eager_engine

ABOUT = {"date": "2026-01-02", "card": "a card", "torch": "2.13.0", "triton": "3.6.0", "cuda": "13.0", "carbon_compile": "0.1.0", "caches": "fresh"}


def case(name="products/square/2x2x2/float32", works=None, check=lambda names: "all rows, two runs alike", absent=()):
    works = works or (work(eager=int, carbon=int),)
    return Case(*name.split("/"), lambda: Prepared(works, check, absent))


def work(name="", **calls):
    return Work(name, tuple(Contender(who.replace("_", " "), lambda call=call: call) for who, call in calls.items()), Cost(1e6, "FLOP", int8=9e6))


def rows_of(times, group="products", name="products/square/2x2x2/float32"):
    """Rows as if measured: {contender: ms or an error}."""
    timings = {who: measure.Timing(rounds=[t]) if isinstance(t, float) else measure.Timing(error=t) for who, t in times.items()}
    return report.measured(case(name), work(), timings, {"FLOP": 1e12}, ABOUT, "all rows")


@pytest.fixture
def run(capsys):
    def call(*argv):
        try:
            code = cli.main(["bench", *argv])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def only(monkeypatch):
    """`only(cases)`: the registry holds these; nobody measures this machine's ceilings."""
    monkeypatch.setattr(measure, "ceilings", lambda clock: {"B": 1e9, "FLOP": 1e9})
    return lambda *cases: monkeypatch.setattr(registry, "cases", lambda device: list(cases))


# --- registry


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_case_has_its_own_name(device):
    names = [case.name for case in registry.cases(device)]
    assert len(set(names)) == len(names)
    assert {name.split("/")[0] for name in names} == {"products", "reductions", "e2e"}
    assert all(name.endswith(("/float32", "/bfloat16")) for name in names)


def test_selection():
    cases = registry.cases("cuda")
    chosen = lambda *texts: [case.name for case in registry.select(cases, list(texts))]  # noqa: E731
    assert not any(name.startswith("e2e") for name in chosen())
    assert not any(name.startswith("e2e") for name in chosen("float32"))
    assert chosen("e2e") == [case.name for case in cases if case.group == "e2e"]
    assert chosen("gpt2-124m-training") == [f"e2e/gpt2-124m-training/8x512/{dtype}" for dtype in ("float32", "bfloat16")]
    both = chosen("softmax/4096x4096/float32", "decode")  # in the registry's order
    assert both == ["products/decode/16x4096x4096/float32", "products/decode/16x4096x4096/bfloat16", "reductions/softmax/4096x4096/float32"]
    with pytest.raises(ValueError, match="no case has 'softmx' in its name; did you mean softmax?"):
        chosen("decode", "softmx")


def test_contenders_by_whole_name_first():
    names = ("eager", "inductor", "inductor deterministic", "carbon", "carbon+graphs")
    chosen = lambda *wanted: [name for name in names if registry.taking_part(name, list(wanted), names)]  # noqa: E731
    assert chosen() == list(names)
    assert chosen("carbon", "inductor") == ["inductor", "carbon"]
    assert chosen("graphs", "determ") == ["inductor deterministic", "carbon+graphs"]


# --- measuring


def test_rounds_are_interleaved_and_an_error_stops_its_contender_only():
    turns = []

    def fails():
        turns.append("c")
        if turns.count("c") > measure.WARM_CALLS + 1:
            raise RuntimeError("late\nand long")

    def broken():
        raise ValueError("never runs")

    doing = work(a=lambda: turns.append("a"), b=lambda: turns.append("b"), c=fails, d=broken)
    timings = measure.measure(doing, measure.Clock("cpu"), rounds=4)
    assert "".join(turns) == "aaabbbccc" + "abc" + "bca" + "ab" + "ba"
    assert [len(timings[who].rounds) for who in "abcd"] == [4, 4, 0, 0]
    assert timings["c"].error == "RuntimeError: late" and timings["d"].error == "ValueError: never runs"
    assert timings["a"].compile_seconds is not None and timings["c"].median is None


def test_median_and_spread():
    timing = measure.Timing(rounds=[5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median, timing.spread) == (3.0, 2.0)
    assert measure.Timing(rounds=[7.0]).spread == 0.0
    assert measure.Timing().spread is None


def test_ceilings_are_rates():
    reached = measure.ceilings(measure.Clock("cpu"), rounds=1)
    assert reached["B"] > 0 and reached["FLOP"] > 0


# --- one case


def measured(case, **options):
    return command.measure_case(case, measure.Clock("cpu"), {"FLOP": 1e12}, ABOUT, rounds=2, **options)


def test_a_failed_check_leaves_no_figure():
    called = []

    def differ(names):
        raise AssertionError("two runs: 1 of 4 elements differ\nmore")

    (row,) = measured(case(works=(work(eager=lambda: called.append(1), carbon=int),), check=differ))
    assert row["error"] == "check failed: AssertionError: two runs: 1 of 4 elements differ"
    assert row["contender"] == "carbon" and row["bits"] == "differ" and row["median_ms"] is None and not called


def test_what_is_missing_is_left_out():
    def prepare():
        raise ModuleNotFoundError("No module named 'transformers'")

    (row,) = measured(Case("e2e", "gpt2", "2x32", "float32", prepare))
    assert row["error"] == "left out: ModuleNotFoundError: No module named 'transformers'"
    rows = measured(case(absent=(("bitexact", "needs a GPU"), ("alia-carbon", contenders.NOT_INSTALLED))))
    assert [(row["contender"], row["error"]) for row in rows] == [("eager", ""), ("carbon", ""), ("bitexact", "left out: needs a GPU")]


def test_works_of_a_case_and_chosen_contenders():
    two = case("e2e/gpt2-training/2x32/float32", works=(work("step", eager=int, inductor=int, carbon=int), work("forward", eager=int, carbon=int)))
    rows = measured(two, contenders=["eager", "carb"])
    assert [(row["case"].rpartition("/")[2], row["contender"]) for row in rows] == [("step", "eager"), ("step", "carbon"), ("forward", "eager"), ("forward", "carbon")]
    assert all(row["over_inductor"] is None and row["over_eager"] > 0 for row in rows)
    assert rows[0]["bits"] == "" and rows[1]["bits"] == "all rows, two runs alike"


def test_a_product_on_the_cpu():
    (chosen,) = registry.select(registry.cases("cpu"), ["decode/16x128x128/float32"])
    eager, carbon, *_ = measured(chosen)
    assert carbon["bits"] == "16 rows as the CPU twin, two runs alike" and not carbon["error"]
    assert carbon["int8_per_second"] == pytest.approx(9 * carbon["rate"])
    assert eager["over_eager"] == 1 and eager["int8_per_second"] is None


@pytest.mark.parametrize("operation", cases_reductions.OPERATIONS, ids=lambda operation: operation.name)
def test_the_check_of_a_reduction(operation, monkeypatch):
    """Equal bits pass and one wrong bit doesn't; graphs run uncompiled here."""
    monkeypatch.setattr(cases_reductions, "_CHECKED", 40)  # a part of the rows, unless weights have gradients
    backward = operation.backward_passes > 0
    prepared = cases_reductions._prepare(operation, (16, 20), "bfloat16", backward, "cpu")
    (doing,) = prepared.works
    carbon = next(contender for contender in doing.contenders if contender.name == "carbon")
    with eager_engine():
        assert prepared.check(()).endswith("as the CPU's definition, two runs alike")
        right = carbon.call
        for place in range(len(right())):

            def wrong(place=place):
                results = [t.clone() for t in right()]
                results[place].view(torch.int16).flatten()[0] ^= 1
                return tuple(results)

            carbon.call = wrong
            with pytest.raises(AssertionError, match="device and CPU definition"):
                prepared.check(())


def test_determinism_is_switched_back():
    engine = contenders.engines()["eager deterministic"]
    assert engine.running(torch.are_deterministic_algorithms_enabled)()
    assert not torch.are_deterministic_algorithms_enabled()


def test_peers_are_not_asked_for_what_they_would_misread(monkeypatch):
    peer = types.SimpleNamespace(matmul=lambda a, b: "product", sum=lambda x: "sum")
    monkeypatch.setattr(contenders, "_import", lambda distribution, module: peer)
    ask = lambda operation, *operands, **more: dict(contenders.peers(operation, "cuda", operands, **more)[1])["bitexact"]  # noqa: E731
    x = torch.ones(4, 6)
    assert ask("row-sum", x) == "faults on rows whose length is no multiple of 4"
    assert ask("product", x.bfloat16(), x.t().bfloat16()) == "takes float32 matrices only"
    assert ask("softmax", torch.ones(4, 8)) == "has no such operation"
    assert ask("layer-norm", x, backward=True) == "has no backward pass"
    found, _ = contenders.peers("product", "cuda", (x, x.t()))
    assert {contender.name: contender() for contender in found if contender.name == "bitexact"} == {"bitexact": "product"}


# --- rows


def test_ratios_are_within_a_case():
    rows = rows_of({"eager": 2.0, "inductor": "RuntimeError: no", "carbon": 3.0})
    assert [row["over_eager"] for row in rows] == [1.0, None, 1.5]
    assert [row["over_inductor"] for row in rows] == [None, None, None]
    assert rows[2]["rate"] == pytest.approx(1e6 / 3e-3) and rows[2]["of_ceiling"] == pytest.approx(1e6 / 3e-3 / 1e12)
    other = rows_of({"carbon": 1.0, "inductor": 4.0}, name="reductions/softmax/2x2/float32")
    merged = report.with_ratios(rows + other)
    assert [row["over_inductor"] for row in merged[3:]] == [0.25, 1.0] and merged[3]["over_eager"] is None


def test_csv_keeps_every_value(tmp_path):
    rows = rows_of({"eager": 0.1, "carbon": 1 / 3, "inductor": 'RuntimeError: a, "quoted" line'})
    path = str(tmp_path / "rows.csv")
    report.write_csv(path, rows)
    assert report.read_csv(path) == rows
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(report.ReportError, match="other columns"):
        report.read_csv(str(tmp_path / "other.csv"))
    with pytest.raises(report.ReportError, match="can't write"):
        report.write_csv(str(tmp_path / "no" / "rows.csv"), rows)


def test_table_marks_failures_red():
    rows = rows_of({"eager": 2.0, "inductor": "RuntimeError: no", "carbon": 3.0})
    rows.append({**report.failed(case(), ABOUT, report.LEFT_OUT + "needs a GPU"), "contender": "bitexact"})
    plain, colored = report.table(rows), report.table(rows, color=True)
    assert "\x1b" not in plain and "1.50" in plain and "compile s" not in plain
    assert "\x1b[31mRuntimeError: no" in colored and "\x1b[31mleft out" not in colored
    assert report.table([]) == ""


@pytest.mark.parametrize(("value", "text"), [(None, ""), (0.0, "0"), (0.012345, "0.0123"), (9.996, "10.00"), (1234.5, "1230"), (105.1, "105")])
def test_digits(value, text):
    assert report.digits(value) == text


def test_readme_table(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    rows = rows_of({"eager": 2.721, "carbon": 1.204})
    rows += rows_of({"eager": 0.5, "inductor": 0.4, "carbon": 0.6}, name="reductions/softmax/2x2/bfloat16")
    rows.append({**report.failed(case("reductions/row-sum/2x2/float32"), ABOUT, "check failed: AssertionError: x", "differ")})
    for _ in range(2):  # the same again
        report.update_readme(str(path), rows)
        text = path.read_text()
        assert text.startswith(f"before\n{report.BEGIN}\na card, torch 2.13.0, Triton 3.6.0, CUDA 13.0, 2026-01-02; ")
        assert text.endswith(f"{report.END}\nafter\n") and "old" not in text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == ["work", "type", "carbon", "eager", "Inductor", "over eager", "over Inductor"]
    assert lines[2:] == [
        ["square 2x2x2", "float32", "1.20", "2.72", "", "0.442", ""],
        ["softmax 2x2", "bfloat16", "0.600", "0.500", "0.400", "1.20", "1.50"],
        ["row-sum 2x2", "float32", "no figure", "", "", "", ""],
    ]
    path.write_text("no markers")
    with pytest.raises(report.ReportError, match="needs one <!-- speed:begin -->"):
        report.update_readme(str(path), rows)


def test_the_readme_has_its_markers():
    text = command.README.read_text()
    assert text.count(report.BEGIN) == text.count(report.END) == 1


def test_plot_names_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(report.ReportError, match=r'the extra "plot": pip install -e "\.\[plot\]"'):
        report.plot(str(tmp_path / "p.png"), rows_of({"eager": 1.0, "carbon": 2.0}))


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(str(tmp_path / "p.png"), rows_of({"eager": 1.0, "carbon": 2.0}))
    assert (tmp_path / "p.png").stat().st_size > 1000
    with pytest.raises(report.ReportError, match="no ratio"):
        report.plot(str(tmp_path / "p.png"), rows_of({"carbon": 2.0}))


# --- the command


def test_list(run, only):
    only(case(), case("e2e/gpt2/2x32/float32"))
    assert run("--list") == (0, "products/square/2x2x2/float32\n", "")
    assert run("--list", "--select", "e2e") == (0, "e2e/gpt2/2x32/float32\n", "")
    assert run("--list", "--select", "sqare") == (2, "", "carbon-compile bench: no case has 'sqare' in its name; did you mean square?\n")


def test_json_csv_and_exit_codes(run, only, tmp_path):
    def differ(names):
        raise AssertionError("bits")

    only(case(), case("products/bad/2x2x2/float32", check=differ))
    code, out, err = run("--device", "cpu", "--rounds", "2", "--json", "--csv", str(tmp_path / "rows.csv"))
    found = json.loads(out)
    assert code == 1 and [row["contender"] for row in found["rows"]] == ["eager", "carbon", "carbon"] and found["left_out"] == []
    assert report.read_csv(str(tmp_path / "rows.csv")) == found["rows"]
    assert "[2/2] products/bad/2x2x2/float32" in err and "check failed" in err
    assert run("--device", "cpu", "--select", "square")[0] == 0
    assert run("--device", "cpu", "--select", "square", "--contenders", "nobody")[:2] == (0, "")


def test_budget_says_what_it_left_out(run, only, monkeypatch):
    ticks = iter(range(0, 1000, 10))
    monkeypatch.setattr(command, "time", types.SimpleNamespace(monotonic=lambda: next(ticks)))
    only(*[case(f"products/p{i}/2x2x2/float32") for i in range(4)])
    code, out, err = run("--device", "cpu", "--json", "--budget", "15")
    assert code == 0 and json.loads(out)["left_out"] == [f"products/p{i}/2x2x2/float32" for i in (1, 2, 3)]
    assert "budget of 15 s spent; left out: products/p1/2x2x2/float32, " in err


def test_readme_option(run, tmp_path, monkeypatch):
    readme, rows = tmp_path / "README.md", str(tmp_path / "rows.csv")
    readme.write_text(f"{report.BEGIN}{report.END}")
    monkeypatch.setattr(command, "README", readme)
    report.write_csv(rows, rows_of({"eager": 2.0, "carbon": 1.0}))
    assert run("--readme", rows) == (0, "", "") and "| square 2x2x2 |" in readme.read_text()
    assert run("--readme", rows, "--select", "softmax")[0] == 2
    assert run("--readme", str(tmp_path / "none.csv"))[0] == 2


def test_without_a_checkout(run, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "carbon_compile" / "cli.py"))
    code, out, err = run("--list")
    assert code == 2 and out == "" and "run this in a checkout, installed with pip install -e ." in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without one")
def test_without_a_gpu(run):
    assert run("--device", "cuda", "--select", "decode")[:2] == (2, "")


def test_results_that_are_committed_can_be_read():
    for path in pathlib.Path(command.README.parent, "bench", "results").glob("*.csv"):
        assert report.read_csv(str(path))
