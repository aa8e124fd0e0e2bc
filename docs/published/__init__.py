"""Tables and figures of the committed results: one module per kind of study, and `pages`, which says where each stands."""
