"""`bench.parallel` on two tiny ranks: it ends, counts and compares; nothing here asserts a time."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from bench import parallel

ROOT = pathlib.Path(__file__).parent.parent
WIDTH, BATCH, LENGTH = 32, 2, 8


def run(*words, limit=200):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "bench.parallel", "--device", "cpu", "--width", str(WIDTH), "--layers", "1", "--batch", str(BATCH), "--length", str(LENGTH), "--rounds", "2", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)


def test_two_ranks(tmp_path):
    path = tmp_path / "rows.json"
    done = run("--select", "eager", "--sizes", "64", "--json", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(path.read_text())
    assert found["about"]["ranks"] == 2 and found["about"]["width"] == WIDTH and "torch" in found["about"]
    rows = {row["step"]: row for row in found["steps"]}
    assert list(rows) == ["plain eager", "exact eager", "exact eager, one rank"]
    assert all(row["median ms"] > 0 and not row["error"] for row in rows.values())
    assert rows["exact eager"]["bits of one rank"] is True and rows["exact eager"]["loss"] == rows["exact eager, one rank"]["loss"]
    assert [row["type"] for row in found["all-reduces"]] == ["float32", "bfloat16"]
    assert "exact eager" in done.stdout and "torch " in done.stdout


def test_what_is_sent_is_counted(tmp_path):
    path = tmp_path / "rows.json"
    done = run("--select", "plain eager", "exact eager", "--sizes", "64", "--json", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(path.read_text())
    sent = {row["step"]: (row["messages"], round(row["MiB sent"] * 2**20)) for row in found["steps"]}
    tokens = BATCH * LENGTH
    # Two sums forward, four backward: queries, keys and values each have their own.
    assert sent["plain eager"] == (6, 6 * tokens * WIDTH * 4)
    assert sent["exact eager, one rank"] == (0, 0)
    # Half of the totals, in four words, and half of what was rounded; row and column exponents.
    summed = 6 * (tokens * WIDTH * (8 + 4) // 2 + (tokens + WIDTH) * 4)
    balances = 6 * WIDTH * 4 + 6 * tokens * 4  # of weights whose columns are cut, of their gradients' tokens
    agreements = 18 * 128
    assert sent["exact eager"] == (6 * 3 + 12 + 18, summed + balances + agreements)
    row = found["all-reduces"][0]
    agreement = 128 / 2**20
    assert row["plain MiB"] * 2**20 == 64 * 4 and row["MiB sent"] - agreement == row["plain MiB"]


def test_ranks_are_stopped_at_the_limit():
    assert run("--select", "nobody", "--sizes", "64", "--limit", "1").returncode == 124


def test_a_rank_that_fails_ends_the_others(tmp_path):
    done = run("--select", "eager", "--sizes", "64", "--json", str(tmp_path / "no" / "rows.json"))
    assert done.returncode == 1 and "FileNotFoundError" in done.stderr


def test_ranks_must_divide(capsys):
    with pytest.raises(SystemExit):
        parallel.main(["--device", "cpu", "--world", "3", "--width", "64"])
    assert "ranks must divide" in capsys.readouterr().err
