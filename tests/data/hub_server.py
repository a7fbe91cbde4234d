"""A local HTTP server that answers the Hub client as the Hub does: data set listing, and files by revision."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The server's files and card fields by repository, and the requests that it got."""

    endpoint: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    fails: bool = False
    downloads: list[str] = field(default_factory=list)


def use_endpoint(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    """Let the Hub client ask this address, as HF_ENDPOINT does when it is set before the client is imported."""
    patch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a server while the block runs."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            if hub.fails:
                self.reply(500, b"{}", body=body)
            elif path.startswith("/api/datasets/"):
                self.listing(path.removeprefix("/api/datasets/").split("/revision/")[0], body=body)
            else:
                repo, _, rest = path.removeprefix("/datasets/").removeprefix("/").partition("/resolve/")
                name = rest.partition("/")[2]
                content = hub.files.get(repo, {}).get(name)
                if content is None:
                    self.reply(404, b"", body=body, error="EntryNotFound")
                    return
                if body:
                    hub.downloads.append(name)
                etag = f'"{hashlib.sha1(content).hexdigest()}"'
                self.reply(200, content, body=body, headers={"ETag": etag, "X-Repo-Commit": REVISION})

        def listing(self, repo: str, *, body: bool) -> None:
            if repo in hub.gated:
                self.reply(403, b"{}", body=body, error="GatedRepo")
            elif repo not in hub.files:
                self.reply(404, b"{}", body=body, error="RepoNotFound")
            else:
                files = [{"rfilename": name, "size": len(data)} for name, data in hub.files[repo].items()]
                answer = {"id": repo, "sha": REVISION, "siblings": files, "tags": [], "private": False}
                if repo in hub.cards:
                    answer["cardData"] = hub.cards[repo]
                self.reply(200, json.dumps(answer).encode(), body=body, kind="application/json")

        def reply(
            self,
            status: int,
            content: bytes,
            *,
            body: bool,
            kind: str = "application/octet-stream",
            error: str | None = None,
            headers: dict[str, str] | None = None,
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            if error is not None:
                self.send_header("X-Error-Code", error)
                self.send_header("X-Error-Message", f"{error} at {self.path}")
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
