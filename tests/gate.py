"""A server in front of the embedded service that counts how many samples are in flight at the same time.

No sampler operation is reported as ended before ``together`` of them were accepted. A loop that waits for one before
it submits the next gets no answer here, until ``GIVES_UP_S`` lets the test fail.
"""

import json
import threading

from between import Between

GIVES_UP_S = 20.0  # a test that goes wrong ends; one that goes right never waits for it


class Gate(Between):
    def __init__(self, service, together):
        super().__init__(service)
        self.together = together
        self.most_in_flight = 0
        self.opened_in_time = True
        self.sampled = []  # payloads of sample, in order
        self.kinds = []  # of all operations, in order
        self._in_flight: set[str] = set()
        self._open: set[str] = set()  # those that may end
        self._changed = threading.Condition()

    def after(self, path, body, answer):
        if not body or not path.endswith("/operations"):
            return answer
        sent = json.loads(body)
        with self._changed:
            self.kinds.append(sent["kind"])
            if "/samplers/" in path:
                self.sampled.append(sent["payload"])
                self._in_flight.add(answer["operation_id"])
                self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
                if len(self._in_flight) >= self.together:
                    self._open |= self._in_flight
                self._changed.notify_all()
        return answer | {"status": "queued", "result": None}

    def before(self, path):
        operation_id = path.partition("?")[0].rpartition("/")[2]
        with self._changed:
            if operation_id in self._in_flight:
                if not self._changed.wait_for(lambda: operation_id in self._open, GIVES_UP_S):
                    self.opened_in_time = False
                    self._open.add(operation_id)
                self._in_flight.discard(operation_id)
