"""The demo: its data, its fixed start, what it prints, and the bits recorded on a GPU."""

import json
from importlib import resources
from io import StringIO
from pathlib import Path

import pytest
import torch

from carbon_compile import cli, demo, fingerprint
from carbon_compile.data import digits

GOLDEN = Path(__file__).parent / "golden" / "demo.json"
CPU = torch.device("cpu")


def silent(*_):
    pass


def test_the_data_is_whole_and_attributed():
    data = digits.load()
    assert [tuple(t.shape) for t in data] == [(1438, 64), (1438,), (359, 64), (359,)]
    assert all(t.dtype is torch.int64 for t in data)
    images = torch.cat([data.train_images, data.test_images])
    assert images.min() == 0 and images.max() == digits.LEVELS - 1
    labels = torch.cat([data.train_labels, data.test_labels])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    folder = resources.files("carbon_compile.data")
    assert len(folder.joinpath("digits.gz").read_bytes()) < 60_000
    attribution = folder.joinpath("ATTRIBUTION.md").read_text()
    assert all(word in attribution for word in ("Alpaydin", "Kaynak", "CC BY 4.0", "scikit-learn"))


def test_the_data_is_that_of_scikit_learn():
    load = pytest.importorskip("sklearn.datasets").load_digits
    images, labels = load(return_X_y=True)
    data = digits.load()
    assert torch.equal(data.test_images, torch.tensor(images).long()[4::5])
    assert torch.equal(data.train_labels[:4], torch.tensor(labels)[:4])


def test_the_start_is_pinned():
    # Recorded results depend on these; a change here needs a new recording.
    model = demo.DigitTransformer()
    demo.initialise(model)
    assert fingerprint(model) == "876c8ed6ef5d926e1906039deb417802c547481193de1e69ed51f6b7768a777d"
    order = list(demo.batches(1438, 45))
    assert fingerprint(order) == "fc88eeb175e2e1934b30d7e21a049e84a0be1bd7695ef53004ca3225cfccbdd9"
    epoch = torch.cat(order[:22])
    assert len(epoch.unique()) == len(epoch) == 22 * demo.BATCH


@pytest.fixture
def one_thread():
    # Waiting threads of PyTorch spin: on a busy machine, one is many times faster than two.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_it_learns(one_thread):
    run = demo.train(digits.load(), CPU, "float32", demo.STEPS, "eager", silent)
    assert run.accuracy > 0.9 and run.loss < 0.5


def test_json_is_all_of_standard_output(capsys):
    code = cli.main(["demo", "--device", "cpu", "--steps", "2", "--backend", "eager", "--json"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert code == 0 and result["match"] is None and "'eager'" in result["not_compared"]
    assert (result["device"], result["steps"]) == ("cpu", 2)
    assert result["versions"]["torch"] == str(torch.__version__)
    assert list(result["runs"]) == ["float32", "bfloat16"]
    weights = [run["weights"] for run in result["runs"].values()]
    assert weights[0] != weights[1] and all(len(w) == 64 for w in weights)
    assert "float32   step 2/2  loss" in err and "\r" not in err


def result_of(steps=demo.STEPS, backend="carbon", golden=None, **changes):
    runs = {p: demo.Run(0.25, 0.95, "a" * 64, "b" * 64, 12.0) for p in demo.PRECISIONS}
    for name, value in changes.items():
        setattr(runs["bfloat16"], name, value)
    return demo.report(runs, CPU, steps, backend, golden)


@pytest.fixture
def golden():
    return result_of() | {"card": "NVIDIA H100"}


def test_what_is_printed_is_what_ships_as_recorded(golden):
    same = result_of(golden=golden)
    assert same["match"] is True and all(run["match"] for run in same["runs"].values())
    assert same["recorded_on"]["card"] == "NVIDIA H100"
    assert "The same bits as on NVIDIA H100 (PyTorch" in demo.text(same)
    assert demo.text(same).count("  as recorded") == 4


@pytest.mark.parametrize("changed", ["weights", "optimizer"])
def test_a_difference_is_named(golden, changed):
    other = result_of(golden=golden, **{changed: "c" * 64})
    assert other["match"] is False
    assert [run["match"] for run in other["runs"].values()] == [True, False]
    assert "NOT the same bits" in demo.text(other) and "NOT as recorded" in demo.text(other)


def test_only_like_is_compared(golden):
    assert result_of(golden=golden, loss=9.0)["match"] is True
    for result, why in [
        (result_of(steps=7, golden=golden), f"{demo.STEPS} steps"),
        (result_of(backend="inductor", golden=golden), "'inductor' promises no bits"),
        (result_of(golden=None), "no recorded result"),
    ]:
        assert result["match"] is None and why in result["not_compared"]
        assert f"not compared: {result['not_compared']}" in demo.text(result)


def test_the_exit_code_says_whether_it_matches(monkeypatch, capsys, golden):
    monkeypatch.setattr(demo, "train", lambda *_: demo.Run(0.25, 0.95, "a" * 64, "b" * 64, 12.0))
    monkeypatch.setattr(demo, "recorded", lambda: golden)
    assert demo.main(["--device", "cpu"]) == 0
    golden["runs"]["float32"]["optimizer"] = "d" * 64
    assert demo.main(["--device", "cpu"]) == 1
    assert demo.main(["--device", "cpu", "--steps", "3"]) == 0
    assert "NOT the same bits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--steps", "0"], "'0' is not a positive number"),
        (["--steps", "many"], "'many' is not a positive number"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--step", "3"], "did you mean --steps?"),
        (["--certificate", "no/such/folder/file"], "--certificate no/such/folder/file: can't write there"),
        pytest.param(
            ["--device", "cuda"],
            "PyTorch sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one"),
        ),
    ],
)
def test_bad_options_end_in_one_line(words, message, capsys):
    try:
        code = demo.main(words)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_a_bar_only_on_a_terminal():
    class Terminal(StringIO):
        def isatty(self):
            return True

    shown = {}
    for stream in (Terminal(), StringIO()):
        progress = demo.Progress(stream)
        progress.compiling("float32")
        for step in range(1, 41):
            progress("float32", step, 40, 1.0)
        shown[type(stream)] = stream.getvalue()
    assert shown[Terminal].count("\n") == 1 and "[" + "#" * 30 + "] 40/40" in shown[Terminal]
    assert shown[StringIO].count("\n") == 9 and "\r" not in shown[StringIO]


def test_the_recorded_result_is_well_formed():
    golden = demo.recorded()
    if golden is None:
        pytest.skip("nothing recorded yet")
    assert golden["device"] == "cuda" and golden["steps"] == demo.STEPS
    for precision in demo.PRECISIONS:
        assert golden["runs"][precision]["accuracy"] > 0.9
        assert all(len(golden["runs"][precision][key]) == 64 for key in ("weights", "optimizer"))


@pytest.mark.skipif(not GOLDEN.is_file(), reason="nothing recorded yet")
@pytest.mark.parametrize("precision", demo.PRECISIONS)
def test_the_first_steps_have_the_bits_of_a_gpu(precision):
    """golden/demo.json is what `carbon-compile demo --device cuda --steps 3 --json` printed."""
    golden = json.loads(GOLDEN.read_text())
    run = demo.train(digits.load(), CPU, precision, golden["steps"], demo._backend("carbon"), silent)
    expected = golden["runs"][precision]
    assert (run.weights, run.optimizer) == (expected["weights"], expected["optimizer"]), golden["card"]
