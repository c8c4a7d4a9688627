"""Ranks on gloo that stay up between tests: importing torch and transformers in each costs more than most cases."""

import os
import socket
import traceback
from multiprocessing import get_context

TIMEOUT_S = 180


def _serve(rank, size, port, pipe):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    while True:
        function, args = pipe.recv()
        if function is None:
            return
        try:
            pipe.send((function(*args), None))
        except BaseException as error:
            pipe.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class RankPool:
    """`size` processes with the environment that torchrun gives."""

    def __init__(self, size):
        self.size = size
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        spawn = get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *args):
        """`function(*args)`, an importable one, on every rank; its results in rank order. Errors of any rank raise."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                self.close(kill=True)
                raise TimeoutError(f"rank {rank} of {self.size} hangs in {function.__name__}{args}")
            result, error = pipe.recv()
            results.append((rank, result, error))
        failed = [f"rank {rank}: {error}" for rank, _, error in results if error]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [result for _, result, _ in results]

    def close(self, *, kill=False):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if kill:
                process.kill()
            else:
                pipe.send((None, ()))
            process.join(10)
