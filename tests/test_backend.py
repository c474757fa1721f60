"""torch.compile(..., backend="carbon") as people use it: options, shapes, modes, caches, precision."""

import copy
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import carbon_compile
from carbon_compile import host, runlog
from carbon_compile.bits import assert_bitwise
from carbon_compile.diagnostics import Refused
from carbon_compile.options import OptionError, Options

from .definition import eager_engine


@pytest.fixture
def fast():
    with eager_engine():
        yield


@pytest.fixture(autouse=True)
def log():
    runlog.LOG.reset()
    return runlog.LOG


def compiled(fn, **options):
    return torch.compile(fn, backend="carbon", options=options or None)


def counted(fn, **how):
    """The compiled function, and a count of its compilations."""
    before = len(runlog.LOG.graphs)
    return torch.compile(fn, backend="carbon", **how), lambda: len(runlog.LOG.graphs) - before


# --- options


@pytest.mark.parametrize(
    "options,told",
    [
        ({"on_unsfe": "warn"}, "unknown option 'on_unsfe'; did you mean 'on_unsafe'?"),
        ({"zzz": 1}, "unknown option 'zzz'; known options: on_unsafe, allow,"),
        ({"on_unsafe": "refuze"}, "option 'on_unsafe' takes one of refuse, warn, allow, not 'refuze'; did you mean 'refuse'?"),
        ({"float32_matmul": "X4"}, "option 'float32_matmul' takes one of auto, X2, X3, not 'X4'"),
        ({"allow": "CB101"}, "option 'allow' takes a list of codes such as ['CB101'], not 'CB101'"),
        ({"allow": ["graph-brake"]}, "option 'allow': no such code: 'graph-brake'; did you mean graph-break?"),
        ({"allow": ["CB901"]}, "option 'allow': CB901 can't be allowed"),
        ({"table": "yes"}, "option 'table' takes True or False, not 'yes'"),
        ({"dump": 3}, "option 'dump' takes a folder to write graphs to, not 3"),
        ({"inductor": 3}, "option 'inductor' takes a dict of Inductor config values, not 3"),
        ({"inductor": {"max_autotun": True}}, "option 'inductor': Inductor has no setting 'max_autotun'; did you mean 'max_autotune'?"),
    ],
)
def test_wrong_options_name_the_nearest(options, told):
    with pytest.raises(OptionError) as caught:
        compiled(torch.sin, **options)(torch.ones(2))
    assert told in str(caught.value)


def test_names_of_options_are_strings():
    with pytest.raises(OptionError, match="unknown option 3; known options: on_unsafe"):
        Options.parse(options={3: 4})


def test_a_mode_is_inductors():
    with pytest.raises(OptionError, match="mode='max-autotune' is Inductor's"):
        torch.compile(torch.sin, backend="carbon", mode="max-autotune")(torch.ones(2))


def test_options_compare_as_written():
    assert Options.parse(options={"allow": ["CB402", "CB101"]}) == Options.parse(options={"allow": ("CB101", "CB402")})
    assert Options.parse("default") == Options.parse()
    assert Options.parse("reduce-overhead") == Options.parse(options={"inductor": {"triton.cudagraphs": True}})


def test_table_and_dump(tmp_path, capsys, fast):
    compiled(lambda x, w: torch.relu(x @ w), table=True, dump=str(tmp_path))(torch.ones(3, 4), torch.ones(4, 5))
    shown = capsys.readouterr()
    assert shown.out == "" and "carbon.mm" in shown.err and "template" in shown.err and "test_backend.py:" in shown.err
    kinds = {path.name.partition(".")[2]: path.read_text() for path in tmp_path.iterdir()}
    assert set(kinds) == {"before.txt", "after.txt", "report.txt"}
    assert "torch.ops.aten.relu" in kinds["before.txt"] and "torch.ops.aten.relu" not in kinds["after.txt"]
    assert "carbon.mm" in kinds["report.txt"]


def test_a_refusal_is_dumped(tmp_path):
    with pytest.raises(Refused):
        compiled(torch.linalg.svdvals, dump=str(tmp_path))(torch.ones(3, 4))
    assert "CB103" in next(tmp_path.glob("*.report.txt")).read_text()


def test_passes_and_verdicts_are_logged_and_traced(tmp_path):
    script = tmp_path / "traced.py"
    script.write_text("import torch\nfrom carbon_compile.backend import carbon\ntorch.compile(lambda x: x + 1, backend=carbon)(torch.ones(2))\n")
    root = str(pathlib.Path(carbon_compile.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": root, "TORCH_LOGS": "+carbon_compile", "TORCH_TRACE": str(tmp_path / "trace")}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("composites", "judge and rewrite", "compile"):
        assert f"] {name}: " in done.stderr, done.stderr
    assert "carbon_verdicts" in next((tmp_path / "trace").glob("*.log")).read_text()


# --- how a function is compiled


@pytest.mark.parametrize("fullgraph", [True, False])
def test_fullgraph_and_not(fullgraph, fast):
    fn, compilations = counted(lambda x: (x * 2).sum(), fullgraph=fullgraph)
    assert fn(torch.ones(4)) == fn(torch.ones(4)) == 8 and compilations() == 1


class Mlp(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 16), torch.nn.Linear(16, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x))))


def test_module_compiled_outside_and_in_place(fast):
    model = Mlp()
    x = torch.randn(3, 8)
    outside = torch.compile(model, backend="carbon")(x)
    names = list(model.state_dict())
    model.compile(backend="carbon")
    assert_bitwise(model(x), outside)
    assert list(model.state_dict()) == names
    assert carbon_compile.certificate(model).held


def test_dynamic_shapes_compile_once_more_and_keep_rows():
    """The only test here that needs real kernels: symbolic sizes must not change a row's bits."""
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(7, 8)
    fn, compilations = counted(model)
    with torch.no_grad():
        whole = fn(x)
        for rows in (2, 5, 3, 7):
            assert_bitwise(fn(x[:rows].clone()), whole[:rows])
        assert compilations() == 2
        torch.compiler.reset()
        marked = x.clone()
        torch._dynamo.mark_dynamic(marked, 0)
        fn, compilations = counted(model)
        assert_bitwise(fn(marked), whole)
        assert_bitwise(fn(x[:2].clone()), whole[:2])
        assert compilations() == 1


def test_inference_modes_and_training_agree(fast):
    model, x = Mlp(), torch.randn(3, 8)
    fn, compilations = counted(model)
    trained = fn(x)
    assert trained.requires_grad
    with torch.no_grad():
        assert_bitwise(fn(x), trained.detach())
    with torch.inference_mode():
        assert_bitwise(fn(x).clone(), trained.detach())
    assert compilations() == 3
    assert [g.kind for g in runlog.LOG.graphs] == ["training", "inference", "inference"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_inside_and_outside_is_one(dtype, fast):
    x = torch.randn(4, 8)

    def run(model, outside):
        def inside(x):
            with torch.autocast("cpu", dtype):
                return model(x).square().mean()

        if outside:
            fn = torch.compile(lambda x: model(x).square().mean(), backend="carbon")
            with torch.autocast("cpu", dtype):
                loss = fn(x)
        else:
            loss = torch.compile(inside, backend="carbon")(x)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    torch.manual_seed(1)
    first = Mlp()
    second = Mlp()
    second.load_state_dict(first.state_dict())
    for a, b in zip(run(first, True), run(second, False), strict=True):
        assert_bitwise(a, b)
    products = [row for g in runlog.LOG.graphs for row in g.nodes if row.template == "mm"]
    assert products
    plain = torch.compile(first, backend="carbon")(x)
    assert plain.dtype is torch.float32


def test_autocast_recompiles_when_it_comes_and_goes(fast):
    model, x = Mlp(), torch.randn(4, 8)
    fn, compilations = counted(model.up)
    assert fn(x).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert fn(x).dtype is torch.bfloat16
    assert fn(x).dtype is torch.float32 and compilations() == 2


def test_reset_compiles_anew(fast):
    fn, compilations = counted(lambda x: x + 1)
    fn(torch.ones(2))
    torch.compiler.reset()
    fn(torch.ones(2))
    assert compilations() == 2


def test_matmul_precision_recompiles_when_the_class_changes(fast):
    fn, compilations = counted(lambda a, b: a @ b)
    a, b = torch.randn(4, 64), torch.randn(64, 4)
    results = {}
    for precision in ("highest", "high", "medium", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        results.setdefault(precision, fn(a, b))
        assert_bitwise(fn(a, b), results[precision])
    assert compilations() == 3, "Dynamo itself tells the three settings apart"
    assert_bitwise(results["high"], results["highest"])
    assert not torch.equal(results["high"], results["medium"])
    assert [g.precision["float32"] for g in runlog.LOG.graphs] == ["X3", "X3", "X2"]


@pytest.fixture
def tf32():
    """Switched on by the newer of PyTorch's two ways, after which the older getters raise."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_the_newer_precision_setting(fast, tf32):
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    torch.compile(lambda a: a @ a, backend="carbon")(torch.ones(2, 2))
    certificate = carbon_compile.certificate()
    assert certificate.held and certificate.data["graphs"][0]["precision"]["float32"] == "X3"
    assert certificate.data["environment"]["cuda_matmul_tf32"] is True


def test_out_of_a_composite(fast):
    def fn(a):
        out = torch.empty(2, 2)
        torch.mm(a, a, out=out)
        return out

    a = torch.randn(2, 2)
    assert_bitwise(compiled(fn)(a), compiled(lambda a: a @ a)(a))


def test_an_option_overrides_the_precision(fast):
    a, b = torch.randn(4, 64), torch.randn(64, 4)
    asked = compiled(lambda a, b: a @ b, float32_matmul="X2")(a, b)
    torch.set_float32_matmul_precision("medium")
    assert_bitwise(compiled(lambda a, b: a @ b)(a, b), asked)


class Block(torch.nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
        self.checkpointed = checkpointed

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def test_checkpointing_with_dropout_changes_nothing(fast):
    models = [Block(False), Block(True)]
    models[1].load_state_dict(models[0].state_dict())
    x, found = torch.randn(4, 8), []
    for model in models:
        torch.compiler.reset()
        torch.manual_seed(3)
        y = torch.compile(model, backend="carbon")(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert_bitwise(a, b)


def test_the_counting_backend_of_dynamo_works_with_it():
    """A backend that wraps ours is still ours: calls go through `carbon`."""
    counter = CompileCounterWithBackend("carbon")
    with eager_engine():
        torch.compile(lambda x: x + 1, backend=counter)(torch.ones(2))
    assert counter.frame_count == 1 and runlog.LOG.graphs[-1].calls == 1


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum())),
        lambda f: torch.func.jacfwd(lambda x: f.up(x).tanh().sum(0)),
    ],
    ids=["grad", "per sample", "jacfwd"],
)
def test_derivatives_of_torch_func(transform, fast):
    model = Mlp()
    for p in model.parameters():
        p.requires_grad_(False)
    x = torch.randn(3, 8)
    found = torch.compile(transform(model), backend="carbon")(x)
    torch.testing.assert_close(found.double(), transform(model.double())(x.double()), rtol=0, atol=2e-6)
    assert carbon_compile.certificate().held


def test_backward_keeps_no_more_than_it_needs(fast):
    """Cheap results are computed again: of a GELU in small steps, as GPT-2 writes it, only its input is kept
    and, for a weight's gradient, its output; of a loss only the scores."""

    def gelu(x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))

    x, target = torch.randn(512, 16), torch.arange(512) % 16
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]

    def loss(x, a, b, c):
        return F.cross_entropy(gelu(gelu(x @ a) @ b) @ c, target)

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        result = compiled(loss)(x, *weights)
    # x, two products with their activations, and the scores.
    assert sum(t.numel() >= x.numel() for t in kept) == 6, [tuple(t.shape) for t in kept]
    with carbon_compile.enable(seed=None):
        expected = torch.autograd.grad(loss(x, *weights), weights)
    assert_bitwise(torch.autograd.grad(result, weights), expected)


def test_sizes_of_zero(fast):
    def fn(a, b, v):
        s = F.scaled_dot_product_attention(a[None], b.mT[None], b.mT[None])
        return a @ b, a @ v, F.linear(a, b.mT[0]), torch.einsum("bik,bkj->bij", a, b), torch.tensordot(a[0], b[0], 1), s

    for shapes in (((2, 3, 0), (2, 0, 5), (0,)), ((0, 3, 4), (0, 4, 5), (4,)), ((2, 0, 4), (2, 4, 5), (4,))):
        given = [torch.zeros(*shape) for shape in shapes]
        if 0 in (shapes[0][0], shapes[0][2]):  # nothing to take from the batch, and no scale of no features
            part = lambda a, b, v: (a @ b, a @ v)  # noqa: E731
            ours, theirs = compiled(part)(*given), part(*given)
        else:
            ours, theirs = compiled(fn)(*given), fn(*given)
        assert [y.shape for y in ours] == [y.shape for y in theirs]
        torch.compiler.reset()


def test_a_compiled_model_may_be_copied(fast):
    model = torch.compile(Mlp(), backend="carbon")
    x = torch.randn(3, 8)
    assert_bitwise(copy.deepcopy(model)(x), model(x))
    assert_bitwise(copy.deepcopy(model)(x), model(x))


# --- caches

WARM = """
import json

import torch

import carbon_compile
from carbon_compile.backend import carbon
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
step = torch.compile(lambda x: model(x).square().mean(), backend=carbon)
step(torch.randn(4, 8)).backward()
certificate = carbon_compile.certificate(model)
print(json.dumps({
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "bits": carbon_compile.fingerprint([p.grad for p in model.parameters()]),
    "identity": certificate.identity,
    "held": certificate.held,
    "nodes": certificate.data["graphs"][0]["nodes"],
}))
"""


def test_a_warm_second_process_gives_the_same_bits(tmp_path):
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    root = str(pathlib.Path(carbon_compile.__file__).parent.parent)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": root}
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = runs
    assert (cold.pop("hits"), warm.pop("hits")) == (0, 1)
    assert warm == cold and cold["held"]


@pytest.mark.parametrize("loop, numel, stores, expected", [(True, 256, True, 1), (True, 256, False, 0), (True, 1, True, 0), (False, 256, True, 0)])
def test_gpu_loops_wait_for_what_others_stored(monkeypatch, loop, numel, stores, expected):
    triton_code = pytest.importorskip("torch._inductor.codegen.triton")
    lines = []
    monkeypatch.setattr(triton_code.TritonKernel, "codegen_body", lambda kernel: None)
    tree = SimpleNamespace(is_loop=loop, is_reduction=True, numel=numel)
    kernel = SimpleNamespace(stores=["store"] if stores else [], range_trees=[tree], body=SimpleNamespace(writeline=lines.append))
    with host._loops_wait_for_stores():
        triton_code.TritonKernel.codegen_body(kernel)
    assert lines == ["tl.debug_barrier()"] * expected
