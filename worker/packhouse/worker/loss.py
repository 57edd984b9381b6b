"""Loss rules: which of a chat's assistant messages are trained."""

from packhouse.worker.records import Chat


def trained(chat: Chat, rule: str) -> list[bool]:
    """Return, for each assistant message, whether it is trained.

    ``assistant`` trains all, ``last_turn`` those behind the last question that is answered, ``completion`` the last.
    What a message says of itself goes before the rule.
    """
    roles = [message["role"] for message in chat.messages]
    places = [place for place, role in enumerate(roles) if role == "assistant"]
    first = 0
    if rule == "last_turn" and places:
        first = max((place for place in range(places[-1]) if roles[place] == "user"), default=0)
    elif rule == "completion" and places:
        first = places[-1]
    stated = chat.stated or [None] * len(places)
    return [place >= first if own is None else own for place, own in zip(places, stated, strict=True)]
