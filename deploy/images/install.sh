#!/bin/sh
# install.sh dependencies|project EXTRAS FOLDER: loraplex with these extras, at the pinned versions, in a virtual
# environment. What it depends on comes first, without the sources: a layer that an edit of them does not make again.
# Both images are made by it, and the tests prove them with it where no container engine is at hand.
set -eu
source=$(cd "$(dirname "$0")/../.." && pwd)
python="$3/bin/python"
install() {
    "$python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
        -c "$source/constraints.txt" -c "$source/deploy/images/constraints.gpu.txt" "$@"
}
if [ "$1" = project ]; then
    install "$source[$2]"
    exec "$python" -m pip check
fi
"${PYTHON:-python3}" -m venv "$3"
"$python" - "$source/pyproject.toml" "$2" > "$3/requirements.txt" <<'END'
import re, sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]

def of(extras):
    for line in (line for extra in extras for line in project["optional-dependencies"][extra]):
        own = re.fullmatch(rf"{project['name']}\[(.+)\]", line)
        yield from of(own[1].split(",")) if own else (line,)

print(*project["dependencies"], *of(sys.argv[2].split(",")), sep="\n")
END
install -r "$3/requirements.txt"
