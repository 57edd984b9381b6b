"""The ledger: what a rank was delivered, written down as it is, and the proof that it was the plan, each pack once.

A log is JSON lines, one file a rank: ``{"plan", "start", "rank", "world", "time"}`` when a pass begins, then ``{"step",
"slot", "pack"}`` for every pack delivered. A pass that begins at step s takes back what earlier ones delivered from s
on: a run that goes on from a checkpoint has unlearnt it. Which is earlier is told by the clock, so the nodes' clocks
must differ by less than a restart takes.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from packhouse.client.errors import InvalidRequest, Mismatch
from packhouse.client.pack import Pack, PackBuilder
from packhouse.client.plan import PlanSource, check_slice, decode_steps
from packhouse.client.store import ReadStore
from packhouse.client.wire import Wire

STEPS_AT_ONCE = 16


def pack_digest(pack: Pack) -> str:
    """Return the xxh3-128 of a pack's tokens, labels and segment borders; padding ids are not in."""
    state = xxhash.xxh3_128(pack.input_ids[: pack.num_tokens].data)
    state.update(pack.labels[: pack.num_tokens].data)
    state.update(pack.cu_seqlens.data)
    return state.hexdigest()


class Log:
    """One rank's log, appended to a file; every line is handed to the system before the step is handed on."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def begin(self, plan_id: str, start: int, rank: int, world: int) -> None:
        """Note that a pass begins."""
        self._write([{"plan": plan_id, "start": start, "rank": rank, "world": world, "time": time.time()}])

    def delivered(self, step: int, slots: list[int], digests: list[str]) -> None:
        """Note the packs of a step."""
        self._write([{"step": step, "slot": slot, "pack": pack} for slot, pack in zip(slots, digests, strict=True)])

    def _write(self, entries: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        # A process that was killed while it wrote may have left half a line behind.
        with open(self.path, "ab+") as file:
            if file.tell() and _last_byte(file) != b"\n":
                text = "\n" + text
            file.write(text.encode())


class Audit(Wire):
    """What the logs prove of the first ``steps`` steps of a plan."""

    plan: str
    steps: int
    packs: int
    """Packs with tokens that the plan has there."""
    tokens: int
    """Their tokens."""
    delivered: int
    """Of those packs, the ones delivered exactly once and unaltered."""
    missing: list[tuple[int, int]]
    """(step, slot) of packs that were not delivered."""
    repeated: list[tuple[int, int]]
    altered: list[tuple[int, int]]
    unplanned: list[tuple[int, int]]

    @property
    def exact(self) -> bool:
        """Whether each planned token was delivered exactly once."""
        return not (self.missing or self.repeated or self.altered or self.unplanned)


def audit(plan: PlanSource, store: ReadStore, logs: Iterable[str | os.PathLike[str]], stop: int | None = None) -> Audit:
    """Compare the logs of all ranks with the packs that the plan's steps before ``stop`` (default all) have.

    Every pack is built again from its shards. Raises ``Mismatch`` for a log of another plan, ``InvalidRequest`` for one
    that cannot be read and for a ``stop`` that the plan does not have.
    """
    header = plan.header
    end = header.steps if stop is None else stop
    check_slice(header, 0, end, 0, 1)
    seen, digests = _deliveries([_read(Path(path), header.id) for path in logs])
    missing: list[tuple[int, int]] = []
    repeated: list[tuple[int, int]] = []
    altered: list[tuple[int, int]] = []
    packs = tokens = 0
    for place, pack in _planned(plan, store, end):
        packs, tokens = packs + 1, tokens + pack.num_tokens
        count = seen.pop(place, 0)
        if count != 1:
            (repeated if count else missing).append(place)
        elif digests[place] != pack_digest(pack):
            altered.append(place)
    unplanned = sorted(place for place in seen if (stop is None or place[0] < stop) and not _is_empty(plan, place))
    return Audit(
        plan=header.id,
        steps=end,
        packs=packs,
        tokens=tokens,
        delivered=packs - len(missing) - len(repeated) - len(altered),
        missing=missing,
        repeated=repeated,
        altered=altered,
        unplanned=unplanned,
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    start: int
    rank: int
    world: int
    time: float
    entries: list[tuple[int, int, str]]


def _read(path: Path, plan_id: str) -> list[_Pass]:
    """Return the passes of a log; half a line, which a killed process leaves behind, is left out."""
    passes: list[_Pass] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequest(f"the log {str(path)!r} cannot be read ({error.strerror})", "name a file") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        try:
            if "start" in entry:
                if entry["plan"] != plan_id:
                    fact = f"the log {str(path)!r} is of plan {entry['plan']} and not {plan_id}"
                    raise Mismatch(fact, "audit that one")
                passes.append(_Pass(entry["start"], entry["rank"], entry["world"], entry["time"], []))
            else:
                passes[-1].entries.append((entry["step"], entry["slot"], entry["pack"]))
        except IndexError:
            fact = f"the log {str(path)!r} does not begin with a pass"
            raise InvalidRequest(fact, "name a log of a Loader") from None
        except (KeyError, TypeError):
            fact = f"line {number} of the log {str(path)!r} is none of a Loader"
            raise InvalidRequest(fact, "name a log of a Loader") from None
    return passes


def _deliveries(files: list[list[_Pass]]) -> tuple[Counter[tuple[int, int]], dict[tuple[int, int], str]]:
    """Return how often each (step, slot) stands, and its digest, in the logs without what was taken back."""
    seen: Counter[tuple[int, int]] = Counter()
    digests: dict[tuple[int, int], str] = {}
    everything = [each for passes in files for each in passes]
    for passes in files:
        for number, one in enumerate(passes):
            later = [each.start for each in everything if _is_later_run(each, one)]
            limit = min([*later, *(each.start for each in passes[number + 1 :])], default=None)
            for step, slot, digest in one.entries:
                if limit is None or step < limit:
                    seen[step, slot] += 1
                    digests[step, slot] = digest
    return seen, digests


def _is_later_run(other: _Pass, one: _Pass) -> bool:
    # The ranks of one run begin at one step, in one world.
    same_run = other.rank != one.rank and (other.start, other.world) == (one.start, one.world)
    return other.time > one.time and not same_run


def _planned(plan: PlanSource, store: ReadStore, stop: int) -> Iterator[tuple[tuple[int, int], Pack]]:
    builder = PackBuilder(plan.header, store)
    for begin in range(0, stop, STEPS_AT_ONCE):
        table = decode_steps(plan.slice(begin, min(begin + STEPS_AT_ONCE, stop), 0, 1))
        packs = builder.build(table.packs, 0, len(table.packs))
        for step, slot, pack in zip(table.step.tolist(), table.slot.tolist(), packs, strict=True):
            if pack.num_tokens:
                yield (step, slot), pack


def _is_empty(plan: PlanSource, place: tuple[int, int]) -> bool:
    step, slot = place
    if not (0 <= step < plan.header.steps and 0 <= slot < plan.header.packs_per_step):
        return False
    return int(decode_steps(plan.slice(step, step + 1, 0, 1)).packs.tokens[slot]) == 0


def _last_byte(file: Any) -> bytes:
    file.seek(-1, os.SEEK_END)
    return bytes(file.read(1))
