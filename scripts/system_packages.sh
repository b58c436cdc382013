#!/bin/bash
# Makes sure that the system has what Warren needs beside Python: a C compiler and Python's headers for the kernel,
# venv for .venv, and a Java runtime of 17 or newer for Spark. What is missing is installed by apt-get when we are root;
# otherwise the command to run is printed and we stop.
#
# Usage: scripts/system_packages.sh [python]
#        scripts/system_packages.sh --tests    what only tests need: the C clients of AMQP, openssl for certificates
set -euo pipefail

if [ "${1:-}" = --tests ]; then
    packages=()
    command -v amqp-publish >/dev/null || packages+=(amqp-tools)
    command -v openssl >/dev/null || packages+=(openssl)
    [ ${#packages[@]} -gt 0 ] || exit 0
    export DEBIAN_FRONTEND=noninteractive
    # Without them the tests that need them are skipped, and say so: that is no reason to stop.
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && apt-get update -qq &&
        apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null; then
        echo "installed ${packages[*]}"
    else
        echo "some tests will be skipped; they need: sudo apt-get install -y --no-install-recommends ${packages[*]}" >&2
    fi
    exit 0
fi

python=${1:-python3}

has_new_python() { "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

has_compiler() { command -v gcc >/dev/null && echo '#include <stdio.h>' | gcc -E - >/dev/null 2>&1; }

has_headers() {
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

has_venv() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }

has_java() {
    local major
    # The first line is: openjdk version "17.0.15" 2025-04-15
    major=$(java -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1) || return 1
    [ "${major:-0}" -ge 17 ]
}

if ! has_new_python; then
    echo "Warren needs Python 3.11 or newer; '$python' is not. Say which to use: make setup PYTHON=python3.12" >&2
    exit 1
fi

# A Python of another version than Debian's own has its own packages, named after it.
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')

packages=()
has_compiler || packages+=(gcc libc6-dev)
has_headers || packages+=("$version-dev")
has_venv || packages+=("$version-venv")
has_java || packages+=(default-jre-headless)

[ ${#packages[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
    echo "Warren needs these packages (Debian's names), and there is no apt-get here to install them:" >&2
    echo "    ${packages[*]}" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "Warren needs some system packages. Run this, then make again:" >&2
    echo "    sudo apt-get update && sudo apt-get install -y --no-install-recommends ${packages[*]}" >&2
    exit 1
fi

echo "installing ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null

for need in compiler headers venv java; do
    "has_$need" || { echo "installed ${packages[*]}, but the check '$need' of $0 still fails" >&2; exit 1; }
done
