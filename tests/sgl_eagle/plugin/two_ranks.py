"""Two ranks as processes with a real group between them."""

import multiprocessing
import tempfile
import traceback
from types import SimpleNamespace

ANSWER_TIMEOUT_S = 300
"""Ends only what hangs: ranks that wait for each other for ever."""


def run_on_two_ranks(function, *arguments):
    """What a function returns on each of two ranks.

    Args:
        function: Called with `Ranks` and the arguments, in a fork of this process. What it imports
            should be imported before: each rank would do it again, which takes half a minute on a
            busy machine.
        *arguments: The same on both.

    Returns:
        Two results.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run, args=(theirs, f"{folder}/meet", rank, function, arguments)
            )
            process.start()
            theirs.close()  # so that a rank that dies is noticed at once
            pipes.append(ours)
            processes.append(process)
        try:
            answers = [_receive(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    errors = [error for _, error in answers if error]
    assert not errors, "\n".join(errors)
    return [result for result, _ in answers]


def _receive(pipe):
    if not pipe.poll(ANSWER_TIMEOUT_S):
        return None, f"no answer in {ANSWER_TIMEOUT_S} s"
    try:
        return pipe.recv()
    except EOFError:
        return None, "it died"


def _run(pipe, meeting_file, rank, function, arguments):
    import torch.distributed as dist

    from sgl_eagle.plugin.ranks import Ranks

    try:
        store = dist.FileStore(meeting_file, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        group = SimpleNamespace(
            world_size=2,
            rank_in_group=rank,
            ranks=[0, 1],
            cpu_group=dist.group.WORLD,
            broadcast=lambda tensor, src: dist.broadcast(tensor, src),
        )
        result = function(Ranks(group), *arguments)
        dist.barrier()  # one that ended earlier would take from the other what is on its way
        pipe.send((result, ""))
    except BaseException:  # noqa: BLE001  the test shows it
        pipe.send((None, traceback.format_exc()))
