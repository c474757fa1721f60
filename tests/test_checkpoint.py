"""Checkpoint files and the data position: whole, checked, the one before kept; killed processes lose nothing."""

import os
import random
import subprocess
import sys

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from carbon_compile import DeterministicLoader, checkpoint
from carbon_compile.bits import assert_bitwise
from carbon_compile.checkpoint import CheckpointError
from carbon_compile.data_order import permutation
from carbon_compile.snapshot import RandomState

CONTENT = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "dtype": torch.bfloat16, "n": 3, "list": [1.5, None, "a"]}


def test_what_is_saved_is_loaded(tmp_path):
    checkpoint.save(tmp_path / "c.pt", CONTENT)
    loaded = checkpoint.load(tmp_path / "c.pt")
    assert_bitwise({key: loaded[key] for key in CONTENT}, CONTENT)
    assert loaded["contract"] == checkpoint.contract()
    assert os.listdir(tmp_path) == ["c.pt"]


def test_the_checkpoint_before_is_kept_and_read_where_the_last_is_damaged(tmp_path):
    path = tmp_path / "c.pt"
    for n in (1, 2, 3):
        checkpoint.save(path, {**CONTENT, "n": n})
    assert sorted(os.listdir(tmp_path)) == ["c.pt", "c.pt.previous"]
    assert checkpoint.load(checkpoint.previous(path))["n"] == 2
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning, match="c.pt can't be read: .*; loaded .*c.pt.previous instead"):
        assert checkpoint.load(path)["n"] == 2
    checkpoint.previous(path).unlink()
    with pytest.raises(CheckpointError, match="c.pt can't be read"):
        checkpoint.load(path)


def test_a_changed_bit_is_found(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.save(path, CONTENT)
    content = torch.load(path, weights_only=True)
    content["model"]["w"][1, 2] = 5.0000005
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="is damaged: its content doesn't have the fingerprint"):
        checkpoint.load(path)


def test_other_files_are_told_apart(tmp_path):
    torch.save({"model": {}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="isn't a checkpoint of carbon's"):
        checkpoint.load(tmp_path / "other.pt")
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none.pt")
    torch.save({**CONTENT, "checkpoint": 99}, tmp_path / "new.pt")
    with pytest.raises(CheckpointError, match="of format 99; this release reads 1"):
        checkpoint.load(tmp_path / "new.pt")


def test_a_failing_save_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    checkpoint.save(path, CONTENT)
    with pytest.raises(TypeError, match="can't hold hooks.0: a function is neither"):
        checkpoint.save(path, {**CONTENT, "hooks": [lambda: 0]})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(path, {**CONTENT, "n": 4})
    assert checkpoint.load(path)["n"] == 3 and os.listdir(tmp_path) == ["c.pt"]


def test_random_states_survive_a_checkpoint(tmp_path):
    numpy = pytest.importorskip("numpy")
    state = RandomState.seeded(5)
    checkpoint.save(tmp_path / "r.pt", {"random": state.state_dict()})

    def draws():
        return [torch.rand(2), random.random(), numpy.random.rand(2)]

    before = RandomState.now()
    state.restore()
    expected = draws()
    RandomState.load(checkpoint.load(tmp_path / "r.pt")["random"]).restore()
    assert_bitwise(draws(), expected)
    before.restore()


# --- the order of data


class Noisy(Dataset):
    """Items that draw random numbers, as augmentations do."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return index, torch.rand(()), random.random()


def told(loader, epochs=1):
    return [[t.tolist() for t in batch] for _ in range(epochs) for batch in loader]


def test_order_is_a_function_of_seed_and_epoch():
    assert permutation(10, 7, 0).tolist() == permutation(10, 7, 0).tolist() != permutation(10, 7, 1).tolist() != permutation(10, 8, 0).tolist()
    assert sorted(permutation(1000, 2**63, 5).tolist()) == list(range(1000))
    # Recorded: another machine and release must draw the same.
    assert permutation(10, 7, 3).tolist() == PERMUTATION_7_3


PERMUTATION_7_3 = [4, 8, 1, 5, 7, 6, 9, 3, 2, 0]


def test_order_and_augmentation_do_not_depend_on_workers():
    alone = told(DeterministicLoader(Noisy(), 4, seed=1), epochs=2)
    torch.manual_seed(99)
    assert told(DeterministicLoader(Noisy(), 4, seed=1, num_workers=2, multiprocessing_context="fork"), epochs=2) == alone
    assert told(DeterministicLoader(Noisy(), 4, seed=2), epochs=2) != alone


def test_loading_draws_no_random_numbers_of_the_process():
    before = RandomState.now().state_dict()
    told(DeterministicLoader(Noisy(), 4))
    assert_bitwise(RandomState.now().state_dict(), before)


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_position_is_taken_up(stop):
    whole = told(DeterministicLoader(Noisy(), 4, seed=3), epochs=2)
    first = DeterministicLoader(Noisy(), 4, seed=3)
    seen = []
    if stop:
        for batch in first:
            seen.append([t.tolist() for t in batch])
            if len(seen) == stop:
                state = first.state_dict()
                break
    else:
        state = first.state_dict()
    again = DeterministicLoader(Noisy(), 4, seed=3)
    again.load_state_dict(state)
    assert (again.epoch, again.batch) == ((0, stop) if stop < 3 else (1, 0))
    for _ in range(again.epoch, 2):
        seen += told(again)
    assert seen == whole


def test_drop_last_and_plain_order():
    loader = DeterministicLoader(TensorDataset(torch.arange(11)), 4, shuffle=False, drop_last=True)
    assert len(loader) == 2 and told(loader) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_wrong_loaders_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(TypeError, match="an iterable dataset has its own order"):
        DeterministicLoader(Stream())
    with pytest.raises(TypeError, match="generator would decide the order"):
        DeterministicLoader(Noisy(), generator=torch.Generator())
    with pytest.raises(ValueError, match="batch_size=0"):
        DeterministicLoader(Noisy(), 0)
    with pytest.raises(ValueError, match="3 items make no batch of 4"):
        DeterministicLoader(TensorDataset(torch.arange(3)), 4, drop_last=True)
    with pytest.raises(ValueError, match="the data's seed was 1, here it is 2"):
        DeterministicLoader(Noisy(), seed=2).load_state_dict(DeterministicLoader(Noisy(), seed=1).state_dict())


# --- kill -9

CRASHES = """
import os, pathlib, random, signal, sys, tempfile, time, warnings
import torch
import carbon_compile
from carbon_compile import checkpoint, ledger_file
from carbon_compile.bits import assert_bitwise
from torch.utils.data import TensorDataset

STEPS, KILLS = 200, 50
torch.set_num_threads(1)

def life(folder, steps=STEPS):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = carbon_compile.DeterministicLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), 8, seed=2)
    trainer = carbon_compile.DeterministicTrainer(model, optimizer, loss_fn=torch.nn.functional.mse_loss, data=data, backend=None)
    path = os.path.join(folder, "c.pt")
    if os.path.exists(path):
        trainer.load(path)
    with carbon_compile.ledger(os.path.join(folder, "run.jsonl"), model=model):
        while trainer.steps < steps:
            for batch in data:
                trainer.step(batch)
                if trainer.steps % 2 == 0:
                    trainer.save(path)

def start(folder):
    child = os.fork()
    if child == 0:
        try:
            life(folder)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child

def broken_run(folder, rng, kills):
    # Killed again and again until it is through: kills so far, and the steps it resumed from.
    resumed = set()
    while True:
        child = start(folder)
        if kills < KILLS:
            time.sleep(rng.random() * 0.15)
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            return kills, resumed
        assert os.WIFSIGNALED(status), status
        kills, saved = kills + 1, 0
        if os.path.exists(f"{folder}/c.pt"):
            saved = checkpoint.load(f"{folder}/c.pt")["step"]
            resumed.add(saved)
        if os.path.exists(f"{folder}/run.jsonl"):
            assert ledger_file.read(f"{folder}/run.jsonl").last >= saved

def main(root, seed):
    life(tempfile.mkdtemp(), steps=1)  # imports, so that a child is killed while it trains
    warnings.simplefilter("error")
    whole = pathlib.Path(root, "whole")
    whole.mkdir()
    assert os.waitpid(start(whole), 0)[1] == 0
    rng, kills, resumed = random.Random(int(seed)), 0, []
    while kills < KILLS:
        broken = pathlib.Path(root, str(kills))
        broken.mkdir()
        kills, found = broken_run(broken, rng, kills)
        resumed += found
        assert_bitwise(checkpoint.load(whole / "c.pt"), checkpoint.load(broken / "c.pt"))
        assert (whole / "run.jsonl").read_text() == (broken / "run.jsonl").read_text()
    print(kills, len(resumed))

main(*sys.argv[1:])
"""


def test_killed_at_any_moment_a_run_resumes_to_the_same_bits(tmp_path):
    done = subprocess.run([sys.executable, "-c", CRASHES, str(tmp_path), "1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, resumed = map(int, done.stdout.split())
    assert kills == 50 and resumed > 10
