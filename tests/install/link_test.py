"""docs/link.md as its reader follows it: the page's programs are saved under the names that it gives them, its commands
run as they are printed, one after the other, and what they print is compared with the page.

Usage: link_test.py make BUILD     `make install` installs that build
       link_test.py pip PYTHON     the package is installed there already

CC, CXX, CFLAGS, CXXFLAGS and CMAKE in the environment say what cc, c++ and cmake are.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent.parent
WARNINGS = "-Wall -Wextra -Wpedantic -Werror"
END = "--- end of a block"
ANOTHER_WAY = {"make": "import scruple", "pip": "make install"}  # to install: what the other block has
# The page's training step, over a CPU engine: its memory is the host's.
TRAINING_STEP = """
cp "$0"/training_step_main.c .
cc training_step_main.c $(pkg-config --cflags --libs scruple) -Wl,-rpath,$(pkg-config --variable=libdir scruple) -o step
./step
"""


def blocks_of(page):
    """(language, the paragraph before, text) of each fenced block."""
    parts = re.split(r"^```(.*)\n((?:.*\n)*?)```\n", page, flags=re.MULTILINE)
    return [(parts[i + 1], parts[i].strip().split("\n\n")[-1], parts[i + 2]) for i in range(0, len(parts) - 1, 3)]


def script_of(blocks, how, saved):
    """What to run, and what each part of it should print at its end. Programs are left in `saved`."""
    script, expected = "set -eu\n", []
    for number, (language, before, text) in enumerate(blocks):
        names = re.findall(r"`(\w+\.\w+)`", before)
        if language == "sh" and ANOTHER_WAY[how] not in text:
            after = blocks[number + 1:number + 2]
            expected.append(after[0][2] if after and after[0][:2] == ("", "") else "")
            script += f"{text}echo '{END}'\n"
        elif language in ("c", "cpp", "cmake") and names:
            (saved / names[-1]).write_text(text)
            script += f"cp saved/{names[-1]} .\n"
        elif language == "cpp":  # parts of an example
            whole = (SOURCE / "examples/cpp/fit.cpp").read_text()
            lost = {line.strip() for line in text.splitlines()} - {line.strip() for line in whole.splitlines()}
            assert not lost, f"examples/cpp/fit.cpp lacks {lost}"
    expected.append("2 steps, 1 skipped, loss scale 32768, weight -1.000\n")
    return f"{script}{TRAINING_STEP}echo '{END}'\necho \"$PREFIX\"", expected


def programs(folder, build):
    """What the page's commands start; with `make install` comes a move, since whoever packages this will move it too."""
    outside = f'PATH="{os.environ["PATH"]}" exec'
    texts = {"cc": f'{outside} {os.environ.get("CC", "cc")} -std=c99 $CFLAGS "$@"',
             "c++": f'{outside} {os.environ.get("CXX", "c++")} $CXXFLAGS "$@"',
             "pip": '[ "$1" = install ]',  # it is there
             "make": f'[ "$1" = install ]\n$CMAKE --install "{build}" --prefix "{folder}/staged"\n'
                     f'mv "{folder}/staged" "${{2#PREFIX=}}"\n"${{2#PREFIX=}}/bin/scruple" --version'}
    if os.environ.get("CMAKE"):
        texts["cmake"] = f'{outside} $CMAKE "$@"'
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\nset -e\n{text}\n")
        (folder / name).chmod(0o755)


def engine_apart(text):
    """Processors have engines of their own, which give the same numbers."""
    return re.sub(r"^cpu-[\w-]+:", "cpu:", text, flags=re.MULTILINE)


def main(how, where):
    with tempfile.TemporaryDirectory() as work:
        home = pathlib.Path(work).resolve()
        folder, bin_ = home / "fit", home / "bin"
        (folder / "saved").mkdir(parents=True)
        bin_.mkdir()
        script, expected = script_of(blocks_of((SOURCE / "docs/link.md").read_text()), how, folder / "saved")
        programs(bin_, os.path.abspath(where))
        shutil.copytree(SOURCE / "examples/cpp", folder / "examples/cpp")

        environment = {"CMAKE": "cmake", **os.environ, "HOME": str(home)}
        for name in ("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "PKG_CONFIG_PATH", "PREFIX"):
            environment.pop(name, None)
        for name in ("CFLAGS", "CXXFLAGS"):
            environment[name] = f"{WARNINGS} {environment.get(name, '')}"
        path = [str(bin_), os.environ["PATH"]] if how == "make" else [str(bin_), os.path.dirname(where), os.environ["PATH"]]
        environment["PATH"] = os.pathsep.join(path)

        done = subprocess.run(["bash", "-c", script, str(HERE)], cwd=folder, env=environment, stdout=subprocess.PIPE,
                              text=True, timeout=600)
        print(done.stdout)
        assert done.returncode == 0, f"exit code {done.returncode}"
        *said, prefix = done.stdout.split(END + "\n")
        assert len(said) == len(expected) >= 6, len(said)
        for found, wanted in zip(said, expected):
            last = found.splitlines(keepends=True)[-wanted.count("\n"):] if wanted else []
            assert engine_apart("".join(last)) == engine_apart(wanted), f"{last} instead of {wanted!r}"
        for build in ("build", "example"):  # of this copy, and of no other that the machine may have
            cache = (folder / build / "CMakeCache.txt").read_text()
            assert f"scruple_DIR:PATH={prefix.strip()}/" in cache, re.findall("scruple_DIR.*", cache)


if __name__ == "__main__":
    main(*sys.argv[1:])
