"""What this machine and process are like, and what about them would weaken the promise.

Importing this module doesn't import torch; calling `describe` does. Private settings of PyTorch are
read only where PyTorch has already loaded them, so that asking changes nothing.
"""

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from carbon_compile.diagnostics import Diagnostic

# The same range as in pyproject.toml.
SUPPORTED_TORCH = ((2, 11), (2, 14))

# Variables that decide whether, how, or with what rounding code is compiled and run.
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCHDYNAMO_DISABLE",
    "TORCHDYNAMO_SUPPRESS_ERRORS",
    "TORCHINDUCTOR_USE_FAST_MATH",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_INTERPRET",
)
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
_OFF = ("", "0", "false", "False")


def package_version() -> str:
    from carbon_compile import __version__

    return __version__


def describe() -> dict:
    """The environment as a flat dict of str, int, bool or None, in the order in which to print it."""
    import torch

    return {
        "carbon_compile": package_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": installed("triton"),
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "gpus": ", ".join(_gpus(torch)) or None,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpuinfo("model name"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_flags": " ".join(flag for flag in _CPU_FLAGS if flag in (_cpuinfo("flags") or "").split()),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        **_flags(torch),
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _flags(torch):
    from carbon_compile.lowering.policy import matmul_precision

    flags = {
        "float32_matmul_precision": matmul_precision(),
        "cuda_matmul_tf32": _tf32(torch.backends.cuda.matmul),
        "cudnn_tf32": _tf32(torch.backends.cudnn),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "subnormals_flushed": subnormals_flushed(),
        "compiler_stance": compiler_stance(),
    }
    for name in ("suppress_errors", "disable", "recompile_limit", "fail_on_recompile_limit_hit"):
        value = _setting("torch._dynamo.config", name)
        if value is not None:
            flags[f"dynamo_{name}"] = value
    return flags


def _tf32(backend):
    """Whether TF32 is on; where that was set by `fp32_precision`, the older name for it raises."""
    try:
        return backend.allow_tf32
    except RuntimeError:
        return True


def _setting(module, name):
    return getattr(sys.modules.get(module), name, None)


def installed(package: str) -> str | None:
    """The version of an installed distribution, without importing it; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


def machine() -> str:
    """The GPUs that the driver knows, or else the CPU, without importing torch."""
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = re.search(r"Model:\s*(.+)", path.read_text())
        models += [model[1].strip()] if model else []
    return ", ".join(models) or _cpuinfo("model name") or platform.machine()


def _gpus(torch):
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs)" for gpu in found]


def _cpuinfo(key):
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def subnormals_flushed() -> bool:
    """Whether this thread flushes subnormals. PyTorch has no getter, but Python's own floats obey."""
    smallest_normal = sys.float_info.min
    return smallest_normal / 2 == 0


def compiler_stance() -> str:
    """The stance set by `torch.compiler.set_stance`, "default" where compilation never started."""
    stance = _setting("torch._dynamo.eval_frame", "_stance")
    return getattr(stance, "stance", "default")


def stance_finding() -> Diagnostic | None:
    """CB605, where the stance of this moment lets compiled functions run uncompiled."""
    if compiler_stance() in ("force_eager", "eager_on_recompile", "eager_then_compile", "aot_eager_then_compile"):
        return Diagnostic("CB605", f'"{compiler_stance()}"')
    stance = _setting("torch._dynamo.eval_frame", "_stance")
    if getattr(stance, "backend", None) is not None:
        return Diagnostic("CB605", f"with force_backend={stance.backend!r}")
    if getattr(stance, "skip_guard_eval_unsafe", False):
        return Diagnostic("CB605", "with skip_guard_eval_unsafe=True")
    return None


def findings(devices: tuple[str, ...] = ()) -> list[Diagnostic]:
    """What about this process would weaken the promise; `devices` are the graph's ("cpu", "cuda")."""
    import torch

    found = [
        *_version_findings(str(torch.__version__)),
        *_device_findings(devices, torch.version.hip),
        *_escape_findings(),
    ]
    if subnormals_flushed():
        found.append(Diagnostic("CB302"))
    if _is_set("TORCHINDUCTOR_USE_FAST_MATH") or _setting("torch._inductor.config", "use_fast_math"):
        found.append(Diagnostic("CB303", "Inductor's use_fast_math"))
    return found


def _version_findings(version):
    match = re.match(r"(\d+)\.(\d+)", version)
    first, last = SUPPORTED_TORCH
    if match is None or not first <= (int(match[1]), int(match[2])) < last:
        supported = f"{first[0]}.{first[1]} to {last[0]}.{last[1] - 1}"
        yield Diagnostic("CB301", f"PyTorch {version} (supported: {supported})")


def _device_findings(devices, hip):
    for device in devices:
        if device not in ("cpu", "cuda"):
            yield Diagnostic("CB304", f"device {device!r}")
        elif device == "cuda" and hip:
            yield Diagnostic("CB304", "AMD GPUs")
        elif device == "cpu" and platform.machine().lower() not in ("x86_64", "amd64"):
            yield Diagnostic("CB304", f"{platform.machine()} processors")


def _escape_findings():
    if _setting("torch._dynamo.config", "suppress_errors") or _is_set("TORCHDYNAMO_SUPPRESS_ERRORS"):
        yield Diagnostic("CB603")
    yield from disabled_findings()
    if stance_finding() is not None:
        yield stance_finding()


def disabled_findings() -> list[Diagnostic]:
    """CB604 for each switch that turns `torch.compile` off."""
    variables = [name for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE") if _is_set(name)]
    found = [Diagnostic("CB604", f"{name}={os.environ[name]}") for name in variables]
    if _setting("torch._dynamo.config", "disable") and not found:
        found.append(Diagnostic("CB604", "torch._dynamo.config.disable"))
    return found


def _is_set(variable):
    return os.environ.get(variable, "") not in _OFF


def text() -> str:
    """A block to paste into a bug report."""
    facts = describe()
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {'none' if value is None else value}" for name, value in facts.items()]
    concerns = [f"{d.code} {d.kind.name}: {d.message}" for d in findings()]
    return "\n".join(["carbon-compile env", *lines, *concerns]) + "\n"
