"""Forms, as a browser sends them."""

from urllib.parse import parse_qsl

from packhouse.client.errors import InvalidRequest

MOST_FIELDS = 100


def fields(body: bytes) -> dict[str, str]:
    """Return the fields of a form as they were typed, with the empty ones; raise ``InvalidRequest`` for too many."""
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError:
        fact = f"the form has more than {MOST_FIELDS} fields"
        raise InvalidRequest(fact, "use the form of this page") from None
