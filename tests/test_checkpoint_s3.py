"""Checkpoints on a server that speaks S3."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import fsspec
import pytest

from .unit.test_checkpoint_objects import life_of_a_run, make


@pytest.mark.slow
def test_a_run_on_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for key, value in {
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }.items():
            monkeypatch.setenv(key, value)
        for _ in range(300):
            with socket.socket() as knock:
                if not knock.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.2)
        store, _ = fsspec.url_to_fs("s3://bucket", use_listings_cache=False)
        store.mkdir("bucket")
        life_of_a_run(make(), "s3://bucket/run")
        with pytest.raises(FileExistsError):
            store.pipe_file("bucket/run/.writer", b"x", mode="create")
    finally:
        server.terminate()
        server.wait()
