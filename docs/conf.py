"""Sphinx: `make docs` builds the site, and a warning is an error."""

import tierstore

project = "tierstore"
version = release = tierstore.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["README.md"]  # The index includes it.
html_theme = "furo"
html_title = "tierstore"
html_copy_source = False
html_show_copyright = False
highlight_language = "text"  # Of blocks that do not name a language: commands and output.

myst_heading_anchors = 4

# Arguments of TierStore and Muon, by purpose.
napoleon_custom_sections = [
    (section, "params_style")
    for section in ("Memory", "Durability", "Device and gradients", "Ranks", "Update")
]

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
