"""The documentation as a site: `make docs` has Sphinx write build/site, of the Markdown files as they lie in the repository.

README.md is the first page. A link to a source file hands out that file. A folder has no page: a link to one leads to its
README.md, or becomes plain text."""
import pathlib
import shutil

from docutils import nodes
from sphinx import addnodes

ROOT = pathlib.Path(__file__).resolve().parents[2]

project = html_title = "Scruple"
html_theme = "furo"
html_static_path, html_css_files = ["site.css"], ["site.css"]
html_show_sourcelink = html_copy_source = html_show_copyright = html_show_sphinx = False
html_show_search_summary = False  # it would be fetched, which pages that are opened from the file system may not
extensions = ["myst_parser"]
myst_heading_anchors = 6  # as GitHub names them
myst_enable_extensions = ["strikethrough"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "evidence/**.md", "examples/*.md", "bench/results/*.md"]
exclude_patterns = ["build*", ".*", "**/__pycache__"]
suppress_warnings = ["misc.highlighting_failure"]  # a block of code may leave out what is not its subject

# What the menu shows, in the order in which a newcomer asks. The pages of a folder stand under its first one.
MENU = {
    "README": """
Home <self>
Recipes <docs/recipes>
PyTorch <docs/torch>
Gradients <docs/gradients>
Frameworks <docs/frameworks>
Training <docs/training>
Data <docs/data>
GPU <docs/gpu>
Checkpoints <docs/checkpoint>
C and C++ <docs/link>
Formats <docs/formats>
Evidence <evidence/README>
Examples <examples/README>
Architecture <docs/architecture>
Glossary <docs/glossary>
Contributing <CONTRIBUTING>
Changes <CHANGELOG>""",
    "evidence/README": "**",
    "docs/gpu": "/bench/results/*",
}


def add_menu(app, page, source):
    if page in MENU:
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n{MENU[page]}\n```\n"


def lead_to_folders(app, page):
    """No page is made of a folder."""
    for link in list(page.findall(addnodes.pending_xref)):
        folder = (ROOT / app.env.docname).parent / link["reftarget"]
        if link.get("refdomain") is None and folder.is_dir():
            first = str((folder / "README").resolve().relative_to(ROOT))
            if first in app.env.found_docs:
                link.attributes.update(refdomain="doc", reftarget=first, reftargetid=None)
            else:
                link.replace_self(nodes.inline("", "", *link[0].children))


def copy_pictures(app, error):
    """Those that are shown by HTML, which Sphinx leaves as it is; and the first page's usual name."""
    if error:
        return
    site = pathlib.Path(app.outdir)
    for picture in [*ROOT.glob("docs/**/*.svg"), *ROOT.glob("evidence/**/*.svg")]:
        copy = site / picture.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, copy)
    shutil.copy(site / "README.html", site / "index.html")


def setup(app):
    app.connect("source-read", add_menu)
    app.connect("doctree-read", lead_to_folders)
    app.connect("build-finished", copy_pictures)
