#!/usr/bin/env bash
# Install what serving needs, for an image: pinned by constraints.txt, the list is [tool.nibblekv] of pyproject.toml.
#
#   packages.sh /opt/venv /wheels       a new venv; wheels of that folder, if there are any, instead of an index
#   packages.sh --beside /opt/launcher /wheels    a venv for the launcher alone, which also sees what a base image has
#
# TensorRT-LLM's own packages stay as they are in its image: they are what it was tested with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

beside=
if [[ $1 == --beside ]]; then beside=yes && shift; fi
into=$1 wheels=$2
offline=()
if compgen -G "$wheels/*.whl" >/dev/null; then offline=(--no-index --find-links "$wheels"); fi

if [[ -n $beside ]]; then
    mapfile -t launcher < <(python3 scripts/requirements.py launcher)
    python3 -m venv --system-site-packages --without-pip "$into"
    python3 -m pip --python "$into/bin/python" install --no-cache-dir --no-compile "${offline[@]}" \
        --constraint constraints.txt "${launcher[@]}"
    exit
fi

python3 -m venv "$into"
pip=("$into/bin/python" -m pip --disable-pip-version-check install --no-cache-dir --no-compile)
index=()
if [[ -n ${TORCH_INDEX:-} && ${#offline[@]} == 0 ]]; then index=(--index-url "$TORCH_INDEX"); fi
"${pip[@]}" --no-deps "${offline[@]}" "${index[@]}" "$(python3 scripts/requirements.py torch)"
# shellcheck disable=SC2086
mapfile -t packages < <(python3 scripts/requirements.py image ${EXTRAS:-})
"${pip[@]}" "${offline[@]}" --constraint constraints.txt "${packages[@]}"
"${pip[@]}" --no-deps "${offline[@]}" "$(python3 scripts/requirements.py no-deps | grep pytriton)"
"$into/bin/python" -m pip uninstall --yes --quiet pip setuptools
echo /opt/nibblekv > "$("$into/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nibblekv.pth"
