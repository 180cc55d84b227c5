from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune._util.ownership import is_run_id
from zerotune._util.proc import ProcessIdentity
from zerotune.errors import OffloadError
from zerotune.offload.record import LeaseRecord

records = st.builds(
    LeaseRecord,
    run_id=st.text(),
    rank=st.integers(),
    world_size=st.integers(),
    plan_digest=st.text(),
    created=st.text(),
    reserved=st.integers(),
    filesystem=st.none() | st.text(),
    owner=st.builds(
        ProcessIdentity,
        host=st.text(),
        boot_id=st.none() | st.text(),
        pid=st.integers(),
        pid_start=st.none() | st.integers(),
        pid_namespace=st.none() | st.integers(),
    ),
)
FIELDS = {"run_id": "20260101T000000-0123456789ab", "rank": 0, "world_size": 1, "plan_digest": ""}
OWNER = attrs.fields_dict(ProcessIdentity)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(record=records)
def test_a_record_round_trips(record):
    assert LeaseRecord.from_json(record.to_json()) == record


@settings(deadline=None)
@given(text=st.text() | anything.map(json.dumps))
def test_malformed_records_give_one_kind_of_error(text):
    with pytest.raises(OffloadError, match="lease record"):
        LeaseRecord.from_json(text)


@pytest.mark.parametrize("name", [*attrs.fields_dict(LeaseRecord), *OWNER])
@pytest.mark.parametrize("wrong", [[], True, 0.5])
def test_a_field_of_another_type_is_named(name, wrong):
    fields = json.loads(LeaseRecord.for_this_process(**FIELDS).to_json())
    (fields["owner"] if name in OWNER else fields)[name] = wrong
    with pytest.raises(OffloadError, match="is no record"):
        LeaseRecord.from_json(json.dumps(fields))


@settings(deadline=None)
@given(text=st.text() | st.from_regex(r"\d{8}T\d{6}-[0-9a-f]{12}\n?"))
def test_every_valid_run_id_is_safe_in_a_path(text):
    if is_run_id(text):
        assert text.isascii()
        assert not set(text) & set("/\\.\0\n ")


def test_a_live_process_is_recognised_and_one_with_a_reused_pid_is_not():
    me = ProcessIdentity.current()
    assert me.alive()
    assert not ProcessIdentity(
        host=me.host, boot_id=me.boot_id, pid=me.pid, pid_start=me.pid_start + 1
    ).alive()
    assert not ProcessIdentity(
        host=me.host, boot_id="earlier", pid=me.pid, pid_start=me.pid_start
    ).alive()
