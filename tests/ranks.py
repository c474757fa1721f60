"""Several processes on this machine that form one Gloo group, for the tests of collectives."""

import datetime
import multiprocessing
import os
import queue
import socket
import time
import traceback

PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.tensor.parallel", "torch._dynamo", "carbon_compile.parallel"]


def _serve(rank, world, port, timeout, function, arguments, answers, done):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=datetime.timedelta(seconds=timeout))
    try:
        answers.put((rank, True, function(rank, world, *arguments)))
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
    done.wait()  # rank 0 is the store of all, and a rank that leaves is an error for the others
    os._exit(0)  # a group whose member is gone can't be taken down in an orderly way


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(function, world, *arguments, timeout=60, limit=300, silent=()):
    """[function(rank, world, *arguments) of each rank]; a rank in `silent` may die without an answer.

    function: of a module that can be imported. What it returns must be plain Python or tensors on
    the CPU. AssertionError with the traceback of a rank that raised; TimeoutError after `limit` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # PyTorch is imported once, not in every process
    answers, done, port = context.Queue(), context.Event(), _free_port()
    ranks = [context.Process(target=_serve, args=(r, world, port, timeout, function, arguments, answers, done), daemon=True) for r in range(world)]
    for process in ranks:
        process.start()
    results, end = {}, time.monotonic() + limit
    try:
        while len(results) < world - len(silent):
            try:
                rank, fine, value = answers.get(timeout=1)
            except queue.Empty:
                gone = [r for r, p in enumerate(ranks) if p.exitcode is not None and r not in {*results, *silent}]
                if gone or time.monotonic() > end:
                    raise TimeoutError(f"ranks {sorted(results)} of {world} answered within {limit} s, {gone} died") from None
                continue
            assert fine, f"rank {rank} of {world}:\n{value}"
            results[rank] = value
    finally:
        done.set()
        for process in ranks:
            process.join(5)
            process.kill()
    return [results.get(r) for r in range(world)]
