#!/bin/sh
# Installs torch into the environment of the Python given as $1: the default build where there is
# an NVIDIA GPU and on macOS, else the CPU build, which spares gigabytes of CUDA packages.
# Where no CPU build can be had, the default build serves as well.
set -eu
python=$1
cpu_build="torch==2.13.0+cpu"
cpu_index="https://download.pytorch.org/whl/cpu"
any_build="torch>=2.11,<2.15"

if "$python" -c "import torch" 2>/dev/null; then
    exit 0
fi
if [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
    # One package, no retries, a short timeout: an index out of reach costs seconds.
    if "$python" -m pip install --quiet --no-deps --retries 0 --timeout 5 \
        --extra-index-url "$cpu_index" "$cpu_build"; then
        exit 0
    fi
    echo "No CPU build of torch is on offer here: installing the default build." >&2
fi
"$python" -m pip install --quiet "$any_build"
