"""A server that wandb takes for its own, until it goes away: it knows the three questions that a run's start asks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = {
    "id": "bucket",
    "name": "name",
    "displayName": "name",
    "config": "{}",
    "historyLineCount": 0,
    "project": {"id": "project", "name": "project", "entity": {"id": "entity", "name": "entity"}},
}
ANSWERS: dict[str, Any] = {
    "viewer": {"id": "viewer", "entity": "entity", "username": "user", "flags": "{}", "teams": {"edges": []}},
    "model": {"bucket": None},
    "upsertBucket": {"bucket": BUCKET, "inserted": True},
}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = json.dumps({"data": ANSWERS} if self.path.endswith("graphql") else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Nothing for the terminal."""


@contextmanager
def answering() -> Iterator[str]:
    """The server's address; it is there inside the block only."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
