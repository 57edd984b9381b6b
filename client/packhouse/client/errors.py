"""What can go wrong for a user: each error states the fact, the value and the remedy."""


class PackhouseError(Exception):
    """An error that a user can act on.

    ``detail`` says the fact and the value, ``remedy`` what to do; ``kind`` is the last part of the problem type on
    the wire, ``status`` the HTTP status that the service answers with.
    """

    kind = "error"
    status = 400

    def __init__(self, detail: str, remedy: str = "") -> None:
        super().__init__(detail, remedy)
        self.detail = detail
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.detail}: {self.remedy}" if self.remedy else self.detail


class InvalidRequest(PackhouseError):
    """The request cannot be carried out as stated."""

    kind = "invalid-request"
    status = 422


class NotFound(PackhouseError):
    """No such job, dataset, plan or shard."""

    kind = "not-found"
    status = 404


class Evicted(NotFound):
    """A dataset or plan that was there, and was evicted to make room."""

    kind = "evicted"
    status = 410


class Damaged(PackhouseError):
    """A stored file is missing, cut or altered: its bytes are not those its manifest states."""

    kind = "damaged"
    status = 500


class Mismatch(PackhouseError):
    """A state or tokenizer belongs to another plan or dataset than the one at hand."""

    kind = "mismatch"
    status = 409


class Unavailable(PackhouseError):
    """The service, or a part it needs, cannot be reached or cannot do its work now."""

    kind = "unavailable"
    status = 503
