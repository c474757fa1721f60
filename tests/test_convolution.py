"""Convolutions whose windows tile the input: products, and a refusal for everything else."""

import pytest
import torch
import torch.nn.functional as F

from carbon_compile.bits import assert_bitwise
from carbon_compile.hashing import fingerprint
from carbon_compile.lowering import composites, registry
from carbon_compile.lowering.policy import Policy
from carbon_compile.lowering.registry import Refusal

from .definition import check_accuracy, check_compiled, compiled

registry.load()


def eager(function, *args, **kwargs):
    with composites.Composites(Policy()):
        return function(*args, **kwargs)


def tensors(dtype):
    shapes = {
        "sequence": (2, 3, 11), "image": (2, 3, 8, 13), "volume": (2, 3, 4, 6, 4),
        "w1": (5, 3, 4), "w2": (5, 3, 4, 4), "w3": (5, 3, 2, 3, 4), "point": (6, 3, 1, 1),
        "t1": (3, 5, 4), "t2": (3, 5, 2, 3), "bias": (5,),
    }  # fmt: skip
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes.values()]


def every_kind(sequence, image, volume, w1, w2, w3, point, t1, t2, bias):
    return (
        F.conv1d(sequence, w1, bias, stride=4),
        torch.conv2d(image, w2, bias, stride=(4, 4)),
        F.conv3d(volume, w3, bias, stride=(2, 3, 4), padding="valid"),
        F.conv2d(image, point, padding="same"),
        F.conv2d(image[0], w2, stride=4),
        F.conv_transpose1d(sequence, t1, bias, stride=4),
        torch.conv_transpose2d(image, t2, bias, stride=(2, 3)),
    )


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_compiled_is_the_definition_and_accurate(dtype, tolerance):
    arguments = tensors(dtype)
    check_accuracy(every_kind, arguments, check_compiled(every_kind, arguments), tolerance)


def test_a_patch_embedding_is_its_product():
    image, weight, bias = torch.randn(3, 4, 12, 8), torch.randn(7, 4, 4, 2), torch.randn(7)
    got = eager(F.conv2d, image, weight, bias, stride=(4, 2))
    patches = F.unfold(image, (4, 2), stride=(4, 2)).transpose(1, 2)
    want = eager(F.linear, patches, weight.reshape(7, -1), bias)
    assert_bitwise(got.flatten(2).transpose(1, 2), want)
    assert_bitwise(eager(F.conv2d, image[1:2], weight, bias, stride=(4, 2)), got[1:2])
    for layout in (torch.channels_last, torch.contiguous_format):
        assert_bitwise(eager(F.conv2d, image.to(memory_format=layout), weight, bias, stride=(4, 2)), got)


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"stride": 3, "padding": 1}, {"stride": 3, "padding": "valid", "dilation": 2}, {"padding": "same"}],
)
def test_overlapping_windows_are_refused(options):
    with pytest.raises(Refusal, match="no rule yet") as refused:
        eager(F.conv2d, torch.ones(1, 2, 9, 9), torch.ones(4, 2, 3, 3), **options)
    assert refused.value.code == "CB105"


def test_groups_and_output_padding_are_refused():
    with pytest.raises(Refusal, match="2 groups"):
        eager(F.conv1d, torch.ones(1, 4, 6), torch.ones(4, 2, 3), stride=3, groups=2)
    with pytest.raises(Refusal, match="output padding"):
        eager(F.conv_transpose1d, torch.ones(1, 4, 6), torch.ones(4, 2, 3), stride=3, output_padding=1)


def test_shapes_that_do_not_fit():
    with pytest.raises(RuntimeError, match="expects 3 channels"):
        eager(F.conv2d, torch.ones(1, 2, 4, 4), torch.ones(4, 3, 2, 2), stride=2)
    with pytest.raises(RuntimeError, match="3 or 4 dimensions"):
        eager(F.conv2d, torch.ones(4, 4), torch.ones(4, 3, 2, 2), stride=2)


def check(device):
    """Fingerprints of outputs and gradients, on `device`."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        arguments = [t.detach().to(device).requires_grad_() for t in tensors(dtype)]
        found[str(dtype)] = fingerprint([y.detach() for part in compiled(every_kind, arguments) for y in part])
    return found


@pytest.mark.gpu
def test_gpu_equals_cpu():
    assert check("cuda") == check("cpu")
