"""Collectives, cut products and sharded training: every number of ranks gives one rank's bits."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from tests import collective_checks as checks
from tests import ranks


def test_operators_on_four_ranks():
    for wrong in ranks.run(checks.operators, 4):
        assert wrong == {"sums": [], "products": [], "vocabulary": [], "eager": [], "lowered": []}


def test_compiled_collectives_on_two_ranks():
    assert ranks.run(checks.compiled, 2) == [[], []]


def test_tensor_and_sequence_parallelism_on_two_ranks():
    for results in ranks.run(checks.tensor_parallel, 2, 1, ("whole", "sequence")):
        assert results["sequence"] == results["whole"]


def test_logical_shards_on_one_rank_and_two():
    alone = ranks.run(checks.data_parallel, 1, 2, ("plain", "microbatches 2", "microbatches 8"))[0]
    both = ranks.run(checks.data_parallel, 2, 2, ("plain", "ddp", "ddp, small buckets", "fsdp"))
    for results in (alone, *both):
        for kind, result in results.items():
            assert result == alone["plain"], kind


def test_trainers_of_shards_on_one_rank_and_two(tmp_path):
    alone = ranks.run(checks.trainers, 1, 2, ("eager",), str(tmp_path / "one"))[0]
    for results in ranks.run(checks.trainers, 2, 2, ("compiled", "fsdp"), str(tmp_path / "two")):
        assert results == dict.fromkeys(results, alone["eager"])


def test_a_trainers_step_that_fails_on_one_rank_ends_on_all():
    for told in ranks.run(checks.trainers_apart, 2):
        assert told["loss"].startswith("StepFailed: step 1: the loss is nan") and told["kept"]
        assert told["apart"].startswith("CollectiveError: ranks of group") and "seeded" in told["apart"]


def test_optimizers_step_a_dtensors_parts():
    assert ranks.run(checks.optimizers_of_parts, 2) == [[], []]


def test_partial_sums_of_dtensors_are_refused():
    for eager, compiled in ranks.run(checks.partial_sums, 2):
        assert eager == ["CB501", None, None] and compiled == ["CB501"]


def test_products_that_ranks_have_rounded_are_not_summed():
    for found, fine in ranks.run(checks.partial_products, 2):
        assert found == dict.fromkeys(found, True) and len(found) == 13
        assert fine == dict.fromkeys(fine, True) and len(fine) == 7


def test_arrangements_without_an_exact_form_name_a_way_out():
    for told in ranks.run(checks.arrangements, 4):
        assert told["hsdp"].startswith("NotImplementedError: HSDP") and "a mesh of one dimension" in told["hsdp"]
        assert told["hsdp_alone"].startswith("Refused") and "CB501" in told["hsdp_alone"] and "in place of HSDP" in told["hsdp_alone"]
        assert told["ddp_of_parts"].startswith("NotImplementedError") and 'group=mesh["dp"].get_group()' in told["ddp_of_parts"]
        assert told["two_dimensions"] == 'ValueError: RowwiseParallel cuts over one dimension of a mesh, and this one has 2: give it mesh["dp"], mesh["tp"]'


def test_ranks_that_disagree_all_say_so_and_go_on():
    for told, clean, after in ranks.run(checks.disagreement, 2):
        shapes, operations, types, seeds = (text for text, _ in told)
        assert "rank 0: all_reduce sum of float32 [4]; rank 1: all_reduce sum of float32 [5]" in shapes
        assert "all_reduce max" in operations and "all_reduce sum" in operations
        assert "bfloat16" in types and "seeded" in seeds
        assert all(text.startswith("CollectiveError: ranks of group") for text, _ in told)
        assert clean and after == [2.0, 2.0]


def test_a_rank_that_dies_is_an_error_within_the_timeout():
    (told, seconds), clean = ranks.run(checks.dying, 2, timeout=5, silent=(1,))[0]
    assert told.startswith("CollectiveError") and "a rank died" in told
    assert seconds < 10 and clean


# --- the whole matrix: pytest -m distributed -------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_tensor_parallel_degrees(world):
    for results in ranks.run(checks.tensor_parallel, world, 5, ("whole", "tensor", "sequence"), timeout=300, limit=900):
        assert results["tensor"] == results["whole"] and results["sequence"] == results["whole"]


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_compiled_tensor_parallelism(world):
    kinds = ("whole", "whole compiled", "tensor compiled", "sequence compiled")
    for results in ranks.run(checks.tensor_parallel, world, 2, kinds, timeout=300, limit=900):
        assert all(result == results["whole"] for result in results.values())


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_styles_of_pytorch_on_dtensors(world):
    kinds = ("whole stock", "stock", "stock compiled")
    for results in ranks.run(checks.tensor_parallel, world, 3, kinds, timeout=300, limit=900):
        assert all(result == results["whole stock"] for result in results.values())


@pytest.mark.distributed
def test_world_sizes_of_data_parallelism():
    expected = None
    for world in (1, 2, 4, 8):
        for results in ranks.run(checks.data_parallel, world, 3, ("plain", "ddp", "fsdp"), timeout=300, limit=900):
            for kind, result in results.items():
                expected = expected or result
                assert result == expected, (world, kind)


@pytest.mark.distributed
def test_world_sizes_of_trainers(tmp_path):
    kinds = ("compiled", "eager", "ddp", "fsdp")
    found = [results for world in (1, 2, 4) for results in ranks.run(checks.trainers, world, 3, kinds, str(tmp_path / str(world)), timeout=300, limit=900)]
    for results in found:
        assert results == dict.fromkeys(kinds, found[0]["compiled"])


DEMO = ("1", "2 --data ddp", "2 --tp 2 --sequence", "4 --data fsdp", "4 --tp 2 --data fsdp --sequence", "8 --tp 4 --data fsdp", "8 --data ddp", "2 --compile --data fsdp")


@pytest.mark.distributed
def test_one_hash_from_every_torchrun():
    lines = {words: torchrun(words, "--steps", "2", "--device", "cpu") for words in DEMO}
    assert len(set(lines.values())) == 1, json.dumps(lines, indent=1)


def torchrun(words, *more):
    """The line that rank 0 prints."""
    ranks_, *options = words.split()
    root = str(pathlib.Path(__file__).parent.parent)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks_, "-m", "carbon_compile.parallel_demo", *options, *more]
    done = subprocess.run(command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.parametrize("words", ["1", "2 --data ddp", "2 --data fsdp", "2 --tp 2", "2 --tp 2 --sequence"])
def test_gpus_print_what_a_cpu_prints(words):
    if torch.cuda.device_count() < int(words.split()[0]):
        pytest.skip("needs more GPUs")
    assert torchrun(words, "--steps", "10", "--device", "cuda") == torchrun("1", "--steps", "10", "--device", "cpu")
