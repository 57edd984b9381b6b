"""Checkpoints that any mode, world and size can go on from: written in the background, whole or not at all.

Every rank writes its own parts with torch.distributed.checkpoint, as slices of the whole tensors, so another cut reads
them back. A checkpoint is a folder that gets its final name by one rename after all ranks' files are on the disk; what
a killed run left unfinished is swept by the next one and never read.
"""

import json
import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from packhouse.client.errors import Mismatch
from packhouse.trainer.parallel.groups import Group
from packhouse.trainer.parallel.shard import Placement
from packhouse.trainer.parallel.sharded import ShardedModel

ABOUT = "about.json"
UNFINISHED = ".unfinished"
MOMENTS = ("exp_avg", "exp_avg_sq")
_WHOLE = Placement(None, Group((0,)), Group((0,)))


class Checkpoints:
    """The checkpoints in `folder`, of which the last `keep` stay; one is written at a time, `step-N` for next step N.

    Creating one is collective, as are its methods; all ranks must see the same folder. With `background` the training
    goes on while a copy of the state is written.
    """

    def __init__(self, folder: Path, *, keep: int = 3, background: bool = True) -> None:
        self.folder, self.keep, self.background = folder, keep, background
        running = dist.is_initialized()
        self._rank = dist.get_rank() if running else 0
        # Its own group: the writer's messages must not mix with those of the training that goes on.
        self._group = dist.new_group(backend="gloo") if running else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if self._rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"*{UNFINISHED}"):
                # A rank of the killed run may still be writing; what it leaves is for the next sweep.
                shutil.rmtree(left, ignore_errors=True)
        # Its own folders: what such a rank still writes must not end up in a checkpoint of this run.
        self._suffix = f".{self._as_rank_0(uuid4().hex[:8])}{UNFINISHED}"

    def save(
        self, step: int, model: ShardedModel, optimizer: torch.optim.Optimizer, data_state: Mapping[str, Any]
    ) -> None:
        """Keep the state with which `step` would begin; raises what the write before failed with."""
        self.wait()
        if self._as_rank_0((self.folder / name_of(step)).exists()):
            return
        _make_moments(optimizer)
        state = _detached(_state(model, optimizer))
        about = {"step": step, "data": dict(data_state), "model": asdict(model.model.config)}
        self._thread = threading.Thread(target=self._guarded, args=(step, state, about), name="checkpoint")
        self._thread.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written; raises, on every rank, what the writing failed with on any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        reasons = self._of_all_ranks(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise RuntimeError(f"rank {rank} could not write a checkpoint ({reason})")

    def latest(self) -> Path | None:
        """The last whole checkpoint, the same on all ranks."""
        last: Path | None = self._as_rank_0(max(self._finished(), default=None))
        return last

    def load(
        self, model: ShardedModel, optimizer: torch.optim.Optimizer, path: Path | None = None
    ) -> dict[str, Any] | None:
        """Fill model and optimizer from `path` or the last checkpoint; returns its step and data state, or None.

        Raises Mismatch for a checkpoint of a model of another shape.
        """
        self.wait()
        path = path or self.latest()
        if path is None:
            return None
        about: dict[str, Any] = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        ours = asdict(model.model.config)
        if about["model"] != ours:
            field = next(key for key in ours if ours[key] != about["model"].get(key))
            raise Mismatch(
                f"the checkpoint {path} is of a model with {field} {about['model'].get(field)} and not {ours[field]}",
                "train a model of the checkpoint's shape",
            )
        _make_moments(optimizer)
        live = _state(model, optimizer)
        # Read into copies on the CPU, then moved: the reader knows nothing of devices.
        state = _detached(live)
        with _alone_is_fine():
            load(_placed(state), checkpoint_id=path, process_group=self._group)
        with torch.no_grad():
            for name, (tensor, _) in live.items():
                tensor.copy_(state[name][0])
        return about

    def _finished(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if not path.name.endswith(UNFINISHED))

    def _guarded(self, step: int, state: "State", about: dict[str, Any]) -> None:
        try:
            self._write(step, state, about)
        except CheckpointException as error:
            causes = [f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()]
            self._error = OSError(f"the checkpoint of step {step} was not written ({'; '.join(causes)})")
        except BaseException as error:
            self._error = error

    def _write(self, step: int, state: "State", about: dict[str, Any]) -> None:
        final = self.folder / name_of(step)
        unfinished = final.with_name(final.name + self._suffix)
        writer = FileSystemWriter(unfinished, sync_files=True)
        with _alone_is_fine():
            save(_placed(state), storage_writer=writer, process_group=self._group)
        if self._rank == 0:
            _write_synced(unfinished / ABOUT, json.dumps(about))
            os.replace(unfinished, final)
            _sync_folder(self.folder)
            for old in self._finished()[: -self.keep]:
                # Renamed first, so that a kill in the middle leaves nothing that looks whole.
                doomed = old.with_name(old.name + self._suffix)
                old.rename(doomed)
                shutil.rmtree(doomed)

    def _of_all_ranks(self, value: str | None) -> list[str | None]:
        values: list[str | None] = [value]
        if self._group is not None:
            values = [None] * dist.get_world_size()
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _as_rank_0(self, seen: Any) -> Any:
        """What rank 0 sees of the folder: on a shared mount another rank may see it later."""
        values = [seen]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]


State = dict[str, tuple[Tensor, Placement]]


def name_of(step: int) -> str:
    """The folder of the checkpoint with which `step` begins; names sort like steps."""
    return f"step-{step:09}"


def _state(model: ShardedModel, optimizer: torch.optim.Optimizer) -> State:
    """Every tensor of the run on this rank, live, with where it lies."""
    state: State = {}
    for name, parameter in model.model.named_parameters():
        placement = model.placements[name]
        state[f"model.{name}"] = parameter.detach(), placement
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{key}.{name}"] = value, placement if key in MOMENTS else _WHOLE
    return state


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has not stepped yet the state it would begin with, so that every checkpoint has all."""
    for group in optimizer.param_groups:
        for parameter in (one for one in group["params"] if one not in optimizer.state):
            moments = {key: torch.zeros_like(parameter) for key in MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=parameter.device if group.get("fused") else "cpu")
            optimizer.state[parameter] = {"step": step, **moments}


def _detached(state: State) -> State:
    return {name: (tensor.detach().cpu().clone(), placement) for name, (tensor, placement) in state.items()}


def _placed(state: State) -> dict[str, Tensor]:
    """The tensors as torch.distributed.checkpoint takes them: a part says which slice of the whole it is."""
    return {name: _slice(tensor, placement) for name, (tensor, placement) in state.items()}


def _slice(tensor: Tensor, placement: Placement) -> Tensor:
    group, cut = placement.shard, placement.cut
    if cut is None or group.size == 1:
        return tensor
    # A mesh without process groups: only its arithmetic is used.
    mesh = DeviceMesh("cpu", list(group.ranks), _init_backend=False)
    shape = list(tensor.shape)
    shape[cut] *= group.size
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(tensor, mesh, [Shard(cut)], run_check=False, shape=whole.shape, stride=whole.stride())


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Without torch's warning that a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
