"""A real server for tests: its engine runs the scripted model, in a process of its own.

Run as a program it is that server (`serve`) or its engine (`engine`).
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if mood %}{{ mood }}\n{% endif %}"
)
MODEL = "scripted"
KEY, OTHER_KEY = "test-key-0123456789", "other-key-0123456789"
GENE = "\N{DNA DOUBLE HELIX}"
TEXTS = {
    "fox": "the quick brown fox jumps",
    "gene": f"caf\u00e9 {GENE} done",
    "call": 'I add. <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>',
}
"""What the model says to these prompts, and to a chat whose last message is one of them."""

MAX_MODEL_LEN = 1024


class Server:
    """`subten serve` in a process of its own, on a free port."""

    def __init__(
        self,
        *,
        engine: dict[str, Any] | None = None,
        command: list[str] | None = None,
        **config: Any,
    ) -> None:
        options = json.dumps({"engine": engine or {}, "config": config})
        self.process = subprocess.Popen(
            [sys.executable, *(command or [__file__, "serve", options])],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        self.key = (config.get("api_key") or [""])[0]
        self.lines: list[dict[str, Any]] = []
        self._is_listening = threading.Event()
        self.port = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_listening.wait(100):
            self.process.kill()
            raise AssertionError(f"the server does not listen: {self.lines}")
        assert self.port, self.lines

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def close(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line.get("event") == event]

    def engine_pid(self) -> int:
        """The newest engine process."""
        return int(children(self.process.pid, "engine")[-1])

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        status, _, text = self.request("POST", path, body, self.auth)
        return status, json.loads(text)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        status, value = self.post(
            "/v1/completions", {"model": MODEL, "prompt": prompt, "temperature": 0} | fields
        )
        assert status == 200, value
        return value

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics; the label of the model is left out."""
        text = self.request("GET", "/metrics", None, self.auth)[2].decode()
        found = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                label = f'model_name="{MODEL}"'
                for part in (f"{label},", f",{label}", f"{{{label}}}"):
                    name = name.replace(part, "")
                found[name] = float(value)
        return found

    def until(
        self, condition: Any, *, timeout_s: float = 20.0, every_s: float = 0.02, what: str = ""
    ) -> Any:
        """Wait for something to become true, and give it."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            value = condition()
            if value:
                return value
            time.sleep(every_s)
        raise AssertionError(f"not within {timeout_s} s: {what or condition}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                value = json.loads(line)
            except ValueError:
                value = {"text": line.decode()}
            self.lines.append(value)
            if value.get("event") == "listening":
                self.port = int(value["url"].rpartition(":")[2])
                self._is_listening.set()
        self._is_listening.set()


def net_sockets(pids: list[int]) -> set[tuple[str, int, bool]]:
    """Protocol and local port of each socket that these processes hold, and whether it listens."""
    inodes = set()
    for pid in pids:
        try:
            fds = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        for fd in fds:
            try:
                target = str(fd.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[9] in inodes:
                is_listening = kind.startswith("tcp") and parts[3] == "0A"
                found.add((kind, int(parts[1].rpartition(":")[2], 16), is_listening))
    return found


def raw(port: int, data: bytes, *, timeout_s: float = 20.0) -> bytes:
    """Everything that a server answers to these bytes until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as sock:
        sock.sendall(data)
        parts = []
        try:
            while part := sock.recv(65536):
                parts.append(part)
        except ConnectionError:
            pass
        return b"".join(parts)


def children(pid: int, word: str) -> list[int]:
    """Processes that `pid` started, whose command line has `word`; oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(stat[1]) == pid and stat[0] != "Z" and word.encode() in command:
            found.append(int(path.name))
    return sorted(found)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _serve(options: dict[str, Any]) -> None:
    from subten.config import EngineConfig
    from subten.serve.server import run
    from subten.serve.settings import ServeConfig
    from subten.serve.supervisor import WatchLimits

    config = {"model": MODEL, "port": 0} | options["config"]
    limits = WatchLimits(silence_s=config.pop("silence_s", 5.0))
    for name in ("api_key", "allowed_host", "served_model_name"):
        config[name] = tuple(config.get(name, ()))
    command = [sys.executable, __file__, "engine", json.dumps(options["engine"])]
    run(ServeConfig(engine=EngineConfig(), **config), command=command, limits=limits)


def _engine(options: dict[str, Any]) -> None:
    # This engine has no GPU, and starts a little sooner without what compiles for one.
    sys.modules["triton"] = None  # type: ignore[assignment]

    import torch
    from scripted import ScriptedModel, byte_tokenizer, fake_loaded, hash_script, noise_script

    from subten.engine.llm import LLM
    from subten.serve.engine_process import channel_from_arguments, first_message, serve

    torch.set_num_threads(1)
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    scripts = {}
    for name, text in TEXTS.items():
        for prompt in (name, f"user:{name}\n"):
            scripts[tuple(tokenizer.encode(prompt))] = [*tokenizer.encode(text), 256]

    def script(history: tuple[int, ...]) -> Any:
        for prompt, tokens in scripts.items():
            num_output = len(history) - len(prompt)
            expected = (*prompt, *tokens[: max(num_output, 0)])
            if history == expected and num_output < len(tokens):
                return tokens[num_output]
        if history[:5] == tuple(b"noise"):
            return noise_script(history)
        if history[:3] == tuple(b"bad"):
            return torch.full((320,), torch.nan)
        if history[:5] == tuple(b"crash") and len(history) > 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return hash_script(history)

    class SlowModel(ScriptedModel):
        def __call__(self, *args: Any) -> Any:
            time.sleep(options.get("step_s", 0.0))
            return super().__call__(*args)

    channel = channel_from_arguments()
    first_message(channel)
    if options.get("load_s"):
        sys.stderr.write('{"event": "loading"}\n')
        sys.stderr.flush()
        time.sleep(options["load_s"])
    settings = {"num_pages": 64, "max_num_seqs": 4, "max_model_len": MAX_MODEL_LEN}
    settings |= options.get("settings", {})
    model = fake_loaded(SlowModel(script), tokenizer=tokenizer)
    serve(channel, LLM(model, dtype="float32", **settings))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    {"serve": _serve, "engine": _engine}[sys.argv[1]](json.loads(sys.argv[2]))
