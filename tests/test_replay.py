"""`carbon-compile diff --replay`: the node where two runs part, its line, and a script that shows it."""

import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carbon_compile
from carbon_compile import DeterministicTrainer, checkpoint, cli
from carbon_compile.ledger_file import first_difference, read
from carbon_compile.replay import (
    ReplayError,
    Setting,
    Target,
    capture,
    default_settings,
    partings,
    replay,
    ulp_histogram,
)
from carbon_compile.replay import run as run_graph
from carbon_compile.snapshot import RandomState


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        h = F.gelu(self.norm(self.first(x)))
        h = self.drop(h)
        return self.last(h)


def line_of(source):
    """The line of this file that holds `source`."""
    return next(i for i, line in enumerate(open(__file__), 1) if line.strip() == source)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def trainer(seed=3, **how):
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return DeterministicTrainer(model, optimizer, seed=seed, loss_fn=F.cross_entropy, backend=None, **how)


def recorded(path, made, steps=9, before_step=lambda step, model: None):
    """Train, recording a ledger and a checkpoint before every step."""
    path.mkdir()
    with carbon_compile.ledger(path / "run.jsonl", model=made.model):
        for step in range(1, steps + 1):
            before_step(step, made.model)
            made.save(path / f"{step}.pt")
            made.step(batch(step))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("replay") / "a", trainer())


CARBON = Setting("carbon"), Setting("carbon")


def replayed(a, b, settings=None, made=trainer, **how):
    """Replay the first step that parts two recorded runs, from the checkpoints before it."""
    step = how.pop("step", None) or first_difference(read(a / "run.jsonl"), read(b / "run.jsonl"))
    contents = [checkpoint.load(folder / f"{how.get('since', step)}.pt") for folder in (a, b)]
    how.pop("since", None)
    return replay(Target((made(), batch), "job:make"), settings or default_settings(contents), contents, step, **how)


def test_another_dropout_seed(run, tmp_path):
    found = replayed(run, recorded(tmp_path / "b", trainer(seed=4)), folder=str(tmp_path / "out"))
    (parting,) = found.found
    assert (found.step, parting.kind, parting.operator, parting.module) == (1, "output", "torch.nn.functional.dropout", "drop")
    assert parting.line == line_of("h = self.drop(h)") and parting.random
    assert "checkpoints: the state of PyTorch's generator differs" in found.state and "settings: seed 3 -> 4" in found.state
    shows(found.script, "elements differ")


def flipped(bit):
    def flip(step, model):
        if step == 7:
            model.last.weight.data.view(torch.int32)[1, 2] ^= 1 << bit

    return flip


def test_one_flipped_weight_bit_at_step_7(run, tmp_path):
    found = replayed(run, recorded(tmp_path / "b", trainer(), before_step=flipped(20)))
    weight, output = found.found
    assert found.step == 7
    assert (weight.kind, weight.operator, weight.difference.index, weight.difference.differing) == ("input", "last.weight", (1, 2), 1)
    assert (output.kind, output.node.partition("_")[0], output.line) == ("output", "linear", line_of("return self.last(h)"))
    assert any(line.startswith("weights: last.weight: 1 of 24 elements differ; first at (1, 2): ") for line in found.state)
    assert "last.weight" in "\n".join(found.lines())


def test_a_bit_that_rounding_swallows(run, tmp_path):
    found = replayed(run, recorded(tmp_path / "b", trainer(), before_step=flipped(0)), step=7)
    assert [p.operator for p in found.found][0] == "last.weight"


def test_two_classes_of_products(run):
    found = replayed(run, run, (Setting.parse("carbon:float32_matmul=X2"), Setting("carbon")), step=2)
    parting = found.found[0]
    assert parting.operator.endswith("linear") and parting.module == "first" and parting.line == line_of("h = F.gelu(self.norm(self.first(x)))")
    assert sum(count for _, count in parting.histogram) == parting.difference.differing
    shows(found.script, "elements differ")


def test_operands_of_lower_precision(run):
    found = replayed(run, run, (Setting("stock"), Setting.parse("stock:autocast=bfloat16")), step=2)
    assert found.found[0].operator.endswith("linear") and found.found[0].module == "first"


def test_stock_against_carbon(run):
    found = replayed(run, run, (Setting("carbon"), Setting("stock")), step=2)
    assert found.found[0].kind == "output" and found.found[0].module in ("first", "norm", "")


def test_runs_that_agree_say_so(run):
    found = replayed(run, run, CARBON, step=3)
    assert found.found == [] and "the replays agree bit for bit: forward, and every gradient" in list(found.lines())


def test_steps_after_the_checkpoint_are_made_first(run):
    whole, since = replayed(run, run, CARBON, step=5), replayed(run, run, CARBON, step=5, since=2)
    assert whole.found == since.found == []
    found = replay(Target((trainer(), batch), "job:make"), CARBON, (checkpoint.load(run / "5.pt"), checkpoint.load(run / "2.pt")), 5)
    assert found.found == []
    with pytest.raises(ReplayError, match="the checkpoint is of step 4; step 3 needs one from before it"):
        replayed(run, run, CARBON, step=3, since=5)
    with pytest.raises(ReplayError, match="give batches as a function of the step, or the checkpoint of step 4"):
        replay(Target((trainer(), batch(5)), "job:make"), CARBON, (checkpoint.load(run / "2.pt"),) * 2, 5)


class Scatter(nn.Module):
    """A sum whose order is not fixed in stock PyTorch on CUDA."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(4, 3))

    def forward(self, x, index):
        total = torch.zeros(4, 3, device=x.device).index_add(0, index, x @ self.weight)
        return total.square().mean()


def scatter(device, items=4096):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(items, 4, generator=generator), torch.randint(0, 4, (items,), generator=generator)
    return Target((Scatter().to(device), tuple(t.to(device) for t in inputs)), "job:make")


def test_a_module_without_a_trainer():
    found = replay(scatter("cpu"), (Setting("carbon"), Setting("stock")))
    assert found.found[0].kind == "output"
    assert replay(scatter("cpu", 8), CARBON).found == []


@pytest.mark.gpu
def test_stock_index_add_on_cuda_does_not_repeat():
    stock = Setting("stock"), Setting("stock")
    found = next(filter(None, (replay(scatter("cuda", 200_000), stock).found for _ in range(10))))
    assert "index_add" in found[0].operator and found[0].source.startswith("total = torch.zeros")
    assert replay(scatter("cuda", 200_000), CARBON).found == []


@pytest.mark.gpu
def test_tf32_in_one_run():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).cuda()
    target = Target((model, (torch.randn(64, 64).cuda(),)), "job:make")
    found = replay(target, (Setting("stock"), Setting.parse("stock:float32_matmul_precision=high")))
    assert found.found[0].operator.endswith("linear") and found.found[0].module.endswith("1")
    assert replay(target, (Setting("carbon"), Setting("stock"))).found


def test_a_difference_only_in_the_backward_is_found():
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * OFF[0]

    weight = nn.Linear(3, 3)

    def function(x):
        h = weight(x)
        h = Backward.apply(h)
        return h.sum()

    runs = []
    for OFF[0] in (1.0, 1.0 + 2**-20):
        graph, inputs = capture(function, torch.ones(2, 3))
        runs.append(run_graph(graph, inputs, Setting("stock"), RandomState.seeded(0)))
    (parting,) = partings(graph, *runs, {})
    assert parting.kind == "gradient" and parting.line == line_of("h = Backward.apply(h)")


OFF = [1.0]


def test_an_operation_of_several_results(tmp_path):
    """Is named itself, and called by the script, whose random state is its own."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.GRU(6, 4, num_layers=2, batch_first=True, dropout=0.3), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.layer(x.unsqueeze(1))[0][:, -1])

    def made(seed=3):
        torch.manual_seed(1)
        model = Recurrent()
        return DeterministicTrainer(model, torch.optim.SGD(model.parameters(), 0.1), seed=seed, loss_fn=F.cross_entropy, backend=None)

    a, b = (recorded(tmp_path / name, made(seed), steps=1) for name, seed in (("a", 3), ("b", 4)))
    found = replayed(a, b, CARBON, made, folder=str(tmp_path))
    first = next(p for p in found.found if p.kind == "output")
    assert "gru" in first.operator and first.random
    assert "torch.gru(" in found.script
    with pytest.raises(AssertionError):
        exec(compile(found.script, "script", "exec"), {})


def test_histogram():
    a = torch.tensor([1.0, 1.0, 1.0, 0.0, float("nan"), 2.0, 1.0])
    b = a.clone()
    b.view(torch.int32)[0] += 1
    b.view(torch.int32)[1] += 6
    b[3], b[4], b[5] = -0.0, 1.0, float("nan")
    assert ulp_histogram(a, b) == (("0 (sign)", 1), ("1", 1), ("4..7", 1), ("nan", 2))
    assert ulp_histogram(torch.tensor([1, 2]), torch.tensor([1, 3])) == (("integers", 1),)


@pytest.mark.parametrize(
    "text,told",
    [("eager", "a setting is carbon or stock"), ("stock:tf32=1", "stock has no setting 'tf32'"), ("carbon:float32_matmul", "carbon has no setting 'float32_matmul' with a value")],
)
def test_wrong_settings(text, told):
    with pytest.raises(ReplayError, match=told):
        Setting.parse(text)


def test_by_default_each_run_is_replayed_as_it_ran(tmp_path):
    trainer().save(tmp_path / "stock.pt")
    with carbon_compile.enable():
        trainer().save(tmp_path / "carbon.pt")
    torch.set_float32_matmul_precision("medium")
    trainer().save(tmp_path / "medium.pt")
    stock, carbon, medium = (checkpoint.load(tmp_path / f"{name}.pt") for name in ("stock", "carbon", "medium"))
    assert tuple(map(str, default_settings((stock, medium)))) == ("stock", "stock:float32_matmul_precision=medium")
    assert tuple(map(str, default_settings((carbon, {**medium, "ran": "carbon"})))) == ("carbon", "carbon:float32_matmul=X2")
    assert tuple(map(str, default_settings((stock, stock)))) == tuple(map(str, default_settings((None, None)))) == ("carbon", "stock")


def test_settings_are_put_back():
    with Setting.parse("stock:float32_matmul_precision=medium,deterministic=1,autocast=bfloat16").in_force():
        assert torch.get_float32_matmul_precision() == "medium" and torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest" and not torch.are_deterministic_algorithms_enabled()
    assert str(Setting.parse("carbon:float32_matmul=X2")) == "carbon:float32_matmul=X2"


def shows(script, told):
    """The reproducer fails with `told`."""
    with pytest.raises(AssertionError, match=told):
        exec(compile(script, "reproducer", "exec"), {})


# --- the command


@pytest.fixture
def job(tmp_path, monkeypatch):
    (tmp_path / "carbon_job.py").write_text(
        textwrap.dedent(
            """\
            from tests.test_replay import batch, trainer

            def make():
                return trainer(), batch

            def nothing():
                return 3
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "carbon_job:make"


def test_the_command(run, job, tmp_path, capsys):
    other = recorded(tmp_path / "b", trainer(), before_step=flipped(22))
    ledgers = ["diff", str(run / "run.jsonl"), str(other / "run.jsonl")]
    assert cli.main([*ledgers, "--replay", job, "--checkpoint", str(run / "7.pt"), str(other / "7.pt")]) == 1
    out = capsys.readouterr().out
    assert out.startswith("first difference: step 7, loss\nequal up to step 6\n")
    assert "replayed step 7 under stock and under stock\n" in out
    assert "first node whose output differs: torch._C._nn.linear (" in out or "first node whose output differs: torch.nn.functional.linear (" in out
    assert f"test_replay.py:{line_of('return self.last(h)')}, last\n" in out
    assert "reproducer:\n    import operator\n" in out
    checkpoints = ["diff", str(run / "7.pt"), str(other / "7.pt")]
    assert cli.main(checkpoints) == 1
    assert capsys.readouterr().out.startswith("weights: last.weight: 1 of 24 elements differ; first at (1, 2): ")
    assert cli.main(["diff", str(run / "7.pt"), str(run / "7.pt")]) == 0
    count = checkpoint.tensor_count(checkpoint.load(run / "7.pt"))
    assert count > 10 and capsys.readouterr().out == f"equal: after step 6, {count} tensors\n"
    assert cli.main([*checkpoints, "--replay", job]) == 1
    assert "replayed step 7 under stock and under stock\n" in capsys.readouterr().out


def test_the_command_explains_what_it_can_not_do(run, job, tmp_path, capsys):
    same = ["diff", str(run / "run.jsonl"), str(run / "run.jsonl"), "--replay"]
    for rest, told in (
        ([job], "the ledgers agree; say with --step which step to replay"),
        (["carbon_job:nothing", "--step", "1"], "carbon_job:nothing() must return (trainer, batches) or (module or function, tuple of inputs), not int"),
        (["carbon_job:mak", "--step", "1"], "carbon_job has no 'mak'; did you mean 'make'?"),
        ([job, "--step", "1", "--checkpoint", "none.pt"], "there is no none.pt"),
        ([job, "--step", "1", "--settings", "carbon", "x"], "a setting is carbon or stock, with what is set behind a colon, not 'x'"),
        ([job, "--step", "1", "--checkpoint", "a", "b", "c"], "--checkpoint takes one or two files, not 3"),
    ):
        assert cli.main([*same, *rest]) == 2
        assert capsys.readouterr().err == f"carbon-compile diff: {told}\n"
