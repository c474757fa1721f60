"""Nothing runs outside the contract without being named: by default it is refused before it runs."""

import json
import logging
import os
import pathlib
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import carbon_compile
from carbon_compile import runlog
from carbon_compile.backend import carbon
from carbon_compile.diagnostics import Refused

from .definition import eager_engine

logger = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def log():
    runlog.LOG.reset()
    return runlog.LOG


@pytest.fixture
def fast():
    """Graphs run eagerly: these tests are about verdicts, not about kernels."""
    with eager_engine():
        yield


def compiled(fn, **options):
    return torch.compile(fn, backend=carbon, options=options or None)


def refused(fn, *args, **options):
    """Codes of the refusal that the first call raises."""
    with pytest.raises(Refused) as caught:
        compiled(fn, **options)(*args)
    return caught.value.report


# --- unsafe operations


@torch.library.custom_op("fail_closed::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("fail_closed::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x):
    return torch.empty_like(x)


triple.register_autograd(lambda ctx, g: g * 3)


class OnlyBackward(torch.autograd.Function):
    """Harmless forward; its backward holds a Fourier transform."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return torch.fft.fft(g).real


def svd(x):
    return torch.linalg.svd(x)[1]


def fft(x):
    return torch.fft.fft(x).real


def multinomial(x):
    return torch.multinomial(x.abs(), 2)


def float64_mm(x):
    return x.double() @ x.double()


def empty_read(x):
    return x + torch.empty(4, 4)


def custom_op_without_derivative(x):
    return double(x) + 1


def custom_op(x):
    return triple(x) + 1


def item_decides(x):
    if x.sum().item() > 0:
        return x / 2
    return x


def branch_on_tensor(x):
    return x / 2 if x.sum() > 0 else x


def unpool(x):
    return F.max_unpool1d(x[:1, :2].unsqueeze(0), torch.zeros(1, 1, 2, dtype=torch.int64), 2)


def backward_only(x):
    return OnlyBackward.apply(x).sum()


UNSAFE = {
    svd: "CB103", fft: "CB104", multinomial: "CB402", float64_mm: "CB201", empty_read: "CB609", custom_op: "CB610",
    custom_op_without_derivative: "CB610", item_decides: "CB612", branch_on_tensor: "CB612", unpool: "CB102", backward_only: "CB104",
}  # fmt: skip


@pytest.fixture
def x():
    return torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize("suppress", [False, True], ids=["", "suppress_errors"])
@pytest.mark.parametrize("fn,code", UNSAFE.items(), ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.filterwarnings("ignore:CB603")
def test_refused_before_it_runs(fn, code, suppress, x):
    with torch._dynamo.config.patch(suppress_errors=suppress):
        report = refused(fn, x)
        assert code in report.counts()
        found = next(d for d in report if d.code == code)
        assert found.file == __file__ and found.source_line
        assert refused(fn, x).counts() == report.counts(), "final: the next call is refused as well"
    assert not any(graph.calls for graph in runlog.LOG.graphs)


@pytest.mark.parametrize("fn,code", [(fft, "CB104"), (item_decides, "CB612"), (float64_mm, "CB201"), (custom_op, "CB610")])
def test_warned_of_and_in_the_certificate(fn, code, x, fast):
    with pytest.warns(UserWarning, match=code) as caught:
        result = compiled(fn, on_unsafe="warn")(x)
    assert torch.equal(result, fn(x))
    warning = next(w for w in caught if code in str(w.message))
    assert warning.filename == __file__ and f"def {fn.__name__}" in pathlib.Path(__file__).read_text().splitlines()[warning.lineno - 2]
    certificate = carbon_compile.certificate()
    assert not certificate.held and code in certificate.reasons[0]


def test_allowed_by_code_only(x, fast):
    report = refused(lambda x: fft(x) + svd(x), x, allow=["CB104"])
    assert "CB103" in {d.code for d in report.refused} and {d.code for d in report.allowed} == {"CB104"}
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "CB")
        compiled(fft, allow=["vendor-fft"])(x)
    rows = [row for row in runlog.LOG.graphs[-1].nodes if row.verdict == "allowed"]
    assert rows and {row.code for row in rows} == {"CB104"}
    assert "allowed: allow=CB104" in carbon_compile.certificate().reasons[0]


def test_a_repeated_index_has_one_winner(x):
    """`put_` with duplicates is no finding: the last write stays, on every device."""
    index = torch.tensor([3, 1, 3, 3])
    result = compiled(lambda x: x.clone().put_(index, torch.arange(4.0)))(x.detach())
    assert result.flatten()[3] == 3.0
    assert carbon_compile.certificate().held


KERNEL = """\
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr))
"""


def test_a_users_triton_kernel(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    (tmp_path / "fail_closed_kernel.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    from fail_closed_kernel import kernel

    def fn(x):
        y = torch.zeros_like(x)
        kernel[(1,)](x, y)
        return y

    assert "CB611" in refused(fn, torch.ones(1)).counts()


# --- the user's line

LAYERS = """\
import torch


class Router(torch.nn.Module):
    def forward(self, x):
        return (
            torch.fft
            .fft(x)
            .real
        )
"""
MODEL = """\
import torch
from torch.utils.checkpoint import checkpoint

from fail_closed_layers import Router


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Linear(4, 4), Router())
        self.blocks = torch.nn.ModuleList([Router(), Router()])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return torch.linalg.svdvals(x)
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    (tmp_path / "fail_closed_layers.py").write_text(LAYERS)
    (tmp_path / "fail_closed_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    import fail_closed_model

    yield fail_closed_model.Net()
    for name in ("fail_closed_model", "fail_closed_layers"):
        sys.modules.pop(name, None)


def test_right_line_forward_and_backward_in_two_files(net):
    report = refused(net, torch.randn(3, 4))
    places = {(d.code, os.path.basename(d.file), d.line, d.module_path, d.direction) for d in report}
    for module in ("stem.1", "blocks.0", "blocks.1"):
        for direction in ("forward", "backward"):
            assert ("CB104", "fail_closed_layers.py", 8, module, direction) in places
    assert ("CB103", "fail_closed_model.py", 17, "", "forward") in places
    assert "blocks.1" in str(report) and ".fft(x)" in str(report)


def test_a_sequential_compiled_on_its_own(fast):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    compiled(model)(torch.ones(2, 4))
    assert runlog.LOG.graphs[-1].function.startswith("Sequential.forward (container.py:")


# --- ways around the compiler


def breaks_first(x):
    torch._dynamo.graph_break()
    return x.sin()


def breaks_in_a_loop(x):
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


def disabled_call(x):
    return plain(x + 1)


@torch.compiler.disable
def plain(x):
    return x * 2


@pytest.mark.parametrize("fn", [breaks_first, breaks_in_a_loop, disabled_call])
def test_graph_breaks_are_refused_wherever_they_are(fn):
    report = refused(fn, torch.ones(4))
    assert [(d.code, d.file) for d in report.refused] == [("CB601", __file__)]


def test_a_break_may_be_allowed_by_a_comment(fast):
    def fn(x):
        x = x + 1
        torch._dynamo.graph_break()  # carbon: allow[CB601] computes nothing
        return x * 2

    assert torch.equal(compiled(fn)(torch.ones(4)), torch.full((4,), 4.0))
    assert carbon_compile.certificate().reasons[0].endswith("allowed: computes nothing")
    assert len(runlog.LOG.graphs) == 2


def test_unused_allows_are_warned_of_once(fast):
    def fn(x):
        y = x * 2  # carbon: allow[CB104] there was a transform here
        return OnlyBackward.apply(y).sum()

    with pytest.warns(UserWarning, match=r"CB001: allow\[CB104\] matches no finding here") as caught:
        compiled(fn, allow=["CB104"])(torch.ones(2, requires_grad=True))
    assert len([w for w in caught if "CB001" in str(w.message)]) == 1
    assert "CB001" not in "".join(carbon_compile.certificate().reasons)


def test_an_allow_for_the_backward_is_not_called_unused_in_inference(fast):
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return torch.fft.fft(g).real  # carbon: allow[CB104] one frequency only

    def fn(x):
        return (x * 2).sum() + Backward.apply(x).sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "CB")
        with torch.no_grad():
            compiled(fn)(torch.ones(2))
        compiled(fn)(torch.ones(2, requires_grad=True))
        with torch.no_grad():
            compiled(fn)(torch.ones(2))


def test_breaks_that_compute_nothing_are_no_findings(fast, capsys):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        print("step")
        loss = model(x).square().mean()
        logger.warning("loss is computed")
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = compiled(step)
    assert step(torch.ones(2, 4)) > step(torch.ones(2, 4))
    assert capsys.readouterr().out == "step\nstep\n"
    certificate = carbon_compile.certificate()
    assert certificate.held, certificate.reasons


def scaled(x, step):
    return x * step


def over_the_limit(**options):
    with torch._dynamo.config.patch(recompile_limit=3):
        fn = torch.compile(scaled, backend=carbon, dynamic=False, options=options)
        return [fn(torch.ones(2), step) for step in range(10)]


def test_recompile_limit_is_an_error(fast):
    with pytest.raises(Refused, match="CB602") as caught:
        over_the_limit()
    assert next(iter(caught.value.report)).line == scaled.__code__.co_firstlineno


def test_recompile_limit_allowed_counts_what_ran_outside(fast):
    results = over_the_limit(allow=["CB602"])
    assert [r[0].item() for r in results] == list(range(10))
    certificate = carbon_compile.certificate()
    assert not certificate.held
    assert any("7 calls of scaled" in reason and "recompile-limit" in reason for reason in certificate.reasons)
    assert sum(graph["calls"] for graph in certificate.data["graphs"]) == 3


def test_calls_of_several_threads_are_counted(fast):
    with torch._dynamo.config.patch(recompile_limit=2):
        fn = torch.compile(scaled, backend=carbon, dynamic=False, options={"allow": ["CB602"]})
        for step in range(3):  # 0 and 1 are compiled, 2 ran outside
            fn(torch.ones(2), step)
        assert sum(bypass.calls for bypass in runlog.LOG.bypassed.values()) == 1
        threads = [threading.Thread(target=lambda: [fn(torch.ones(2), step) for step in 100 * [0, 2]]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(bypass.calls for bypass in runlog.LOG.bypassed.values()) == 401
    assert sum(graph.calls for graph in runlog.LOG.graphs) == 402


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "eager_then_compile"])
def test_stances_are_refused(stance):
    with torch.compiler.set_stance(stance):
        assert list(refused(scaled, torch.ones(2), 2).counts()) == ["CB605"]


def test_a_stance_may_use_what_is_compiled(fast):
    fn = compiled(scaled)
    fn(torch.ones(2), 2)
    with torch.compiler.set_stance("eager_on_recompile"):
        fn(torch.ones(2), 2)
        with pytest.raises(Refused, match="CB605"):
            fn(torch.ones(2, 2, dtype=torch.float16), 2)
    for stance in ({"stance": "force_eager"}, {"force_backend": "eager"}, {"skip_guard_eval_unsafe": True}):
        with torch.compiler.set_stance(**stance), pytest.raises(Refused, match="CB605"):
            fn(torch.ones(2), 2)
    assert carbon_compile.certificate().held


def test_an_allowed_stance_is_counted(fast):
    fn = compiled(scaled, allow=["CB605"])
    fn(torch.ones(2), 2)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            fn(torch.ones(2), 2)
    fn(torch.ones(2), 2)
    certificate = carbon_compile.certificate()
    assert any("3 calls of scaled" in reason and "eager-stance" in reason for reason in certificate.reasons)
    assert certificate.data["graphs"][0]["calls"] == 2


def test_a_disabled_compiler_is_refused():
    with torch._dynamo.config.patch(disable=True):
        assert list(refused(scaled, torch.ones(2), 2).counts()) == ["CB604"]


def test_a_dispatch_mode_keeps_dynamo_from_compiling():
    with FlopCounterMode(display=False):
        assert list(refused(scaled, torch.ones(2), 2).counts()) == ["CB607"]


def test_a_layer_that_runs_uncompiled(monkeypatch):
    from carbon_compile import dynamo

    settings = dynamo.unbroken_settings()
    monkeypatch.setattr(dynamo, "unbroken_settings", lambda: {**settings, "allow_rnn": False})
    gru = torch.nn.GRU(4, 4)
    assert list(refused(gru, torch.ones(2, 1, 4)).counts()) == ["CB107"]
    torch.compiler.reset()
    report = refused(gru, torch.ones(2, 1, 4), allow=["CB107"])
    assert [(d.code, d.op.partition(" ")[0]) for d in report.refused] == [("CB607", "GRU.forward")]


def failing_backend(*args, **kwargs):
    raise AssertionError("no such kernel")


@pytest.mark.filterwarnings("ignore:CB603")
def test_suppressed_errors_stay_errors_unless_allowed(monkeypatch):
    from carbon_compile import host

    monkeypatch.setattr(host, "compile_fx_inner", failing_backend)
    with torch._dynamo.config.patch(suppress_errors=True), torch._inductor.config.patch(force_disable_caches=True):
        with pytest.raises(Exception, match="no such kernel"):
            compiled(scaled)(torch.ones(2), 2)
        fn = compiled(scaled, allow=["CB603"])
        assert torch.equal(fn(torch.ones(2), 2), torch.full((2,), 2.0))
        fn(torch.ones(2), 2)
    reasons = carbon_compile.certificate().reasons
    assert any("2 calls of scaled" in reason and "errors-suppressed" in reason for reason in reasons), reasons


def test_suppress_errors_alone_is_a_warning(fast):
    with torch._dynamo.config.patch(suppress_errors=True), pytest.warns(UserWarning, match="CB603"):
        compiled(lambda x: x + 3)(torch.ones(2))
    assert carbon_compile.certificate().held


def test_data_parallel_sums_gradients_outside(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        assert "CB502" in refused(model, torch.ones(2, 4)).counts()
    finally:
        dist.destroy_process_group()


def test_an_inductor_setting_that_takes_back_a_pin():
    report = refused(scaled, torch.ones(2), 2, inductor={"use_fast_math": True})
    assert list(report.counts()) == ["CB303"]


def test_a_certificate_of_nothing_says_so():
    model = torch.nn.Linear(2, 2)
    assert carbon_compile.certificate(model).reasons == ["CB607: carbon compiled no graph"]


def test_flushing_that_starts_after_the_compilation(fast):
    fn = compiled(scaled)
    fn(torch.ones(2), 2)
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(Refused, match="CB302"):
            fn(torch.ones(2), 2)
    finally:
        torch.set_flush_denormal(False)
    fn(torch.ones(2), 2)
    assert carbon_compile.certificate().held
    allowed = compiled(lambda x: x + 1, allow=["CB302"])
    allowed(torch.ones(2))
    torch.set_flush_denormal(True)
    try:
        allowed(torch.ones(2))
    finally:
        torch.set_flush_denormal(False)
    assert carbon_compile.certificate().reasons == ["CB302: this thread flushes subnormal numbers to zero; allowed: allow=CB302"]


def test_jagged_tensors_in_a_product_are_refused():
    layer = torch.nn.Linear(4, 4)
    jagged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    assert "CB108" in refused(lambda x: layer(x), jagged).counts()


def test_a_layer_compiled_in_place_is_skipped_by_dynamo():
    layer = torch.nn.Linear(4, 4)
    layer.compile(backend="carbon")
    with pytest.raises(Refused, match="CB607"):
        layer(torch.ones(2, 4))


# --- our own bugs


def test_a_rule_that_leaves_its_operator_behind(fast, monkeypatch):
    from carbon_compile import rewrite

    table = rewrite.rewriting_table()
    monkeypatch.setattr(rewrite, "rewriting_table", lambda: {op: rule for op, rule in table.items() if op != torch.ops.aten.exp.default})
    report = refused(torch.exp, torch.ones(2), on_unsafe="allow")
    assert [(d.code, d.op) for d in report.refused] == [("CB901", "aten.exp")]
    monkeypatch.undo()
    torch.compiler.reset()
    with eager_engine():
        assert compiled(torch.exp)(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_verdicts_that_were_never_given(monkeypatch):
    from carbon_compile import host

    monkeypatch.setattr(host, "compile_fx", lambda *args, **kwargs: print)
    report = refused(torch.exp, torch.ones(2), on_unsafe="allow")
    assert list(report.counts()) == ["CB902"]


# --- a second process with warm caches

WARM = """
import json, sys, warnings

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import carbon_compile
from carbon_compile.backend import carbon


def fn(x, w):
    y = F.conv2d(x, w, padding=1)
    return torch.fft.fft(y).real.sum() + (x * 2).mean()


def refusing(x):
    return torch.linalg.svdvals(x)


torch.manual_seed(0)
x, w = torch.randn(1, 1, 4, 4, requires_grad=True), torch.randn(1, 1, 3, 3, requires_grad=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    y = torch.compile(fn, backend=carbon, options={"on_unsafe": "warn"})(x, w)
    y.backward()
    plain = torch.compile(lambda x: (x * 3).exp(), backend=carbon)(x.detach())
try:
    torch.compile(refusing, backend=carbon)(x)
    report = "ran"
except carbon_compile.Refused as error:
    report = str(error)
certificate = carbon_compile.certificate()
print(json.dumps({
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "hash": carbon_compile.fingerprint([y.detach(), x.grad, w.grad, plain.detach()]),
    "warnings": [str(w.message) for w in caught if str(w.message).startswith("CB")],
    "refused": report,
    "graphs": certificate.data["graphs"],
    "findings": certificate.data["findings"],
    "identity": certificate.identity,
}))
"""


def test_a_warm_second_process_says_the_same(tmp_path):
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
    assert (cold.pop("hits"), warm.pop("hits")) == (0, 2)
    assert warm == cold
    assert {"CB104", "CB105"} <= {text[:5] for text in cold["warnings"]}
    assert "error[CB103]" in cold["refused"]
