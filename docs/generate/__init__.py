"""Writers of the reference pages: one module for each page, which returns the page as Markdown."""
