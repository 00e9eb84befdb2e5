#!/usr/bin/env bash
# Install what serving needs, for an image: pinned by constraints.txt, the list is [tool.nibblekv] of pyproject.toml.
#
#   packages.sh /opt/venv /wheels       a new venv; wheels of that folder, if there are any, instead of an index
#   packages.sh --into-image /wheels    into the Python of a base image that has torch and Triton (TensorRT-LLM's)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

into=$1 wheels=$2
offline=()
if compgen -G "$wheels/*.whl" >/dev/null; then offline=(--no-index --find-links "$wheels"); fi

if [[ $into == --into-image ]]; then
    mapfile -t front < <(python3 scripts/requirements.py front)
    python3 -m pip install --no-cache-dir --no-deps "${offline[@]}" "${front[@]}"
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
