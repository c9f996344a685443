"""A server on a loopback port that handles bytes: the base of the tests' servers and proxies."""

import socket
import struct
import threading

GIVES_UP_S = 10.0  # a test that goes wrong ends; one that goes right never waits for it


class Listener:
    """``serve(connection)`` is called for each connection, one after the other, in one thread."""

    def __init__(self, serve=None):
        self.serve = serve or self.serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.serve(connection)


def reset_at_close(connection):
    """Make the close of a connection a reset: it sends a RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
