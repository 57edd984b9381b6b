"""A block's bytes, tokenized by a function of the user's: its results checked, so that no shard holds a wrong one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import numpy as np
import pyarrow as pa

from packhouse.client.errors import InvalidRequest
from packhouse.client.extra import data_type, struct_type
from packhouse.worker.hf_tokenizer import hugging_face
from packhouse.worker.recipe import Recipe
from packhouse.worker.records import BadRecord, Line, Reject, lines, parse
from packhouse.worker.samples import Samples
from packhouse.worker.tokenize_fn import Custom, File, describe, make, said
from packhouse.worker.tokenizer_content import TokenizerContent

ENGINE = "function"
"""What progress calls the engine of blocks that a function tokenizes."""
AUDITED = 2
"""Records of a block that a function is called for twice, to see that it gives the same."""

_PROBLEMS = {"missing_file": "is not there", "file_outside": "lies outside of the source's folder and of file_roots"}

Files = Mapping[str, File]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A recipe's function, made in this process."""

    custom: Custom
    call: Any
    """The function itself."""
    vocab_size: int

    @classmethod
    def of(cls, recipe: Recipe, content: TokenizerContent) -> Self | None:
        """Make the recipe's function, if it has one; raise ``InvalidRequest`` unless it is the one resolved."""
        custom = recipe.tokenize
        if custom is None:
            return None
        options = custom.to_json()["options"]
        made = make(custom.name, options, lambda: hugging_face(content, recipe.template, recipe.now))
        if describe(custom.name, options, made) != custom:
            raise InvalidRequest(
                f"{custom.name} has another hash or other extra columns on a worker than in the service",
                "let hash() not depend on the process (Python's hash() does), and have one version everywhere",
            )
        return cls(custom, made, content.vocab_size)


@dataclass(frozen=True, slots=True)
class _Result:
    """What a function made of a record, checked."""

    ids: Ids
    trained: np.ndarray[tuple[int], np.dtype[np.bool_]]
    extra: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Result)
            and np.array_equal(self.ids, other.ids)
            and np.array_equal(self.trained, other.trained)
            and repr(self.extra) == repr(other.extra)  # to which NaN is equal
        )


@dataclass(slots=True)
class _Read:
    """What has been made of a block so far."""

    rows: list[int] = field(default_factory=list)
    results: list[_Result] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    records: int = 0


def by_function(data: bytes, function: Loaded, files: Files) -> Samples:
    """Tokenize a block by a function. Bad records, and what the function raises, end up in ``rejects``.

    Raises ``InvalidRequest`` for a function that gives another result for the same record.
    """
    read = _Read()
    for line in lines(data):
        read.records += 1
        try:
            result = _result(line, function, files, audited=len(read.results) < AUDITED)
        except BadRecord as error:
            read.rejects.append(line.reject(error))
        else:
            read.rows.append(line.row)
            read.results.append(result)
    return _samples(read, function)


def _result(line: Line, function: Loaded, files: Files, *, audited: bool) -> _Result:
    result = _checked(_called(line, function, files), function)
    if audited and _checked(_called(line, function, files), function) != result:
        raise InvalidRequest(
            f"{function.custom.name} gives another result when it is called again for a record",
            "make it depend on the record alone: what is cached is used as if it were called each time",
        )
    return result


def _called(line: Line, function: Loaded, files: Files) -> Any:
    """Call the function, for a record read anew: it may alter what it is given. A lazy mapping is read here, too."""
    try:
        record = parse(line.data)
        given = (_given(list(function.call.files(record)), files),) if function.custom.files else ()
        made = function.call(record, *given)
        return dict(made) if isinstance(made, Mapping) else made
    except BadRecord:
        raise
    except (Exception, SystemExit) as error:  # the function is a user's, and one record must not end a job
        raise BadRecord("tokenize_error", said(error)) from None


def _given(names: list[str], files: Files) -> dict[str, File]:
    """Return the files that a record names; raise ``BadRecord`` for one that cannot be used."""
    for name in names:
        if name not in files:
            raise BadRecord("tokenize_error", "files() names other files than when it was asked first")
        if problem := files[name].problem:
            raise BadRecord(problem, f"the file {name[:200]!r} {_PROBLEMS[problem]}")
    return {name: files[name] for name in names}


def _checked(made: Any, function: Loaded) -> _Result:
    """Return a function's result as arrays; raise ``BadRecord`` for one that cannot be kept."""
    if not isinstance(made, Mapping) or "input_ids" not in made or "labels" not in made:
        shown = f"the fields {sorted(map(str, made))}" if isinstance(made, Mapping) else type(made).__name__
        raise BadRecord("bad_tokens", f"the function gives {shown}, not a mapping with input_ids and labels")
    ids, labels = _integers(made["input_ids"], "input_ids"), _integers(made["labels"], "labels")
    if len(ids) != len(labels):
        raise BadRecord("bad_tokens", f"{len(ids)} ids, and {len(labels)} labels")
    if not len(ids):
        raise BadRecord("empty", "the function gives no id")
    if int(ids.min()) < 0 or int(ids.max()) >= function.vocab_size:
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise BadRecord("bad_tokens", f"id {wrong} is not in the vocabulary of {function.vocab_size}")
    trained = labels != -100
    if not np.array_equal(labels[trained], ids[trained]):
        raise BadRecord("bad_tokens", "a label is neither -100 nor the id at its place; labels are not to be shifted")
    if not trained.any():
        raise BadRecord("nothing_to_train", "every label is -100")
    return _Result(ids, trained, _extra(made, function))


def _extra(made: Mapping[str, Any], function: Loaded) -> tuple[Any, ...]:
    columns = function.custom.extra
    if unknown := sorted(set(map(str, made)) - {"input_ids", "labels", *(name for name, _ in columns)}):
        raise BadRecord("bad_extra", f"the function gives {unknown[0]!r}, which its class does not state as extra")
    values = []
    for name, kind in columns:
        try:
            values.append(pa.array([made.get(name)], data_type(kind))[0].as_py())
        except Exception as error:  # the value is a user's
            raise BadRecord("bad_extra", f"{name!r} is no {kind} ({said(error)})") from None
    return tuple(values)


def _integers(value: Any, name: str) -> Ids:
    try:
        found = np.asarray(value)
    except Exception as error:  # the value is a user's: a tensor, say, that cannot be read here
        raise BadRecord("bad_tokens", f"{name} are no list of integers ({said(error)})") from None
    if not found.size and found.ndim == 1:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu" or (found.dtype == np.uint64 and found.max() > 2**62):
        raise BadRecord("bad_tokens", f"{name} are not one list of integers: {found.dtype} of shape {found.shape}")
    return found.astype(np.int64)


def _samples(read: _Read, function: Loaded) -> Samples:
    offsets = np.zeros(len(read.results) + 1, np.int64)
    np.cumsum([len(result.ids) for result in read.results], out=offsets[1:])
    ids = np.concatenate([np.zeros(0, np.int64), *(result.ids for result in read.results)]).astype(np.uint32)
    mask = np.concatenate([np.zeros(0, np.bool_), *(result.trained for result in read.results)])
    rows = np.array(read.rows, np.int32)
    samples = Samples(ids, offsets, mask, rows, records=read.records, rejects=read.rejects, engine=ENGINE)
    if function.custom.extra:
        kind = struct_type(function.custom.extra)
        values = list(zip(*(result.extra for result in read.results), strict=True)) or [()] * kind.num_fields
        columns = [pa.array(column, one.type) for column, one in zip(values, kind, strict=True)]
        samples.extra = pa.StructArray.from_arrays(columns, fields=list(kind))
    return samples


def names_in(data: bytes, function: Loaded) -> list[str]:
    """Return the names of the files that the records of a block depend on, each once, in order."""
    if not function.custom.files:
        return []
    found: list[list[str]] = []
    for line in lines(data):
        try:
            found.append([str(name) for name in function.call.files(parse(line.data))])
        except (Exception, SystemExit):  # the record is kept out, with the reason, when it is tokenized
            continue
    return list(dict.fromkeys(chain.from_iterable(found)))
