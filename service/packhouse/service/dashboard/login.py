"""The page where a browser is given its token: kept in a cookie that no script reads and no other site's page sends."""

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from packhouse.service.access import COOKIE
from packhouse.service.dashboard.form import fields
from packhouse.service.dashboard.render import page
from packhouse.service.json_body import JsonRequest
from packhouse.service.parts import Given

router = APIRouter(include_in_schema=False)

KEPT_SECONDS = 12 * 3600
"""How long a browser keeps the token."""


@router.get("/login", response_class=Response)
def ask(next: str = "/") -> Response:
    """Show the form."""
    return page("login.html", wrong=None, next=_inside(next))


@router.post("/login", response_class=Response)
async def enter(request: Request, parts: Given) -> Response:
    """Keep a token that is good, and lead on; say so of one that is not."""
    typed = fields(await JsonRequest(request.scope, request.receive).body())
    token, onward = typed.get("token", "").strip(), _inside(typed.get("next", "/"))
    if await run_sync(parts.tokens.caller, token) is None:
        return page("login.html", 401, wrong="This token is not known, was revoked or has ended.", next=onward)
    answer = RedirectResponse(onward, 303, {"cache-control": "no-store"})
    # The browser's own word counts too: where a proxy speaks TLS, the request itself comes without.
    secure = request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://")
    answer.set_cookie(COOKIE, token, max_age=KEPT_SECONDS, httponly=True, samesite="strict", secure=secure)
    return answer


@router.post("/logout", response_class=Response)
def leave() -> Response:
    """Forget the token."""
    answer = RedirectResponse("/login", 303, {"cache-control": "no-store"})
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def _inside(path: str) -> str:
    """Return a path of this service, whatever was asked for."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"
