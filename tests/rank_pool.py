"""Ranks on gloo that stay up between tests: importing torch and transformers in each costs more than most cases."""

import os
import pickle
import socket
import time
import traceback
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import wait

TIMEOUT_S = 180
GRACE_S = 30
"""How long the other ranks may go on once one has failed: most then wait for it for ever."""

# A fork server imports once for all ranks. Modules of the tests are not on its path: each rank imports those itself.
_PRELOAD = ["accelerate", "peft", "longstraw_sdk.evidence.tiny", "longstraw_sdk.models.dense"]
_PRELOAD += ["longstraw_sdk.models.qwen36", "transformers.models.llama.modeling_llama"]


def _serve(rank, size, port, pipe):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the process that holds the pool is gone
            return
        if function is None:
            return
        try:
            answer = pickle.dumps((function(*args), None))
        except BaseException as error:
            answer = pickle.dumps((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        _destroy_new_groups()
        pipe.send_bytes(answer)


def _destroy_new_groups():
    """All but those that backends keep for later: each gloo group has threads, and of one that failed they spin."""
    from torch import distributed as dist

    from longstraw_sdk.backends import accelerate

    if dist.is_initialized():
        kept = {dist.group.WORLD, *(group for groups in accelerate._made.values() for group in groups)}
        for group in set(dist.distributed_c10d._world.pg_map) - kept:
            dist.destroy_process_group(group)


class RankPool:
    """`size` processes with the environment that torchrun gives. They start with the first `run`, and again after one
    that hung.
    """

    def __init__(self, size):
        self.size = size
        self._pipes, self._processes = [], []

    def run(self, function, *args, timeout_s=TIMEOUT_S):
        """`function(*args)`, an importable one, on every rank; its results in rank order. Errors of any rank raise."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))  # multiprocessing would share the tensors' memory
        results, failed = {}, {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failed) < self.size:
            waiting = [r for r in range(self.size) if r not in results and r not in failed]
            ready = wait([self._pipes[r] for r in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close(kill=True)
                said = "".join(f"\nrank {r}: {error}" for r, error in failed.items())
                raise TimeoutError(f"ranks {waiting} of {self.size} hang in {function.__name__}{args}{said}")
            for rank in (r for r in waiting if self._pipes[r] in ready):
                try:
                    result, error = pickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    self._processes[rank].join()
                    result, error = None, f"the process ended with code {self._processes[rank].exitcode}"
                if error is None:
                    results[rank] = result
                else:
                    failed[rank] = error
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failed:
            if any(not process.is_alive() for process in self._processes):
                self.close(kill=True)
            raise RuntimeError("\n".join(f"rank {rank}: {error}" for rank, error in sorted(failed.items())))
        return [results[rank] for rank in range(self.size)]

    def close(self, *, kill=False):
        """End all ranks; `run` starts new ones."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill or not process.is_alive():
                process.kill()
            else:
                pipe.send_bytes(pickle.dumps((None, ())))
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._pipes, self._processes = [], []

    def _start(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        method = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
        start = get_context(method)
        if method == "forkserver":
            start.set_forkserver_preload(_PRELOAD)
        for rank in range(self.size):
            ours, theirs = start.Pipe()
            process = start.Process(target=_serve, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
