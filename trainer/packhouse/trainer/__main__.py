"""The command: ``torchrun -m packhouse.trainer --config run.toml`` (or ``python -m``, for one process)."""

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from packhouse.client.errors import PackhouseError
from packhouse.trainer.config import read_config
from packhouse.trainer.parallel.failure import first_failure_told
from packhouse.trainer.run import run


def main() -> None:
    """Read the settings, join the world that torchrun made, train; exits with 2 for what a user can correct."""
    parser = argparse.ArgumentParser(prog="packhouse.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file; see trainer/README.md")
    arguments = parser.parse_args()
    try:
        config = read_config(arguments.config)
        device = _join(timedelta(seconds=config.parallel.timeout))
        with first_failure_told():
            run(config, device)
    except (PackhouseError, ValueError) as error:
        sys.exit(_refusal(error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(timeout: timedelta) -> torch.device:
    """This process's device; torchrun's variables say whether there are other processes, and which GPU is its own."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    return device


def _refusal(error: Exception) -> int:
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    print(f"{rank}{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    main()
