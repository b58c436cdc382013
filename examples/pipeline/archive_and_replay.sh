#!/bin/sh
# A queue to Parquet and back: `archive` copies what is in the queue now, `replay` publishes the copy, each message once.
# An archive leaves the queue as it is, so every order is in it twice in the end.
#
#   warren serve &
#   python examples/pipeline/publish_orders.py
#   sh examples/pipeline/archive_and_replay.sh archive/
set -eu

archive=$1
url=${WARREN_URL:-http://127.0.0.1:15672}
export WARREN_USER="${WARREN_USER:-guest}" WARREN_PASSWORD="${WARREN_PASSWORD:-guest}"

warren spark archive --url "$url" --queue orders --to "$archive"
warren spark replay "$archive" --url "$url" --exchange shop
