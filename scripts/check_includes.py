#!/usr/bin/env python3
"""Checks who includes whom, and which Python imports what: arrows between the rooms of the house never point back.

usage: check_includes.py [REPOSITORY]
"""
import ast
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
    # The trainer is a user of the library; from inside it takes threads, random numbers, 16-bit codecs and old names.
    "train": ["engine/philox.h", "io/"],
    "train/text": ["io/", "engine/philox.h", "train/random.h", "train/json_object.h"],
    # Without train/text/: `scruple plan` reads models in builds without the trainer.
    "train/model": ["include/", "io/", "formats/bf16.h", "formats/fp16.h", "train/json_object.h"],
    # What a device does for a model, and the memory that it takes.
    "train/pass": ["include/", "train/model/description.h"],
    "train/run": ["include/", "io/", "engine/threads.h", "optim/renamed.h", "train/random.h", "train/text/", "train/model/",
                  "train/pass/"],
    # A device's room each: it sees the interface that it implements, and nobody sees it.
    "train/cpu": ["include/", "engine/threads.h", "formats/codec.h", "formats/bf16.h", "formats/fp16.h",
                  "train/pass/", "train/model/description.h"],
    "train/cuda": ["include/", "train/pass/", "train/model/description.h"],
    "capi": ["formats/", "optim/", "engine/", "grad/", "io/", "train/", "include/"],
    "cli": ["include/"],
    "fuzz": ["io/", "train/"],
    "python": ["include/"],
}
# Files with a door of their own.
OF_TRAINER = ("train.", "training.", "session.", "ending.", "room.", "progress.", "page.", "compare.", "comparison.", "sample.", "eval.",
              "found.", "rate.", "tokenize.", "checkpoint.", "checkpoint_")
EXCEPTIONS = {f"cli/{name}": ["train/", "io/"] for name in OF_TRAINER}
EXCEPTIONS["cli/memory."] = ["train/run/rows.h", "train/pass/ledger.h"]
EXCEPTIONS["cli/model."] = EXCEPTIONS["cli/plan."] = ["train/model/", "io/"]
SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".def", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
# What a Python file may import besides the standard library; the longest prefix of its path counts.
IMPORTS = {
    "python/scruple/": {"scruple"},  # works without torch
    "python/scruple/torch/": {"scruple", "torch"},
    # Doors to frameworks, which nothing else of the package opens.
    "python/scruple/torch/axolotl.py": {"scruple", "torch", "axolotl", "pydantic"},
    "python/scruple/torch/lightning.py": {"scruple", "torch", "lightning", "pytorch_lightning"},
    "python/scruple/torch/torchtitan.py": {"scruple", "torch", "torchtitan"},
    "python/scruple/torch/transformers.py": {"scruple", "torch", "transformers"},
}
# Imports that would break the rule above, and may stand inside a function: they happen when it is called, so that
# `import scruple` still needs no torch. scruple.save and scruple.load take torch models.
LAZY = {("python/scruple/__init__.py", "scruple.torch.checkpoint")}


def resolve(root, source, name):
    """The included file relative to the repository, or None if it is not in it."""
    for base in (source.parent, root, root / "include"):
        path = (base / name).resolve()
        if path.is_file() and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return None


def room_of(path):
    """The innermost: train/cpu/x.h is in train/cpu."""
    return max((room for room in ALLOWED if path.startswith(room + "/")), key=len)


def may_include(source, target):
    room = room_of(source)
    allowed = [room + "/"] + ALLOWED[room]
    for prefix, more in EXCEPTIONS.items():
        if source.startswith(prefix):
            allowed = allowed + more
    if room_of(target) in ("train/cpu", "train/cuda") and room_of(target) != room:
        return False, allowed
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


def imports_of(path, package):
    """(line, dotted name, whether inside a function) of every import in a file, wherever in it; `package` is what
    relative ones start from."""
    tree = ast.parse(path.read_text(encoding="utf-8"), path, feature_version=(3, 10))  # the oldest that pyproject.toml names
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    # Only bodies: decorators and defaults are evaluated when the file is imported.
    inside = {id(node) for function in functions for line in function.body for node in ast.walk(line)}
    for node in ast.walk(tree):
        lazy = id(node) in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, lazy
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) + 1 - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:  # a name may be a module: `from . import torch`
                yield node.lineno, ".".join(base + [alias.name]), lazy


def check_python(root, path):
    source = path.relative_to(root).as_posix()
    room = max((prefix for prefix in IMPORTS if source.startswith(prefix)), key=len)
    for number, name, lazy in imports_of(path, source.split("/")[1:-1]):
        if lazy and (source, name) in LAZY:
            continue
        top = name.split(".")[0]
        if top not in IMPORTS[room] and top not in sys.stdlib_module_names:
            allowed = ", ".join(["the standard library", *sorted(IMPORTS[room])])
            yield f"{source}:{number}: may not import {name}; it may import {allowed}"
        elif "torch" not in IMPORTS[room] and (name + ".").startswith("scruple.torch."):
            yield f"{source}:{number}: may not import {name}, which imports torch"


def main():
    default = pathlib.Path(__file__).resolve().parent.parent
    root = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else default
    files = sorted({p for room in ALLOWED for p in (root / room).rglob("*") if p.suffix in SUFFIXES})
    problems = [problem for path in files for problem in check_file(root, path)]
    modules = sorted((root / "python" / "scruple").rglob("*.py"))
    problems += [problem for path in modules for problem in check_python(root, path)]
    if not files:
        problems = [f"{root}: no sources found"]
    print("\n".join(problems) if problems else f"{len(files) + len(modules)} files keep the include rule")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
