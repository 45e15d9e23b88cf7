#!/usr/bin/env bash
# Builds a wheel (of the CPU engines: the CUDA ones take minutes; without the trainer, as `make wheel`; at -O1, which
# compiles faster), looks at what is in it, and uses it: in a fresh environment without torch, with torch, its command
# line, and to build C and C++ programs. Needs no network. scripts/check_wheel.sh goes further, and takes a wheel that is
# there.
# Usage: wheel_test.sh PYTHON FOLDER   (PYTHON: with torch and scikit-build-core; FOLDER: kept, so that the next is quick)
set -euo pipefail
python=$1
folder=$2
source=$(cd "$(dirname "$0")/.." && pwd)
unset SCRUPLE_LIBRARY PYTHONPATH PYTHONHOME CMAKE_ARGS
for module in scikit_build_core torch; do
  "$python" -c "import $module" 2>/dev/null || { echo "skipped: $python has no $module; run scripts/python.sh"; exit 77; }
done
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
rm -rf "$folder/dist" "$folder/venv" "$folder/saved" "$folder/smaller"

# make does where there is no ninja, which only pip's own environments are sure to have.
"$python" -m pip --disable-pip-version-check --quiet wheel "$source" --wheel-dir "$folder/dist" --no-deps \
  --no-build-isolation --config-settings=build-dir="$folder/build" --config-settings=ninja.make-fallback=true \
  --config-settings=cmake.define.SCRUPLE_CUDA=OFF --config-settings=cmake.define.SCRUPLE_TRAIN=OFF \
  --config-settings=cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O1
wheel=$(echo "$folder"/dist/*)

# The command line is in it where what that needs is here; `make test` sees to it.
command_line=scruple/bin/scruple
if grep -qE '^(CLI11|nlohmann_json)_DIR:PATH=.*-NOTFOUND$' "$folder/build/CMakeCache.txt"; then command_line=; fi

# Its name and its files: the package as it stands in the source tree, library, command line, and what describes them.
"$python" - "$wheel" "$source" $command_line <<'END'
import pathlib, platform, re, sys, zipfile
wheel, source = map(pathlib.Path, sys.argv[1:3])
header = (source / "include/scruple/scruple.h").read_text()
version = re.search(r'define SCRUPLE_VERSION "(.*)"', header)[1]
expected = f"scruple-{version}-py3-none-linux_{platform.machine()}.whl"
assert wheel.name == expected, f"the wheel is {wheel.name} instead of {expected}"
info = f"scruple-{version}.dist-info"
with zipfile.ZipFile(wheel) as file:
    found = set(file.namelist())
    metadata = file.read(f"{info}/METADATA").decode().partition("\n\n")[0].splitlines()
package = {p.relative_to(source / "python").as_posix() for p in (source / "python/scruple").rglob("*.py")}
described = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
# For C and C++: find_package, pkg-config, headers.
linking = {f"scruple/{name}" for name in (
    "libscruple.so", "include/scruple/scruple.h", "include/scruple/scruple.hpp", "lib/pkgconfig/scruple.pc",
    *(f"lib/cmake/scruple/scruple-{part}.cmake" for part in ("config", "config-version", "targets", "targets-release")))}
expected = package | described | linking | set(sys.argv[3:])
assert found == expected, f"missing: {sorted(expected - found)}, not expected: {sorted(found - expected)}"
for line in ("Name: scruple", f"Version: {version}", "License-Expression: Apache-2.0", "Requires-Python: >=3.10",
             "Provides-Extra: torch"):
    assert line in metadata, f"METADATA lacks {line!r}: {metadata}"
needed = [line for line in metadata if line.startswith("Requires-Dist:")]
assert len(needed) == 1 and "extra ==" in needed[0], f"only the extra should need something: {needed}"
END

"$python" -m venv --without-pip "$folder/venv"
fresh=$folder/venv/bin/python
"$python" -m pip --disable-pip-version-check --quiet --python "$fresh" install --no-deps --no-index "$wheel"
cd "$folder"  # away from the source tree

"$fresh" -c "
import scruple, sys
assert 'torch' not in sys.modules
print(scruple.__version__, scruple.engines())
assert scruple.__version__ == scruple.version(), scruple.__version__
assert scruple._abi.library.path.startswith(sys.prefix), scruple._abi.library.path
try:
    import scruple.torch
except ModuleNotFoundError as error:
    assert error.name == 'torch', error
else:
    sys.exit('scruple.torch was imported, and there is no torch here')"

PYTHONPATH=$("$fresh" -c "import sysconfig; print(sysconfig.get_path('purelib'))") "$python" -W ignore -c "
import importlib.metadata, torch, scruple.torch
(entry,) = importlib.metadata.entry_points(group='llmfoundry_optimizers', name='scruple_adamw')
assert entry.load() is scruple.torch.AdamW, entry
model = torch.nn.Linear(8, 1).to(torch.bfloat16)
before = model.weight.detach().clone()
optimizer = scruple.torch.AdamW(model.parameters(), lr=0.1)
model(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
assert not torch.equal(before, model.weight), 'the weights stand still'
scruple.save(optimizer, model, '$folder/saved')
path = scruple._abi.library.path
assert path.startswith('$folder/venv'), path
print('one step with', path.removeprefix('$folder/'))"

says() { # exit code, the text that its output or its error has, command
  local said status=0
  said=$(PATH=$folder/venv/bin:$PATH "${@:3}" 2>&1) || status=$?
  [ "$status" = "$1" ] && [[ $said == *$2* ]] || { echo "${*:3}: exit code $status, without '$2': $said"; exit 1; }
}
version=$("$fresh" -c "import scruple; print(scruple.__version__)")
says 0 "scruple $version" scruple --version
if [ -n "$command_line" ]; then
  says 0 companded8 scruple list
  says 0 7.125 "$fresh" -m scruple plan --params 8.03e9
  says 0 "every value is finite" scruple checkpoint verify "$folder/saved"
  says 0 "wrote $folder/smaller" scruple checkpoint convert "$folder/saved" --recipe scant --out "$folder/smaller"
  says 2 libpcre2-dev scruple train --data book.txt
  says 2 "did you mean 'checkpoint verify'" scruple verify "$folder/saved"
  "$fresh" "$source/tests/install/cli_test.py" "$folder/venv/bin/scruple"
  rm "$("$fresh" -c "import scruple; print(*scruple.__path__)")/bin/scruple"
fi
# Without the command line: what a build has where CLI11 is not.
says 0 "scruple $version" scruple --version
says 2 "sudo apt install libcli11-dev nlohmann-json3-dev" scruple list

"$fresh" "$source/tests/install/link_test.py" pip "$fresh"
