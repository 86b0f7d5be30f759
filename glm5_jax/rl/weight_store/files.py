"""Serves a store's folder over HTTP, in ranges, to engines that share no disk with it.

Needs the extra `serve`.
"""

import hmac
import os
import pathlib

from starlette import applications, requests, responses, routing

from glm5_jax.rl.weight_store import manifest


def app(root: str | os.PathLike, key: str | None = None) -> applications.Starlette:
    """Returns an ASGI application for `sources.Url`.

    Args:
      root: the store's folder.
      key: that requests must bring as `Authorization: Bearer KEY`; None for none.
    """
    folder = pathlib.Path(root)

    def refused(request: requests.Request) -> responses.Response | None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key is None or hmac.compare_digest(given.encode(), key.encode()):
            return None
        return responses.PlainTextResponse("The key is missing or wrong.", 401)

    def versions(request: requests.Request) -> responses.Response:
        return refused(request) or responses.JSONResponse(manifest.names(folder))

    def one(request: requests.Request) -> responses.Response:
        version, file = request.path_params["version"], request.path_params["file"]
        known = {name.folder for name in manifest.names(folder)}
        path = folder / version / file
        is_file = version in known and pathlib.Path(file).name == file
        if (answer := refused(request)) is not None:
            return answer
        if not is_file or not path.is_file():
            return responses.PlainTextResponse("There is no such file.", 404)
        return responses.FileResponse(path, media_type="application/octet-stream")

    return applications.Starlette(
        routes=[
            routing.Route("/versions", versions),
            routing.Route("/{version}/{file}", one),
        ]
    )
