"""Options are checked before anything is opened, and secrets go nowhere."""

from __future__ import annotations

import pytest

from warren.pipeline.errors import ColumnError, OptionError
from warren.pipeline.options import OPTIONS, SECRETS, SourceOptions, checked_options, plain_options

GOOD = {"path": "data", "queue": "orders"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**GOOD, "quueue": "x"}, "there is no option 'quueue'; did you mean 'queue'"),
        ({**GOOD, "TOSEQ": "x"}, "there is no option 'TOSEQ'; did you mean 'toSeqId'"),
        ({**GOOD, "zzz": "x"}, "there is no option 'zzz'; there are path, url"),
        ({**GOOD, "lease": "x"}, "option 'lease' is for a streaming read, not for a batch read"),
        ({**GOOD, "exchange": "x"}, "option 'exchange' is for a write, not for a batch read"),
        ({"queue": "orders"}, "neither path nor url is given"),
        ({**GOOD, "url": "http://a"}, "both path and url are given"),
        ({"path": "data"}, "no queue is given"),
        ({**GOOD, "queuePattern": "x"}, "both queue='orders' and queuePattern='x' are given"),
        ({"path": "data", "queuePattern": "("}, "which is no regular expression"),
        ({**GOOD, "fromSeqId": "-1"}, "option fromSeqId is '-1'; it is a whole number, 0 or more"),
        ({**GOOD, "minPartitions": "0"}, "option minPartitions is '0'; it is a whole number, 1 or more"),
        ({**GOOD, "maxRecordsPerPartition": "many"}, "option maxRecordsPerPartition is 'many'"),
        ({**GOOD, "since": "yesterday"}, "option since is 'yesterday'; it is a time such as"),
        ({**GOOD, "since": "2e13"}, "option since is '2e13'; it is a time such as"),
        ({**GOOD, "until": "-1e300"}, "option until is '-1e300'; it is a time such as"),
        ({**GOOD, "state": "read"}, "option state is 'read'; it can be ready, unacked, all"),
        ({**GOOD, "access": "ftp"}, "option access is 'ftp'; it can be auto, files, http"),
        ({**GOOD, "table": "queue"}, "option table is 'queue'; it can be messages, queues"),
        (
            {"path": "data", "table": "segments", "since": "0"},
            "option since chooses messages, and table=segments has none",
        ),
        ({**GOOD, "table": "queues", "state": "ready"}, "option state chooses messages"),
        ({**GOOD, "failOnDataLoss": "no"}, "option failOnDataLoss is 'no'; it can be true, false"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_value(options, message):
    with pytest.raises(OptionError) as caught:
        SourceOptions.parse(options)
    assert message in str(caught.value)


def test_an_unknown_column_is_refused_by_name():
    with pytest.raises(ColumnError, match="there is no column 'boddy'; did you mean 'body'"):
        SourceOptions.parse({**GOOD, "columns": "seq_id,boddy"})
    with pytest.raises(ColumnError, match="column 'body' is named twice"):
        SourceOptions.parse({**GOOD, "columns": "body, body"})


def test_names_of_options_are_known_in_any_case():
    parsed = SourceOptions.parse({"PATH": "data", "Queue": "orders", "FROMSEQID": "7", "failondataloss": "FALSE"})
    assert (parsed.path, parsed.queue, parsed.from_seq, parsed.fail_on_data_loss) == ("data", "orders", 7, False)
    assert checked_options({"LEASE": "x"}, "streaming read") == {"lease": "x"}


def test_times_are_iso_or_seconds_and_utc_unless_they_say_otherwise():
    def micros(text: str) -> int | None:
        return SourceOptions.parse({**GOOD, "since": text}).since

    assert micros("2026-01-01T00:00:00Z") == micros("2026-01-01") == micros("2026-01-01T01:00:00+01:00")
    assert micros("1767225600.5") == 1_767_225_600_500_000
    assert micros("2026-01-01T00:00:00.000001") == 1_767_225_600_000_001


def test_no_secret_is_kept_shown_or_sent():
    secrets = {name: f"hush-{name}" for name in SECRETS}
    parsed = SourceOptions.parse({"url": "http://a", "queue": "orders", **secrets})
    assert "hush" not in repr(parsed)
    assert plain_options({"url": "http://a", "queue": "orders", "State": "all", **secrets}) == {
        "queue": "orders",
        "state": "all",
    }


def test_every_option_has_a_use():
    assert all(OPTIONS.values())
    assert set(OPTIONS) >= SECRETS
