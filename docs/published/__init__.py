"""Tables and figures of the committed results: one module per kind of study."""
