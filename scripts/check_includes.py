#!/usr/bin/env python3
"""Checks who includes whom: arrows between the rooms of the house never point back.

usage: check_includes.py [REPOSITORY]
"""
import pathlib
import re
import sys

# What a file in a room may include besides its own room: folders, or single files.
ALLOWED = {
    "include": [],
    "formats": [],
    "optim": ["formats/codec.h"],
    # The public structs are the engine's own table.
    "engine": ["formats/", "optim/", "include/scruple/scruple.h"],
    "grad": ["engine/", "include/"],
    "io": [],
    # The trainer is a user of the library; from inside it takes threads, random numbers and 16-bit codecs.
    "train": ["include/", "io/", "engine/threads.h", "engine/philox.h", "formats/codec.h", "formats/bf16.h",
              "formats/fp16.h"],
    "capi": ["formats/", "optim/", "engine/", "grad/", "io/", "train/", "include/"],
    "cli": ["include/"],
    "fuzz": ["io/"],
    "python": ["include/"],
}
# Files with a door of their own.
EXCEPTIONS = {f"cli/{name}": ["train/", "io/"] for name in ("train.", "training.", "compare.", "sample.", "checkpoint.")}
SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".def", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')


def resolve(root, source, name):
    """The included file relative to the repository, or None if it is not in it."""
    for base in (source.parent, root, root / "include"):
        path = (base / name).resolve()
        if path.is_file() and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return None


def may_include(source, target):
    room = source.split("/")[0]
    allowed = [room + "/"] + ALLOWED[room]
    for prefix, more in EXCEPTIONS.items():
        if source.startswith(prefix):
            allowed = allowed + more
    return any(target.startswith(a) if a.endswith("/") else target == a for a in allowed), allowed


def check_file(root, path):
    source = path.relative_to(root).as_posix()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        target = resolve(root, path, match.group(2))
        where = f"{source}:{number}"
        if target is None:
            if match.group(1) == '"':
                yield f"{where}: \"{match.group(2)}\" is not a file of this repository"
            continue
        fits, allowed = may_include(source, target)
        if not fits:
            yield f"{where}: may not include {target}; it may include {', '.join(allowed)}"


def main():
    default = pathlib.Path(__file__).resolve().parent.parent
    root = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else default
    files = [p for room in ALLOWED for p in sorted((root / room).rglob("*")) if p.suffix in SUFFIXES]
    problems = [problem for path in files for problem in check_file(root, path)]
    if not files:
        problems = [f"{root}: no sources found"]
    print("\n".join(problems) if problems else f"{len(files)} files keep the include rule")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
