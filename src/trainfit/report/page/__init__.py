"""Results as one page that a person opens: sections, charts, tables; as HTML, Markdown or SVG."""
