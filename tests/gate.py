"""A service in front of the embedded one that works on samples at the same time, and shows how many at most.

No operation of a sampler ends before ``together`` of them were accepted and none was told to have ended. A loop that
waits for one before it submits the next never gets an answer here, until ``GIVES_UP_S`` lets the test fail.
"""

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GIVES_UP_S = 20.0  # a test that goes wrong ends; one that goes right never waits for it


class Gate:
    def __init__(self, service, together):
        self.service, self.together = service, together
        self.most_in_flight = 0
        self.opened_in_time = True
        self.sampled = []  # payloads of sample, in their order
        self.kinds = []  # of all operations, in their order
        self._in_flight: set[str] = set()
        self._open: set[str] = set()  # those that may end
        self._changed = threading.Condition()
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                gate.hold(self.path)
                self._pass_on(None)

            def do_POST(self):
                self._pass_on(self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def _pass_on(self, body):
                headers = {name: self.headers[name] for name in ("Authorization", "Idempotency-Key", "Content-Type")
                           if name in self.headers}  # fmt: skip
                asked = urllib.request.Request(service.base_url + self.path, body, headers, method=self.command)
                with urllib.request.urlopen(asked) as answer:
                    status, content = answer.status, answer.read()
                if body and self.path.endswith("/operations"):
                    gate.accepted(json.loads(body), content, at_sampler="/samplers/" in self.path)
                    content = json.dumps(json.loads(content) | {"status": "queued", "result": None}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.api_key = service.api_key
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def accepted(self, sent, content, *, at_sampler):
        with self._changed:
            self.kinds.append(sent["kind"])
            if at_sampler:
                self.sampled.append(sent["payload"])
                self._in_flight.add(json.loads(content)["operation_id"])
                self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
                if len(self._in_flight) >= self.together:
                    self._open |= self._in_flight
                self._changed.notify_all()

    def hold(self, path):
        operation_id = path.partition("?")[0].rpartition("/")[2]
        with self._changed:
            if operation_id in self._in_flight:
                if not self._changed.wait_for(lambda: operation_id in self._open, GIVES_UP_S):
                    self.opened_in_time = False
                    self._open.add(operation_id)
                self._in_flight.discard(operation_id)
