"""A server between a client and the embedded service that passes requests on; tests look at them or change answers."""

import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PASSED_ON = ("Authorization", "Idempotency-Key", "Content-Type")


class Between:
    """``change(answer)`` returns the answer to send in place of the service's, which is an object."""

    def __init__(self, service, change=lambda answer: answer):
        self.service, self.change = service, change
        self.api_key = service.api_key
        between = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1  # head and body in one packet

            def log_message(self, *_):
                pass

            def do_GET(self):
                between.before(self.path)
                self._pass_on(None)

            def do_POST(self):
                self._pass_on(self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def _pass_on(self, body):
                headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
                asked = urllib.request.Request(service.base_url + self.path, body, headers, method=self.command)
                try:
                    with urllib.request.urlopen(asked) as answer:
                        status, content = answer.status, json.load(answer)
                except urllib.error.HTTPError as error:
                    with error:
                        status, content = error.code, json.load(error)
                content = json.dumps(between.after(self.path, body, content)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                self.wfile.flush()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._server.handle_error = lambda *_: None  # the client or the service may leave
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.005,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def before(self, path):
        """Called before a GET is passed on."""

    def after(self, path, body, answer):
        """Return the answer to send; ``body`` is that of a POST, else None."""
        return self.change(answer)


class Recorder(Between):
    """A service that keeps the payload of every operation that it is sent."""

    def __init__(self, service):
        super().__init__(service)
        self.sent = []  # (kind, payload)

    def after(self, path, body, answer):
        if body and path.endswith("/operations"):
            operation = json.loads(body)
            self.sent.append((operation["kind"], operation["payload"]))
        return answer

    def of_kind(self, kind):
        return [payload for sent, payload in self.sent if sent == kind]


def changing_results(service, kind, change):
    """A service in which ``change(result)`` replaces each result of an operation of this kind."""

    def changed(answer):
        if answer.get("kind") == kind and answer.get("result"):
            return answer | {"result": change(answer["result"])}
        return answer

    return Between(service, changed)
