"""Errors in the shape that OpenAI's API gives them, so that its client knows them by name.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

The status says whose turn it is: 4xx the client's (change the request, or 429: send it later),
5xx ours (send the same again).
"""


class ApiError(Exception):
    """Something that a client is told. The message names the value, the limit and the remedy."""

    def __init__(self, status: int, message: str, code: str | None = None,
                 param: str | None = None, kind: str = "invalid_request_error",
                 headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers
        self.code, self.param, self.kind = code, param, kind

    def body(self) -> dict:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param,
                          "code": self.code}}


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code, param)


def queue_full(num_waiting: int, limit: int) -> ApiError:
    return ApiError(429, f"{num_waiting} requests wait for their first token, and the limit is "
                    f"{limit}: send this one again in a moment", "queue_full",
                    kind="rate_limit_error", headers={"retry-after": "1"})


def engine_failed(error: BaseException) -> ApiError:
    return ApiError(500, f"the engine failed while it served this request "
                    f"({type(error).__name__}); the log says more. Send the request again",
                    "engine_failed", kind="server_error")


def unavailable(reason: str) -> ApiError:
    return ApiError(503, f"{reason}: send the request again later", "unavailable",
                    kind="server_error", headers={"retry-after": "5"})
