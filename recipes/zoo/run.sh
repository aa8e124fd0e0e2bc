#!/usr/bin/env bash
# The digits network of the zoo, the row shift-0 of digits_shift: trained, certified, and checked by the independent checker.
# Usage: run.sh [RUNS]     PYTHON names the interpreter that has specguard. Killed, it continues.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
runs=${1:-runs/zoo}
run env "PYTHON=${PYTHON:-python3}" bash "$here/../digits_shift/run.sh" "$runs/digits" shift-0
place=$runs/digits/shift-0
run cp "$place/result.json" "$here/digits-certified-result.json"
run cp "$place/proofs/summary.json" "$here/digits-certified-certificates.json"
run cp "$place/checked/summary.json" "$here/digits-certified-checked.json"
