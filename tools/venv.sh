#!/bin/sh
# Make the virtual environment that the Makefile uses, or say in one line why that cannot be done.
#
#   tools/venv.sh .venv
#
# Does nothing, without any network, when the environment already holds what pyproject.toml and constraints.txt ask for:
# a stamp in it says what it was made from. PYTHON=/path/to/python3.12 chooses another interpreter.
set -eu

venv=${1:?usage: tools/venv.sh DIRECTORY}
needed_mb=8000 # torch comes with its CUDA libraries: 6 GB unpacked, and pip's downloads beside them

fail() {
    echo "elastictrainer: $*" >&2
    exit 1
}

free_mb() {
    df -Pk "$1" | awk 'NR == 2 { print int($4 / 1000) }'
}

# Where the checkout lies is part of it: an editable install and a venv's scripts hold absolute paths.
wanted=$( (pwd -P; cat pyproject.toml constraints.txt tools/venv.sh) | cksum)
stamp=$venv/.made-from
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$venv/bin/python" -c "" 2>/dev/null; then
    exit 0
fi

suitable() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if suitable "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    found=$(python3 --version 2>&1 || true)
    [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a Python 3.10 to 3.13"
    fail "Python 3.10 to 3.13 is needed and python3 says '$found'; install one (Debian, Ubuntu: apt install python3 python3-venv)"
fi

"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv module; install it (Debian, Ubuntu: apt install python3-venv)"

if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; then
    free_mb=$(free_mb .)
    [ "$free_mb" -ge "$needed_mb" ] ||
        fail "PyTorch needs $((needed_mb / 1000)) GB of disk and $(pwd) has $((free_mb / 1000)) GB free; make room and run this again"
fi

if ! suitable "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "elastictrainer: making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "$python -m venv $venv failed; see above"
fi

echo "elastictrainer: installing into $venv (once; the first time it takes a few minutes)"
export PIP_RETRIES="${PIP_RETRIES:-2}" # without a network five, the default, take minutes
log=$venv/install.log
if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' >"$log" 2>&1; then
    if grep -qiE 'no space left|disk quota' "$log"; then
        fail "no room left on the disk: $(pwd) has $(free_mb .) MB free, ${TMPDIR:-/tmp}, where pip unpacks, $(free_mb "${TMPDIR:-/tmp}") MB; make room, or set TMPDIR to a folder that has some, and run this again"
    # Every pip has its own words; that even the small build backend is nowhere says the same when it was told not to retry.
    elif grep -qiE 'connection broken|unreachable|connection (refused|reset|error)|timed out|requirement hatchling.*from versions: none' "$log"; then
        fail "the package index cannot be reached; the first run needs the network (pip's own words are in $log)"
    fi
    tail -n 15 "$log" >&2
    fail "pip could not install the packages (its last words are above, all of them in $log)"
fi
echo "$wanted" >"$stamp"
