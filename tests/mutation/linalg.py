"""Mutants of the bounds on norms, and of the account of rounding."""

from mutation.mutant import Mutant, mutants

# fmt: off
LINALG: tuple[Mutant, ...] = (
    *mutants(
        "linalg/rounding.py",
        ("UNIT = 2.0**-53", "UNIT = 2.0**-56", "a rounding is an eighth of what it is"),
        ("/ (1 - count * UNIT) * (1 + 1e-10)", "/ (1 - count * UNIT)", "gamma is rounded down"),
        ("count * UNIT / (1 - count * UNIT) * (1 + 1e-10)", "count * UNIT * (1 + 1e-10)",
         "gamma lacks its second order"),
        ("values * (1 + gamma(count)) + torch.finfo(values.dtype).tiny", "values * (1 + gamma(count))",
         "small numbers are accurate to a fraction of themselves"),
        ("values * (1 + gamma(count)) + torch", "values + torch", "nothing is rounded up"),
        ("scaled.square().sum(-1).sqrt(), x.shape[-1] + 8)", "scaled.square().sum(-1).sqrt(), 0)",
         "lengths are rounded down"),
        ("scaled.square().sum(-1).sqrt(), x.shape[-1] + 8)", "scaled.square().sum(-1).sqrt(), 8)",
         "long sums are as exact as short ones"),
        ("scaled = x / torch.where(largest > 0, largest, 1.0)[..., None]",
         "largest, scaled = torch.ones_like(largest), x", "squares vanish"),
    ),
    *mutants(
        "linalg/norms.py",
        ("round_up(column.sqrt() * row.sqrt(), A.shape[1] + A.shape[2] + 8)", "column.sqrt() * row.sqrt()",
         "sums of rows and columns are exact"),
        ("round_up(column.sqrt() * row.sqrt(), A.shape[1] + A.shape[2] + 8)",
         "round_up(column.sqrt() * row.sqrt(), 8)",
         "long sums of rows are as exact as short ones"),
        ("scale * (top * stretch.sqrt() + residual)", "scale * top", "the SVD is exact"),
        ("scale * (top * stretch.sqrt() + residual)", "scale * (top * stretch.sqrt())",
         "the factors of the SVD make the matrix"),
        ("scale * (top * stretch.sqrt() + residual)", "scale * (top + residual)",
         "the factors of the SVD are orthogonal"),
        ("stretch = (1 + _defect(P)) * (1 + _defect(Qt.mT))", "stretch = 1 + _defect(P)",
         "the right factor of the SVD is orthogonal"),
        ("errors.append(gamma(H.shape[1] + 3))", "errors.append(0.0)", "squarings are exact"),
        ("size * ((bound + error).sqrt() + UNIT), 8)", "size * (bound + error).sqrt(), 8)",
         "dividing by the size is exact",
         "of gamma(rows + 3) the product takes gamma(rows), as ||H||_F <= 1 + u; sqrt(s^2 + 3u) >= s + u for s = "
         "||H||"),
        ("G = _to_float64(A if A.shape[1] >= A.shape[2] else A.mT)\n    sizes", "G = _to_float64(A)\n    sizes",
         "the larger side is squared", "both sides have the same norm: only the cost grows"),
        ("round_up(torch.linalg.vector_norm(G, dim=(1, 2)), G.shape[1] * G.shape[2] + 16)",
         "torch.linalg.vector_norm(G, dim=(1, 2))", "sizes of squares are exact"),
        ("square = _verify_eigenvalue(gram, norm**2, excess, gram_error, 0.0)",
         "square = norm**2 * (1 + excess) ** 2",
         "the candidate is not verified"),
        ("top = estimate[open_] * (1 + excess) ** 2 + 2 * error", "top = estimate[open_] * (1 + excess) ** 2",
         "a candidate",
         "whatever the candidate is, the factorization verifies it"),
        ("shift = error + (gamma(side + 2) / (1 - gamma(side + 2)) + 4 * UNIT) * side * (top + negative)",
         "shift = 0.0 * top", "the factorization and the matrix are exact"),
        ("passed = torch.linalg.cholesky_ex(shifted).info == 0", "passed = estimate[open_] >= 0",
         "a factorization that breaks down verifies"),
        ("norm**2, excess, gram_error, 0.0)", "norm**2, excess, 0.0, 0.0)", "the Gram matrix is exact"),
        ("excess, 4 * UNIT, 1.0)", "excess, 0.0, 1.0)", "the symmetric part is exact",
         "entries are off by 2u of themselves, so the matrix by 2u; the shift holds 1u side (top + 1) more than "
         "the diagonal takes, and gamma(side + 2) (side - sqrt(side)) more than the trace does: 4u from side 2 "
         "on; for side 1 the halves add exactly, one rounding is left, and 1u (top + 1) covers it"),
        ("bound[open_], open_ = 1.0, open_[:0]", "bound[open_], open_ = 0.5, open_[:0]",
         "the trivial bound is not trivial"),
    ),
)
