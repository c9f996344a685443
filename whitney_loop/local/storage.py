"""Saved states and exported adapters on disk.

A state is a folder ``states/STATE_ID``. In it, ``engine`` is a folder that only the engine writes and reads, and
``origin.json`` names the engine, model and rank of the run that was saved. ``adapters/ARTIFACT_ID`` is a PEFT adapter.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whitney_loop.local.engine import Engine, EngineError, JSONObject
from whitney_loop.local.log import log
from whitney_loop.local.requests import RunSettings, ServiceError, invalid, shown

DEFAULT_STORAGE = ".whitney_local"

_STATE_ID = re.compile(r"state-[0-9a-f]{16}")  # no dots and slashes, so that an id cannot name another folder


class Storage:
    """The folder of the states and adapters of one engine. Raise OSError if it cannot be written.

    If that happens later, ``save_state`` and ``export_lora`` raise EngineError ``storage_failed``.
    """

    def __init__(self, folder: Path, engine_name: str) -> None:
        self._states, self._adapters = folder.absolute() / "states", folder.absolute() / "adapters"
        self._engine_name = engine_name
        for each in (self._states, self._adapters):
            each.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=each).close()  # raise now, not after the training

    def save_state(self, engine: Engine, settings: RunSettings) -> JSONObject:
        state_id = f"state-{secrets.token_hex(8)}"
        with _new_folder(self._states / state_id) as folder:
            (folder / "engine").mkdir()
            step = engine.save_state(folder / "engine")
            (folder / "origin.json").write_text(json.dumps(self._origin(settings)), encoding="utf-8")
        return {"state_id": state_id, "step": step}

    def check_state(self, settings: RunSettings) -> None:
        """Raise ServiceError unless the state to resume from exists and has the run's engine, model and rank."""
        state_id = settings.resume_from
        if state_id is None:
            return
        if not _STATE_ID.fullmatch(state_id) or not (self._states / state_id).is_dir():
            raise ServiceError(404, "not_found", f"resume_from: there is no state {shown(state_id)} in this storage")
        try:
            saved = json.loads((self._states / state_id / "origin.json").read_text(encoding="utf-8"))
            engine_name = saved["engine"]
        except (ValueError, LookupError, TypeError, OSError) as error:
            raise invalid(f"resume_from: {_damaged(state_id, error)}") from error
        if engine_name != self._engine_name:
            raise invalid(
                f"resume_from: {state_id} was saved by the engine {shown(engine_name)}; "
                f"this service runs {shown(self._engine_name)}"
            )
        if saved != (asked := self._origin(settings)):
            raise invalid(f"resume_from: {state_id} was saved by a run of {saved}; this one asks for {asked}")

    def load_state(self, engine: Engine, settings: RunSettings) -> None:
        """Load the state to resume from, if there is one.

        Raise EngineError ``damaged_state`` if the engine cannot read it.
        """
        if settings.resume_from is None:
            return
        try:
            engine.load_state(self._states / settings.resume_from / "engine")
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and _is_of_network(error):
                raise
            raise EngineError("damaged_state", _damaged(settings.resume_from, error)) from error

    def export_lora(self, engine: Engine, settings: RunSettings) -> JSONObject:
        artifact_id = f"adapter-{secrets.token_hex(8)}"
        path = self._adapters / artifact_id
        with _new_folder(path) as folder:
            engine.export_lora(folder, base_model=settings.model)
        return {"artifact_id": artifact_id, "uri": path.as_uri()}

    def _origin(self, settings: RunSettings) -> JSONObject:
        """Return the properties that a run must share with the state from which it resumes."""
        return {"engine": self._engine_name, "model": settings.model, "rank": settings.rank}


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Give the block a new folder, and rename it to ``path`` at the end. If the block fails, remove the folder.

    Raise EngineError ``storage_failed`` if a file cannot be written.
    """
    draft = path.with_name(f".{path.name}")
    try:
        draft.mkdir()
        yield draft
        draft.rename(path)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError) and not _is_of_network(error):
            log(logging.WARNING, f"the storage cannot be written: {error}")
            raise EngineError("storage_failed", f"the storage could not be written: {error.strerror}") from error
        raise


def _is_of_network(error: OSError) -> bool:
    """Return whether an engine's OSError is about a connection, not a file. Errors of urllib have no ``errno``."""
    return isinstance(error, (ConnectionError, TimeoutError)) or error.errno is None


def _damaged(state_id: str, error: Exception) -> str:
    log(logging.WARNING, f"state {state_id} cannot be read: {error}")  # may contain a path, so the client never sees it
    return f"the files of {state_id} are damaged; resume from another state"
