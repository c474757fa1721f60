"""Kernels compiled for GPUs that aren't here: a driver that does nothing but name one."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def pretend(capability):
    """Let Triton, and the plans of products, take this process for one with such a GPU ("90" is 9.0) of 132 multiprocessors.

    For the rest of the process: see `printed`.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from carbon_compile.templates import launch

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return capability  # Triton keeps compiled kernels by the device's number

        def get_current_stream(self, device=0):
            return 0

    triton.runtime.driver.set_active(Driver())
    launch.hardware = lambda device: launch.Hardware(divmod(capability, 10), 132)
    launch.gemm_plan.cache_clear()


def printed(code):
    """What a program prints in a process of its own. AssertionError with its last errors where it fails."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def generated(loss, backward=True):
    """The CUDA code that Inductor writes for `loss()`, compiled with carbon, forward and backward: its source files.

    The graphs are traced on the CPU, where canonical graphs are the same, and moved. For the rest of the
    process; checked on PyTorch 2.11 and 2.13, of which neither needs to be a build with CUDA.
    """
    import torch
    from torch._functorch import config as functorch
    from torch._guards import TracingContext
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    from carbon_compile import backend, host
    from carbon_compile.lowering import unsigned

    graphs, sources, compile_graph = [], [], host.compile_fx_inner

    class Written(Exception):
        pass

    def stop(lowering):
        source = lowering.codegen()[0]
        sources.append(getattr(source, "value", source))
        raise Written

    def keep(gm, inputs, **kwargs):
        """Instead of compiled code: something that gives results of the right layouts."""
        graphs.append((gm, inputs, kwargs))
        results = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in gm.graph.output_node().args[0]]
        layouts = [(v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in results]
        told = TracingContext.get().output_strides
        if told is not None:  # the backward graph is compiled for what a forward graph's results are like
            told.extend(layout[1] if isinstance(layout, tuple) else None for layout in layouts)

        def run(arguments):
            arguments.clear()
            return [torch.empty_strided(*v[:2], dtype=v[2]).zero_() if isinstance(v, tuple) else v for v in layouts]

        run._boxed_call = True
        return run

    host.compile_fx_inner = keep
    with config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        result = torch.compile(loss, backend="carbon")()
        if backward:
            result.backward()
    _pretend_for_inductor()
    GraphLowering._compile_to_module = GraphLowering.compile_to_module = stop
    for gm, inputs, kwargs in graphs:
        _move(gm)
        unsigned.place(gm)  # which the backend did while it was the CPU's
        settings = {**host.known_config(backend.inductor_config()), "fx_graph_cache": False, "compile_threads": 1}
        try:
            with config.patch(settings):
                compile_graph(gm, [_moved(value) for value in inputs], **kwargs)
        except Exception as error:
            if backend.cause(error, Written) is None:
                raise
    return sources


def _moved(value):
    """A fake tensor with its layout on a GPU; anything else as it is."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    if not isinstance(value, FakeTensor):
        return torch.device("cuda", 0) if isinstance(value, torch.device) else value
    with unset_fake_temporarily():
        meta = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, torch.device("cuda", 0))


def _move(gm):
    from torch.utils._pytree import tree_map

    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(_moved, node.meta["val"])
        if node.op == "call_function":
            node.args, node.kwargs = tree_map(_moved, node.args), tree_map(_moved, node.kwargs)
    gm.recompile()


def _pretend_for_inductor():
    """Let Inductor take this process for one with an H100. It asks in many places."""
    import contextlib
    import types

    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._subclasses import fake_tensor

    pretend(90)
    properties = types.SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, gcnArchName="", L2_cache_size=50 << 20,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    )  # fmt: skip
    nothing, stream = (lambda *args, **kwargs: None), types.SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1)
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties, "get_device_capability": (9, 0),
        "is_initialized": True, "get_device_name": properties.name, "is_bf16_supported": True, "current_stream": stream,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "_exchange_device": 0, "_maybe_exchange_device": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    for name in ("_lazy_init", "init", "synchronize", "set_device", "set_rng_state"):
        setattr(torch.cuda, name, nothing)
    for name, answer in {"getCurrentRawStream": 0, "getDevice": 0, "setDevice": None, "getDeviceCount": 1}.items():
        setattr(torch._C, f"_cuda_{name}", lambda *args, answer=answer: answer)
    interface = {"is_available": True, "get_compute_capability": 90, "get_device_properties": properties, "current_device": 0, "get_raw_stream": 0}
    for name, answer in interface.items():
        setattr(CudaInterface, name, staticmethod(lambda *args, answer=answer: answer))
    CudaInterface.set_device = CudaInterface.synchronize = staticmethod(nothing)
    CudaInterface.Worker.get_device_properties = staticmethod(lambda *args: properties)
    CudaInterface.device = lambda *args: contextlib.nullcontext()
    fake_tensor.init_gpu_context = joint_graph.lazy_init = post_grad.lazy_init = nothing
    scheduler.has_triton = lambda *args: True
