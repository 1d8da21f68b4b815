"""What the processes of test_launch.py do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def add_up(world, *numbers):
    """All ranks add what each has."""
    total = torch.tensor([float(numbers[world.rank])])
    dist.all_reduce(total)
    return {"rank": world.rank, "size": world.size, "total": total.item(),
            "threads": torch.get_num_threads(), "policy": os.environ["OMP_WAIT_POLICY"],
            "pid": os.getpid()}


def raise_one(world, which):
    if world.rank == which:
        print("about to fail")
        raise ZeroDivisionError(f"rank {which} divides")
    dist.barrier()


def die(world, which):
    if world.rank == which:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    return "alive"


def hang(world, folder):
    """Each leaves its id, and that of a child of its own, which would go on."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(folder) / str(world.rank)).write_text(f"{os.getpid()} {other.pid}")
    time.sleep(600)


def parent_of_two(folder):
    """A parent that is killed while its workers hang."""
    from minimodel.cluster.launch import launch
    launch(f"{__file__}:hang", 2, folder)


if __name__ == "__main__":
    parent_of_two(sys.argv[1])
