#!/usr/bin/env python3
"""Finds names in a page's script that nothing declares, and declared ones that nothing uses; and the same for the
properties (--name) of its style sheet, whose classes and ids must stand in the script or the page.

usage: check_script.py FILE.js FILE.css FILE.html

It reads tokens, not scopes: a name counts as declared or used wherever in the file it is. It expects a semicolon
after every statement. Whether the browser takes the files is for tests/browser_test.py to see.
"""
import re
import sys

KEYWORDS = set("""async await break case catch class const continue debugger default delete do else export extends false
    finally for function if import in instanceof let new null of return static super switch this throw true try typeof
    undefined var void while yield""".split())
BROWSER = set("""Infinity JSON Math Number Object ResizeObserver Set addEventListener document
    getComputedStyle parseFloat requestAnimationFrame""".split())
TOKEN = re.compile(r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<name>[A-Za-z_$][\w$]*)
    |(?P<number>(?:\d[\w.]*|\.\d[\w.]*)(?:(?<=e)[+-]\d+)?)
    |(?P<mark>=>|\.\.\.|\?\.(?!\d)|[=!]==?|[-+*/%&|^<>?]=|\?\?=?|&&|\|\||\+\+|--|\*\*|>>>?|<<|[-+*/%&|^~<>=!?:;,.(){}\[\]])
    """, re.VERBOSE | re.DOTALL)
PATTERN = re.compile(r"/(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}


def template_end(text, at):
    """Where the template literal that opens at `at` ends, and the code inside its ${...}."""
    inside, i = [], at + 1
    while text[i] != "`":
        if text[i] == "\\":
            i += 1
        elif text.startswith("${", i):
            depth, begin = 1, i + 2
            i = begin
            while depth:
                if text[i] == "`":
                    i, _ = template_end(text, i)
                    continue
                depth += {"{": 1, "}": -1}.get(text[i], 0)
                i += 1
            inside.append((begin, i - 1))
            continue
        i += 1
    return i + 1, inside


def tokens_of(text, begin=0, end=None):
    """(kind, text, place) of each token; strings, numbers and regular expressions are kept as one mark each."""
    tokens, i, end = [], begin, len(text) if end is None else end
    while i < end:
        if text[i] == "`":
            after, inside = template_end(text, i)
            for part in inside:
                tokens += [("mark", "(", i), *tokens_of(text, *part), ("mark", ")", i)]
            i = after
            continue
        before = tokens[-1] if tokens else ("mark", ";", 0)
        starts = before[0] == "mark" and before[1] not in CLOSE or before[1] in ("return", "case")
        match = PATTERN.match(text, i) if text[i] == "/" and text[i + 1] not in "/*" and starts else None
        if match:
            tokens.append(("text", match.group(), i))
        else:
            match = TOKEN.match(text, i)
            if not match:
                raise SyntaxError(f"line {text.count(chr(10), 0, i) + 1}: cannot read {text[i:i + 20]!r}")
            if match.lastgroup != "space":
                tokens.append((match.lastgroup, match.group(), i))
        i = match.end()
    return tokens


def closing(tokens, at):
    depth = 0
    for i in range(at, len(tokens)):
        if tokens[i][0] == "mark":
            depth += (tokens[i][1] in OPEN) - (tokens[i][1] in CLOSE)
            if depth == 0:
                return i
    raise SyntaxError(f"'{tokens[at][1]}' is never closed")


def opening(tokens, at):
    depth = 0
    for i in range(at, -1, -1):
        if tokens[i][0] == "mark":
            depth += (tokens[i][1] in CLOSE) - (tokens[i][1] in OPEN)
            if depth == 0:
                return i
    raise SyntaxError("a bracket is never opened")


def bound(tokens, i, end):
    """Indices of the names that the patterns in tokens[i:end], with commas between them, bind."""
    while i < end:
        kind, text, _ = tokens[i]
        if kind == "mark" and text in ("{", "["):
            yield from bound(tokens, i + 1, closing(tokens, i))
            i = closing(tokens, i) + 1
        elif kind == "name" and tokens[i + 1][1] == ":":  # a key: what follows is bound
            i += 2
        elif kind == "name":
            yield i
            i += 1
        elif text == "=":  # a default: an expression
            while i < end and tokens[i][1] != ",":
                i = (closing(tokens, i) if tokens[i][0] == "mark" and tokens[i][1] in OPEN else i) + 1
        else:
            i += 1


def declared(tokens, i):
    """The same for the statement that const, let or var at i begins."""
    i += 1
    while True:
        end = closing(tokens, i) if tokens[i][1] in OPEN else i
        yield from bound(tokens, i, end + 1)
        i = end + 1
        while tokens[i][1] not in (",", ";", "of", "in") and tokens[i][1] not in CLOSE:
            i = (closing(tokens, i) if tokens[i][0] == "mark" and tokens[i][1] in OPEN else i) + 1
        if tokens[i][1] != ",":
            return
        i += 1


def bindings(tokens):
    for i, (kind, text, _) in enumerate(tokens):
        if text in ("const", "let", "var"):
            yield from declared(tokens, i)
        elif text == "function":
            named = tokens[i + 1][0] == "name"
            if named:
                yield i + 1
            first = i + 1 + named
            yield from bound(tokens, first + 1, closing(tokens, first))
        elif text == "catch" and tokens[i + 1][1] == "(":
            yield from bound(tokens, i + 2, closing(tokens, i + 1))
        elif text == "=>" and tokens[i - 1][1] == ")":
            yield from bound(tokens, opening(tokens, i - 1) + 1, i - 1)
        elif text == "=>":
            yield i - 1


def is_reference(tokens, i):
    before, after = tokens[i - 1][1] if i else ";", tokens[i + 1][1] if i + 1 < len(tokens) else ";"
    return before not in (".", "?.") and not (after == ":" and before in ("{", ","))


def problems(text):
    tokens = tokens_of(text)
    names = [i for i, (kind, word, _) in enumerate(tokens) if kind == "name" and word not in KEYWORDS]
    places = set(bindings(tokens))
    known = {tokens[i][1] for i in places}
    used = {tokens[i][1] for i in names if i not in places and is_reference(tokens, i)}
    line = {tokens[i][1]: text.count("\n", 0, tokens[i][2]) + 1 for i in reversed(names)}
    for name in sorted(used - known - BROWSER, key=line.get):
        yield f"{line[name]}: nothing declares '{name}'"
    for name in sorted(known - used, key=line.get):
        yield f"{line[name]}: nothing uses '{name}'"


def style_problems(style, script, page):
    style = re.sub(r"/\*.*?\*/", lambda comment: re.sub(r"[^\n]", " ", comment.group()), style, flags=re.DOTALL)
    texts = " ".join(text for kind, text, _ in tokens_of(script) if kind == "text") + page
    texts += " ".join(re.findall(r"`[^`]*`", script))
    words = set(re.findall(r"[A-Za-z][\w-]*", texts))
    declared = set(re.findall(r"[{;\s](--[\w-]+)\s*:", style))
    used = set(re.findall(r"var\((--[\w-]+)\)", style))

    def line(text):
        return style.count("\n", 0, style.index(text)) + 1
    for name in sorted(used - declared):
        yield f"{line(name)}: nothing declares '{name}'"
    for name in sorted(declared - used):
        yield f"{line(name)}: nothing uses '{name}'"
    for selector in re.findall(r"([^{};]+)\{", style):
        for mark in re.findall(r"[.#][A-Za-z][\w-]*", selector if "@" not in selector else ""):
            # A number at its end is put there by the script.
            if not words & {mark[1:], mark[1:].rstrip("0123456789")}:
                yield f"{line(mark)}: neither the script nor the page says '{mark[1:]}'"
    if style.count("{") != style.count("}"):
        yield f"1: {style.count('{')} braces are opened, {style.count('}')} closed"


def main(paths):
    if len(paths) != 3:
        sys.exit(__doc__)
    script, style, page = (open(path, encoding="utf-8").read() for path in paths)
    found = [f"{paths[0]}:{problem}" for problem in problems(script)]
    found += [f"{paths[1]}:{problem}" for problem in style_problems(style, script, page)]
    print("\n".join(found) if found else "every name is declared and used")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
