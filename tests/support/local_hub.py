"""A small hub of models on this machine: the part of the Hugging Face hub's HTTP interface that is used."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TOKEN = "hf_write"
MODEL = r"(?P<repo>[^/]+/[^/]+)"


@dataclass
class Repo:
    """Commits by branch or id, each a table of files; ``gated`` ones show their names only."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[digest] = files
        self.branches[branch] = digest
        return digest


class LocalHub:
    """``repos`` by name; ``requests`` are the method and path of every one so far; while ``is_down`` every
    answer is 503."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.url = ""
        self.is_down = False

    def add(self, name: str, folder: Path, branch: str = "main", **options: Any) -> str:
        """Commit the files of a folder -> the commit."""
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        repo = self.repos.setdefault(name, Repo(**options))
        return repo.commit(files, branch)

    @property
    def downloads(self) -> list[str]:
        """Names of the files that were sent, without folders of the repository."""
        found = (re.fullmatch(r"GET /[^/]+/[^/]+/resolve/[^/]+/(.+)", line) for line in self.requests)
        return sorted(match[1] for match in found if match)


class Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def handle_one(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        self.body = (
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if not self.is_chunked
            else self.chunks()
        )
        if self.hub.is_down:
            return self.fail(503)
        for pattern, method, answer in ROUTES:
            if self.command in method and (match := re.fullmatch(pattern, path)):
                return answer(self, **match.groupdict())
        self.fail(404, "EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    @property
    def is_chunked(self) -> bool:
        return self.headers.get("Transfer-Encoding") == "chunked"

    def chunks(self) -> bytes:
        out = b""
        while size := int(self.rfile.readline(), 16):
            out += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return out

    @property
    def token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def send(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def response(self, value: Any, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), status, Content_Type="application/json")

    def fail(self, status: int, code: str = "", message: str = "") -> None:
        self.send(b"{}", status, X_Error_Code=code, X_Error_Message=message, Content_Type="application/json")

    def found(self, repo: str) -> Repo | None:
        """The repository, if it is there and this token may see it; else the answer is sent."""
        known = self.hub.repos.get(repo)
        if self.token and self.token not in (TOKEN, "hf_read"):
            self.fail(401, message="Invalid credentials in Authorization header")
        elif known is None or (known.private and not self.token):
            self.fail(404 if self.token else 401, "RepoNotFound")
        else:
            return known
        return None

    def at(self, known: Repo, revision: str) -> str | None:
        revision = revision.replace("%2F", "/")
        commit = known.branches.get(revision, revision)
        if commit in known.commits:
            return commit
        self.fail(404, "RevisionNotFound")
        return None

    def info(self, repo: str, revision: str = "main") -> None:
        if (known := self.found(repo)) is None or (commit := self.at(known, revision)) is None:
            return
        siblings = [{"rfilename": name} for name in known.commits[commit]]
        self.response({"id": repo, "sha": commit, "private": known.private, "siblings": siblings})

    def tree(self, repo: str, revision: str) -> None:
        if (known := self.found(repo)) is None or (commit := self.at(known, revision)) is None:
            return
        files = known.commits[commit].items()
        rows = [
            {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files
        ]
        self.response(rows)

    def resolve(self, repo: str, revision: str, file: str) -> None:
        if (known := self.found(repo)) is None or (commit := self.at(known, revision)) is None:
            return
        if known.gated:
            return self.fail(403 if self.token else 401, "GatedRepo")
        data = known.commits[commit].get(file)
        if data is None:
            return self.fail(404, "EntryNotFound")
        self.send(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)

    def may_write(self) -> bool:
        if self.token == TOKEN:
            return True
        self.fail(403 if self.token else 401, message="You have no right to write here")
        return False

    def create(self) -> None:
        if not self.may_write():
            return
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repos:
            return self.response({"error": "exists", "url": f"{self.hub.url}/{name}"}, 409)
        self.hub.repos[name] = Repo(private=asked.get("visibility") == "private")
        self.hub.repos[name].commit({".gitattributes": b""})
        self.response({"url": f"{self.hub.url}/{name}"})

    def preupload(self, repo: str, revision: str) -> None:
        files = [file["path"] for file in json.loads(self.body)["files"]]
        mode = {True: "lfs", False: "regular"}
        rows = [
            {"path": f, "uploadMode": mode[f.endswith(".safetensors")], "shouldIgnore": False} for f in files
        ]
        self.response({"files": rows})

    def batch(self, repo: str) -> None:
        objects = json.loads(self.body)["objects"]
        for each in objects:
            each["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}
        self.response({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.blobs[oid] = self.body
        self.send(b"")

    def commit(self, repo: str, revision: str) -> None:
        if not self.may_write() or (known := self.found(repo)) is None:
            return
        files = dict(known.commits[known.branches[revision]])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        oid = known.commit(files, revision)
        self.response({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}"})

    def yaml(self) -> None:
        self.response({"errors": [], "warnings": []})


ROUTES = [
    (
        rf"/api/models/{MODEL}(/revision/(?P<revision>.+))?",
        "GET",
        lambda at, repo, revision: at.info(repo, revision or "main"),
    ),
    (rf"/api/models/{MODEL}/tree/(?P<revision>[^/]+)", "GET", Handler.tree),
    (rf"/{MODEL}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "GET HEAD", Handler.resolve),
    ("/api/repos/create", "POST", Handler.create),
    (rf"/api/models/{MODEL}/preupload/(?P<revision>.+)", "POST", Handler.preupload),
    (rf"/{MODEL}\.git/info/lfs/objects/batch", "POST", Handler.batch),
    (r"/lfs/(?P<oid>\w+)", "PUT", Handler.put),
    (rf"/api/models/{MODEL}/commit/(?P<revision>.+)", "POST", Handler.commit),
    ("/api/validate-yaml", "POST", Handler.yaml),
]


@contextmanager
def serving() -> Iterator[LocalHub]:
    """An empty hub that answers at its ``url``."""
    hub = LocalHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """An empty hub that this process takes for the only one, with caches of its own and no token."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))
    with serving() as made:
        for name, value in {
            "ENDPOINT": made.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": made.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        yield made


def environment(hub: LocalHub, home: Path) -> dict[str, str]:
    """Variables that make another process take ``hub`` for the only one."""
    caches = {"HF_HOME": str(home / "home"), "EAGLE_KIT_CACHE": str(home / "cache")}
    switches = {
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "",
        "HF_TOKEN": "",
    }
    return {"HF_ENDPOINT": hub.url, **switches, **caches}
