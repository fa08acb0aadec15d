"""A stand-in for a pod in the tests of the harness: a runner port, a log, a clean stop.

It answers ``/readyz`` with 503 once and with 200 from then on, and ``/status`` with what it has.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from tests.harness.sidelog import SideLog

ASKED: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ASKED.append(self.path)
        ready = ASKED.count("/readyz") > 1 or self.path != "/readyz"
        self.send_response(200 if ready else 503)
        self.end_headers()
        settings = {k: v for k, v in os.environ.items() if k.startswith("PERDURE_")}
        told = {"name": os.environ["POD_NAME"], "argv": sys.argv[1:], "env": settings}
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, format: str, *args: object) -> None:
        print(f"asked: {args[0]}")


def main() -> None:
    def stop(*_: object) -> None:
        print("stopped cleanly")
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    if "--broken" in sys.argv:
        sys.exit("cannot start: broken as asked for")
    if "SIDE_LOG_FILE" in os.environ:
        log = SideLog.from_environment()
        with log.execution("run-1", "/first#0", input={"n": 1}):
            pass
        with log.execution("run-1", "/second#0"):
            print("in the second step")
            while not Path(os.environ["SIDE_LOG_FILE"] + ".go").exists():
                time.sleep(0.01)
    server = HTTPServer(("127.0.0.1", int(os.environ["PERDURE_RUNNER_PORT"])), Handler)
    print("listening")
    server.serve_forever()


if __name__ == "__main__":
    main()
