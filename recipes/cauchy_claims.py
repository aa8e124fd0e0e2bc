"""What of "ViT as a Cauchy problem" shows in the rows of a recipe, as JSON.

Usage: cauchy_claims.py FOLDER [PATTERN]     PATTERN chooses rows, such as '*_32-*'
"""

import json
import sys
from pathlib import Path

from specguard.studies import cauchy_claims, diagnoses

if __name__ == "__main__":
    folder, pattern = [*sys.argv[1:], "*"][:2]
    print(json.dumps(cauchy_claims(diagnoses(Path(folder), pattern)), indent=2))
