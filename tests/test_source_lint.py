import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from carbon_compile import source_lint
from carbon_compile.codes import CODES, page
from carbon_compile.diagnostics import Policy, Report
from carbon_compile.source_lint import lint_paths, lint_source, python_files

EXAMPLES = [(code, i, e) for code in CODES for i, e in enumerate(page(code).examples()) if e.kind == "source"]


def codes(text):
    return [(d.code, d.line) for d in lint_source(textwrap.dedent(text))]


def in_forward(body):
    lines = textwrap.indent(textwrap.dedent(body), " " * 8)
    return f"import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n{lines}"


def found_in_forward(body):
    return [d.code for d in lint_source(in_forward(body))]


@pytest.mark.parametrize("code,i,example", EXAMPLES, ids=[f"{c}-{i}" for c, i, _ in EXAMPLES])
def test_examples_of_the_pages(code, i, example, tmp_path):
    file = tmp_path / "example.py"
    file.write_text(example.source)
    report, failures = lint_paths([str(file)])
    assert not failures
    left = {d.code for d in (*report.refused, *report.warned)}
    if example.fails:
        assert code in left and left - {code} <= ({"CB402"} if code in ("CB002", "CB003") else set()), str(report)
    else:
        assert report.clean, str(report)


def test_imports_no_torch():
    check = "import sys, carbon_compile.source_lint, carbon_compile.cli; sys.exit('torch' in sys.modules or 'tabulate' in sys.modules)"
    root = str(pathlib.Path(source_lint.__file__).parent.parent)
    assert subprocess.run([sys.executable, "-c", check], env={**os.environ, "PYTHONPATH": root}).returncode == 0


# --- names and scopes


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.linalg.svd(x)",
        "import torch as t\nt.linalg.svd(x)",
        "from torch import linalg\nlinalg.svd(x)",
        "import torch.linalg as la\nla.svd(x)",
        "from torch.linalg import svd as decompose\ndecompose(x)",
    ],
)
def test_names_are_followed_through_imports(text):
    assert codes(text) == [("CB103", 2)]


def test_names_of_others_are_left_alone():
    assert codes("import numpy as np\nnp.linalg.svd(x)\nscipy.fft.fft(x)\nmodel.fft(x)\nself.svd(x)") == []
    assert codes("import torch\ntorch.fft.fftshift(x)\ntorch.fft.fftfreq(8)") == []


ITEM = "return x.sum().item()"


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nclass M(torch.nn.Module):\n  def forward(self, x):\n    return x.item()",
        "from torch import nn\nclass M(nn.Module):\n  def forward(self, x):\n    return x.item()",
        "import torch\nclass B(torch.nn.Module): pass\nclass M(B):\n  def forward(self, x): return x.item()",
        "import torch\n@torch.compile\ndef f(x): return x.item()",
        "import torch\n@torch.compile(backend='carbon')\ndef f(x): return x.item()",
        "import torch\ndef f(x): return x.item()\ng = torch.compile(f, backend='carbon')",
        "import torch\ng = torch.compile(lambda x: x.item())",
        "import torch\ndef h(x): return x.item()\n@torch.compile\ndef f(x): return h(x)",
        "import torch\nclass M(torch.nn.Module):\n  def forward(self, x): return self.part(x)\n  def part(self, x): return x.item()",
    ],
)
def test_compiled_code_is_recognised(text):
    assert [d.code for d in lint_source(text)] == ["CB612"]


@pytest.mark.parametrize(
    "text",
    [
        "def f(x): return x.item()",
        "import torch\nclass M(torch.nn.Module):\n  def log(self, x): return x.item()",
        "import torch\nclass Loader:\n  def forward(self, x): return x.item()",
        "import torch\n@torch.compiler.disable\ndef h(x): return x.item()\ndef g(x): return h(x)",
        in_forward("if not torch.compiler.is_compiling():\n    assert x.min() >= 0, x.tolist()\nreturn x"),
    ],
)
def test_code_that_is_not_compiled_may_read_values(text):
    assert lint_source(text) == []


# --- the checks, beyond the examples of the pages


@pytest.mark.parametrize(
    "body,code",
    [
        ("if x.any(): return x", "CB612"),
        ("while (x > 0).all(): x = x - 1", "CB612"),
        ("assert not torch.isnan(x), 'nan'", "CB612"),
        ("return 1 if x.sum() > 0 else 2", "CB612"),
        ("return float(x.mean())", "CB612"),
        ("return x.cpu().numpy()", "CB612"),
        ("import numpy as np\nreturn x + np.random.rand()", "CB401"),
        ("return x.cauchy_()", "CB402"),
        ("torch.cuda.manual_seed_all(1)", "CB404"),
        ("torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.PRODUCT)", "CB501"),
        ("return x.nonzero()", "CB606"),
        ("x.set_(y)", "CB608"),
        ("for part in set(parts): x = x + part", "CB305"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "CB207"),
    ],
)
def test_in_compiled_code(body, code):
    assert found_in_forward(body) == [code]


@pytest.mark.parametrize(
    "body",
    [
        "if self.training: return x",
        "if x.dim() == 2 and x.shape[0] > 1: return x",
        "if mask is not None: return x",
        "if self.norm(x) is None: return x",
        "for name in sorted({'a', 'b'}): x = x + 1",
        "return x.unique(), {}.items()",
        "torch.distributed.all_gather(parts, x)",
        "torch.distributed.all_reduce(x)",
        "return x.exponential_(), torch.randperm(4)",
    ],
)
def test_in_compiled_code_quiet(body):
    assert found_in_forward(body) == []


@pytest.mark.parametrize(
    "line,code",
    [
        ("torch.backends.cudnn.allow_tf32 = True", "CB206"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "CB206"),
        ("os.environ['NVIDIA_TF32_OVERRIDE'] = '1'", "CB206"),
        ("torch._dynamo.config.patch(suppress_errors=True)", "CB603"),
        ("torch._dynamo.config.patch({'suppress_errors': True})", "CB603"),
        ("os.environ.setdefault('TORCH_COMPILE_DISABLE', '1')", "CB604"),
        ("os.environ.update(TORCHDYNAMO_DISABLE='1')", "CB604"),
        ("torch._dynamo.config.disable = True", "CB604"),
        ("torch.compiler.set_stance(stance='eager_on_recompile')", "CB605"),
        ("with torch.compiler.set_stance('force_eager'): pass", "CB605"),
        ("torch._dynamo.config.fail_on_recompile_limit_hit = False", "CB602"),
        ("os.environ['TORCHINDUCTOR_USE_FAST_MATH'] = '1'", "CB303"),
        ("torch.seed()", "CB405"),
        ("random.seed()", "CB405"),
        ("torch.manual_seed(int.from_bytes(os.urandom(4), 'little'))", "CB405"),
        ("torch.set_default_device('cuda:0')", "CB406"),
        ("with torch.device('cuda'): model = M()", "CB406"),
        ("torch.set_default_dtype(torch.float64)", "CB201"),
        ("torch.einsum('ij,jk', a.to(torch.float64), b)", "CB201"),
        ("torch.nn.parallel.DistributedDataParallel(m)", "CB502"),
    ],
)
def test_anywhere(line, code):
    assert codes(f"import os, random, torch\n{line}") == [(code, 2)]


@pytest.mark.parametrize(
    "line",
    [
        "torch.backends.cuda.matmul.allow_tf32 = False",
        "torch.set_float32_matmul_precision('medium')",
        "os.environ['TORCHDYNAMO_DISABLE'] = '0'",
        "torch.compiler.set_stance('fail_on_recompile')",
        "torch.manual_seed(args.seed)",
        "m = torch.nn.Linear(4, 4, device='cpu')",
        "x = torch.zeros(4, device='cuda')",
        "y = (a.double() + b).float() @ w",
    ],
)
def test_anywhere_quiet(line):
    quiet = line.startswith("y = ")  # its operand is float32 again, which the text hardly tells
    assert codes(f"import os, random, torch\n{line}") == ([("CB201", 2)] if quiet else [])


@pytest.mark.parametrize(
    "body,line",
    [
        ("return torch.empty(4) + x", 1),
        ("return -torch.empty_like(x)", 1),
        ("y = x.new_empty(4)\nreturn y * 2", 2),
        ("y = torch.empty(4)\ny += x", 2),
    ],
)
def test_uninitialised_read(body, line):
    assert codes("import torch\ndef f(x):\n" + textwrap.indent(body, "  ")) == [("CB609", line + 2)]


@pytest.mark.parametrize(
    "body",
    [
        "y = torch.empty(4)\ny.copy_(x)\nreturn y + 1",
        "y = torch.empty(4)\ntorch.add(x, 1, out=y)\nreturn y + 1",
        "y = torch.empty(4)\nfor i in range(4): y[i] = i\nreturn y + 1",
        "y = torch.empty(4)\nif c: y = x\nreturn y + 1",
        "self.w = torch.nn.Parameter(torch.empty(4))",
        "return torch.empty(4).fill_(1) + x",
    ],
)
def test_uninitialised_read_quiet(body):
    assert codes("import torch\ndef f(x):\n" + textwrap.indent(body, "  ")) == []


def test_suppressed_errors_name_the_calls_that_need_fullgraph():
    text = "import torch\ntorch._dynamo.config.suppress_errors = True\nf = torch.compile(g, backend='carbon')\n"
    assert lint_source(text)[0].note == 'torch.compile(backend="carbon") without fullgraph=True on line 3'
    assert lint_source(text.replace("'carbon'", "'carbon', fullgraph=True"))[0].note == ""


def test_triton_kernels_are_shown_where_they_are_launched():
    kernels = "import triton\n@triton.jit\ndef helper(x):\n  return x\n@triton.jit\ndef kernel(x):\n  helper(x)\n"
    assert codes(kernels) == [("CB611", 6)]
    assert codes(kernels + "def run(x):\n  kernel[(1,)](x)\n") == [("CB611", 9)]


# --- allow comments


def test_allowed_findings_are_kept_as_allowed(tmp_path):
    file = tmp_path / "m.py"
    file.write_text("import torch\ny = torch.fft.fft(x)  # carbon: allow[CB104] plots only\n")
    report, _ = lint_paths([str(file)])
    assert report.clean and [d.code for d in report.allowed] == ["CB104"]


def test_comments_about_codes_that_only_a_graph_shows_are_left_to_the_graph_lint():
    assert codes("y = x.mode()  # carbon: allow[CB101] ties don't matter\n") == []
    assert codes("y = f(x)  # carbon: allow[CB402] a sampler hidden in f\n") == []
    assert codes("y = f(x)  # carbon: allow[CB405] nothing here\n") == [("CB001", 1)]


@pytest.mark.parametrize(
    "comment,message",
    [
        ("allow[CB10] why", "the allow comment names no such code: 'CB10'; did you mean CB101?"),
        ("allow why", "the allow comment names no code"),
        ("allow[] why", "the allow comment names no code"),
        ("allow[CB402]", "allow[CB402] gives no reason and has no effect"),
    ],
)
def test_malformed_comments(comment, message):
    assert message in [d.message for d in lint_source(f"x = 1  # carbon: {comment}\n")]


# --- files


def test_files_are_found_sorted_without_hidden_and_installed_ones(tmp_path):
    for name in ("b.py", "a/x.py", ".venv/y.py", "lib/site-packages/z.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert list(python_files([str(tmp_path)])) == [str(tmp_path / "a/x.py"), str(tmp_path / "b.py")]


def test_what_is_not_python_is_one_line_and_the_rest_is_linted(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "good.py").write_text("import torch\ntorch.seed()\n")
    report, failures = lint_paths([str(tmp_path)])
    assert report.counts() == {"CB405": 1}
    assert failures == [
        f"{tmp_path / 'bad.py'}:1: not Python: invalid syntax",
        f"{tmp_path / 'binary.py'}: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ]


def test_policy_reaches_the_report(tmp_path):
    (tmp_path / "m.py").write_text("import torch\ntorch.seed()\n")
    report, _ = lint_paths([str(tmp_path)], Policy(allow=["CB405"]))
    assert isinstance(report, Report) and report.clean
