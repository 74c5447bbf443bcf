"""Over HTTP: a server whose weights change, that sleeps, and whose engine core dies meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.server_process import ServerProcess, wait_until
from tests.e2e.tiny_model import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SMALL = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "128",
         "--max-num-seqs", "8")  # fmt: skip
KEY = {"Authorization": "Bearer admin"}
PROMPT = "Once upon a time there was a small model that was made of random numbers"


class Admin:
    """A server, its checkpoints, and its routes behind the admin key."""

    def __init__(self, root: Path, temp: Path) -> None:
        self.old, self.new = save_tiny_model(root / "old"), save_tiny_model(root / "new")
        generator = torch.Generator().manual_seed(3)
        tensors = load_file(self.new / "model.safetensors")
        for tensor in tensors.values():
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, self.new / "model.safetensors", {"format": "pt"})
        self.server = ServerProcess(
            self.old, temp, *SMALL, "--admin-api-key", "admin", "--weight-update-root", str(root),
            "--enable-sleep-mode",
        )  # fmt: skip

    def post(self, path: str, **body: Any) -> httpx.Response:
        options: dict[str, Any] = {"json": body} if body else {}
        return self.server.client.post(f"/{path}", headers=KEY, **options)

    def do(self, path: str, **body: Any) -> Any:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str) -> Any:
        return self.server.get(f"/{path}", headers=KEY).json()

    def complete(self) -> tuple[str, str]:
        """Text, and the version of the weights that wrote it."""
        body = self.server.complete(prompt=PROMPT, max_tokens=12, ignore_eos=True).json()
        return body["choices"][0]["text"], body["weight_version"]


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[Admin]:
    admin = Admin(tmp_path / "models", tmp_path)
    yield admin
    admin.server.kill()


def test_update_sleep_and_death(admin: Admin) -> None:
    server = admin.server
    text, version = admin.complete()
    assert version == "default" and server.client.post("/pause").status_code == 401
    admin.do("start_weight_update")
    assert admin.post("update_weights", update_info={"path": "../elsewhere"}).status_code == 400
    assert admin.post("finish_weight_update").status_code == 500
    assert admin.complete() == (text, "default")

    admin.do("start_weight_update")
    admin.do("update_weights", update_info={"path": "new"})
    answer = admin.do("finish_weight_update", weight_version="v2")
    assert answer["weight_version"] == "v2" and answer["path"] == str(admin.new)
    new_text, version = admin.complete()
    assert version == "v2" and new_text != text
    assert admin.get("weight_info")["weight_version"] == "v2"

    assert admin.do("sleep?level=1") == {"status": "sleeping", "level": 1}
    assert admin.get("is_sleeping") == {"is_sleeping": True}
    core = psutil.Process(server.core.pid)
    core.kill()
    wait_until(lambda: not core.is_running(), 10, "the engine core has gone")
    asleep = {"is_sleeping": True}
    wait_until(lambda: admin.get("is_sleeping") == asleep, 60, "another one is there, asleep")
    assert admin.do("wake_up?tags=weights")["status"] == "sleeping"
    assert admin.do("wake_up?tags=kv_cache")["status"] == "awake"
    assert admin.complete() == (new_text, "v2")


def test_calls_of_workers(admin: Admin) -> None:
    assert admin.do("collective_rpc", method="reload_weights") == {"results": [None]}
    answer = admin.post("collective_rpc", method="_build_model", args=["x"])
    assert answer.status_code == 400 and "no method" in answer.json()["error"]["message"]
    assert admin.post("collective_rpc", method="get_model").status_code == 500
    assert admin.get("get_world_size") == {"world_size": 1}
