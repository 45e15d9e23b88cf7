"""The command `scruple`: starts the native command line that was built with this package, or says what was
missing when it was built."""

import os
import pathlib
import sys

import scruple

_MISSING = """\
scruple: this build has the library alone. In its source tree, on Debian or Ubuntu:
  sudo apt install libcli11-dev nlohmann-json3-dev                        # list, plan, bench, checkpoint
  sudo apt install libopenblas-pthread-dev libpcre2-dev libutf8proc-dev   # train, sample, compare, tokenize
  pip install --force-reinstall --no-deps .                               # or, without Python: make install"""


def main():
    here = pathlib.Path(__file__).resolve().parent
    for program in (here / "bin" / "scruple", here.parents[1] / "build" / "scruple"):  # as libscruple.so
        if program.is_file():
            os.execv(program, ["scruple", *sys.argv[1:]])
    if sys.argv[1:] == ["--version"]:
        print("scruple", scruple.__version__)
        return
    print(_MISSING, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
