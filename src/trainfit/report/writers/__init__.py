"""Writers of a result's sections: as HTML, as Markdown, as a picture of a chart; traces."""
