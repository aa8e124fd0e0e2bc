"""The networks whose certificates are measured with relations between perturbations kept, and without."""
