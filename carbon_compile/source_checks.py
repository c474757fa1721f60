"""The source lint's checks, each a function from a node to findings, listed in CHECKS at the end."""

import ast
import re
from collections.abc import Iterator

from carbon_compile.diagnostics import Diagnostic
from carbon_compile.source import Source, decorators

_ANYWHERE = (
    ("CB103", re.compile(
        r"torch\.(linalg\.(svd|svdvals|eig|eigh|eigvals|eigvalsh|qr|cholesky\w*|solve\w*|lstsq|inv\w*|pinv|"
        r"det|slogdet|lu\w*|ldl\w*|matrix_rank|matrix_exp|cond|tensorsolve|tensorinv|householder_product)"
        r"|svd|svd_lowrank|pca_lowrank|qr|cholesky\w*|inverse|pinverse|det|logdet|slogdet|lu\w*|geqrf|ormqr|"
        r"orgqr|lobpcg|triangular_solve|matrix_exp)")),
    ("CB104", re.compile(r"torch\.(fft\.(?!fftshift|ifftshift|fftfreq|rfftfreq)\w+|stft|istft)")),
    ("CB402", re.compile(r"torch\.(multinomial|poisson|binomial)")),
    ("CB502", re.compile(
        r"torch\.nn\.parallel\.(DistributedDataParallel|distributed\.DistributedDataParallel)"
        r"|torch\.distributed\.(fsdp|_composable\.fsdp)\.(fully_shard|FullyShardedDataParallel)")),
)
_COMPILED_ONLY = (
    ("CB107", re.compile(r"torch\.nn\.utils\.rnn\.(pack_padded_sequence|pack_sequence|pad_packed_sequence)")),
    ("CB207", re.compile(r"torch\.set_float32_matmul_precision")),
    ("CB401", re.compile(r"(random|numpy\.random|secrets)\.\w+|os\.urandom|uuid\.uuid[14]")),
    ("CB404", re.compile(r"torch\.(manual_seed|seed|random\.(manual_seed|seed)|cuda\.(manual_seed|seed)(_all)?)")),
    ("CB501", re.compile(
        r"torch\.distributed\.(_functional_collectives\.|nn\.functional\.)?"
        r"(all_reduce|reduce|reduce_scatter|reduce_scatter_tensor|all_reduce_coalesced)")),
    ("CB601", re.compile(r"torch\._dynamo\.graph_break")),
    ("CB606", re.compile(r"torch\.(nonzero|argwhere|masked_select|unique|unique_consecutive)")),
)
# Methods are known by name alone, so only names that nothing but a tensor has are listed.
_METHODS = (
    ("CB402", {"multinomial", "cauchy_", "geometric_", "log_normal_"}),
    ("CB606", {"nonzero", "argwhere", "masked_select", "unique_consecutive"}),
    ("CB608", {"resize_", "resize_as_", "set_"}),
    ("CB612", {"item", "tolist", "numpy"}),
)


def check_call(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """Functions and methods that are known by name to have no rule."""
    if not isinstance(node, ast.Call):
        return
    name = source.name(node.func)
    for code, pattern in _ANYWHERE:
        if pattern.fullmatch(name) and not (code == "CB502" and _reduces_exactly(source)):
            yield source.finding(code, node, name)
    if not source.is_compiled(node):
        return
    for code, pattern in _COMPILED_ONLY:
        if pattern.fullmatch(name) and not (code == "CB501" and _has_rule(source, node)):
            yield source.finding(code, node, name)
    if isinstance(node.func, ast.Attribute) and not name.startswith(("torch.", "numpy.")):
        for code, methods in _METHODS:
            if node.func.attr in methods:
                yield source.finding(code, node.func, f"Tensor.{node.func.attr}")


def _reduces_exactly(source):
    """Whether a file that wraps a model uses carbon's reduction of gradients."""
    return any(name.startswith("carbon_compile.data_parallel") for name in source.names.values())


_WITHOUT_RULE = re.compile(r"(premul_sum|product|band|bor|bxor)", re.I)


def _has_rule(source, node):
    """Whether a collective adds, averages or compares, as all do by default."""
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    named = [v.value if isinstance(v, ast.Constant) else source.name(v).rpartition(".")[2] for v in given]
    return not any(isinstance(name, str) and _WITHOUT_RULE.fullmatch(name) for name in named)


def check_disabled_call(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """A call, in compiled code, of a function of this file that `torch.compiler.disable` wraps."""
    if isinstance(node, ast.Call) and source.name(node.func) in source.disabled and source.is_compiled(node):
        name = source.name(node.func)
        yield source.finding("CB601", node, name, f"{name} is under torch.compiler.disable")


# --- tensors asked for a value by Python itself

_REDUCTIONS = {"all", "any", "isnan", "isinf", "isfinite", "allclose", "equal", "max", "mean", "min", "norm", "sum"}


def _gives_tensor(source, node):
    """Whether an expression contains a call that most likely gives a tensor."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            name = source.name(part.func)
            # self.norm(x) is a layer or a method, whatever it gives.
            other = name.startswith(("math.", "numpy.")) or name.count(".") == 1 and name.startswith("self.")
            if part.func.attr in _REDUCTIONS and not other:
                return True
    return False


def check_truth_value(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """`if x.any():`, `while`, `assert`, and `bool`, `float`, `int` of a tensor, in compiled code."""
    if not source.is_compiled(node):
        return
    if isinstance(node, ast.If | ast.While | ast.Assert | ast.IfExp):
        reads_already = any(isinstance(part, ast.Attribute) and part.attr == "item" for part in ast.walk(node.test))
        if not reads_already and _gives_tensor(source, node.test):
            word = {ast.If: "if", ast.IfExp: "if", ast.While: "while", ast.Assert: "assert"}[type(node)]
            yield source.finding("CB612", node.test, f"`{word}` on a tensor")
    elif isinstance(node, ast.Call) and source.name(node.func) in ("bool", "float", "int") and len(node.args) == 1:
        if _gives_tensor(source, node.args[0]):
            yield source.finding("CB612", node, f"{source.name(node.func)}()")


def check_set_order(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """A loop over a set, in compiled code."""
    if isinstance(node, ast.For | ast.comprehension) and source.is_compiled(node):
        over = node.iter
        called = isinstance(over, ast.Call) and source.name(over.func) in ("set", "frozenset")
        if called or isinstance(over, ast.Set | ast.SetComp):
            yield source.finding("CB305", over)


# --- settings

_SWITCHES = (
    # (code, setting, value, op, detail)
    ("CB206", re.compile(r"torch\.backends\.(cuda\.matmul|cudnn)\.allow_tf32"), True),
    ("CB206", re.compile(r"torch\.backends\.(\w+\.)*fp32_precision"), "tf32"),
    ("CB303", re.compile(r"torch\._inductor\.config\.(use_fast_math|cpp\.enable_unsafe_math_opt_flag)"), True),
    ("CB602", re.compile(r"torch\._dynamo\.config\.fail_on_recompile_limit_hit"), False),
    ("CB603", re.compile(r"torch\._dynamo\.config\.suppress_errors"), True),
    ("CB604", re.compile(r"torch\._dynamo\.config\.disable"), True),
)
_VARIABLES = {
    "TORCHDYNAMO_DISABLE": "CB604",
    "TORCH_COMPILE_DISABLE": "CB604",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "CB603",
    "TORCHINDUCTOR_USE_FAST_MATH": "CB303",
    "NVIDIA_TF32_OVERRIDE": "CB206",
}


def _settings(source, node) -> Iterator[tuple[str, ast.AST]]:
    """(setting, value) of an assignment, of `config.patch(...)`, of `os.environ[...] = ...`."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and source.name(target.value) == "os.environ":
                if isinstance(target.slice, ast.Constant):
                    yield str(target.slice.value), node.value
            elif source.name(target):
                yield source.name(target), node.value
    elif isinstance(node, ast.Call):
        yield from _settings_of_call(source, node)


def _settings_of_call(source, node):
    name = source.name(node.func)
    if name in ("os.environ.setdefault", "os.putenv") and len(node.args) == 2 and isinstance(node.args[0], ast.Constant):
        yield str(node.args[0].value), node.args[1]
    elif name == "os.environ.update":
        yield from ((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg)
    elif name.endswith("config.patch"):
        base = name.removesuffix("patch")
        yield from ((base + keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg)
        for given in node.args:
            if isinstance(given, ast.Dict):
                yield from ((f"{base}{key.value}", value) for key, value in zip(given.keys, given.values, strict=True) if isinstance(key, ast.Constant))


def check_setting(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """Flags, configuration and environment variables that weaken the promise."""
    for setting, value in _settings(source, node):
        if not isinstance(value, ast.Constant):
            continue
        for code, pattern, bad in _SWITCHES:
            if pattern.fullmatch(setting) and value.value == bad:
                inside = code == "CB206" and source.is_compiled(node)
                yield source.finding("CB207" if inside else code, node, setting, _setting_detail(source, code, setting))
        if setting in _VARIABLES and str(value.value) not in ("0", "", "False"):
            yield source.finding(_VARIABLES[setting], node, setting, setting)


def _setting_detail(source, code, setting):
    if code != "CB603":
        return setting
    lines = [str(node.lineno) for node in source.nodes if _compiles_without_fullgraph(source, node)]
    return f"torch.compile(backend=\"carbon\") without fullgraph=True on line {', '.join(lines)}" if lines else ""


def _compiles_without_fullgraph(source, node):
    if not (isinstance(node, ast.Call) and source.name(node.func) == "torch.compile"):
        return False
    given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
    return given.get("backend") == "carbon" and given.get("fullgraph") is not True


def check_stance(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """`torch.compiler.set_stance` with a stance that runs calls uncompiled."""
    if isinstance(node, ast.Call) and source.name(node.func) == "torch.compiler.set_stance":
        given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "stance")]
        stance = given[0].value if given and isinstance(given[0], ast.Constant) else None
        if stance in ("force_eager", "eager_on_recompile", "eager_then_compile"):
            yield source.finding("CB605", node, "torch.compiler.set_stance", f'"{stance}"')


def check_flush(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    if isinstance(node, ast.Call) and source.name(node.func) == "torch.set_flush_denormal":
        if node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value:
            yield source.finding("CB302", node, "torch.set_flush_denormal")


_SEEDS = re.compile(r"(torch\.(random\.)?|torch\.cuda\.|numpy\.random\.|random\.)(manual_seed|manual_seed_all|seed)")
_CLOCKS = re.compile(r"time\.\w+|os\.(urandom|getpid)|secrets\.\w+|uuid\.\w+|random\.SystemRandom|datetime\.\S*now")


def check_seed(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """A seed from the clock or the operating system; `torch.seed()`, which is one."""
    if not isinstance(node, ast.Call) or not _SEEDS.fullmatch(source.name(node.func)):
        return
    name = source.name(node.func)
    inner = [source.name(part.func) for part in ast.walk(node) if isinstance(part, ast.Call) and part is not node]
    drawn = [called for called in inner if _CLOCKS.fullmatch(called)]
    if name in ("torch.seed", "torch.random.seed", "torch.cuda.seed") or drawn or not (node.args or node.keywords):
        yield source.finding("CB405", node, name)


# --- tensors

_UNINITIALISED = re.compile(r"torch\.(empty|empty_like|empty_strided|empty_permuted)")


def _is_empty(source, node):
    if not isinstance(node, ast.Call):
        return False
    new = isinstance(node.func, ast.Attribute) and node.func.attr in ("new_empty", "new_empty_strided")
    return new or bool(_UNINITIALISED.fullmatch(source.name(node.func)))


def _is_operand(node, parent):
    if isinstance(parent, ast.AugAssign):
        return True
    return isinstance(parent, ast.BinOp | ast.UnaryOp | ast.Compare) and node is not parent


def _empty_name(node):
    return f"{ast.unparse(node.func)}"


def check_empty(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """`torch.empty(...)` as an operand, or a name bound to it whose next mention is as an operand."""
    if not _is_empty(source, node):
        return
    parent = source.parent[node]
    if _is_operand(node, parent):
        yield source.finding("CB609", node, _empty_name(node))
    elif isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
        read = _next_mention(source, parent, parent.targets[0].id)
        if read is not None and _is_operand(read, source.parent[read]):
            yield source.finding("CB609", read, _empty_name(node))


def _next_mention(source, assignment, name):
    """The first use of a name after its assignment, where only straight-line code lies between."""
    block = next(
        (body for _, body in ast.iter_fields(source.parent[assignment]) if isinstance(body, list) and assignment in body), []
    )
    for statement in block[block.index(assignment) + 1 :]:
        mentions = [part for part in ast.walk(statement) if isinstance(part, ast.Name) and part.id == name]
        if mentions:
            simple = isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr)
            return min(mentions, key=lambda part: (part.lineno, part.col_offset)) if simple else None
    return None


_PRODUCTS = re.compile(r"torch\.(mm|matmul|bmm|addmm|baddbmm|mv|dot|einsum|tensordot|inner|nn\.functional\.linear)")
_DOUBLES = ("torch.float64", "torch.double")


def _is_double(source, node):
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            if isinstance(part.func, ast.Attribute) and part.func.attr == "double" and not part.args:
                return True
            given = [*part.args, *(keyword.value for keyword in part.keywords if keyword.arg == "dtype")]
            if any(source.name(value) in _DOUBLES for value in given):
                return True
    return False


def check_double_product(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """A product with an operand that is visibly float64, and a float64 default dtype."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        if _is_double(source, node.left) or _is_double(source, node.right):
            yield source.finding("CB201", node, "@")
    elif isinstance(node, ast.Call):
        name = source.name(node.func)
        if _PRODUCTS.fullmatch(name) and any(_is_double(source, value) for value in node.args):
            yield source.finding("CB201", node, name)
        elif name == "torch.set_default_dtype" and node.args and source.name(node.args[0]) in _DOUBLES:
            yield source.finding("CB201", node, name, "it makes float64 the type of all new tensors and products")


_GPU_MODULE = re.compile(r"torch\.nn\.[A-Z]\w*")


def check_initialised_on_gpu(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """`nn.Linear(..., device="cuda")`, `torch.set_default_device("cuda")`, `with torch.device("cuda")`."""
    if isinstance(node, ast.With):
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and source.name(call.func) == "torch.device" and _names_gpu(call.args):
                yield source.finding("CB406", call, "torch.device")
    elif isinstance(node, ast.Call):
        name = source.name(node.func)
        device = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
        if (_GPU_MODULE.fullmatch(name) and _names_gpu(device)) or (
            name == "torch.set_default_device" and _names_gpu(node.args)
        ):
            yield source.finding("CB406", node, name)


def _names_gpu(values):
    return any(isinstance(value, ast.Constant) and str(value.value).startswith("cuda") for value in values)


def check_triton_kernel(source: Source, node: ast.AST) -> Iterator[Diagnostic]:
    """Launches of this file's `triton.jit` kernels; a kernel that the file neither launches nor
    calls from another kernel is shown where it is defined."""
    if not _is_kernel(source, node):
        return
    calls = [part for part in source.nodes if isinstance(part, ast.Call)]
    launches = [c for c in calls if isinstance(c.func, ast.Subscript) and source.name(c.func.value) == node.name]
    helper = any(source.name(call.func) == node.name for call in calls)
    for place in launches or ([] if helper else [node]):
        yield source.finding("CB611", place, node.name)


def _is_kernel(source, node):
    return isinstance(node, ast.FunctionDef) and "triton.jit" in decorators(source, node)


CHECKS = (
    check_call,
    check_disabled_call,
    check_truth_value,
    check_set_order,
    check_setting,
    check_stance,
    check_flush,
    check_seed,
    check_empty,
    check_double_product,
    check_initialised_on_gpu,
    check_triton_kernel,
)
