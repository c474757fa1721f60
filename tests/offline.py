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
