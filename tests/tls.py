"""Certificates made by the ``openssl`` command, and a TLS server and a proxy on loopback that use them."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading

import pytest

from listener import Listener
from scripted_server import ScriptedServer

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    """A certificate authority in a folder; ``ca_file`` is its certificate."""

    def __init__(self, folder):
        self.folder, self.ca_file = folder, folder / "ca.pem"
        extensions = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"]
        self._openssl("req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
                      "-subj", "/CN=authority of the test", *extensions)  # fmt: skip

    def certificate(self, *names, days=2):
        """Return a file with a server's key and certificate; with negative ``days`` it has expired."""
        (self.folder / "extensions").write_text(
            f"subjectAltName={','.join(names)}\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n"
        )
        self._openssl("req", *_KEY, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server of the test")
        self._openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                      "-out", "server.pem", "-days", str(days), "-extfile", "extensions")  # fmt: skip
        both = self.folder / "both.pem"
        both.write_text((self.folder / "server.key").read_text() + (self.folder / "server.pem").read_text())
        return both

    def _openssl(self, *arguments):
        done = subprocess.run(["openssl", *arguments], cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this openssl cannot: {done.stderr}")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")


class TLSServer(ScriptedServer):
    """A scripted server behind TLS; ``host`` is the name that the client asks for."""

    def __init__(self, certificate, *script, host="localhost", **options):
        super().__init__(*script, **options)
        self.port = self.base_url.rpartition(":")[2]
        self.base_url = f"https://{host}:{self.port}"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._listener = _Wrapping(self._listener, context)


class _Wrapping:
    def __init__(self, listener, context):
        self._listener, self._context = listener, context

    def accept(self):
        while True:
            connection, address = self._listener.accept()
            try:
                return self._context.wrap_socket(connection, server_side=True), address
            except OSError:  # the client did not trust us
                connection.close()

    def __getattr__(self, name):
        return getattr(self._listener, name)


class ConnectProxy(Listener):
    """An HTTP proxy that tunnels every CONNECT to one port of this machine; ``heard`` holds the bytes it could read."""

    def __init__(self, port):
        self._port = int(port)
        self.heard = []
        super().__init__()

    def serve(self, connection):
        with connection, socket.create_connection(("127.0.0.1", self._port)) as onward:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            self.heard.append(head)
            connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=self._pump, args=(onward, connection))
            back.start()
            self._pump(connection, onward, self.heard)
            back.join()

    def _pump(self, source, target, heard=None):
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                if heard is not None:
                    heard.append(chunk)
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)
