#!/usr/bin/env bash
# Build and push images with docker, podman or buildah, whichever is there and works.
#
#   TARGET=cpu bash scripts/image.sh build                     localhost/nibblekv:<version>-cpu
#   TARGET=cpu ENGINE=smollm2-135m/int4 bash scripts/image.sh build    with that engine and its model baked in
#   TARGET=cpu REGISTRY=registry.example/team bash scripts/image.sh push
#
# IMAGE_FLAGS= goes to the build as it is (--build-arg CPU_BASE=..., --isolation chroot), PUSH_FLAGS= to the push.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TARGET=${TARGET:-cpu}
TARGETS="cpu gpu trtllm"

fail() { printf '\033[31mimage:\033[0m %s\n' "$*" >&2; exit 2; }

[[ " $TARGETS " == *" $TARGET "* ]] || fail "TARGET: got '$TARGET', allowed ${TARGETS// /, }"

find_tool() {
    if command -v docker >/dev/null && docker info >/dev/null 2>&1; then echo docker
    elif command -v podman >/dev/null && podman info >/dev/null 2>&1; then echo podman
    elif command -v buildah >/dev/null; then echo buildah
    else fail "found no docker with a running daemon, no podman and no buildah; install one of them"
    fi
}

pin() { sed -n "s/^$1==//p" constraints.txt; }

version() { sed -n 's/^__version__ = "\(.*\)"/\1/p' nibble/__init__.py; }

name() { echo "nibblekv:$(version)-$TARGET"; }

# Links the engine and the model it runs into the build context; they are gone again when this script ends.
lay_engine() {
    local root=${NIBBLE_ENGINES:-engines} model=${ENGINE%%/*}
    [[ $ENGINE == */* && -f $root/$ENGINE/manifest.json ]] ||
        fail "ENGINE: got '$ENGINE', allowed <model>/<kv> with $root/<model>/<kv>/manifest.json; see make engine"
    trap 'rm -rf "docker/engine/${ENGINE%%/*}"' EXIT
    mkdir -p "docker/engine/$model"
    cp -rL "$root/$ENGINE" "docker/engine/$model/"
    [[ ! -d $root/$model/source ]] || cp -rL "$root/$model/source" "docker/engine/$model/"
    chmod -R a+rX "docker/engine/$model" # the image's user is not the one who built the engine
}

build() {
    local tool=$1 arguments
    arguments=(--target "$TARGET" --tag "localhost/$(name)" --file Dockerfile
        --build-arg "VERSION=$(version)" --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)"
        --build-arg TRITON_VERSION=2.51.0 --build-arg "TORCH_VERSION=$(pin torch)")
    if [[ -n ${ENGINE:-} ]]; then lay_engine; fi
    # HEALTHCHECK is not part of OCI's format, only of Docker's.
    if [[ $tool != docker ]]; then arguments+=(--format docker); fi
    # shellcheck disable=SC2086
    "$tool" build "${arguments[@]}" ${IMAGE_FLAGS:-} .
    echo "built localhost/$(name) with $tool"
}

push() {
    local tool=$1 format=()
    [[ -n ${REGISTRY:-} ]] || fail "REGISTRY: missing; allowed a registry and a path in it, such as registry.example/team"
    "$tool" tag "localhost/$(name)" "$REGISTRY/$(name)"
    if [[ $tool != docker ]]; then format=(--format v2s2); fi # OCI's format would drop the health check
    # shellcheck disable=SC2086
    "$tool" push "${format[@]}" ${PUSH_FLAGS:-} "$REGISTRY/$(name)"
    echo "pushed $REGISTRY/$(name)"
}

case ${1:-} in
    build | push) "$1" "$(find_tool)" ;;
    *) fail "got '${1:-}', allowed build, push" ;;
esac
