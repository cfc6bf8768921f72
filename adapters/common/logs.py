"""Log lines on stderr: for people, or JSON for programs, with the id of the request in hand."""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

log = logging.getLogger(__name__)

Format = Literal["text", "json"]
_TEXT = "%(asctime)s %(levelname)s %(message)s"
# Libraries speak only of trouble: what they say otherwise may hold URLs with credentials.
_QUIET = (
    *("httpx", "httpcore", "httpx2", "httpcore2", "huggingface_hub", "urllib3"),
    *("uvicorn", "websockets", "asyncio", "opentelemetry"),
)


class JsonFormatter(logging.Formatter):
    """Writes log records as JSON. One object a line. request_id: of the request in hand where the
    line is written, or None.

    A record's `facts` become fields. Its message is then the first word of its text.
    """

    def __init__(self, request_id: Callable[[], str | None]) -> None:
        super().__init__()
        self._request_id = request_id

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = self._request_id()
        if request_id is not None:
            line["request_id"] = request_id
        facts = getattr(record, "facts", None)
        if facts is not None:
            line |= facts
            line["message"] = record.msg.partition(" ")[0]
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(
    level: int = logging.INFO,
    written: Format = "text",
    request_id: Callable[[], str | None] = lambda: None,
    text: str = _TEXT,
) -> None:
    """Sends this process' log to stderr. text: the format of lines for people."""
    handler = logging.StreamHandler(sys.stderr)
    if written == "json":
        handler.setFormatter(JsonFormatter(request_id))
        logging.captureWarnings(True)
        sys.excepthook = lambda *error: log.critical("unforeseen error", exc_info=error)
    else:
        handler.setFormatter(logging.Formatter(text, "%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler])
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def say_last(sentence: str) -> None:
    """Why this process ends, on stderr, in the form of its log."""
    handlers = logging.getLogger().handlers
    if any(isinstance(handler.formatter, JsonFormatter) for handler in handlers):
        log.critical("%s", sentence)
    else:
        sys.stderr.write(f"{sentence}\n")
