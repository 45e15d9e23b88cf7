"""The documentation: every relative link and anchor of every Markdown file leads somewhere; the site that `make docs`
builds has no warning, loads nothing from other hosts, fits a phone and can be searched, opened from the file system.

Usage: docs_test.py CHROMIUM FOLDER   (which the site is built in; the site's tests are skipped where .venv has no
Sphinx, those in a browser where there is no Chromium)
"""
import functools
import importlib.util
import pathlib
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

from browser_test import Browser

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which(sys.argv[1]) if len(sys.argv) > 1 else None
SITE = pathlib.Path(sys.argv[2]) / "site" if len(sys.argv) > 2 else None
PHONE = 360  # pixels
CODE_BLOCK = re.compile(r"^ *(```+|~~~+).*?^ *\1[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"""(?:\]\(\s*<?|^ {0,3}\[[^\]]+\]:\s+<?|\b(?:src|href|srcset)=["'])([^)\s">']+)""", re.MULTILINE)


def files():
    """Those that git knows, and new ones that it would not ignore; all that is here where there is no git."""
    git = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, capture_output=True, text=True) if shutil.which("git") else None
    if listed and listed.returncode == 0:
        return sorted(path for path in set(listed.stdout.split("\0")) if path and (ROOT / path).is_file())
    hidden = re.compile(r"(^|/)\.|^build|__pycache__")
    paths = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())
    return sorted(path for path in paths if not hidden.search(path))


def pages():
    return [path for path in files() if path.endswith(".md")]


def without(pattern, text):
    """With blanks in its place: lines keep their numbers."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def anchors(text):
    """GitHub's, of a page's headings and of the HTML in it."""
    text, found, seen = without(CODE_BLOCK, text), set(), {}
    for heading in re.findall(r"^ {0,3}#{1,6}[ \t]+(.*?)[ \t#]*$", text, re.MULTILINE):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # of a link its text
        words = re.sub(r"(?<![\w\\])[*_]+(?=\S)|(?<=\S)[*_]+(?!\w)", "", words)  # emphasis
        slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        found.add(slug if not seen[slug] else f"{slug}-{seen[slug]}")
    return found | set(re.findall(r"""\b(?:id|name)=["']([^"']+)""", without(CODE_SPAN, text)))


class Links(unittest.TestCase):
    def test_every_link_leads_somewhere(self):
        every = set(files())
        folders = {"."} | {parent.as_posix() for path in every for parent in pathlib.PurePosixPath(path).parents}
        text = {path: (ROOT / path).read_text(encoding="utf-8") for path in pages()}
        known, broken, count = {path: anchors(page) for path, page in text.items()}, [], 0
        for path, page in text.items():
            plain = without(CODE_SPAN, without(CODE_BLOCK, page))
            for match in LINK.finditer(plain):
                link = urllib.parse.urlsplit(match[1])
                if link.scheme or link.netloc:
                    continue
                count += 1
                where = f"{path}:{plain[:match.start(1)].count(chr(10)) + 1}: {match[1]}"
                to = posixpath.join(posixpath.dirname(path), urllib.parse.unquote(link.path)) if link.path else path
                to = posixpath.normpath(to)
                if to not in every and to not in folders:
                    broken.append(f"{where}: no such file")
                elif link.fragment and to in known and urllib.parse.unquote(link.fragment) not in known[to]:
                    broken.append(f"{where}: {to} has no such heading")
        self.assertGreater(count, 50)
        self.assertEqual(broken, [], "\n" + "\n".join(broken))

    def test_anchors_are_those_of_github(self):
        page = "# A `code` & more\n## A, *b* and _c_\n## A, b and c\n```\n# no\n```\n### [x](y.md) z_1\n<a id=\"own\"></a>\n"
        self.assertEqual(anchors(page), {"a-code--more", "a-b-and-c", "a-b-and-c-1", "x-z_1", "own"})


@functools.cache
def build_site():
    if any(importlib.util.find_spec(name) is None for name in ("furo", "myst_parser")):
        raise unittest.SkipTest("there is no Sphinx")
    shutil.rmtree(SITE, ignore_errors=True)
    build = [sys.executable, "-m", "sphinx", "-q", "-E", "-c", ROOT / "docs/site", "-d", SITE.with_name("doctrees"), ROOT, SITE]
    return subprocess.run(build, capture_output=True, text=True)


class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        build_site()

    def test_it_builds_without_a_warning(self):
        done = build_site()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertFalse(done.stderr, done.stderr)

    def test_every_page_is_there(self):
        missing = [path for path in pages() if path.startswith(("docs/", "evidence/", "bench/results/")) or "/" not in path
                   if not (SITE / path).with_suffix(".html").is_file()]
        self.assertEqual(missing, [])
        self.assertTrue((SITE / "index.html").is_file())

    def test_nothing_is_loaded_from_other_hosts(self):
        load = re.compile(r"""(?:\bsrc(?:set)?=|<link\b[^>]*href=|url\(|@import)\s*["']?\s*(?:https?:)?//[^\s"')>]+""")
        found = [f"{path.relative_to(SITE)}: {match[0]}" for path in SITE.rglob("*") if path.suffix in (".html", ".css", ".svg")
                 for match in load.finditer(path.read_text(encoding="utf-8"))]
        self.assertEqual(found, [])

    def test_links_of_html_lead_to_pages(self):
        """Those that are no Markdown, Sphinx leaves as they are."""
        broken = []
        for path in SITE.rglob("*.html"):
            for link in re.findall(r"""(?:href|src|srcset)=["']([^"'#?]+)""", path.read_text(encoding="utf-8")):
                to = path.parent / urllib.parse.unquote(link)
                if not urllib.parse.urlsplit(link).scheme and not to.is_file():
                    broken.append(f"{path.relative_to(SITE)}: {link}")
        self.assertEqual(broken, [])


# What a reader of a page sees. What stands out of the window counts unless a box of the page's text scrolls around it.
COLLECT = """(() => {
  const scrolls = (node) => !node.matches("article") &&
      (["auto", "scroll"].includes(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
  const out = (node) => node.getBoundingClientRect().right > innerWidth + 1 && !scrolls(node);
  return {
    width: document.documentElement.scrollWidth,
    out: [...document.querySelectorAll("article *")].filter(out).map((node) => node.outerHTML.slice(0, 120)),
    broken: [...document.images].filter((image) => !image.naturalWidth).map((image) => image.src),
    size: parseFloat(getComputedStyle(document.querySelector("article p") || document.body).fontSize),
  };
})()"""


@unittest.skipUnless(CHROMIUM, "there is no Chromium")
class Phone(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        build_site()
        profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(profile.cleanup)
        cls.browser = Browser(CHROMIUM, profile.name)
        cls.addClassCleanup(cls.browser.close)

    def opened(self, path, query="", width=PHONE):
        """A page of the site, from the file system; all that it asks for lies there too."""
        target = self.browser.open_tab()
        self.addCleanup(self.browser.close_tab, target)
        self.browser.call("Emulation.setDeviceMetricsOverride", width=width, height=740, deviceScaleFactor=2, mobile=True)
        self.browser.navigate((SITE / path).as_uri() + query)
        asked = [event["params"]["request"]["url"] for event in self.browser.events
                 if event["method"] == "Network.requestWillBeSent"]
        self.assertEqual([url for url in asked if not url.startswith(("file:", "data:"))], [], path)

    def test_every_page_fits(self):
        for page in pages():
            with self.subTest(page):
                self.opened(pathlib.Path(page).with_suffix(".html"))
                found = self.browser.evaluate(COLLECT)
                self.assertLessEqual(found["width"], PHONE)
                self.assertEqual(found["out"], [])
                self.assertEqual(found["broken"], [])
                self.assertGreaterEqual(found["size"], 14)
                self.doCleanups()

    def test_the_search_finds(self):
        self.opened("search.html", "?q=checkpoint")
        found = []
        for _ in range(100):
            self.browser.settle()
            links = "[...document.querySelectorAll('#search-results li a')]"
            found = self.browser.evaluate(links + ".map((link) => link.textContent)")
            if found:
                break
        self.assertIn("checkpoint", " ".join(found).lower())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
