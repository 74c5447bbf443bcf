"""nginx with the configuration of `scripts/deploy/`, in front of servers on ports of the test's."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.server_process import free_port, wait_until

DEPLOY = Path(__file__).parent.parent.parent / "scripts" / "deploy"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt has it)")


class NginxProcess:
    """Runs in the foreground below `directory`; `port` is what clients talk to."""

    def __init__(
        self, directory: Path, upstreams: Sequence[int], fail_timeout: str = "30s"
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = directory / "nginx.conf"
        config.write_text(self._config(directory, upstreams, fail_timeout))
        assert NGINX is not None
        self._log = (directory / "nginx.log").open("w")
        command = [NGINX, "-p", str(directory), "-c", str(config), "-e", "stderr"]
        self.process = subprocess.Popen(command, stderr=self._log)
        wait_until(self._listens, 10, "nginx listens")

    def _config(self, directory: Path, upstreams: Sequence[int], fail_timeout: str) -> str:
        text = (DEPLOY / "nginx.conf").read_text()
        servers = [
            f"        server 127.0.0.1:{port} max_fails=1 fail_timeout={fail_timeout};"
            for port in upstreams
        ]
        text = re.sub(r"^ +server 127.*;$", "", text, flags=re.MULTILINE)
        text = text.replace("least_conn;", "least_conn;\n" + "\n".join(servers) + "\n        #")
        text = text.replace("listen 8000;", f"listen 127.0.0.1:{self.port};")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "\n".join(f"    {kind}_temp_path {directory}/{kind};" for kind in kinds)
        text = text.replace("http {", f"http {{\n    access_log off;\n{paths}", 1)
        text = text.replace("worker_processes auto;", "worker_processes 2;")
        user = "user root;\n" if os.getuid() == 0 else ""
        return f"daemon off;\n{user}pid {directory}/nginx.pid;\nerror_log stderr warn;\n{text}"

    def _listens(self) -> bool:
        assert self.process.poll() is None, Path(self._log.name).read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self._log.close()
