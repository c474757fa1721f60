"""Products into padded rows in Triton's interpreter: TRITON_INTERPRET=1 python -m tests.padding_checks"""

import torch

from tests import interpreter

interpreter.patch()

from carbon_compile.templates import launch, matmul, matmul_kernels  # noqa: E402


def bits(x):
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def products():
    """(a, b, balance, bias, plan) of products whose rows are worth no whole chunk; the last column matters."""
    g = torch.Generator().manual_seed(0)
    levels, joint = launch.Plan(32, 32, 64, 4, 1), launch.Plan(32, 16, 64, 4, 1, joint=True, swap=True, tma=True)
    parts = launch.Plan(16, 16, 64, 4, 1, joint=True, tma=True, parts=2, places=3)
    for m, n in ((21, 19), (5, 33)):
        a, b = (torch.randn(*size, generator=g) * torch.exp(torch.randn(*size, generator=g)) for size in ((m, 150), (150, n)))
        a[3], a[4, 7], b[9, n - 1] = 0, torch.inf, torch.nan
        for plan, splits in ((levels, 1), (joint, 1), (levels, 3), (joint, 2), (parts, 1)):
            yield a, b, "weight", None, plan, splits
        yield a, b, "none", torch.randn(n, generator=g).expand(m, n), levels, 1
        yield a.t().contiguous().t(), b, "gradient", None, joint, 1


def check_products():
    count = 0
    for a, b, balance, bias, plan, splits in products():
        n = b.shape[1]
        for window, dtype, row in ((24, torch.float32, 48), (16, torch.bfloat16, 64), (24, torch.float32, n)):
            want = matmul.exact_mm(a, b, window=window, balance=balance, bias=bias, out_dtype=dtype)
            twin = matmul.exact_mm(a, b, window=window, balance=balance, bias=bias, out_dtype=dtype, row=row)
            got = matmul_kernels.multiply(a, b, window, balance, bias, dtype, plan=launch.split(plan, 256, window, splits), row=row)
            for each in (twin, got):
                assert each.stride() == (row, 1) and each.untyped_storage().nbytes() == a.shape[0] * row * dtype.itemsize
                assert torch.equal(bits(each), bits(want)), (window, balance, dtype, plan, row)
            count += 1
    return count


if __name__ == "__main__":
    print(check_products(), "equal")
