#!/usr/bin/env bash
# Install programs that tests run, from the packages of Debian or Ubuntu. If all are there, nothing happens.
set -euo pipefail
PATH=$PATH:/usr/sbin # not on that of every user

# What the tests run, and the package that has it. The first name of several is enough.
PROGRAMS=(
    "promtool:prometheus"
    "prometheus:prometheus"
    "chromium,chromium-browser,google-chrome:chromium"
    "chromium-headless-shell,google-chrome:chromium-headless-shell"
    "etcd:etcd-server"
    "systemd-analyze:systemd"
    "redis-server:redis-server"
    "rabbitmq-server:rabbitmq-server"
    "jq:jq"
    "mvn:maven"
    "pg_ctlcluster:postgresql"
    "groff:groff"
    "zsh:zsh"
    "fish:fish"
)

packages_of_missing() {
    local line name
    for line in "${PROGRAMS[@]}"; do
        for name in $(tr ',' ' ' <<< "${line%:*}"); do
            if command -v "$name" > /dev/null; then continue 2; fi
        done
        echo "${line#*:}"
    done | sort -u
}

install() {
    apt-get update --quiet --quiet \
        && DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --quiet --no-install-recommends \
            -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o Acquire::http::Timeout=60 "$@"
}

mapfile -t packages < <(packages_of_missing)
if ((${#packages[@]} == 0)); then exit 0; fi

if ! command -v apt-get > /dev/null || (($(id -u) != 0)); then
    echo "error: programs that tests run are missing. As root: apt-get install ${packages[*]}" >&2
    exit 1
fi
echo "Installing Debian packages: ${packages[*]}"
output=$(mktemp)
trap 'rm -f "$output"' EXIT
for pause in 5 20 0; do
    if install "${packages[@]}" > "$output" 2>&1; then
        mapfile -t packages < <(packages_of_missing)
        if ((${#packages[@]} == 0)); then exit 0; fi
        echo "error: installed, but their programs are not on PATH: ${packages[*]}" >&2
        exit 1
    fi
    tail -n 5 "$output" >&2
    sleep "$pause"
done
echo "error: apt-get could not install ${packages[*]}" >&2
exit 1
