#!/bin/sh
# install.sh EXTRAS FOLDER: loraplex with these extras, at the pinned versions, in a new virtual environment.
# Both images are made by it, and the tests prove them with it where no container engine is at hand.
set -eu
source=$(cd "$(dirname "$0")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$2"
"$2/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
    -c "$source/constraints.txt" -c "$source/deploy/images/constraints.gpu.txt" "$source[$1]"
"$2/bin/python" -m pip check
