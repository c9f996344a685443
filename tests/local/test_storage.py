"""Saved states on disk: whole or not at all, and only for the run that they belong to."""

from __future__ import annotations

import json

import pytest

from local.bench import WAIT_S, refusal
from whitney_loop.local.byte_lm import ByteLM
from whitney_loop.local.service import Service


def test_a_storage_that_cannot_be_written_is_found_at_the_start(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError):
        Service(tmp_path / "file")


def test_a_state_is_a_folder_of_its_engines_beside_a_file_that_names_its_origin(bench, tmp_path):
    state_id = bench().do("save_state")["result"]["state_id"]
    folder = tmp_path / "storage" / "states" / state_id
    assert json.loads((folder / "origin.json").read_text()) == {"engine": "byte-lm", "model": "byte-lm", "rank": 2}
    assert [path.name for path in (folder / "engine").iterdir()] == ["state.json"]


@pytest.mark.parametrize("kind", ["save_state", "export_lora"])
def test_a_save_that_fails_leaves_nothing(bench, tmp_path, monkeypatch, kind):
    def disk_full(engine, folder, **_):
        (folder / "half").write_text("written")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ByteLM, kind, disk_full)
    assert bench().do(kind)["error"]["code"] == "storage_failed"
    assert [path.name for path in (tmp_path / "storage").rglob("*")] == ["states", "adapters"]


def test_a_state_outlives_the_service(bench):
    first = bench()
    first.do("forward_backward")
    first.do("optim_step")
    state_id = first.do("save_state")["result"]["state_id"]
    loss = first.do("forward")["result"]["loss"]
    first.service.stop(WAIT_S)
    second = bench(resume_from=state_id)
    assert second.do("forward")["result"]["loss"] == loss
    assert second.do("save_state")["result"]["step"] == 1


@pytest.mark.parametrize("fields", [{"model": "another"}, {"lora": {"rank": 3}}])
def test_a_state_of_another_model_or_rank_is_refused(bench, fields):
    made = bench()
    state_id = made.do("save_state")["result"]["state_id"]
    with refusal(422, "invalid_payload") as refused:
        made.create(resume_from=state_id, **fields)
    assert state_id in str(refused.value)


def test_a_state_of_another_engine_is_refused_by_name(bench, tmp_path):
    made = bench()
    state_id = made.do("save_state")["result"]["state_id"]
    origin = {"engine": "another-engine", "model": "byte-lm", "rank": 2}
    (tmp_path / "storage" / "states" / state_id / "origin.json").write_text(json.dumps(origin))
    with refusal(422, "invalid_payload") as refused:
        made.create(resume_from=state_id)
    assert 'saved by the engine "another-engine"; this service runs "byte-lm"' in str(refused.value)


def test_a_state_that_the_engine_cannot_load_fails_the_run_without_telling_its_path(bench, tmp_path):
    made = bench()
    state_id = made.do("save_state")["result"]["state_id"]
    (tmp_path / "storage" / "states" / state_id / "engine" / "state.json").write_bytes(b"damaged")
    run = made.create(resume_from=state_id)
    assert (run["status"], run["error"]["code"]) == ("failed", "damaged_state")
    assert state_id in run["error"]["message"]
    assert str(tmp_path) not in str(run)


@pytest.mark.parametrize("content", [b"damaged", b"[]", b"{}"])
def test_a_state_of_unknown_origin_is_refused_without_its_path(bench, tmp_path, content):
    made = bench()
    state_id = made.do("save_state")["result"]["state_id"]
    (tmp_path / "storage" / "states" / state_id / "origin.json").write_bytes(content)
    with refusal(422, "invalid_payload") as refused:
        made.create(resume_from=state_id)
    assert str(tmp_path) not in str(refused.value)
    assert made.service.session(made.session_id)["runs"] == [made.run()]


@pytest.mark.parametrize("state_id", ["../../etc/passwd", "state-0123456789abcdeF", "state-0123456789abcdef\n", "x\0"])
def test_a_state_id_is_not_a_path(bench, state_id):
    with refusal(404, "not_found"):
        bench().create(resume_from=state_id)


def test_a_state_outside_the_storage_cannot_be_reached(bench, tmp_path):
    made = bench()
    state_id = made.do("save_state")["result"]["state_id"]
    (tmp_path / "storage" / "states" / state_id).rename(tmp_path / state_id)
    with refusal(404, "not_found"):
        made.create(resume_from=f"../../{state_id}")
