"""Replace a server's weights from a trainer: this process, which has the new ones.

    headrace serve MODEL --admin-api-key KEY --weight-transfer-config '{"backend": "gloo"}'
    python scripts/workers/replace_weights.py CHECKPOINT --key KEY --version step-100

The trainer broadcasts tensor by tensor; each worker takes its share of each and packs it as at the
start. Requests that run are finished with the old weights, later ones wait for the new ones.
"""

import argparse
import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from headrace.workers.distributed.weight_group import WeightGroup


class Server:
    """The routes of a server that change its engine."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        """The answer as a value; urllib's HTTPError for an error."""
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data, self._headers, method=method)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())


def beside(work: Any, *args: Any) -> threading.Thread:
    """A call of the server that waits for us, and we for it."""
    thread = threading.Thread(target=work, args=args)
    thread.start()
    return thread


def main() -> None:
    """Send every tensor of a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder of safetensors")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", required=True, help="the server's admin key")
    parser.add_argument("--version", help="name of the new weights")
    parser.add_argument("--address", default="127.0.0.1", help="of this process, for the workers")
    parser.add_argument("--port", type=int, default=29600)
    args = parser.parse_args()
    server = Server(args.url, args.key)
    num_workers = server.call("get_world_size", method="GET")["world_size"]
    init_info = {
        "master_address": args.address, "master_port": args.port, "rank_offset": 1,
        "world_size": 1 + num_workers,
    }  # fmt: skip
    joining = beside(server.call, "init_weight_transfer_engine", {"init_info": init_info})
    group = WeightGroup(args.address, args.port, 0, 1 + num_workers)
    joining.join()
    server.call("start_weight_update")
    for file in sorted(args.checkpoint.glob("*.safetensors")):
        tensors = load_file(file)
        update_info = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype) for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        taking = beside(server.call, "update_weights", {"update_info": update_info})
        group.send(list(tensors.values()))
        taking.join()
        print(f"{file.name}: {len(tensors)} tensors")
    answer = server.call("finish_weight_update", {"weight_version": args.version})
    server.call("shutdown_weight_transfer_engine")
    group.close()
    print(f"the server answers with weights {answer['weight_version']}")


if __name__ == "__main__":
    main()
