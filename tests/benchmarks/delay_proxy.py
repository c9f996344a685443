"""A proxy that delays each direction, and counts connections, bytes and sequential round trips."""

import contextlib
import queue
import socket
import threading
import time


class DelayProxy:
    """``delay_s``: seconds that each chunk of bytes takes in each direction.

    ``exchanges`` holds, for each request, the times when it came and when the last of its answer left.
    """

    def __init__(self, upstream, delay_s):
        host, port = upstream.removeprefix("http://").split(":")
        self._upstream, self._delay_s = (host, int(port)), delay_s
        self.reset()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def reset(self):
        """Count from here. Connections that are open stay open and are not counted again."""
        self.connections = self.bytes_up = self.bytes_down = 0
        self.exchanges = []

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def round_trips(self):
        """The most exchanges of which each began after the one before it had ended: those that overlap count once."""
        count, free_from = 0, 0.0
        for begin, end in sorted(self.exchanges, key=lambda exchange: exchange[1]):
            if begin >= free_from:
                count, free_from = count + 1, end
        return count

    def _accept(self):
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                service = socket.create_connection(self._upstream)
                for each in (client, service):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                exchange = [0.0, 0.0]  # when the request came, when its answer left; of this connection's newest
                for source, target, count in ((client, service, self._came), (service, client, self._left)):
                    self._forward(source, target, count, exchange)

    def _forward(self, source, target, count, exchange):
        """Pass bytes on after the delay. Reading goes on meanwhile, so the delay does not limit the bandwidth."""
        chunks = queue.SimpleQueue()

        def read():
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    chunks.put((time.monotonic(), data))
            chunks.put((0.0, b""))

        def write():
            with contextlib.suppress(OSError):
                while (chunk := chunks.get())[1]:
                    came, data = chunk
                    time.sleep(max(came + self._delay_s - time.monotonic(), 0))
                    count(exchange, came, len(data))
                    target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

        for work in (read, write):
            threading.Thread(target=work, daemon=True).start()

    def _came(self, exchange, came, size):
        self.bytes_up += size
        if exchange[1] >= exchange[0]:  # the one before is answered
            exchange[:] = came, 0.0

    def _left(self, exchange, came, size):
        self.bytes_down += size
        if exchange[1] == 0.0:
            exchange[1] = time.monotonic()
            self.exchanges.append(tuple(exchange))
