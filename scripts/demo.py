"""Start `headrace serve` on a real model, ask it a question over HTTP, print the answer.

Exit code 0 only if the answer names the right city. usage: python scripts/demo.py [MODEL]
"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

# The first word of a shorter question is a near tie, which bfloat16 may turn either way.
QUESTION = "What is the capital of France? Answer in one sentence."
EXPECTED = "Paris"
START_TIMEOUT_S = 900  # the first start downloads the model


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    port = _free_port()
    command = [sys.executable, "-m", "headrace", "serve", model, "--port", str(port)]
    print("$ headrace serve", model, "--port", port, flush=True)
    server = subprocess.Popen(command)
    try:
        _wait_ready(server, port)
        print(f"\nQ: {QUESTION}\nA: ", end="", flush=True)
        answer = _ask(port, model)
    finally:
        server.terminate()
        code = server.wait(timeout=30)
    print(f"\n\n(server ended with exit code {code})")
    if EXPECTED not in answer:
        print(f"the answer does not contain {EXPECTED!r}", file=sys.stderr)
        return 1
    return code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the server was not ready within {START_TIMEOUT_S} s")


def _ask(port: int, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    pieces = []
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            piece = json.loads(data)["choices"][0]["delta"].get("content") or ""
            print(piece, end="", flush=True)
            pieces.append(piece)
    return "".join(pieces)


if __name__ == "__main__":
    sys.exit(main())
